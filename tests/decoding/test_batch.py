"""A batch decodes each sequence as alone: tokens, steps, drafts, whatever its neighbours."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from specbench.decoding.batch import BatchEngine, TurnRequest
from specbench.decoding.drafter import Drafter, ModelDrafter
from specbench.decoding.protocols import ModelCall
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.decoding.verify import GreedyVerifier, RejectionVerifier
from specbench.errors import CaseFailed, ConfigurationError
from specbench.models import batch_target, kv_cache
from specbench.models.batch_target import BatchTarget
from specbench.models.graph_target import GraphTarget
from specbench.models.heads.drafter import heads_of
from specbench.models.heads.layer_shape import read_shape
from specbench.models.kv_cache import KVCache
from specbench.models.target import Target
from specbench.system.clock import Clock
from tests.conftest import ARCHITECTURES, CARRIERS, engine, quick_first, tiny_model
from tests.contract import driver
from tests.decoding.test_engine import Adversary
from tests.methods.test_adaptive import surface
from tests.models.heads import tiny_heads

VOCAB = driver.VOCABULARY
NEW_TOKENS = 14
# Ragged, and on both sides of the sliding windows of tiny models.
LENGTHS = (19, 1, 7, 33, 12)
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n) for n in LENGTHS]
OVERLAPPED = ("card", "pearl")  # refused: they draft while the target reads
ALWAYS = ("cacheback", "eagle2", "pld", "sps", "suffix_decoding", "token_recycling")
METHODS = [name for name in driver.method_names() if name not in OVERLAPPED]
METHODS = quick_first(METHODS, ALWAYS)


@pytest.fixture(scope="module")
def targets():
    cache = {}

    def get(architecture="llama", size=5):
        if architecture not in cache:
            model = tiny_model(architecture, vocab_size=VOCAB)
            cache[architecture] = Target(model, max_len=64, max_nodes=128)
        return cache[architecture], BatchTarget(cache[architecture], size)

    return get


def alone(target, drafters, verifier=None, prompts=PROMPTS, n=NEW_TOKENS, **options):
    """Decode each sequence by itself."""
    loop = engine(target, verifier or GreedyVerifier(), **options)
    return [
        loop.decode(prompt, drafter, max_new_tokens=n, seed=seed)
        for seed, (prompt, drafter) in enumerate(zip(prompts, drafters, strict=False))
    ]


def together(*args, **options):
    return batch_result(*args, **options).turns


def batch_result(
    batch, drafters, verifier=GreedyVerifier, prompts=PROMPTS, n=NEW_TOKENS, **options
):
    options = {"eos_ids": options.pop("eos", frozenset()), **options}
    loop = BatchEngine(batch, [verifier() for _ in batch.slots], **options)
    requests = [
        TurnRequest(prompt, drafter, seed)
        for seed, (prompt, drafter) in enumerate(zip(prompts, drafters, strict=False))
    ]
    return loop.decode(requests, max_new_tokens=n)


def same(turns, expected):
    for turn, other in zip(turns, expected, strict=True):
        assert not isinstance(turn, Exception), turn
        assert turn.output_ids == other.output_ids
        assert turn.committed_per_step == other.committed_per_step
        assert turn.drafted_per_step == other.drafted_per_step
        assert turn.finish_reason == other.finish_reason
    return True


def adversaries(target, count):
    plain = alone(target, [Drafter(name="ar")] * len(PROMPTS))
    truths = [turn.output_ids for turn in plain]
    return [Adversary(truth=truth, seed=i) for i, truth in enumerate(truths)][:count]


@pytest.mark.parametrize("architecture", CARRIERS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_text_is_its_single_run(architecture, count, targets):
    target, batch = targets(architecture)
    drafters = adversaries(target, count)
    same(together(batch, drafters), alone(target, drafters))


@pytest.mark.parametrize("architecture", CARRIERS)
def test_passes_of_fixed_shape_give_each_text_its_single_run(architecture, targets):
    """What a GPU replays; drafts of 40 nodes have no shape where a text nears its end."""
    exact, _ = targets(architecture)
    model = tiny_model(architecture, vocab_size=VOCAB)
    graph = GraphTarget(model, max_len=64, max_nodes=40, fused=True, capture=False)
    drafters = adversaries(exact, 5)
    batch = BatchTarget(graph, 5)
    for n in (NEW_TOKENS, 30):
        drafters = adversaries(exact, 5)
        same(together(batch, drafters, n=n), alone(exact, drafters, n=n))
    assert graph.eager_passes < 30


@pytest.fixture
def drafters(targets, tmp_path_factory, monkeypatch):
    """Drafters of one method, ready for the prompts."""
    base = tmp_path_factory.getbasetemp()

    def get(name, *, joined, count=3, shared=False, of="llama", **knobs):
        """Get drafters; ``joined``: with shared weights; ``of``: the target's architecture."""
        ready, first, (target, _) = [], None, targets(of)
        for prompt in PROMPTS[:count]:
            drafter = driver.instantiate(name, **knobs)
            cache = base / ("contract-artifacts" if of == "llama" else f"artifacts-{of}")
            context = driver.toy_context(drafter, cache, monkeypatch, architecture=of)
            if context.heads:  # of this target's size
                shape, folder = read_shape(target.config, of), base / f"heads-{of}"
                context = replace(context, heads=tiny_heads.save_each(folder, VOCAB, shape))
            first = first or context
            if joined:
                draft = first.draft_model and first.draft_model.clone()
                context = replace(context, head_cache=first.head_cache, draft_model=draft)
            drafter.setup(replace(context, target=target, budget_shared=shared))
            drafter.reset()
            if drafter.needs.reference:
                plain = alone(target, [Drafter(name="ar")], prompts=[prompt])
                drafter.set_reference(np.array(plain[0].output_ids))
            ready.append(drafter)
        return ready

    return get


