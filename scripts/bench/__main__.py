"""Measure what no run of ``run.py`` shows, in three sections.

    python -m scripts.bench engine       # against transformers, a pass by rows, host work a step
    python -m scripts.bench drafters     # drafting time per step of each method
    python -m scripts.bench growth       # drafting time by context and store, time to build stores

All figures of a section are measured in one process: compare ratios, not numbers of two runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.bench import drafters, engine, growth
from scripts.bench.harness import console
from specbench.errors import SpecBenchError
from specbench.system import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

SECTIONS = {"engine": engine, "drafters": drafters, "growth": growth}


def main(argv: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="section", metavar="SECTION", required=True)
    for name, module in SECTIONS.items():
        about = module.__doc__ or ""
        command = commands.add_parser(name, description=about, formatter_class=formatter)
        command.add_argument("--out", type=Path, help="write the results as JSON")
        module.add_options(command)
    options = parser.parse_args(argv)
    section = SECTIONS[options.section]
    try:
        results = section.measure(options)
    except SpecBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    section.show(results)
    if options.out:
        facts = {
            "command": " ".join(sys.argv),
            "date": time.strftime("%Y-%m-%d"),
            "environment": environment.describe(),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(facts | results, indent=1), encoding="utf-8")
        console.print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
