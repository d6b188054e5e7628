"""On a GPU: every method decodes as plain decoding does, by both engines.

Exact in float32 (without TF32) and float64 on tiny models; in bfloat16 and float16 every difference
must be a near tie. Files that methods draft from are toys. Skipped where there is no CUDA device;
`make gpu-check` runs them with the rest, without pytest's plugins: nothing here may need them.
"""

from functools import partial
from pathlib import Path

import hydra.utils
import numpy as np
import pytest
import torch

from methods.random_drafts import RandomDrafts
from specbench.config.compare import method_node
from specbench.config.compose import option_names
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.lossless import audit_output
from specbench.decoding.structs import AFTER_FINAL_NORM, DraftContext, DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.index.adjacency_matrix import UPDATE_RULES, AdjacencyMatrix
from specbench.index.static_tree import TREES, load_tree
from specbench.models.checks.audit_tolerance import calibrate
from specbench.models.draft.model import DraftModel
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import ARCHITECTURES, VOCAB, tiny_model
from tests.models.gpu_toys import TOKENIZER, ToyFiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE, SECOND = "cuda:0", "cuda:1"
EOS = frozenset({2})
BATCH = 10  # k of N-Grammys: its layout is a batch, and a target of one row runs that as a tree
FUSED = partial(GraphTarget, fused=True)  # as runs have it
ENGINES = {"eager": Target, "graph": FUSED}


# Small enough for the vocabulary, and for many passes; nothing may depend on a thread's turn.
KNOBS = {
    "ssd": {"rebuild": "sync"},
    "card": {"k": 6, "r": 3, "max_depth": 12},
    "ouroboros": {"gamma": 3, "ngram": 3, "window": 4, "guesses": 4, "topk": 2},
}


def build(name: str) -> Drafter:
    node = method_node(name, KNOBS.get(name, {}), "pair=none")
    return hydra.utils.instantiate(node, _convert_="all")


# Composing them takes seconds, which collection without a GPU need not spend.
NAMES = option_names("method") if torch.cuda.is_available() else ()
NEEDS = {name: build(name).needs for name in NAMES if name != "ar"}
# Methods with trained heads are the parts `methods` and `steps` of the check: no toy has any.
METHODS = [n for n, needs in NEEDS.items()
           if not (needs.reference or needs.draft_model or needs.heads)]  # fmt: skip
DRAFTED = [n for n, needs in NEEDS.items() if needs.draft_model and not needs.heads]
OVERLAPPED = [name for name in DRAFTED if NEEDS[name].overlap]


def context(target: Target, **more: object) -> DraftContext:
    return DraftContext(
        vocab_size=VOCAB, eos_ids=EOS, max_len=target.cache.max_len, target=target, **more
    )


def small_draft(architecture: str, device: str, seed: int) -> DraftModel:
    """A draft model on the graph engine, for any method; with seed 0 it is the target itself."""
    nodes = max(NEEDS[name].draft_nodes or NEEDS[name].max_nodes for name in DRAFTED)
    model = tiny_model(architecture, seed=seed).to(device)
    fixed = FUSED(model, max_len=200 + nodes, max_nodes=nodes, drafts=True)
    return DraftModel(fixed, target_vocab=VOCAB, max_nodes=nodes)


def decode(target, drafter, prompt, tokens: int, toys: ToyFiles | None = None) -> list[int]:
    files = toys.files(drafter) if toys else {}
    drafter.setup(context(target, artifacts=files, tokenizer_hash=TOKENIZER))
    engine = Engine(target, GreedyVerifier(), eos_ids=EOS)
    out = engine.decode(prompt, drafter, max_new_tokens=tokens).output_ids
    drafter.close()
    return out


