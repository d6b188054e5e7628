"""What the commands over runs share: reading them, and errors as exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.runs.load import Run, usable_runs
from specbench.errors import SpecBenchError


def runs_parser(command: str, description: str) -> argparse.ArgumentParser:
    """The parser of ``python -m analysis.<command> RUNS...``; the command adds its own options."""
    parser = argparse.ArgumentParser(prog=f"python -m analysis.{command}", description=description)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them")
    add("--incomplete", action="store_true", help="also use runs that have not reached their end")
    return parser


def with_runs(
    options: argparse.Namespace, show: Callable[[Sequence[Run], argparse.Namespace], int]
) -> int:
    """What ``show`` returns for the runs that the options name.

    2 where there is nothing to show or a file is damaged.
    """

    def read_and_show() -> int:
        runs, hidden = usable_runs(options.runs, options.incomplete, surfaces=True)
        for run in hidden:
            sys.stderr.write(f"not shown, because incomplete: {run.path}\n")
        return show(runs, options)

    return reporting_errors(read_and_show)


def reporting_errors(work: Callable[[], int]) -> int:
    """The exit code of a command's work; an error of the project goes to stderr with its own."""
    try:
        return work()
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