@pytest.mark.parametrize("inner", ["suffix_decoding", "eagle2", "sps"])
def test_texts_that_choose_their_rows_together_stay_what_they_are(
    inner, targets, drafters, tmp_path
):
    target, batch = targets()
    plain = alone(target, [Drafter(name="ar")] * 5)
    file = surface(tmp_path, 1 + 0.2 * np.arange(60), n_sequences=5, dtype="float64")
    knobs = {"policy": "marginal", "surface": file, "drafter": inner}
    drafted = offered = 0
    for count in (1, 2, 5):
        joint = drafters("adaptive", joined=True, count=count, shared=True, **knobs)
        turns = together(batch, joint)
        for turn, other in zip(turns, plain, strict=False):
            assert not isinstance(turn, Exception), turn
            assert turn.output_ids == other.output_ids
        offered += sum(sum(turn.drafter["offered_per_step"]) for turn in turns)
        drafted += sum(turn.n_drafted for turn in turns)
    assert 0 < drafted < offered


@pytest.mark.parametrize("name", METHODS)
def test_every_method_drafts_as_it_does_alone(name, targets, drafters):
    target, batch = targets()
    expected = alone(target, drafters(name, joined=False))
    joint = drafters(name, joined=True)
    same(together(batch, joint), expected)
    if joint[0].needs.heads or joint[0].needs.draft_model:
        # Each text by itself, in as many passes of the model as it takes.
        alone_passes = [
            batch_result(batch, [drafter]).model_passes for drafter in drafters(name, joined=True)
        ]
        assert 0 < batch_result(batch, joint).model_passes <= sum(alone_passes) / 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", [m for m in driver.method_names() if m not in OVERLAPPED])
def test_every_method_on_every_architecture_in_groups_of_each_size(
    name, architecture, targets, drafters
):
    target, batch = targets(architecture)
    expected = alone(target, drafters(name, joined=False, count=5, of=architecture))
    for count in (1, 2, 5):
        joint = drafters(name, joined=True, count=count, of=architecture)
        same(together(batch, joint), expected[:count])


def test_heads_of_all_texts_have_their_weights_in_common(targets, tmp_path):
    target, _ = targets()
    heads = tiny_heads.save_each(tmp_path, VOCAB, read_shape(target.config, "llama"))
    context = DraftContext(VOCAB, frozenset(), target=target, heads=heads)
    for name in driver.methods_that_need("heads"):
        weights = []
        for _ in range(2):
            drafter = driver.instantiate(name)
            drafter.setup(context)
            weights.append(_weights(drafter))
        assert weights[0] and weights[0] == weights[1]


def _weights(drafter):
    """Addresses of the parameters that it drafts with."""
    modules = [
        value for part in heads_of(drafter) for value in vars(part).values()
        if isinstance(value, torch.nn.Module)
    ]  # fmt: skip
    return [p.data_ptr() for module in modules for p in module.parameters()]


