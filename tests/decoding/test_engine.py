"""Any drafter whatever leaves plain greedy decoding's output untouched, step by step."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from methods.lookahead import Lookahead
from methods.pld import PromptLookup
from methods.random_drafts import RandomDrafts
from methods.sps import Sps
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DraftContext, DraftTree, Needs
from specbench.errors import CaseFailed, ConfigurationError
from specbench.models.draft.model import DraftModel
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from specbench.system.clock import CpuClock
from tests.conftest import CARRIERS, VOCAB, engine, side_by_side, tiny_model
from tests.tiny_checkpoint import TINY

NEW_TOKENS = 24


def sequential(
    target: Target, prompt: np.ndarray, n: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """Greedy decoding by transformers' forward alone, no cache."""
    ids, new = prompt.tolist(), []
    model = target.model
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        while len(new) < n and not (new and new[-1] in eos):
            logits = model(input_ids=torch.tensor([ids + new]), use_cache=False).logits
            new.append(int(logits[0, -1].argmax()))
    model.set_attn_implementation("specbench")
    return new


@dataclass(kw_only=True, eq=False)
class Adversary(Drafter):
    """Random trees that mix the truth with garbage, auxiliary nodes included."""

    name: str = "adversary"
    truth: list[int] = field(default_factory=list)
    honesty: float = 0.6
    seed: int = 0
    with_aux: bool = True

    def reset(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def begin(self, state):
        self.reset()
        self.lengths = [state.length]

    def propose(self, state):
        n = int(self._rng.integers(0, 16))
        position = state.length - state.n_prompt
        tokens, parents, depth, aux = [], [], [], []
        for i in range(n):
            parent = int(self._rng.integers(-1, i))
            level = 0 if parent < 0 else depth[parent] + 1
            true = position + level < len(self.truth) and self._rng.random() < self.honesty
            tokens.append(self.truth[position + level] if true else int(self._rng.integers(VOCAB)))
            parents.append(parent)
            depth.append(level)
            inherited = parent >= 0 and aux[parent]
            aux.append(bool(self.with_aux and (inherited or self._rng.random() < 0.2)))
        as_array = lambda x: np.array(x, dtype=np.int64)  # noqa: E731
        return DraftTree(as_array(tokens), as_array(parents), aux=np.array(aux, dtype=bool))

    def observe(self, state, outcome):
        assert len(outcome.committed) >= 1
        assert state.tokens[-len(outcome.committed) :].tolist() == outcome.committed.tolist()
        assert state.last_committed == len(outcome.committed)
        self.lengths.append(state.length)


@pytest.mark.parametrize("architecture", CARRIERS)
@settings(max_examples=8)
@given(seed=st.integers(0, 999), n_prompt=st.integers(1, 20), honesty=st.floats(0, 1))
def test_random_trees_change_nothing(architecture, seed, n_prompt, honesty, make_target):
    target = make_target(architecture)
    prompt = np.random.default_rng(seed).integers(0, VOCAB, n_prompt)
    truth = sequential(target, prompt, NEW_TOKENS)
    drafter = Adversary(truth=truth, honesty=honesty, seed=seed)
    result = engine(target).decode(prompt, drafter, max_new_tokens=NEW_TOKENS)
    assert result.output_ids == truth
    assert sum(result.committed_per_step) == len(truth) - 1
    assert min(result.committed_per_step, default=1) >= 1
    # the root's keys and values are never stored: length of the cache = committed - 1 (or fewer
    # tokens were committed than verified in the last step, which the limit cut)
    assert target.cache.length >= len(prompt) + len(truth) - 1


@dataclass(kw_only=True, eq=False)
class Truth(Drafter):
    """A chain of the true continuation."""

    name: str = "truth"
    truth: list[int]
    depth: int = 4

    def propose(self, state):
        at = state.length - state.n_prompt
        return DraftTree.chain(np.array(self.truth[at : at + self.depth], dtype=np.int64))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_a_true_draft_of_depth_d_takes_n_over_d_plus_1_steps(make_target, rng, depth):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 6)
    n = 1 + 4 * (depth + 1)
    truth = sequential(target, prompt, n)
    result = engine(target).decode(prompt, Truth(truth=truth, depth=depth), max_new_tokens=n)
    assert result.output_ids == truth
    assert result.committed_per_step == [depth + 1] * 4
    assert target.cache.length == len(prompt) + n - 1


def test_the_end_token_cuts_inside_an_accepted_block(make_target, rng):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 6)
    truth = sequential(target, prompt, 30)
    end = next(i for i, t in enumerate(truth) if i >= 9 and t not in truth[:i])
    result = engine(target, eos=frozenset({truth[end]})).decode(
        prompt, Truth(truth=truth, depth=7), max_new_tokens=30
    )
    assert result.output_ids == truth[: end + 1]
    assert result.finish_reason == "eos"
    assert sum(result.committed_per_step) == end


