"""``python run.py --list NAME``: what can be chosen, read from the files themselves."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench import paths
from specbench.config.compose import option_names
from specbench.errors import ConfigurationError, unknown_name

LISTS = {"methods": "method", "models": "model", "datasets": "dataset", "experiments": "experiment"}
_ASIDE = ("# @package", "# python ")  # lines of a head comment that do not describe
_WIDTH = 80


def print_list_if_requested(arguments: Sequence[str], console: Console | None = None) -> bool:
    """Print the list that ``--list`` names; return whether it was typed.

    A line is a name, a sentence of description, and of methods the paper's arXiv id.

    Raises:
        ConfigurationError: there is no such list.
    """
    parts = " ".join(arguments).replace("--list=", "--list ").split()
    if "--list" not in parts:
        return False
    name = next(iter(parts[parts.index("--list") + 1 :]), None)
    if name is None:
        raise ConfigurationError(f"--list needs a name. Type --list {'|'.join(LISTS)}.")
    if name not in LISTS:
        raise unknown_name("list", name, LISTS)
    console = console or Console(width=min(Console().width, _WIDTH) or _WIDTH)
    group, methods = LISTS[name], name == "methods"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(group, no_wrap=True)
    if methods:
        table.add_column("arXiv", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for option in option_names(group):
        text = (paths.CONF_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
        cells = _method(option, text) if methods else [_describe(text)]
        table.add_row(*map(Text, [option, *cells]))
    console.print(table)
    return True


def _method(option: str, text: str) -> list[str]:
    """Return the arXiv id that a method's yaml or file names, and its class's first line."""
    target = (yaml.safe_load(text) or {}).get("_target_", f"methods.{option}.")
    module, _, name = str(target).rpartition(".")
    spec = importlib.util.find_spec(module)  # which runs nothing of it
    if spec is None or spec.origin is None:
        return ["", _describe(text)]
    source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    written = text + (ast.get_docstring(source) or "")
    arxiv = re.search(r"arXiv:?\s*(\d{4}\.\d{4,5})", written, re.I)
    unpublished = re.search(r"\bno paper\b|paper: none|blog post", written, re.I)
    paper = arxiv[1] if arxiv else "no paper" if unpublished else ""
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    description = (ast.get_docstring(classes[name]) or "") if name in classes else _describe(text)
    return [paper, description.partition("\n")[0].rstrip(".")]


def _describe(text: str) -> str:
    """Return the first sentence of a yaml's head comment, or its id or source."""
    head = re.match(r"(#.*\n)*", text)
    assert head is not None
    lines = [line for line in head[0].splitlines() if not line.startswith(_ASIDE)]
    comment, keys = " ".join(line.lstrip("# ") for line in lines), yaml.safe_load(text) or {}
    first = re.split(r"(?<=[.?])\s", comment)[0].rstrip(".:;")
    return first or str(keys.get("id") or keys.get("source") or "")
