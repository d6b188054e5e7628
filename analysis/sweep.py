"""Summarise a sweep: one table of its runs, printed and in files, and their figures.

``python -m analysis.sweep RUNS... -o DIR``; ``run.py -m`` calls it when its jobs are done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import figures, tables
from analysis.runs.cli import runs_parser, with_runs
from analysis.runs.load import Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("sweep", "One table of the runs of a sweep, and their figures.")
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="DIR", required=True, help="where files go")
    return with_runs(parser.parse_args(arguments), _summarize)


def _summarize(runs: Sequence[Run], options: argparse.Namespace) -> int:
    folders, files = [*map(str, options.runs)], ["-o", str(options.output)]
    tables.show(runs, tables.parser().parse_args(folders))
    sys.stdout.write("files:\n")
    tables.show(runs, tables.parser().parse_args([*folders, *files]))
    return figures.draw(runs, options.output)


if __name__ == "__main__":
    sys.exit(main())