def test_the_first_end_token_counts(make_target, rng):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 6)
    first = sequential(target, prompt, 1)[0]
    loop = engine(target, eos=frozenset({first}))
    result = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=9)
    assert result.output_ids == [first] and result.committed_per_step == []


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_limit_counts_the_first_token(make_target, rng, limit):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 6)
    truth = sequential(target, prompt, 12)
    result = engine(target).decode(prompt, Truth(truth=truth, depth=7), max_new_tokens=limit)
    assert result.output_ids == truth[:limit] and result.finish_reason == "length"


def test_the_context_is_a_limit_too(make_target, rng):
    target = make_target("llama")
    limited = engine(target, context_length=20)
    result = limited.decode(rng.integers(0, VOCAB, 15), Drafter(name="ar"), max_new_tokens=9)
    assert len(result.output_ids) == 5 and result.finish_reason == "context"
    with pytest.raises(CaseFailed) as caught:
        limited.decode(rng.integers(0, VOCAB, 20), Drafter(name="ar"), max_new_tokens=9)
    assert caught.value.kind == "prompt_too_long"
    with pytest.raises(CaseFailed, match="no tokens"):
        limited.decode(np.array([], dtype=np.int64), Drafter(name="ar"), max_new_tokens=9)


@dataclass(kw_only=True, eq=False)
class Rows(Drafter):
    """Chains side by side that know a part of the answer, as N-Grammys' batch layout has them."""

    name: str = "rows"
    truth: list[int] = field(default_factory=list)
    needs = Needs(max_nodes=12, layout="batch", batch=3)

    def propose(self, state):
        at = state.length - state.n_prompt
        right = (self.truth[at : at + 4] + [3] * 4)[:4]
        return side_by_side(np.array([[3] * 4, right, [5] * 4]).reshape(-1), 4)


CONTEXT = 40
LABELS = {
    "chain": lambda: PromptLookup(),
    "tree": lambda: RandomDrafts(n_nodes=30),
    "rows": lambda: Rows(),
    "auxiliary nodes": lambda: Lookahead(ngram=4, window=6, guesses=4),
    "draft model": lambda: Sps(gamma=6),
}


@pytest.fixture(scope="module", params=["gpt2", "opt", "llama"])
def short_context(request):
    """Learned positions, an offset among them, and rotary ones: `CONTEXT` of them."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    if request.param != "gpt2":
        sizes = TINY | {"max_position_embeddings": CONTEXT, "ffn_dim": 48}
        sizes |= {"word_embed_proj_dim": 32, "pad_token_id": 0, "num_key_value_heads": 4}
    config = AutoConfig.for_model(
        request.param, vocab_size=VOCAB, initializer_range=0.4, bos_token_id=1, **sizes
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@pytest.mark.parametrize("make", [Target, GraphTarget])
@pytest.mark.parametrize("label", LABELS)
def test_every_draft_decodes_until_the_context_is_full(short_context, label, make, rng):
    """Draft rows get no position that the model lacks; the draft model's context is shorter."""
    drafter = LABELS[label]()
    needs = drafter.needs
    target = make(short_context, max_len=CONTEXT, max_nodes=needs.max_nodes, batch=needs.batch)
    prompt, loop = rng.integers(3, VOCAB, 12), engine(target, context_length=CONTEXT)
    plain = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=99).output_ids
    assert len(plain) == CONTEXT - len(prompt)
    if label == "rows":
        drafter.truth = plain
    draft = None
    if needs.draft_model:  # the target itself, which drafts rightly as far as it reads
        draft = DraftModel(
            Target(short_context, max_len=CONTEXT, max_nodes=needs.max_nodes),
            target_vocab=VOCAB,
            max_nodes=needs.max_nodes,
            context_length=CONTEXT - 8,
        )
    drafter.setup(DraftContext(VOCAB, frozenset(), target=target, draft_model=draft))
    drafter.reset()
    result = loop.decode(prompt, drafter, max_new_tokens=99)
    assert (result.output_ids, result.finish_reason) == (plain, "context")
    room = CONTEXT - len(prompt) - 1 - np.cumsum([0, *result.committed_per_step[:-1]])
    assert (np.array(result.depth_per_step) <= room).all() and sum(result.drafted_per_step)


@dataclass(kw_only=True, eq=False)
class Fixed(Drafter):
    """Always the same tree."""

    name: str = "fixed"
    tree: DraftTree

    def propose(self, state):
        return self.tree


@pytest.mark.parametrize("on", [np.array, torch.tensor], ids=["host", "device"])
def test_a_token_outside_the_vocabulary_fails_the_case(make_target, on):
    tree = DraftTree.chain(on([VOCAB]))
    with pytest.raises(CaseFailed, match=r"method=fixed.*vocabulary") as caught:
        engine(make_target("llama")).decode(np.arange(4), Fixed(tree=tree), max_new_tokens=5)
    assert caught.value.kind == "invalid_draft"