def test_a_pass_by_one_call_gives_each_text_its_own_to_the_last_bit():
    model = tiny_model("llama", dtype=torch.float32, vocab_size=VOCAB)
    target = Target(model, max_len=64, max_nodes=40, packed_bytes=1 << 22)
    assert target.compiled is not None
    batch = BatchTarget(target, 3)
    drafters = adversaries(target, 3)
    same(together(batch, drafters), alone(target, drafters))
    tree = DraftTree(np.array([5, 6, 7]), np.array([-1, 0, -1]))
    expected = []
    for slot, prompt in zip(batch.slots, PROMPTS, strict=False):
        slot.prefill(prompt)
        target.prefill(prompt)
        expected.append(target.forward(9, tree).logits.clone())
    drafts = [(i, 9, tree) for i in range(3)]
    for i in range(3):
        batch.check(i, tree)
    for scores, logits in zip(batch.forward(drafts), expected, strict=True):
        assert torch.equal(scores.logits, logits)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_drawn_drafts_are_accepted_as_they_are_alone(count, targets, drafters):
    target, batch = targets()
    verifier = lambda: RejectionVerifier(Sampling(temperature=0.8))  # noqa: E731
    expected = alone(target, drafters("sps", joined=False, count=count), verifier())
    same(together(batch, drafters("sps", joined=True, count=count), verifier), expected)


# -- ends and failures -----------------------------------------------------------------------------


def test_texts_leave_at_their_own_end(targets):
    """A sequence ends with its first token, another at the model's context, others go on."""
    target, batch = targets()
    first = alone(target, [Drafter(name="ar")], n=1)[0].output_ids[0]
    options = {"eos": frozenset({first}), "context_length": 40}
    drafters = adversaries(target, 5)
    expected = alone(target, drafters, **options)
    assert expected[0].output_ids == [first]
    assert "context" in {turn.finish_reason for turn in expected}
    same(together(batch, drafters, **options), expected)


@dataclass(kw_only=True, eq=False)
class Failing(Drafter):
    """Fails in the hook named by ``how``, or with its third draft."""

    name: str = "failing"
    how: str = "error"

    def begin(self, state):
        self._fail("begin")

    def observe(self, *seen):
        self._fail("observe")

    def end(self, state):
        self._fail("end")

    def report(self):
        self._fail("report")
        return {}

    def _fail(self, hook):
        if hook == self.how:
            raise ValueError("a bug of the method")

    def propose(self, state):
        if state.step < 2:
            return DraftTree.empty()
        self._fail("error")
        if self.how in HOOKS:
            return DraftTree.empty()
        return DraftTree.chain(np.array([3, VOCAB] * 75))


HOOKS = ("error", "begin", "observe", "end", "report")


@pytest.mark.parametrize(
    ("how", "kind"), [("token", CaseFailed), *((hook, ValueError) for hook in HOOKS)]
)
def test_one_that_fails_leaves_the_others_as_they_are(how, kind, targets):
    target, batch = targets()
    drafters = adversaries(target, 4)
    expected = alone(target, drafters)
    drafters[1] = Failing(how=how)
    turns = together(batch, drafters)
    assert isinstance(turns.pop(1), kind)
    expected.pop(1)
    same(turns, expected)


@dataclass(kw_only=True, eq=False)
class Asking(ModelDrafter):
    """Drafts the answers of a model that all sequences share."""

    name: str = "asking"
    truth: list[int]
    fails: bool = False

    def drafting(self, state):
        at = state.length - state.n_prompt
        request = (self.truth[at : at + 2], self.fails and state.step == 2)
        return DraftTree.chain(np.array((yield ModelCall("model", request, self._answer))))

    def _answer(self, requests):
        if any(fails for _, fails in requests):
            raise RuntimeError("no memory for this row")
        return [tokens for tokens, _ in requests]


def test_one_that_a_common_pass_of_the_drafters_fails_for_leaves_the_others(targets):
    target, batch = targets()
    truths = [turn.output_ids for turn in alone(target, [Drafter(name="ar")] * 4)]
    expected = alone(target, [Asking(truth=truth) for truth in truths])
    turns = together(batch, [Asking(truth=truth, fails=i == 1) for i, truth in enumerate(truths)])
    assert "no memory" in str(turns.pop(1))
    expected.pop(1)
    same(turns, expected)


