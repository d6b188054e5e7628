"""Make a cost surface of steps that others timed, so that their machine prices a replay here.

    python scripts/import_steps.py STEPS.csv --out surface.json --model vicuna7b --dtype float16
        --gpu "NVIDIA H100" --source "who timed them, where they are published"    (one line)
    python run.py runner=replay runner.traces=RUN runner.surface=surface.json method=pld

The table (.csv, .json, .jsonl, .parquet) has a line per step and the columns rows (tokens of the
pass; or batch and tokens of each sequence), context (cached tokens before it) and seconds. Steps
with a batch above 1 are left out. The medians are made monotone, as those measured here are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from specbench.errors import ConfigurationError
from specbench.replay.imported_surface import (
    UNITS,
    Origin,
    imported_surface,
    read_steps_of_others,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("file", type=Path, help="the table of steps")
    add("--out", type=Path, required=True, help="the surface, for runner.surface")
    add("--source", required=True, help="whose timings: captions of predicted numbers say it")
    add("--model", required=True, help="the model's name, as in conf/model")
    add("--dtype", required=True, help="number format of its weights, e.g. float16")
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--gpu", help="name of the GPU")
    machine.add_argument("--cpu", help="name of the processor, where no GPU computed")
    add("--threads", type=int, help="threads that computed, where they are known")
    add("--columns", nargs="+", default=[], metavar="OURS=THEIRS", help="e.g. seconds=step_ms")
    add("--where", nargs="+", default=[], metavar="COLUMN=VALUE", help="only lines like these")
    add("--unit", choices=UNITS, default="s", help="of the times (default: s)")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _import(options))


def _import(options: argparse.Namespace) -> int:
    columns, where = _pairs(options.columns), _pairs(options.where)
    steps = read_steps_of_others(options.file, columns, where, options.unit)
    origin = Origin(
        *(options.source, options.model, options.dtype, options.gpu, options.cpu, options.threads)
    )
    surface = imported_surface(steps, origin, options.file)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    surface.write(options.out)
    said = surface.model["imported"]
    axes = surface.tree.axes
    print(
        f"{options.out}: {said['steps']} steps of {axes['rows'][0]} to {axes['rows'][-1]} rows "
        f"behind {axes['context'][0]} to {axes['context'][-1]} tokens, relative error "
        f"{surface.tree.error:.1%}; {said['steps_left_out']} steps left out"
    )
    return 0


def _pairs(typed: Sequence[str]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in typed)
    if wrong := [text for text in typed if "=" not in text]:
        raise ConfigurationError(f"{wrong[0]!r} is no pair. Type NAME=VALUE, e.g. seconds=step_ms.")
    return pairs


if __name__ == "__main__":
    sys.exit(main())
