"""On a GPU, real or pretended: all kinds of methods decode as plain decoding does on the CPU."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from methods.random_drafts import RandomDrafts
from specbench.decoding.batch import BatchEngine, TurnRequest
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree
from specbench.decoding.verify import GreedyVerifier, MatchVerifier
from specbench.errors import ConfigurationError, DeviceLost
from specbench.kernels.fused_pass import Products
from specbench.models.batch_target import BatchTarget
from specbench.models.graph_target import StaticPass
from specbench.models.hidden_states import Embeddings
from specbench.models.loading import shape_model
from specbench.models.target import Target
from tests.conftest import VOCAB, quick_first, side_by_side, tiny_model
from tests.fake_cuda import decoders
from tests.fake_cuda.decoders import DEVICE, DRAFTED, FUSED, HEADS, PROMPT, SECOND, TEXT, decode

DRAFTS_COMPARED = {*HEADS, "token_recycling", "sps", "opt_tree"}
QUICK = ("eagle2", "eagle3", "opt_tree", "token_recycling")
# On a GPU also in the formats of runs, which have other kernels than float64.
DTYPES = [torch.float64] + [torch.bfloat16, torch.float32] * torch.cuda.is_available()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def plain(dtype):
    return decoders.plain(dtype)


@pytest.mark.parametrize("name", quick_first(sorted(DRAFTS_COMPARED), QUICK))
def test_captured_drafts_are_those_of_the_cpu(gpu, plain, dtype, tmp_path, name):
    """The text is the target's whatever a head drafts, so trees are compared."""
    make = (HEADS | TEXT | DRAFTED)[name]
    files = {"heads": decoders.heads(tmp_path)} if name in HEADS else {}
    sizes = {"max_nodes": max(make().needs.max_nodes, 5), "dtype": dtype}
    target = decoders.target(**sizes)
    # The same layers, because stock ones round hidden states differently.
    uncaptured = decoders.target(engine=partial(FUSED, capture=False), device="cpu", **sizes)

    def drafts(where, drafter, device):
        draft = {"draft_model": decoders.draft(drafter, device, dtype)} if name in DRAFTED else {}
        return decoders.drafts(where, drafter, plain, **draft, **files)

    captured, drafter = make(), make()
    trees = drafts(target, captured, DEVICE)
    expected = drafts(uncaptured, drafter, "cpu")
    # Random heads have near ties; the kernels of a real GPU round float32 in their own way, too.
    least = {torch.bfloat16: 0.5, torch.float32: 0.9}.get(dtype) if gpu is None else None
    if least is not None:
        assert alike(trees, expected) > least
    else:
        assert trees.keys() == expected.keys() and len(trees) > 6
        for at, (*tree, probs) in trees.items():
            *expected_tree, expected_probs = expected[at]
            assert tree == expected_tree
            assert probs is expected_probs is None or np.allclose(probs, expected_probs, rtol=1e-3)
    if name in HEADS:
        launched = captured.report()["launched_drafts"]
        assert launched <= len(trees) / 2  # paths that no head drafts
        assert not drafter.report()


def alike(trees, expected) -> float:
    """Return the share of nodes that drafts of the same text have in common despite near ties."""
    both, nodes = 0, 0
    assert len(trees.keys() & expected.keys()) > 6
    for at in trees.keys() & expected.keys():
        paths = []
        for tokens, parents, _ in (trees[at], expected[at]):
            tree_paths = []
            for token, parent in zip(tokens, parents, strict=True):
                tree_paths.append((*(tree_paths[parent] if parent >= 0 else ()), token))
            paths.append(set(tree_paths))
        both, nodes = both + len(paths[0] & paths[1]), nodes + max(map(len, paths))
    return both / nodes


def test_methods_that_draft_text(gpu, plain, dtype):
    target = decoders.target(max_nodes=80, dtype=dtype)
    for name, make in TEXT.items():
        plain.check(decode(target, make(), turns=2).output_ids, name)
    assert not target.reasons