def test_one_that_the_targets_pass_fails_for_leaves_the_others(targets, monkeypatch):
    target, batch = targets()
    drafters = adversaries(target, 4)
    expected = alone(target, drafters)
    faulty, inner = batch.slots[2].cache, batch_target._joint_pass

    def passed(target, compiled, ids, texts, *more):
        caches = [text.cache for text in texts]
        if faulty in caches and faulty.length > len(PROMPTS[2]) + 3:
            raise RuntimeError("no memory for these rows")
        return inner(target, compiled, ids, texts, *more)

    monkeypatch.setattr(batch_target, "_joint_pass", passed)
    turns = together(batch, drafters)
    assert "no memory" in str(turns.pop(2))
    expected.pop(2)
    same(turns, expected)


def test_a_prompt_that_does_not_fit_fails_alone(targets):
    target, batch = targets()
    drafters = adversaries(target, 5)
    turns = together(batch, drafters, context_length=30)
    assert [isinstance(turn, CaseFailed) for turn in turns] == [n >= 30 for n in LENGTHS]


def test_times_are_the_groups_until_a_text_ended(targets):
    """Use a clock that counts one second per mark."""

    class Marks(Clock):
        __slots__ = ()

        def _start(self, steps):
            pass

        def _mark(self, name):
            self._names.append(name)

        def _seconds(self):
            return [1.0] * len(self._names)

    target, batch = targets()
    plain = [Drafter(name="ar"), Drafter(name="ar")]
    end = alone(target, plain)[1].output_ids[3]
    loop = BatchEngine(batch, [GreedyVerifier()] * 5, eos_ids=frozenset({end}), clock=Marks)
    requests = [TurnRequest(p, d, reset_s=0.5) for p, d in zip(PROMPTS, plain, strict=False)]
    result = loop.decode(requests, max_new_tokens=NEW_TOKENS)
    steps = [len(turn.committed_per_step) for turn in result.turns]
    for turn, n in zip(result.turns, steps, strict=True):
        times = turn.timings
        assert (times.prefill_s, times.drafter_setup_s, times.decode_s) == (2.0, 3.0, 3.0 + n)
        assert times.step_s == [1.0] * n
    assert result.full_s == min(steps) < max(steps)


