"""Guarantees for drafters that read the target's hidden states, tested with a toy head."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.pld import PromptLookup
from methods.sam import SuffixAutomatonDecoding
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import AFTER_FINAL_NORM, DraftContext, DraftTree, Needs
from specbench.decoding.verify import GreedyVerifier
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import ARCHITECTURES, VOCAB, engine, tiny_model
from tests.decoding.test_engine import Adversary, sequential
from tests.models.test_target import plain

NEW_TOKENS = 14
LAYERS = (0, 1, AFTER_FINAL_NORM)
PROMPT = np.array([5, 9, 5, 9, 7, 5, 9])


@dataclass(kw_only=True, eq=False)
class ToyHead(Drafter):
    """Drafts the LM head's best ids for the last state plus the root's embedding.

    It stores every state that it gets, as a head with a cache does.
    """

    name: str = "toy_head"
    width: int = 3
    inner: Drafter | None = None  # drafts in its place
    states: dict = field(default_factory=dict)
    of_trees: list = field(default_factory=list)

    @property
    def needs(self):
        return Needs(tokens_only=False, hidden_layers=LAYERS, tree_hidden=True, max_nodes=16)

    def setup(self, context):
        assert context.target is not None
        self.target = context.target

    def observe_prompt_hidden(self, prompt, hidden):
        assert tuple(hidden) == LAYERS
        assert {len(rows) for rows in hidden.values()} == {len(prompt)}
        self.states = {i: [rows] for i, rows in hidden.items()}
        self.of_trees = []

    def begin(self, state):
        if self.inner is not None:
            self.inner.begin(state)

    def propose(self, state):
        # All committed tokens but the root, which the next pass reads.
        n_states = sum(map(len, self.states[AFTER_FINAL_NORM]))
        assert n_states == state.length - 1
        if self.inner is not None:
            return self.inner.propose(state)
        head = self.target.embeddings
        last = self.states[AFTER_FINAL_NORM][-1][-1]
        best = head.logits(last + head.embedding[state.root]).topk(self.width).indices
        return DraftTree(best.numpy(), np.array([-1, 0, -1])[: self.width])

    def observe(self, state, outcome):
        for i, rows in outcome.hidden.items():
            assert len(rows) == len(outcome.committed)
            self.states[i].append(rows)
        rows = np.concatenate(([-1], outcome.path))[: len(outcome.committed)] + 1
        for i, of_tree in outcome.tree_hidden.items():
            assert len(of_tree) == len(outcome.tree) + 1
            # In a union the head's tree may lack the tokens accepted from another part.
            if len(rows) == len(outcome.committed):
                self.of_trees.append((of_tree[rows].clone(), outcome.hidden[i]))

    def read(self) -> dict[int, torch.Tensor]:
        return {i: torch.cat(rows) for i, rows in self.states.items()}


def ready(target, drafter):
    drafter.setup(DraftContext(vocab_size=VOCAB, eos_ids=frozenset(), target=target))
    drafter.reset()
    return drafter


def check_states(target, head, text):
    """Check that the head got the states of all the text's tokens but the last."""
    expected = plain(target, text[:-1])[1]
    for i, rows in head.read().items():
        torch.testing.assert_close(rows, expected[i], atol=1e-9, rtol=0)


MAKE = {
    "exact": Target,
    "padded": partial(GraphTarget, capture=False),
    "verified on the host": partial(GraphTarget, capture=False, commits=False),
}


