"""On a GPU: every method decodes as plain decoding does, by both engines.

Exact in float32 (without TF32) and float64 on tiny models; in bfloat16 every difference must be a
near tie. Skipped where there is no CUDA device; `make gpu-check` runs them with the rest, also on
machines without Hydra, hypothesis and pytest's plugins: nothing here may need them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from methods.random_drafts import RandomDrafts
from scripts import gpu_methods
from specbench.audit import audit_output
from specbench.draft_model import DraftModel
from specbench.drafter import Drafter
from specbench.engine import Engine
from specbench.graph import GraphTarget
from specbench.index.adjacency import UPDATE_RULES, AdjacencyMatrix
from specbench.index.static_tree import TOKEN_RECYCLING_TREE, load_tree
from specbench.structs import DraftContext
from specbench.target import Target
from specbench.verify import GreedyVerifier
from tests.conftest import ARCHITECTURES, VOCAB, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EOS = frozenset({2})
BATCH = 10  # k of N-Grammys: its layout is a batch, and a target of one row runs that as a tree
ENGINES = {"eager": Target, "graph": GraphTarget}


# When a background thread gets its turn is not the method's.
KNOBS = gpu_methods.WITHOUT_FILES | {"ssd": {"rebuild": "sync"}}


def build(name: str) -> Drafter:
    return gpu_methods.build(name, **KNOBS.get(name, {}))


# What needs no file and no second model; those have CPU tests on the same verification.
METHODS = [
    name
    for name in gpu_methods.names()
    if name != "ar"
    and not gpu_methods.missing(drafter := build(name))
    and not drafter.needs.draft_model
]


def context(target: Target) -> DraftContext:
    return DraftContext(vocab_size=VOCAB, eos_ids=EOS, max_len=target.cache.max_len, target=target)


def decode(target: Target, drafter: Drafter, prompt: np.ndarray, tokens: int) -> list[int]:
    drafter.setup(context(target))
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
        assert decode(target, build(name), prompt, 60) == plain, name


@pytest.mark.parametrize("engine", ENGINES)
def test_differences_in_bfloat16_are_near_ties(engine, rng):
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    auditor = Target(model, max_len=200)
    target = ENGINES[engine](model, max_len=200, max_nodes=127, batch=BATCH)
    for _ in range(4):
        prompt = rng.integers(3, VOCAB, 40)
        plain = decode(auditor, Drafter(name="plain"), prompt, 60)
        for name in METHODS:
            out = decode(target, build(name), prompt, 60)
            assert audit_output(auditor, prompt.tolist(), out, plain).verdict != "bug", name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_passes_give_the_same_tokens(architecture, rng):
    sizes = {"max_len": 200, "max_nodes": 40}
    plain = Target(tiny_model(architecture).cuda(), **sizes)
    fixed = GraphTarget(tiny_model(architecture).cuda(), **sizes)
    drafter = RandomDrafts(name="random_drafts", n_nodes=20)
    drafter.setup(context(fixed))
    prompt = rng.integers(3, VOCAB, 30)
    eos = EOS
    wanted = Engine(plain, GreedyVerifier(), eos_ids=eos).decode(
        prompt, Drafter(name="plain"), max_new_tokens=60
    )
    got = Engine(fixed, GreedyVerifier(), eos_ids=eos).decode(prompt, drafter, max_new_tokens=60)
    assert got.output_ids == wanted.output_ids
    assert fixed.describe()["graphs"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_drafts_captured_passes_give_the_same_logits(architecture, rng):
    sizes = {"max_len": 300, "max_nodes": 8}
    exact, fixed = (
        DraftModel(target, target_vocab=VOCAB, max_nodes=8)
        for target in (
            Target(tiny_model(architecture).cuda(), **sizes),
            GraphTarget(tiny_model(architecture).cuda(), drafts=True, **sizes),
        )
    )
    text = rng.integers(0, VOCAB, 20)
    for draft in (exact, fixed):
        draft.begin(text[:17])
    torch.testing.assert_close(fixed.catch_up(text), exact.catch_up(text))
    for tokens, parents in (([5], [-1]), ([6], [0]), ([7, 8, 9], [0, 1, 1])):
        nodes = np.array(tokens), np.array(parents)
        torch.testing.assert_close(fixed.extend(*nodes), exact.extend(*nodes))
    assert fixed._target.describe()["graphs"] and not fixed._target.reasons


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_nothing_waits_for_the_device(rule):
    torch.manual_seed(0)
    host, device = AdjacencyMatrix(5000, 8), AdjacencyMatrix(5000, 8, "cuda")
    for matrix in (host, device):
        matrix.prepare(load_tree(TOKEN_RECYCLING_TREE))
    tokens, logits = torch.randint(0, 40, (81,)), torch.randn(81, 5000)
    on_device = tokens.cuda(), logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        device.update(*on_device, rule)
        drafted = device.fill(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host.update(tokens, logits, rule)
    assert torch.equal(device.rows.cpu(), host.rows)
    assert torch.equal(drafted.cpu(), host.fill(3))
