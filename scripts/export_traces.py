"""Pack the recorded outputs of a run into one portable file, for replay on another machine.

    python scripts/export_traces.py RUN traces.jsonl.gz
    python run.py runner=replay runner.traces=traces.jsonl.gz method=pld

The file holds ids of prompts and outputs, the tokenizer's hash and the names of model and data set:
no text, no time, no machine's path. Token ids can be turned back into text by whoever has the
tokenizer, so the questions' licence holds for it too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from specbench.replay.traces import load_traces, write_pack


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished greedy run, or a pack")
    parser.add_argument("out", type=Path, help="the file; gzipped where it ends in .gz")
    parser.add_argument("--labels", nargs="+", help="keep only these, e.g. ar (default: all)")
    options = parser.parse_args()
    traces = load_traces(options.run)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    count = write_pack(traces, options.out, options.labels)
    print(f"{count} turns, {options.out.stat().st_size / 1024:.0f} KiB: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