@pytest.mark.slow  # over a second
def test_methods_with_a_draft_model(gpu, plain, dtype):
    target = decoders.target(max_nodes=31, dtype=dtype)
    for name in DRAFTED.keys() - DRAFTS_COMPARED:
        drafter = DRAFTED[name]()
        draft = decoders.draft(drafter, dtype=dtype)
        plain.check(decode(target, drafter, turns=2, draft_model=draft).output_ids, name)
    assert not target.reasons


@pytest.mark.parametrize(
    ("name", "waits", "replays", "launches"),
    [
        ("plain", 1, 1, 4),
        ("token_recycling", 1, 3, 9),
        ("sps", 1, 2.2, 9),
        pytest.param("hydra", 1, 3.2, 9, marks=pytest.mark.slow),
        pytest.param("eagle", 1, 3, 9, marks=pytest.mark.slow),
        ("eagle2", 2, 3, 9),
    ],
)
def test_what_a_step_costs(pretended, tmp_path, name, waits, replays, launches):
    """Waits for accepted tokens, graphs, and launches of their inputs.

    The host waits twice if it must also know the shape of a tree.
    """
    drafter = (TEXT | HEADS | DRAFTED)[name]()
    target = decoders.target(max_nodes=max(drafter.needs.max_nodes, 5))
    given = {"heads": decoders.heads(tmp_path)} if name in HEADS else {}
    given |= {"draft_model": decoders.draft(drafter)} if name in DRAFTED else {}
    counts, passes = [], []
    for tokens in (4, 4, 20):  # what is made once is made first
        pretended.waits.clear()
        pretended.counts.clear()
        passes.append(decode(target, drafter, tokens=tokens, **given).n_target_passes)
        counts.append(
            (len(pretended.waits), *(pretended.counts[k] for k in ("replays", "launches")))
        )
    steps = passes[2] - passes[1]
    per_step = [(last - first) / steps for first, last in zip(*counts[1:], strict=True)]
    assert steps > 4 and 1 <= per_step[0] <= waits
    assert per_step[1] <= replays and per_step[2] <= launches


def test_sequences_of_a_batch_are_one_graph_a_step(gpu, plain, dtype):
    target = decoders.target(max_nodes=20, dtype=dtype)
    batch = BatchTarget(target, 3)
    drafters = [RandomDrafts(name="random_drafts", n_nodes=n) for n in (20, 3, 9)]
    for drafter in drafters:
        drafter.setup(DraftContext(VOCAB, frozenset(), max_len=128, target=target))
    engine = BatchEngine(batch, [GreedyVerifier() for _ in drafters], eos_ids=decoders.EOS)
    requests = [TurnRequest(PROMPT, drafter, 0) for drafter in drafters]
    with decoders.recorded_graphs() as graphs:
        if gpu is not None:
            gpu.counts.clear()
        turns = engine.decode(requests, max_new_tokens=24).turns
    for turn in turns:
        plain.check(turn.output_ids)
    assert not graphs and not target.eager_passes
    if gpu is not None:
        assert gpu.counts["replays"] == max(turn.n_target_passes for turn in turns)


def test_the_fastest_product_is_chosen_once_and_kept(pretended, tmp_path):
    def slow(x, weight, bias):
        for _ in range(50):
            linear(x, weight, bias)
        return linear(x, weight, bias)

    def too_large(x, weight, bias):
        raise type("OutOfResources", (Exception,), {})

    x, weight = torch.ones(1, 64, device=DEVICE), torch.ones(512, 64, device=DEVICE)
    ways = {"library": slow, "row": linear, "tile": too_large}
    for damaged in (False, True):
        if damaged:
            (file,) = tmp_path.iterdir()
            file.write_text(file.read_text()[:9])
        assert Products(folder=tmp_path)._choice(ways, x, (weight, None), 1) == "row"
    calls = dict.fromkeys(ways, too_large)  # nothing is timed again
    assert Products(folder=tmp_path)._choice(calls, x, (weight, None), 1) == "row"


