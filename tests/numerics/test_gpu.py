"""On a GPU: every method decodes as plain decoding does, by both engines.

Exact in float32 (without TF32) and float64 on tiny models; in bfloat16 every difference must be a
near tie. Skipped where there is no CUDA device; `make gpu-check` runs them with the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from specbench.audit import audit_output
from specbench.drafter import Drafter
from specbench.engine import Engine
from specbench.graph import GraphTarget
from specbench.structs import DraftContext
from specbench.target import Target
from specbench.verify import GreedyVerifier
from tests.conftest import ARCHITECTURES, VOCAB, tiny_model
from tests.contract.driver import instantiate, method_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if TYPE_CHECKING:
    import numpy as np

EOS = frozenset({2})
BATCH = 10  # k of N-Grammys: its layout is a batch, and a target of one row runs that as a tree
ENGINES = {"eager": Target, "graph": GraphTarget}
# What needs no file and no second model; those have CPU tests on the same verification.
METHODS = [
    name
    for name in method_names()
    if name != "ar"
    and not (n := instantiate(name).needs).artefacts
    and not n.draft_model
    and not n.reference
]


def decode(target: Target, drafter: Drafter, prompt: np.ndarray, tokens: int) -> list[int]:
    drafter.setup(
        DraftContext(vocab_size=VOCAB, eos_ids=EOS, max_len=target.cache.max_len, target=target)
    )
    engine = Engine(target, GreedyVerifier(), eos_ids=EOS)
    out = engine.decode(prompt, drafter, max_new_tokens=tokens).output_ids
    drafter.close()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_methods_are_exact(architecture, engine, dtype, rng):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model(architecture, dtype=dtype).cuda()
    prompt = rng.integers(3, VOCAB, 40)
    plain = decode(Target(model, max_len=200), Drafter(name="plain"), prompt, 60)
    target = ENGINES[engine](model, max_len=200, max_nodes=127, batch=BATCH)
    for name in METHODS:
        assert decode(target, instantiate(name), prompt, 60) == plain, name


@pytest.mark.parametrize("engine", ENGINES)
def test_differences_in_bfloat16_are_near_ties(engine, rng):
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    auditor = Target(model, max_len=200)
    target = ENGINES[engine](model, max_len=200, max_nodes=127, batch=BATCH)
    for _ in range(4):
        prompt = rng.integers(3, VOCAB, 40)
        plain = decode(auditor, Drafter(name="plain"), prompt, 60)
        for name in METHODS:
            out = decode(target, instantiate(name), prompt, 60)
            assert audit_output(auditor, prompt.tolist(), out, plain).verdict != "bug", name