def test_batch_steps_and_empty_drafts_may_alternate(make_target):
    """A pass without rows writes one batch row; the others must not read what was there before."""
    k, w = 3, 2
    batched, plain = make_target("llama", batch=k), make_target("llama")

    @dataclass(kw_only=True, eq=False)
    class Alternating(Drafter):
        name: str = "alternating"
        truth: list[int]

        def propose(self, state):
            if state.step % 2:
                return DraftTree.empty()
            at = state.length - state.n_prompt
            right = (self.truth[at : at + w] + [0] * w)[:w]
            return side_by_side(np.array([[1] * w, [2] * w, right]).reshape(-1), w)

    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(0, VOCAB, 7)
        truth = sequential(plain, prompt, 24)
        result = engine(batched).decode(prompt, Alternating(truth=truth), max_new_tokens=24)
        assert result.output_ids == truth
        assert max(result.committed_per_step) == w + 1


def test_nan_logits_fail_the_case():
    model = tiny_model("llama")
    target = Target(model, max_len=64, max_nodes=8)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(CaseFailed) as caught:
        engine(target).decode(np.arange(4), Drafter(name="ar"), max_new_tokens=5)
    assert caught.value.kind == "nan_logits"


def test_a_tree_larger_than_the_room_left_is_cut_not_refused(rng):
    target = Target(tiny_model("llama"), max_len=20, max_nodes=4)
    target.cache.max_len = 24  # as if the context ended here
    tree = DraftTree(np.arange(4), np.array([-1, 0, 1, 2]))
    prompt = rng.integers(0, VOCAB, 10)
    truth = sequential(target, prompt, 14)
    result = engine(target).decode(prompt, Fixed(tree=tree), max_new_tokens=14)
    assert result.output_ids == truth
    assert result.drafted_per_step[-1] < 4


@dataclass(kw_only=True, eq=False)
class Parallel(Truth):
    """Prepares the next draft while the target verifies, as CARD and PEARL do."""

    calls: list[int] = field(default_factory=list)

    @property
    def needs(self):
        return Needs(overlap=True)

    def overlap(self, state, tree):
        self.calls.append(state.length)


def test_overlapped_and_serial_schedules_agree(make_target, rng):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 6)
    truth = sequential(target, prompt, 25)
    runs = {}
    for mode in ("serial", "thread"):
        drafter = Parallel(truth=truth, depth=3)
        result = engine(target, overlap=mode).decode(prompt, drafter, max_new_tokens=25)
        runs[mode] = (result.output_ids, result.committed_per_step, drafter.calls)
    assert runs["serial"] == runs["thread"]
    assert len(runs["serial"][2]) == len(runs["serial"][1])


class MarkedPhases(CpuClock):
    """Notes the phases in order."""

    def __init__(self) -> None:
        super().__init__(phases=True)
        self.marks: list[str] = []

    def phase(self, name: str) -> None:
        self.marks.append(name)


def test_no_pass_is_left_running_if_the_drafter_fails_meanwhile(make_target, rng, monkeypatch):
    target = make_target("llama", max_len=64)
    running = threading.Event()
    forward = target.forward

    def slow(*args, **kwargs):
        running.set()
        time.sleep(0.2)
        scores = forward(*args, **kwargs)
        running.clear()
        return scores

    class Failing(Drafter):
        @property
        def needs(self):
            return Needs(overlap=True)

        def overlap(self, state, tree):
            assert running.wait(5)
            raise RuntimeError("no memory for the draft")

    monkeypatch.setattr(target, "forward", slow)
    with pytest.raises(RuntimeError, match="no memory for the draft"):
        engine(target, overlap="thread").decode(
            rng.integers(3, VOCAB, 9), Failing(name="failing"), max_new_tokens=5
        )
    assert not running.is_set()
    # Its OpenMP team would slow the passes of all other methods of a run.
    assert not [t for t in threading.enumerate() if t.name.startswith("target-pass")]


@pytest.mark.parametrize(
    ("overlap", "beside"), [("auto", ["verify", "draft"]), ("thread", [])], ids=str
)
def test_only_the_serial_emulation_tells_drafting_from_the_pass(overlap, beside, make_target):
    """And it is what ``auto`` means where phases are taken."""
    clock = MarkedPhases()
    loop = engine(make_target("llama"), overlap=overlap, phases=True, clock=lambda: clock)
    loop.decode(np.array([1, 2]), Parallel(truth=[], depth=1), max_new_tokens=2)
    assert clock.marks == ["draft", *beside, "verify", "accept", "cache", "observe"]


def test_an_unknown_overlap_mode_names_the_nearest(make_target):
    with pytest.raises(ConfigurationError, match="thread"):
        engine(make_target("llama"), overlap="threed")


def test_sources_of_accepted_nodes_are_traced(make_target, rng):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 6)
    truth = sequential(target, prompt, 4)
    tree = DraftTree(
        np.array([truth[1], truth[2], 0]), np.array([-1, 0, -1]), sources=np.array([5, 6, 7])
    )
    result = engine(target).decode(prompt, Fixed(tree=tree), max_new_tokens=4)
    assert result.sources_per_step is not None and result.sources_per_step[0] == [5, 6]
