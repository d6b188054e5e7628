"""What a sweep ends in: one table of its runs, in print and in files, and their figures.

``python -m analysis.sweep RUNS... -o DIR``; ``run.py -m`` calls it when its jobs are done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import figures, tables
from analysis.runs.command import runs_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("sweep", "One table of the runs of a sweep, and their figures.")
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="DIR", required=True, help="where files go")
    options = parser.parse_args(arguments)
    runs, files = [*map(str, options.runs)], ["-o", str(options.output)]
    runs += ["--incomplete"] if options.incomplete else []
    code = tables.main(runs)
    sys.stdout.write("files:\n")
    return code or tables.main([*runs, *files]) or figures.main([*runs, *files])


if __name__ == "__main__":
    sys.exit(main())