def test_freed_work_spaces_belong_to_no_graph(gpu):
    """The work space of split products: torch's own graphs free that of all streams."""
    large = gpu is None  # products of small models are not split
    hidden, layers = (4096, 2) if large else (32, 2)
    shape = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": hidden,
             "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
             "num_attention_heads": hidden // 16, "num_key_value_heads": hidden // 32}  # fmt: skip
    device = torch.device(DEVICE)
    model = shape_model(shape, dtype=torch.bfloat16, device=device).eval().requires_grad_(False)
    target = FUSED(model, max_len=128, max_nodes=15)
    outputs = []
    for _ in range(2):
        outputs.append(decode(target, Drafter(name="plain")).output_ids)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    assert outputs[0] == outputs[1] and not target.reasons


@pytest.mark.parametrize("name", ["eagle2", "hydra"])
def test_graphs_that_are_replaced_go_at_once(gpu, tmp_path, name):
    """Else the garbage collector would destroy them in the middle of a step."""
    drafter = HEADS[name]()
    target = decoders.target(max_nodes=max(drafter.needs.max_nodes, 5))
    heads = decoders.heads(tmp_path)
    drafter.setup(DraftContext(VOCAB, frozenset(), max_len=600, target=target, heads=heads))
    references = []
    gc.disable()
    try:
        for new in (24, 500):  # the second text exceeds what the first one's graphs are for
            with decoders.recorded_graphs() as graphs:
                drafter.begin(DecodeState(PROMPT, new))
            references.append([weakref.ref(recorder) for recorder, _ in graphs])
            del graphs
        assert references[0] and references[1] and not any(ref() for ref in references[0])
    finally:
        gc.enable()


@pytest.mark.slow  # over a second
@pytest.mark.parametrize(
    ("overlap", "names"),
    [("stream", ["pearl", "card"]), ("thread", ["card"]), ("serial", ["pearl", "sps"])],
)
def test_drafting_on_the_second_device(gpu, overlap, names):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    target = decoders.target(max_nodes=31)
    for name in names:
        drafter = DRAFTED[name]()
        draft = decoders.draft(drafter, SECOND)
        result = decode(target, drafter, turns=2, draft_model=draft, overlap=overlap)
        decoders.plain(torch.float64).check(result.output_ids, name)
    assert not target.reasons


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pearl", "card"])
def test_late_drafts_during_a_pass_are_the_same(gpu, monkeypatch, name):
    """Drafts have their own stream: a step that does not wait for them reads old memory."""
    if gpu is not None:
        pytest.skip("a pretended GPU is never late")
    target, results = decoders.target(max_nodes=31), []
    for late in (False, True):
        drafter = DRAFTED[name]()
        overlap = drafter.overlap

        def slow(state, tree, overlap=overlap, late=late):
            if late:
                torch.cuda._sleep(5_000_000)
            return overlap(state, tree)

        monkeypatch.setattr(drafter, "overlap", slow)
        draft = decoders.draft(drafter)
        result = decode(target, drafter, turns=2, draft_model=draft, overlap="stream")
        results.append((result.output_ids, result.n_target_passes))
    assert results[0] == results[1]


@pytest.mark.parametrize("architecture", ["mistral_window", "qwen3"])
def test_windows_and_the_batch_layout(gpu, architecture):
    """Drafts of several rows, a text longer than a window, and a tree that no bucket holds."""
    exact = Target(tiny_model(architecture), max_len=128, max_nodes=150, batch=4)
    target = FUSED(
        tiny_model(architecture).to(DEVICE), max_len=128, max_nodes=150, batch=4, layouts=[(4, 4)]
    )
    random = np.random.default_rng(0)
    trees = [
        side_by_side(random.integers(3, VOCAB, 12), 3),
        DraftTree.chain(random.integers(3, VOCAB, 6)),
        DraftTree(random.integers(3, VOCAB, 140), np.repeat([-1, 0], 70)),
    ]
    for engine in (exact, target):
        engine.prefill(PROMPT)
    for tree in trees:
        scores = [engine.forward(5, tree) for engine in (exact, target)]
        assert torch.equal(*(torch.as_tensor(s.greedy()).cpu() for s in scores))
        for engine in (exact, target):
            engine.commit(tree, np.arange(2))
    assert list(target.reasons) == ["141 rows"]


