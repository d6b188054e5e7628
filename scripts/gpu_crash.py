"""Check that captured passes survive what other programs do to the GPU's memory.

    python -m scripts.gpu_crash all [--out FILE]    all cases, without the mend and with it
    FIX=0 python -m scripts.gpu_crash CASE          one case without the mend, in this process

Between two equal decodes of a captured model (two layers as wide as a 7B model's) a case does:

    clear_empty     forget cuBLAS's work spaces, then give the allocator's free memory back
    reuse           forget them, then fill new tensors of the same size on the same stream
    compiled        transformers' generate with a compiled static cache, of another model

Exit code of `all`: 0 where each ends as the explanation says that cuBLAS's work space was freed
under the graph: without the mend `clear_empty` and `compiled` crash and `reuse` gives other tokens
or overwrites a stranger's tensor; with it all give the same tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one
from specbench.config.compose import compose
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import DeviceLost
from specbench.kernels import cuda_graphs
from specbench.models.graph_target import GraphTarget
from specbench.models.loading import shape_model

WITHOUT = {"clear_empty": "crash", "reuse": "other", "compiled": "crash"}  # the mend
LIMIT_S = 50  # of a case; all run at once
PROMPT, TOKENS, DEVICE = np.arange(3, 131), 64, torch.device("cuda:0")


def model() -> PreTrainedModel:
    shape = dict(compose(["model=vicuna7b", "model.shape=true"]).model.shape_config)
    network = shape_model(shape | {"num_hidden_layers": 2}, dtype=torch.bfloat16, device=DEVICE)
    return network.eval().requires_grad_(False)  # type: ignore[no-any-return]


@torch.inference_mode()
def disturb(case: str, stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """Do what the case does; returns tensors of sevens that must not change."""
    sevens: list[torch.Tensor] = []
    if case == "compiled":
        other = model()
        ids = torch.from_numpy(PROMPT)[None].to(DEVICE)
        for _ in range(2):
            other.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False,
                eos_token_id=None, pad_token_id=0, cache_implementation="static",
            )  # fmt: skip
    else:
        torch._C._cuda_clearCublasWorkspaces()
    if case == "clear_empty":
        torch.cuda.empty_cache()
    if case == "reuse":
        with torch.cuda.stream(stream):  # whose free blocks the work space is one of
            sevens = [torch.full((1 << 23,), 7.0, device=DEVICE) for _ in range(64)]
    torch.cuda.synchronize()  # what it did itself is right
    return sevens


def run_case(case: str) -> str:
    """Tell whether both decodes gave the ``same`` tokens, or ``other`` ones.

    Raises:
        RuntimeError: the second one could not run.
    """
    # In torch's layers, because our own product of one row is not cuBLAS's.
    target = GraphTarget(model(), max_len=256, max_nodes=1)
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset())

    def decode() -> list[int]:
        output = engine.decode(PROMPT, Drafter(name="ar"), max_new_tokens=TOKENS).output_ids
        torch.cuda.synchronize()
        return output

    without = os.environ.get("FIX") == "0"
    unmended = mock.patch.object(cuda_graphs, "_forget_work_space", lambda: None)
    with unmended if without else nullcontext():
        first = decode()
        try:
            sevens = disturb(case, target.capture_stream())
        except Exception:  # says nothing of our passes
            traceback.print_exc()
            return "disturber failed"
        second = decode()
    intact = all(bool((tensor == 7).all()) for tensor in sevens)
    return "same" if second == first and intact else "other"


def in_process(case: str, fix: str) -> str:
    """Run a case in its own process; returns how it ended."""
    command = [sys.executable, "-m", "scripts.gpu_crash", case]
    try:
        ran = subprocess.run(
            command, env=os.environ | {"FIX": fix}, text=True, stdout=subprocess.PIPE,
            timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not over after {LIMIT_S} s"
    if ran.returncode:
        return f"failed with exit code {ran.returncode}"
    return ran.stdout.splitlines()[-1]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("case", choices=("all", *WITHOUT), help="what to try")
    parser.add_argument("--out", type=Path, help="write how the cases ended as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"needs a GPU, torch sees none. Cases: {', '.join(WITHOUT)}", file=sys.stderr)
        return 2
    if options.case != "all":
        try:
            print(run_case(options.case), flush=True)
        except (RuntimeError, DeviceLost) as error:
            if "illegal memory access" not in f"{error} {error.__cause__}":
                raise
            print(error, file=sys.stderr)
            print("crash", flush=True)
        return 0
    expected = {"0": WITHOUT, "1": dict.fromkeys(WITHOUT, "same")}  # by FIX
    pairs = [(fix, case) for fix in expected for case in WITHOUT]
    endings: dict[str, dict[str, str]] = {fix: {} for fix in expected}
    with ThreadPoolExecutor(len(pairs)) as pool:
        for (fix, case), ended in zip(
            pairs, pool.map(lambda pair: in_process(pair[1], pair[0]), pairs), strict=True
        ):
            endings[fix][case] = ended
            print(f"{case}, {'with' if fix == '1' else 'without'} the mend: {ended}", flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"without": endings["0"], "with": endings["1"]}, indent=1)
        )
    return int(endings != expected)


if __name__ == "__main__":
    sys.exit(main())
