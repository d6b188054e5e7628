"""``python run.py --list NAME``: what can be chosen, read from the files themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench import paths
from specbench.config.compose import option_names
from specbench.errors import ConfigurationError, unknown_name

LISTS = {
    "methods": "method",
    "models": "model",
    "datasets": "dataset",
    "experiments": "experiment",
}
_FLAG = "--list"
_ASIDE = ("# @package", "# python ")  # lines of a head comment that do not describe
_UNPUBLISHED = r"\bno paper\b|paper: none"
_WIDTH = 80


def asked_for(arguments: Sequence[str]) -> str | None:
    """The list that is asked for; None where none is.

    Raises:
        ConfigurationError: there is no such list.
    """
    for number, text in enumerate(arguments):
        flag, equals, name = text.partition("=")
        if flag == _FLAG:
            if not equals:
                name = next(iter(arguments[number + 1 :]), "")
            if not name:
                raise ConfigurationError(f"{_FLAG} needs a name. Type {_FLAG} {'|'.join(LISTS)}.")
            if name not in LISTS:
                raise unknown_name("list", name, LISTS)
            return name
    return None


def shown(arguments: Sequence[str]) -> bool:
    """Print the list that is asked for, if one is; whether one was."""
    name = asked_for(arguments)
    if name is not None:
        show(name)
    return name is not None


def show(name: str, console: Console | None = None) -> None:
    """Print a list: name, a sentence of description, and of methods the paper's arXiv id."""
    console = console or Console(width=min(Console().width, _WIDTH) or _WIDTH)
    group, methods = LISTS[name], name == "methods"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(group, no_wrap=True)
    if methods:
        table.add_column("arXiv", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for option in option_names(group):
        text = (paths.CONF_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
        described, paper = _described(text)
        cells = [option, *([paper] if methods else []), described]
        table.add_row(*map(Text, cells))
    console.print(table)


def _described(text: str) -> tuple[str, str]:
    """The first sentence of a yaml's head comment, else its id or source; and its paper."""
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            if head:
                break
            continue
        if not line.startswith(_ASIDE):
            head.append(line.lstrip("# "))
    comment, keys = " ".join(head), yaml.safe_load(text) or {}
    target = str(keys.get("_target_", ""))
    written = comment + _module_head(target)
    found = re.search(r"arXiv:?\s*(\d{4}\.\d{4,5})", written, re.I)
    paper = found[1] if found else "no paper" if re.search(_UNPUBLISHED, written, re.I) else ""
    comment = re.sub(r"\s*\([^()]*arXiv[^()]*\)", "", comment, flags=re.I)
    first = re.split(r"(?<=[.?])\s", comment)[0].rstrip(".:;")
    return first or str(keys.get("id") or keys.get("source") or ""), paper


def _module_head(target: str) -> str:
    """The docstring of a method's file, which names its paper."""
    path = paths.PROJECT.joinpath(*target.split(".")[:-1]).with_suffix(".py")
    if not target or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8").split('"""')[1]
