"""Helpers of the commands: help texts, reading runs, errors as exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis.runs.load import Run, usable_runs
from specbench.config.removed import refuse_removed
from specbench.errors import ConfigurationError, SpecBenchError, replace_unprintable

_AS_WRITTEN = argparse.RawDescriptionHelpFormatter


class _Parser(argparse.ArgumentParser):
    """A parser that names the replacement of arguments that ``command`` once had."""

    command = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            refuse_removed(self.command, sys.argv[1:] if args is None else args)
        except ConfigurationError as error:
            self.exit(error.exit_code, f"error: {error}\n")
        return super().parse_known_args(args, namespace)


def parser_of(about: str | None, command: str = "") -> argparse.ArgumentParser:
    """Make a parser whose help shows ``about``, a module's docstring, as it was written.

    ``command`` is the module's name: words and options that it had are then answered from the
    table of removed names.
    """
    parser = _Parser(description=about, formatter_class=_AS_WRITTEN)
    parser.command = command
    return parser


def add_command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    """Add one of several commands to the object of ``add_subparsers``, with its own help."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about.splitlines()[0], description=about, formatter_class=_AS_WRITTEN
    )
    return parser


def runs_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of ``python -m analysis.<command> RUNS...``; the command adds options."""
    parser = _Parser(prog=f"python -m analysis.{command}", description=description)
    parser.command = f"analysis.{command}"
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them")
    add("--incomplete", action="store_true", help="also use runs that have not reached their end")
    return parser


def with_runs(
    options: argparse.Namespace, show: Callable[[Sequence[Run], argparse.Namespace], int]
) -> int:
    """Read the runs that the options name, and return what ``show`` returns for them.

    Returns 2 if there is nothing to show or a file is damaged.
    """

    def read_and_show() -> int:
        runs, hidden = usable_runs(options.runs, options.incomplete, surfaces=True)
        for run in hidden:
            sys.stderr.write(f"not shown, because incomplete: {run.path}\n")
        return show(runs, options)

    return reporting_errors(read_and_show)


def reporting_errors(work: Callable[[], int]) -> int:
    """Run a command's work and return its exit code; errors of the project go to stderr.

    A file or folder that cannot be read or written gives 2, or 1 if the disk is full.
    """
    replace_unprintable()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        reason = f"{error.filename} cannot be used: {error.strerror}"
        sys.stderr.write(f"error: {reason}. Name another file or folder, or make room.\n")
        return 1 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 2
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
