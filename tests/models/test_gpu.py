"""On a GPU: every method decodes as plain decoding does, of every architecture, by both engines.

Exact in float32 (without TF32) and float64 on tiny models; in bfloat16 and float16 every difference
must be a near tie. Files that methods draft from are toys. Skipped where there is no CUDA device;
`tests/fake_cuda` has the heads, and runs on a pretended one, too.
"""

from functools import partial

import pytest
import torch

from specbench.config.compose import option_names
from specbench.decoding.drafter import Drafter
from specbench.decoding.lossless import audit_output
from specbench.decoding.structs import DraftContext
from specbench.models.checks.audit_tolerance import calibrate
from specbench.models.draft.model import DraftModel
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import ARCHITECTURES, engine, tiny_model
from tests.contract.driver import EOS, VOCABULARY, instantiate, toy_context

THERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="needs a CUDA device")]

FUSED = partial(GraphTarget, fused=True)  # as runs have it
ENGINES = {"eager": Target, "graph": FUSED}
# Small enough for the vocabulary, and for many passes.
KNOBS = {
    "card": {"k": 6, "r": 3, "max_depth": 12},
    "ouroboros": {"gamma": 3, "ngram": 3, "window": 4, "guesses": 4, "topk": 2},
}


def build(name: str) -> Drafter:
    return instantiate(name, **KNOBS.get(name, {}))


# Composing them takes seconds, which collection without a GPU need not spend.
NEEDS = {name: build(name).needs for name in option_names("method") * THERE if name != "ar"}


def model(architecture: str, *, dtype: torch.dtype = torch.float64, **options):
    """The weights that files of toys were made with, rounded."""
    return tiny_model(architecture, vocab_size=VOCABULARY, **options).to("cuda", dtype)


@pytest.fixture
def decode(tmp_path_factory, monkeypatch):
    """Decodes a prompt; files that drafters need are built once for an architecture."""

    def text(target, drafter, prompt, tokens=40, of="llama", draft=None) -> list[int]:
        files = {}
        if drafter.needs.artifacts:
            cache = tmp_path_factory.getbasetemp() / f"toys-{of}"
            files = toy_context(drafter, cache, monkeypatch, architecture=of).artifacts
        drafter.setup(
            DraftContext(
                VOCABULARY, frozenset({EOS}), "toy", target.cache.max_len, files, target=target,
                draft_model=draft,
            )
        )  # fmt: skip
        loop = engine(target, eos=frozenset({EOS}))
        for _ in range(2 if draft else 1):  # the second turn finds the first one's caches
            drafter.reset()
            output = loop.decode(prompt, drafter, max_new_tokens=tokens).output_ids
        drafter.close()
        return output

    return text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ENGINES)
def test_differences_in_half_precision_are_near_ties(way, dtype, rng, decode):
    network = model("llama", dtype=dtype)
    auditor = Target(network, max_len=200)
    target = ENGINES[way](network, max_len=200, max_nodes=127, batch=10)
    prompts = [rng.integers(3, VOCABULARY, 40) for _ in range(2)]
    tolerance = calibrate([target], prompts).value
    for prompt in prompts:
        plain = decode(auditor, Drafter(name="plain"), prompt)
        for name in without_a_model():
            out = decode(target, build(name), prompt)
            assert audit_output(auditor, prompt.tolist(), out, plain, tolerance).verdict != "bug", (
                name
            )


@pytest.mark.parametrize("seed", [0, 1], ids=["itself", "stranger"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_methods_with_a_draft_model_are_exact(architecture, seed, rng, decode):
    target = FUSED(model(architecture), max_len=200, max_nodes=127)
    names = [name for name, needs in NEEDS.items() if needs.draft_model and not needs.heads]
    nodes = max(NEEDS[name].draft_nodes or NEEDS[name].max_nodes for name in names)
    network = model(architecture, seed=seed)
    fixed = FUSED(network, max_len=200 + nodes, max_nodes=nodes, drafts=True)
    draft = DraftModel(fixed, target_vocab=VOCABULARY, max_nodes=nodes)
    prompt = rng.integers(3, VOCABULARY, 40)
    plain = decode(target, Drafter(name="plain"), prompt, 30)
    for name in names:
        assert decode(target, build(name), prompt, 30, draft=draft) == plain, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_methods_are_exact(architecture, way, dtype, rng, decode):
    network = model(architecture, dtype=dtype)
    prompt = rng.integers(3, VOCABULARY, 40)
    plain = decode(Target(network, max_len=200), Drafter(name="plain"), prompt)
    target = ENGINES[way](network, max_len=200, max_nodes=127, batch=10)
    for name in without_a_model():
        assert decode(target, build(name), prompt, of=architecture) == plain, name


def without_a_model() -> list[str]:
    return [n for n, needs in NEEDS.items()
            if not (needs.reference or needs.draft_model or needs.heads)]  # fmt: skip