def test_a_clone_has_its_own_graphs(gpu):
    """A graph writes to the cache that was there when it was captured."""
    prompts = PROMPT, PROMPT[::-1].copy()
    exact, first = Target(tiny_model("llama"), max_len=128), decoders.target(max_nodes=3)
    pairs = [(exact, first), (exact.clone(), first.clone())]
    for text, pair in zip(prompts, pairs, strict=True):
        for engine in pair:
            engine.prefill(text)
    tree = DraftTree.chain(np.array([4, 5]))
    for exact, graphed in pairs:
        right, graph = (engine.forward(7, tree).greedy().tolist() for engine in (exact, graphed))
        assert right == graph
        for engine in (exact, graphed):
            engine.commit(tree, np.array([], dtype=np.int64))
    for exact, graphed in pairs:
        right, graph = (engine.forward(9, tree).greedy().tolist() for engine in (exact, graphed))
        assert right == graph
    assert len(pairs[1][1].graphs) == len(first.graphs) > 0


def test_a_head_hears_the_lm_head_where_it_lies(gpu):
    """The last layers of a model on two GPUs are on the second one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    network = decoders.model()
    states = torch.ones(2, network.config.hidden_size, dtype=torch.float64, device=DEVICE)
    expected = Embeddings.from_model(network).logits(states)
    network.lm_head.to(SECOND)
    network.lm_head.register_forward_pre_hook(lambda _, given: (given[0].to(SECOND),))
    logits = Embeddings.from_model(network).logits(states)
    assert logits.device == states.device and torch.equal(logits.cpu(), expected.cpu())


SAMPLINGS = [Sampling(0.3, top_p=0.9, top_k=20), Sampling(1.0)]


@pytest.mark.parametrize("sampling", quick_first(SAMPLINGS, SAMPLINGS[:1]))
def test_sampled_outputs_equal_the_cpu_s(gpu, sampling):
    """By a pass that draws, and by a host that decides, after which rows are moved."""
    results = []
    for target in (
        Target(tiny_model("llama"), max_len=128, max_nodes=31),
        decoders.target(max_nodes=31, commits=False),
        decoders.target(max_nodes=31, sampling=sampling),
    ):
        verifier = MatchVerifier(sampling, getattr(target, "uniforms", None))
        drafter = RandomDrafts(name="random_drafts", n_nodes=20)
        for _ in range(2):
            result = decode(target, drafter, verifier=verifier)
        results.append((result.output_ids, result.committed_per_step))
    assert results[0] == results[1] == results[2]
    assert max(results[0][1]) > 1


def test_passes_without_a_graph_run_eagerly_and_say_why(gpu, monkeypatch):
    monkeypatch.setattr(StaticPass, "device_part", lambda self: self.numbers.cpu())
    target = decoders.target(max_nodes=20)
    monkeypatch.undo()
    assert not target.graphs
    assert set(target.reasons) == {f"1 x {n} rows" for n in (1, 2, 4, 8, 16, 32)}
    decoders.plain(torch.float64).check(decode(target, TEXT["random_drafts"]()).output_ids)


def test_a_capture_that_loses_the_gpu_is_not_passed_over(pretended, monkeypatch):
    """All captures after it would fail too, and be blamed."""

    def lost(self):
        if self.rows == 4:
            pretended.lost = "CUDA error: an illegal memory access was encountered"
        return real(self)

    real = StaticPass.device_part
    monkeypatch.setattr(StaticPass, "device_part", lost)
    message = r"graph of 1 x 4 rows failed with .*illegal.* ran 1 x 2 rows"
    with pytest.raises(DeviceLost, match=message):
        decoders.target(max_nodes=20)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),  # of the driver, as a graph is made
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_a_graph_without_memory_says_what_to_type(gpu, error, monkeypatch):
    def full(self):
        raise error

    monkeypatch.setattr(StaticPass, "device_part", full)
    with pytest.raises(ConfigurationError, match=r"no memory left for the CUDA graph of 1 x 1 row"):
        decoders.target()
