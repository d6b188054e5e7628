"""Measure what no run of ``run.py`` shows, in ten sections.

    python -m scripts.bench engine       # a pass by rows, host work a step
    python -m scripts.bench others       # plain decoding against transformers and llama.cpp
    python -m scripts.bench passes       # a CPU's pass by one call and form of weights
    python -m scripts.bench steps        # what a step takes beside the pass, part by part
    python -m scripts.bench start        # a one-case run and its table: seconds and memory
    python -m scripts.bench drafters     # drafting time per step of each method
    python -m scripts.bench undrafted    # a step without a draft against plain decoding's
    python -m scripts.bench kernels      # kernels that a pass would launch on a GPU
    python -m scripts.bench vllm RUN     # our drafters inside vLLM, where it is installed
    python -m scripts.bench gpu PART     # bandwidth, loops or kernels of a GPU (make gpu-check)

All figures of a section are measured in one process: compare ratios, not numbers of two runs.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.runs.command import add_command, parser_of, reporting_errors
from scripts.bench import (
    console,
    drafters,
    engine,
    gpu,
    kernels,
    others,
    passes,
    start,
    steps,
    undrafted,
    vllm,
)
from specbench.storage import jsonl
from specbench.system import environment

SECTIONS = {
    "engine": engine,
    "others": others,
    "passes": passes,
    "steps": steps,
    "start": start,
    "drafters": drafters,
    "undrafted": undrafted,
    "kernels": kernels,
    "vllm": vllm,
    "gpu": gpu,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "scripts.bench")
    commands = parser.add_subparsers(dest="section", metavar="SECTION", required=True)
    for name, module in SECTIONS.items():
        command = add_command(commands, name, module.__doc__ or "")
        command.add_argument("--out", type=Path, help="write the results as JSON, as they come")
        module.add_options(command)
    options = parser.parse_args(argv)
    facts = {
        "command": f"python -m scripts.bench {shlex.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment.describe(),
    }
    results = {}
    for results in SECTIONS[options.section].measure(options):
        if options.out:  # a command that is stopped leaves what it had
            options.out.parent.mkdir(parents=True, exist_ok=True)
            jsonl.write_json(options.out, facts | results)
    SECTIONS[options.section].show(results)
    if options.out:
        console.print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
