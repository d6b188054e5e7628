"""Give a run folder the hidden states that vLLM recorded, so that heads replay without the model.

    python scripts/import_states.py RUN FOLDER --layers 2 16 29 32
    python run.py runner=replay runner.traces=RUN method=eagle3            (one file per request)

RUN holds greedy answers of plain decoding; FOLDER what vLLM's ExampleHiddenStatesConnector wrote of
the same questions with include_output_tokens. A file belongs to the turn whose tokens it has. The
last of --layers is the model's number of layers: vLLM keeps it before the final norm, which is
applied here. Over these states the LM head must say the recorded answers, or nothing is written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="the run folder; its folder states is written")
    parser.add_argument("folder", type=Path, help="of vLLM's files")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="as vLLM was asked")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _import(options))


def _import(options: argparse.Namespace) -> int:
    import torch

    from specbench.config.compose import compose, model_words, typed
    from specbench.models import loading
    from specbench.models.stored_target import StoredTarget
    from specbench.replay.imported_states import import_states
    from specbench.replay.traces import load_traces

    traces = load_traces(options.run)
    node = typed(compose([model_words(traces.config["model"])])).model
    device, dtype = loading.choose_device(node.device), getattr(torch, traces.model["dtype"])
    target = StoredTarget(node, device=device, dtype=dtype)
    files = sorted(options.folder.rglob("*.safetensors"))
    found = import_states(traces, files, options.layers, target)
    print(
        f"{options.run}: hidden states of {found.turns} turns, {found.n_bytes / 1e6:.1f} MB; the "
        f"LM head says {found.agreement:.1%} of their tokens; {found.others} files of other texts"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