def test_what_does_not_fit_is_refused_with_the_number_that_does(targets, monkeypatch):
    target, _ = targets()
    slot_bytes = target.cache.nbytes + 129 * VOCAB * 8
    monkeypatch.setattr(batch_target, "free_bytes", lambda _: 3 * slot_bytes + 10)
    BatchTarget(target, 3)
    with pytest.raises(ConfigurationError, match=r"batch.size=5.*Type batch.size=3"):
        BatchTarget(target, 5)
    with pytest.raises(ConfigurationError, match=r"draft models, too.*Type batch.size=2"):
        BatchTarget(target, 3, draft_bytes=target.token_bytes // 4)


def test_where_longer_texts_do_not_fit_the_shorter_ones_go_on(monkeypatch):
    target = Target(tiny_model("llama", vocab_size=VOCAB), max_len=64, max_nodes=128)
    batch = BatchTarget(target, 2)
    drafters = adversaries(target, 2)
    expected = alone(target, drafters)
    monkeypatch.setattr(batch_target, "free_bytes", lambda _: 0)
    with pytest.raises(ConfigurationError, match=r"batch.size=2.*Type batch.size=1"):
        batch.reserve(2048)
    same(together(batch, drafters), expected)
    # A shorter sequence does not request the refused size again.
    slot_bytes = batch.slots[0].cache.nbytes + 129 * VOCAB * target.dtype.itemsize
    monkeypatch.setattr(batch_target, "free_bytes", lambda _: 4 * slot_bytes)
    batch.reserve(target.cache.max_len)
    assert 256 < batch.slots[0].cache.max_len < 1024


def test_where_the_machine_had_less_memory_than_it_said_the_shorter_ones_go_on(monkeypatch):
    target = Target(tiny_model("llama", vocab_size=VOCAB), max_len=64, max_nodes=128)
    batch = BatchTarget(target, 2)
    drafters = adversaries(target, 2)
    expected, inner = alone(target, drafters), Target.new_cache

    def short_of_memory(self, length, *more):
        if length > 1000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return inner(self, length, *more)

    monkeypatch.setattr(Target, "new_cache", short_of_memory)
    with pytest.raises(RuntimeError, match="allocate"):
        batch.reserve(2048)
    same(together(batch, drafters), expected)


# -- planted faults --------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Truth(Drafter):
    """Drafts the truth in a tree of three nodes of a given shape."""

    name: str = "truth"
    truth: list[int]
    parents: tuple[int, ...]

    def propose(self, state):
        at, depths = state.length - state.n_prompt, [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        following = [*self.truth[at:], 3, 3, 3, 3]
        tokens = [following[depth - 1] for depth in depths[1:]]
        # Siblings differ: the last of them is the right one.
        for i, parent in enumerate(self.parents):
            if parent in self.parents[i + 1 :]:
                tokens[i] = (tokens[i] + 1) % VOCAB
        return DraftTree(np.array(tokens), np.array(self.parents))


def zeroed_key(patch):
    """Add a key of zeros after each text's keys, which the softmax counts as e^0."""
    update = KVCache.update

    def padded(self, keys, values, layer, *more, **named):
        zero = torch.zeros_like(keys[:, :, :1])
        keys, values = update(self, keys, values, layer, *more, **named)
        if self.length:  # not of a prompt
            keys, values = torch.cat([zero, keys], 2), torch.cat([zero, values], 2)
        return keys, values

    patch.setattr(KVCache, "update", padded)


def with_other_texts(change):
    """Plant ``change(text, other)``, which is read instead of a text; ``other``: its neighbour."""

    def plant(patch):
        inner = batch_target._joint_pass

        def changed(target, compiled, ids, texts, *more):
            texts = [change(*pair) for pair in zip(texts, texts[::-1], strict=True)]
            return inner(target, compiled, ids, texts, *more)

        patch.setattr(batch_target, "_joint_pass", changed)

    return plant


def at_the_neighbours_positions(text, other):
    return text._replace(depths=text.depths + other.cache.length - text.cache.length)


def with_the_neighbours_mask(text, other):
    return text._replace(visible=other.visible) if text.rows == other.rows else text


def gather_off_by_one(patch):
    inner = KVCache.commit

    def shifted(self, rows, count, retained=0):
        if rows is not None and len(rows) > 1:
            rows = torch.cat([rows[:1], rows[1:] - 1])
        inner(self, rows, count, retained)

    patch.setattr(KVCache, "commit", shifted)


FAULTS = {
    "neighbours_positions": with_other_texts(at_the_neighbours_positions),
    "neighbours_mask": with_other_texts(with_the_neighbours_mask),
    "gather_off_by_one": gather_off_by_one,
}


def row_that_nobody_wrote(patch):
    """Let the compiled pass read one row beyond each text's rows of the cache."""
    inner = batch_target.Segment

    def late(storage, text, past, *more):
        return inner(storage, text, past + (past > 0), *more)

    for module in (kv_cache, batch_target):
        patch.setattr(module, "Segment", late)


@pytest.mark.parametrize("fault", [None, *FAULTS, row_that_nobody_wrote.__name__])
def test_planted_faults_are_found_in_passes_by_one_call(fault, monkeypatch):
    model = tiny_model("llama", dtype=torch.float32, vocab_size=VOCAB)
    target = Target(model, max_len=64, max_nodes=40, packed_bytes=1 << 22)
    assert target.compiled is not None
    plant = {**FAULTS, row_that_nobody_wrote.__name__: row_that_nobody_wrote}.get(fault)
    batch = BatchTarget(target, 2)
    assert outputs_are_those_alone(target, batch, plant, monkeypatch) == (fault is None)


def outputs_are_those_alone(target, batch, plant, monkeypatch):
    plain = alone(target, [Drafter(name="ar")] * 2)
    shapes = ((-1, 0, 1), (-1, -1, 1))
    drafters = [
        Truth(truth=turn.output_ids, parents=shape)
        for turn, shape in zip(plain, shapes, strict=True)
    ]
    expected = alone(target, drafters)
    if plant:
        plant(monkeypatch)
    outputs = [turn.output_ids for turn in together(batch, drafters)]
    return outputs == [turn.output_ids for turn in expected]


def test_a_zeroed_key_that_still_counts_is_found(targets, monkeypatch):
    target, batch = targets()
    drafters = [Drafter(name="ar")] * 3
    expected = alone(target, drafters)
    zeroed_key(monkeypatch)
    turns = together(batch, drafters)
    assert [turn.output_ids for turn in turns] != [turn.output_ids for turn in expected]
