"""Whether captured passes survive what another program does to the GPU's memory.

    python -m scripts.gpu_crash all [--out FILE]    all cases without the mend, then three with it
    FIX=0 python -m scripts.gpu_crash CASE          one case without the mend, in this process

Between two equal decodes of a captured model (two layers as wide as a 7B model's) a case does:

    empty           give the allocator's free memory back
    clear           forget cuBLAS's work spaces
    reuse           forget them, then fill new tensors of the same size on the same stream
    clear_empty     forget them, then give free memory back
    compiled        transformers' generate with a compiled static cache, of another model
    compiled_kept   the same, and torch does not forget work spaces
    compiled_plain  the same, compiled without CUDA graphs

Exit code of `all`: 0 where each ends as the explanation says that cuBLAS's work space was freed
under the graph: without the mend `clear_empty` and `compiled` crash and `reuse` gives other tokens
or overwrites a stranger's tensor; the others, and all with the mend, give the same tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import CompileConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one
from specbench.config.compose import compose
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import DeviceLost
from specbench.kernels import cuda_graphs
from specbench.models.graph_target import GraphTarget
from specbench.models.loading import shape_model

WITHOUT = {  # how each ends without the mend
    "empty": "same",
    "clear": "same",
    "reuse": "other",
    "clear_empty": "crash",
    "compiled": "crash",
    "compiled_kept": "same",
    "compiled_plain": "same",
}
WITH = ("clear_empty", "compiled", "reuse")
LIMIT_S = 50  # of a case; all run at once
GAVE_BACK = "MiB given back:"
PROMPT, TOKENS, DEVICE = np.arange(3, 131), 64, torch.device("cuda:0")


def model() -> PreTrainedModel:
    shape = dict(compose(["model=vicuna7b", "model.shape=true"]).model.shape_config)
    made = shape_model(shape | {"num_hidden_layers": 2}, dtype=torch.bfloat16, device=DEVICE)
    return made.eval().requires_grad_(False)  # type: ignore[no-any-return]


@torch.inference_mode()
def disturb(case: str, stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """Do what the case does; the tensors that nobody may write to, all sevens."""
    kept: list[torch.Tensor] = []
    if case in ("clear", "reuse", "clear_empty"):
        torch._C._cuda_clearCublasWorkspaces()
    if case in ("empty", "clear_empty"):
        torch.cuda.empty_cache()
    if case == "reuse":
        with torch.cuda.stream(stream):  # whose free blocks the work space is one of
            kept = [torch.full((1 << 23,), 7.0, device=DEVICE) for _ in range(64)]
    if case.startswith("compiled"):
        other = model()
        ids = torch.from_numpy(PROMPT)[None].to(DEVICE)
        plain = {"compile_config": CompileConfig(mode="default")} if case.endswith("plain") else {}
        for _ in range(2):
            other.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False,
                eos_token_id=None, pad_token_id=0, cache_implementation="static", **plain,
            )  # fmt: skip
    torch.cuda.synchronize()  # what it did itself is right
    return kept


def one(case: str) -> str:
    """Whether both decodes gave the ``same`` tokens, or ``other`` ones.

    Prints the sizes of the memory segments that the case gave back.

    Raises:
        RuntimeError: the second one could not run.
    """
    ours = GraphTarget(model(), max_len=256, max_nodes=1, fused=True)
    engine = Engine(ours, GreedyVerifier(), eos_ids=frozenset())

    def decode() -> list[int]:
        found = engine.decode(PROMPT, Drafter(name="ar"), max_new_tokens=TOKENS).output_ids
        torch.cuda.synchronize()
        return found

    with ExitStack() as stack:
        if os.environ.get("FIX") == "0":
            nothing = mock.patch.object(cuda_graphs, "_forget_work_space", lambda: None)
            stack.enter_context(nothing)
        if case == "compiled_kept":
            trees = "torch._inductor.cudagraph_trees.clear_cublass_cache"
            stack.enter_context(mock.patch(trees, lambda: None))
        first, before = decode(), segments()
        try:
            kept = disturb(case, ours.capture_stream())
        except Exception:  # says nothing of our passes
            traceback.print_exc()
            return "disturber failed"
        gone = before.keys() - segments().keys()
        print(GAVE_BACK, json.dumps(sorted(before[at] >> 20 for at in gone)), flush=True)
        again = decode()
    whole = all(bool((tensor == 7).all()) for tensor in kept)
    return "same" if again == first and whole else "other"


def segments() -> dict[int, int]:
    """The bytes of each segment of the allocator, by address."""
    return {each["address"]: each["total_size"] for each in torch.cuda.memory_snapshot()}


def alone(case: str, fix: str) -> dict[str, Any]:
    """How a case ends in a process of its own, and the MiB of the segments that it gave back."""
    command = [sys.executable, "-m", "scripts.gpu_crash", case]
    environ = os.environ | {"FIX": fix}
    try:
        ran = subprocess.run(
            command, env=environ, text=True, stdout=subprocess.PIPE, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"ended": f"not over after {LIMIT_S} s"}
    lines = ran.stdout.splitlines()
    said = [line.removeprefix(GAVE_BACK) for line in lines if line.startswith(GAVE_BACK)]
    ended = f"failed with exit code {ran.returncode}" if ran.returncode else lines[-1]
    return {"ended": ended, "given_back_mib": json.loads(said[0]) if said else None}


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
            print(one(options.case), flush=True)
        except (RuntimeError, DeviceLost) as error:
            if "illegal memory access" not in f"{error} {error.__cause__}":
                raise
            print(error, file=sys.stderr)
            print("crash", flush=True)
        return 0
    wanted = {("without", case): ended for case, ended in WITHOUT.items()}
    wanted |= {("with", case): "same" for case in WITH}
    found: dict[str, dict[str, Any]] = {"without": {}, "with": {}}
    with ThreadPoolExecutor(len(wanted)) as pool:
        begun = {
            pool.submit(alone, case, "0" if mend == "without" else "1"): (mend, case)
            for mend, case in wanted
        }
        for ended in as_completed(begun):
            mend, case = begun[ended]
            found[mend][case] = ended.result()
            print(f"{mend} the mend, {case}: {ended.result()}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))
    return int(any(found[mend][case]["ended"] != w for (mend, case), w in wanted.items()))


if __name__ == "__main__":
    sys.exit(main())
