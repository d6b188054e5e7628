"""What commands share: help, tables, reports, clocks, and a method made of its yaml."""

import argparse
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra.utils
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from specbench.config.compare import with_parts
from specbench.config.compose import compose
from specbench.config.knobs import check_method
from specbench.decoding.drafter import Drafter
from specbench.storage import jsonl

# Whole rows also where the output is not a terminal.
console = Console(width=130)
_AS_WRITTEN = argparse.RawDescriptionHelpFormatter


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows ``about``, a module's docstring, as it was written."""
    return argparse.ArgumentParser(description=about, formatter_class=_AS_WRITTEN)


def add_command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    """One of several commands (an object of ``add_subparsers``) with a help of its own."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about.splitlines()[0], description=about, formatter_class=_AS_WRITTEN
    )
    return parser


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
) -> None:
    """Names in the first column, numbers in the others."""
    table = Table(title=title, caption=caption)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """The report as JSON, where ``--out`` names a file for it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(path, report)
        console.print(f"written to {path}")


def make_drafter(name: str, knobs: Mapping[str, Any], *overrides: str) -> Drafter:
    """The method with its yaml's knobs, and these instead of some.

    Raises:
        ConfigurationError: a knob that the method does not have, or of another type.
    """
    node = {**_defaults(name, overrides), **knobs}
    check_method(node)
    drafter: Drafter = hydra.utils.instantiate(with_parts(node), _convert_="all")
    return drafter


@functools.cache
def _defaults(name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    method = compose([f"method={name}", *overrides]).method
    node: Any = OmegaConf.to_container(method, resolve=True)
    del node["label"]
    return dict(node)