def toy_files(folder: Path, target: Target, rng: np.random.Generator) -> ToyFiles:
    """Of all ids, so that whatever is answered is found."""
    texts = [rng.permutation(np.arange(3, VOCAB)) for _ in range(20)]
    return ToyFiles(folder, target.model, texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_methods_are_exact(architecture, engine, dtype, rng, tmp_path):
    model = tiny_model(architecture, dtype=dtype).to(DEVICE)
    prompt = rng.integers(3, VOCAB, 40)
    plain = decode(Target(model, max_len=200), Drafter(name="plain"), prompt, 60)
    target = ENGINES[engine](model, max_len=200, max_nodes=127, batch=BATCH)
    toys = toy_files(tmp_path, target, rng)
    for name in METHODS:
        assert decode(target, build(name), prompt, 60, toys) == plain, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_differences_in_half_precision_are_near_ties(engine, dtype, rng, tmp_path):
    model = tiny_model("llama", dtype=dtype).to(DEVICE)
    auditor = Target(model, max_len=200)
    target = ENGINES[engine](model, max_len=200, max_nodes=127, batch=BATCH)
    toys = toy_files(tmp_path, target, rng)
    prompts = [rng.integers(3, VOCAB, 40) for _ in range(4)]
    tolerance = calibrate([target], prompts).value
    for prompt in prompts:
        plain = decode(auditor, Drafter(name="plain"), prompt, 60)
        for name in METHODS:
            out = decode(target, build(name), prompt, 60, toys)
            assert audit_output(auditor, prompt.tolist(), out, plain, tolerance).verdict != "bug", (
                name
            )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_passes_of_stock_layers_give_the_same_tokens(architecture, rng):
    sizes = {"max_len": 200, "max_nodes": 40}
    plain = Target(tiny_model(architecture).to(DEVICE), **sizes)
    fixed = GraphTarget(tiny_model(architecture).to(DEVICE), **sizes)
    prompt = rng.integers(3, VOCAB, 30)
    drafter = RandomDrafts(name="random_drafts", n_nodes=20)
    wanted = decode(plain, Drafter(name="plain"), prompt, 60)
    assert decode(fixed, drafter, prompt, 60) == wanted
    assert fixed.describe()["graphs"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_passes_hand_out_the_same_hidden_states(architecture, rng):
    sizes, layers = {"max_len": 300, "max_nodes": 15}, (0, 1, AFTER_FINAL_NORM)
    exact = Target(tiny_model(architecture).to(DEVICE), **sizes)
    fixed = GraphTarget(tiny_model(architecture).to(DEVICE), **sizes)
    fixed.expect(layers)
    graphs = fixed.describe()["graphs"]
    for n_prompt in (9, 250):
        prompt = rng.integers(3, VOCAB, n_prompt)
        for target in (exact, fixed):
            target.prefill(prompt)
        for n in (0, 6, 15):
            tree = DraftTree.chain(rng.integers(3, VOCAB, n))
            fixed.forward(5, tree)  # another graph, which may write over the first one's outputs
            found, wanted = (each.forward(5, tree, hidden_layers=layers) for each in (fixed, exact))
            assert found.hidden.keys() == wanted.hidden.keys()
            for i in layers:
                torch.testing.assert_close(found.hidden[i], wanted.hidden[i], atol=1e-10, rtol=0)
            for target in (exact, fixed):
                target.commit(tree, np.array([], dtype=np.int64))
    assert fixed.describe() == {"engine": "graph", "graphs": graphs, "eager": {}}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_drafts_captured_passes_give_the_same_logits(architecture, rng):
    sizes = {"max_len": 300, "max_nodes": 8}
    exact, fixed = (
        DraftModel(target, target_vocab=VOCAB, max_nodes=8)
        for target in (
            Target(tiny_model(architecture).to(DEVICE), **sizes),
            GraphTarget(tiny_model(architecture).to(DEVICE), drafts=True, **sizes),
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


@pytest.mark.parametrize("seed", [0, 1], ids=["itself", "stranger"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_methods_with_a_draft_model_are_exact(architecture, seed, rng):
    target = FUSED(tiny_model(architecture).to(DEVICE), max_len=200, max_nodes=127)
    draft = small_draft(architecture, DEVICE, seed)
    prompt = rng.integers(3, VOCAB, 40)
    plain = decode(target, Drafter(name="plain"), prompt, 30)
    for method in DRAFTED:
        check_drafting(target, method, "auto", draft, prompt, plain)


@pytest.mark.parametrize("seed", [0, 1], ids=["itself", "stranger"])
@pytest.mark.parametrize("method", OVERLAPPED)
def test_tokens_do_not_depend_on_how_drafting_overlaps_the_pass(method, seed, rng):
    prompt = rng.integers(3, VOCAB, 40)
    check_overlaps(method, DEVICE, seed, prompt)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("method", OVERLAPPED)
def test_the_draft_model_may_be_on_a_second_device(method, rng):
    prompt = rng.integers(3, VOCAB, 40)
    check_overlaps(method, SECOND, 0, prompt)


def check_overlaps(method: str, device: str, seed: int, prompt: np.ndarray) -> None:
    """Stream, thread and serial: the plain tokens, and the same tokens accepted at every step."""
    target = Target(tiny_model("llama").to(DEVICE), max_len=200)
    plain = decode(target, Drafter(name="plain"), prompt, 30)
    accepted = []
    for overlap in ("stream", "thread", "serial"):
        # Made anew: each way must do with graphs that nothing else has captured.
        target = FUSED(tiny_model("llama").to(DEVICE), max_len=200, max_nodes=127)
        draft = small_draft("llama", device, seed)
        accepted.append(check_drafting(target, method, overlap, draft, prompt, plain))
    assert accepted[0] == accepted[1] == accepted[2]


def check_drafting(target, method, overlap, draft, prompt, plain: list[int]) -> list[int]:
    """Twice in a row, as the second turn finds the first one's caches; gives what was accepted."""
    drafter = build(method)
    drafter.setup(context(target, draft_model=draft))
    engine = Engine(target, GreedyVerifier(), eos_ids=EOS, overlap=overlap)
    assert overlap in ("auto", engine.overlap)  # not another way in its place
    accepted = []
    for _ in range(2):
        drafter.reset()
        result = engine.decode(prompt, drafter, max_new_tokens=len(plain))
        assert result.output_ids == plain, (method, overlap)
        accepted += result.committed_per_step
    drafter.close()
    return accepted


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_nothing_waits_for_the_device(rule):
    torch.manual_seed(0)
    host, device = AdjacencyMatrix(5000, 8), AdjacencyMatrix(5000, 8, "cuda")
    for matrix in (host, device):
        matrix.prepare(load_tree(TREES["template"]))
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
