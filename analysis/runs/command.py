"""What the commands over runs share: reading them, and errors as exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from analysis.runs.load import Run, usable_runs
from specbench.errors import SpecBenchError


def with_runs(options: argparse.Namespace, show: Callable[[Sequence[Run]], int]) -> int:
    """Read the runs that a command names and show them.

    Args:
        options: with ``runs`` (folders) and ``incomplete``.
        show: what the command does with the runs; returns the exit code.

    Returns:
        What ``show`` returns, or 2 where there is nothing to show or a file is damaged.
    """

    def read_and_show() -> int:
        runs, hidden = usable_runs(options.runs, options.incomplete, surfaces=True)
        for run in hidden:
            sys.stderr.write(f"not shown, because incomplete: {run.path}\n")
        return show(runs)

    return reporting_errors(read_and_show)


def reporting_errors(work: Callable[[], int]) -> int:
    """The exit code of a command's work; an error of the project goes to stderr with its own."""
    try:
        return work()
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