@pytest.fixture(scope="module")
def targets():
    targets_by_key = {}

    def get(kind, architecture):
        if (kind, architecture) not in targets_by_key:
            model = tiny_model(architecture)
            targets_by_key[kind, architecture] = MAKE[kind](model, max_len=64, max_nodes=16)
        return targets_by_key[kind, architecture]

    return get


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("exact", "llama"), ("padded", "mistral_window"), ("verified on the host", "qwen3")],
)
@settings(max_examples=5)
@given(seed=st.integers(0, 999), n_prompt=st.integers(1, 20), honesty=st.floats(0.2, 1))
def test_states_are_those_of_committed_tokens(architecture, kind, seed, n_prompt, honesty, targets):
    """Whatever was drafted, accepted, rolled back, or cut by the limit."""
    target = targets(kind, architecture)
    prompt = np.random.default_rng(seed).integers(0, VOCAB, n_prompt)
    truth = sequential(target, prompt, NEW_TOKENS)
    head = ready(target, ToyHead(inner=Adversary(truth=truth, honesty=honesty, seed=seed)))
    result = engine(target).decode(prompt, head, max_new_tokens=NEW_TOKENS)
    assert result.output_ids == truth
    check_states(target, head, [*prompt.tolist(), *truth])
    for of_tree, committed in head.of_trees:
        assert torch.equal(of_tree, committed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_changes_no_output(architecture, targets):
    target = targets("padded", architecture)
    truth = sequential(target, PROMPT, NEW_TOKENS)
    head = ready(target, ToyHead())
    for _ in range(2):  # the second turn starts over
        result = engine(target).decode(PROMPT, head, max_new_tokens=NEW_TOKENS)
        assert result.output_ids == truth
        check_states(target, head, [*PROMPT.tolist(), *truth])


@pytest.mark.parametrize("kind", MAKE)
def test_within_other_drafters_it_reads_all_that_is_committed(kind, targets):
    """This includes tokens that another part drafted, which the head's tree lacks."""
    target = targets(kind, "llama")
    truth = sequential(target, PROMPT, NEW_TOKENS)

    def adversary(name="adversary"):
        return Adversary(name=name, truth=truth, honesty=0.9, with_aux=False)

    def lookup():
        return PromptLookup(num_tokens=4)

    for make in (
        lambda head: Union(drafters=[head, adversary()], max_nodes=16),
        lambda head: Union(drafters=[lookup(), head], max_nodes=12),
        lambda head: SuffixAutomatonDecoding(
            auxiliary=head, automata="dynamic", len_threshold=2, max_predicts=6
        ),
    ):
        head = ToyHead()
        drafter = ready(target, make(head))
        assert drafter.needs.hidden_layers == tuple(sorted(LAYERS)) and drafter.needs.tree_hidden
        result = engine(target).decode(PROMPT, drafter, max_new_tokens=NEW_TOKENS)
        assert result.output_ids == truth
        check_states(target, head, [*PROMPT.tolist(), *truth])


def test_overlap_in_a_thread_gives_the_same_states(targets):
    @dataclass(kw_only=True, eq=False)
    class Overlapping(ToyHead):
        @property
        def needs(self):
            return Needs(
                tokens_only=False, hidden_layers=LAYERS, tree_hidden=True, max_nodes=16,
                overlap=True,
            )  # fmt: skip

    target = targets("padded", "llama")
    truth = sequential(target, PROMPT, NEW_TOKENS)
    for mode in ("thread", "serial"):
        head = ready(target, Overlapping())
        loop = engine(target, GreedyVerifier(), overlap=mode)
        assert loop.decode(PROMPT, head, max_new_tokens=NEW_TOKENS).output_ids == truth
        check_states(target, head, [*PROMPT.tolist(), *truth])


def test_a_drafter_that_asks_for_none_is_given_none(targets):
    """Even next to a drafter that asks for some."""
    target = targets("padded", "llama")
    seen = []

    @dataclass(kw_only=True, eq=False)
    class Plain(Drafter):
        name: str = "plain"

        @property
        def needs(self):
            return Needs(max_nodes=4)

        def observe_prompt_hidden(self, prompt, hidden):
            raise AssertionError("not asked for")

        def observe(self, state, outcome):
            seen.append((outcome.hidden, outcome.tree_hidden))

    for drafter in (Plain(), Union(drafters=[ToyHead(), Plain()], max_nodes=16)):
        engine(target).decode(PROMPT, ready(target, drafter), max_new_tokens=6)
    assert len(seen) > 5 and set(seen) == {(None, None)}
