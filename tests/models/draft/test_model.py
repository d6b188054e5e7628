"""A tree fed in layers gives every node the logits of its own path, read in one fresh pass."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.structs import Needs
from specbench.errors import ConfigurationError
from specbench.models.draft.model import DraftModel
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, tiny_draft, tiny_model
from tests.models.test_target import TOLERANCE, plain_logits

NODES = 24


class Feeder:
    """A draft model beside the plain text and tree that it should have in its cache."""

    def __init__(self, model: DraftModel, text: list[int]) -> None:
        self.model, self.text = model, text
        self.tokens: list[int] = []
        self.parents: list[int] = []
        model.begin(np.array(text))

    def expected(self, node: int) -> torch.Tensor:
        tokens = [self.tokens[i] for i in self.path(node)]
        return plain_logits(self.model.target, [*self.text, *tokens])[-1]

    def extend(self, tokens: list[int], parents: list[int], *, on_device: bool = False) -> None:
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += parents
        nodes = np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)
        if on_device:
            got = self.model.extend(*(torch.from_numpy(array) for array in nodes))
        else:
            got = self.model.extend(*nodes)
        for i, row in enumerate(got):
            close(row, self.expected(first + i))

    def path(self, node: int) -> list[int]:
        nodes: list[int] = []
        while node >= 0:
            nodes.insert(0, node)
            node = self.parents[node]
        return nodes

    def keep(self, node: int, *, survivors: bool) -> None:
        """Commit the path to ``node``, with what hangs below it or without."""
        path = self.path(node)
        below = [i for i in range(len(self.tokens)) if node in self.path(i)[:-1]]
        if node < 0:
            below = list(range(len(self.tokens)))
        surviving = below if survivors else []
        self.model.commit_path(np.array(path, dtype=int), np.array(surviving, dtype=int))
        self.text += [self.tokens[i] for i in path]
        number = {old: new for new, old in enumerate(surviving)}
        self.tokens = [self.tokens[i] for i in surviving]
        self.parents = [number.get(self.parents[i], -1) for i in surviving]

    def check_cache(self) -> None:
        """Committed rows are those of a fresh prefill."""
        cache = self.model.target.cache
        n = cache.length
        assert n == len(self.text)
        got = cache.storage[..., :n, :].clone()
        fresh = Target(self.model.target.model, max_len=256, max_nodes=1)
        fresh.prefill(np.array(self.text))
        close(got, fresh.cache.storage[..., :n, :])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


_models: dict[tuple[str, str], DraftModel] = {}

ENGINES = {
    "eager": Target,
    "graph": partial(GraphTarget, capture=False, drafts=True),  # what a GPU captures
}


def draft(architecture: str, engine: str = "eager") -> DraftModel:
    key = architecture, engine
    if key not in _models:
        _models[key] = tiny_draft(Needs(max_nodes=NODES), architecture, engine=ENGINES[engine])
    return _models[key]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("architecture", CARRIERS)
@settings(max_examples=10)
@given(data=st.data())
def test_trees_fed_in_layers(architecture, engine, data):
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    text = np.random.default_rng(pick(0, 99)).integers(0, VOCAB, pick(1, 25)).tolist()
    feeder = Feeder(draft(architecture, engine), text)
    for _ in range(2):
        for _ in range(pick(1, 3)):
            first, n = len(feeder.tokens), pick(1, 4)
            inside = data.draw(st.booleans())  # parents among the nodes of the same call
            parents = [pick(-1, (first + i if inside else first) - 1) for i in range(n)]
            tokens = [pick(0, VOCAB - 1) for _ in range(n)]
            feeder.extend(tokens, parents, on_device=not inside and data.draw(st.booleans()))
        feeder.keep(pick(-1, len(feeder.tokens) - 1), survivors=data.draw(st.booleans()))
    feeder.model.drop_nodes()
    feeder.tokens, feeder.parents = [], []
    feeder.check_cache()
    feeder.text += [pick(0, VOCAB - 1) for _ in range(pick(1, 3))]
    close(feeder.model.catch_up(np.array(feeder.text)), feeder.expected(-1))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_branch_takes_no_mask_and_may_fork_later(engine):
    feeder = Feeder(draft("mistral_window", engine), list(range(20)))
    for node in range(5):
        feeder.extend([node + 7], [node - 1])
    feeder.extend([1, 2], [2, -1])
    feeder.keep(1, survivors=True)
    feeder.extend([9], [0])
    feeder.keep(2, survivors=False)
    feeder.check_cache()
    feeder.tokens, feeder.parents = [], []
    feeder.extend([5, 6, 7, 8], [-1, 0, 1, 2])
    with pytest.raises(ValueError, match="without a gap"):
        feeder.model.commit_path(np.array([0]), np.array([2]))


def test_nothing_is_read_twice():
    model = draft("llama")
    text = list(range(9))
    model.begin(np.array(text))
    assert (model.forwards, model.tokens) == (0, 0)
    first = model.catch_up(np.array(text))  # the prompt's own pass said it already
    assert (model.forwards, model.tokens) == (0, 0)
    close(first, plain_logits(model.target, text)[-1])
    model.extend(np.array([4]), np.array([-1]))
    model.extend(np.array([5]), np.array([0]))
    model.commit_path(np.array([0, 1]))
    model.catch_up(np.array([*text, 4, 5, 6]))
    assert (model.forwards, model.tokens) == (3, 3)
    longer = [*text, 4, 5, 6]
    close(model.catch_up(np.array(longer)), plain_logits(model.target, longer)[-1])
    assert model.forwards == 3


def test_a_text_that_was_cut_or_is_all_there_is_read_again_at_its_end():
    model = draft("llama")
    model.begin(np.arange(6))
    model.extend(np.array([7, 8]), np.array([-1, 0]))
    model.commit_path(np.array([0, 1]))
    text = [*range(6), 7, 8]
    close(model.catch_up(np.array(text)), plain_logits(model.target, text)[-1])
    close(model.catch_up(np.array(text[:7])), plain_logits(model.target, text[:7])[-1])


def test_too_many_nodes_and_wrong_parents_are_refused():
    model = draft("llama")
    model.begin(np.arange(4))
    with pytest.raises(ValueError, match=r"needs\.draft_nodes"):
        model.extend(np.zeros(NODES + 1, dtype=int), np.full(NODES + 1, -1))
    with pytest.raises(ValueError, match="parent"):
        model.extend(np.zeros(2, dtype=int), np.array([-1, 1]))


def test_padding_of_the_vocabularies_may_differ():
    text = np.array([3, 40, 5])
    for draft_size, theirs in ((48, 40), (40, 48)):
        model = tiny_draft(Needs(max_nodes=4), vocab_size=draft_size, target_vocab=theirs)
        model.begin(text)
        logits = model.catch_up(text)
        both = min(draft_size, theirs)
        assert logits.shape == (theirs,)
        # An id that the draft lacks is read as its id 0.
        read = [i if i < draft_size else 0 for i in text]
        close(logits[:both], plain_logits(model.target, read)[-1][:both])
        assert torch.isneginf(logits[both:]).all()
        assert model.catch_up(text, draft_vocab=True).shape == (both,)


def packed(**options) -> DraftModel:
    """A draft whose pass is one compiled call, which finds the likeliest ids."""
    network = tiny_model("llama", dtype=torch.float32, vocab_size=VOCAB)
    target = Target(network, max_len=64, max_nodes=8, packed_bytes=1 << 22)
    assert target.compiled is not None
    return DraftModel(target, target_vocab=VOCAB, max_nodes=8, **options)


def test_the_likeliest_ids_are_those_that_a_pass_by_one_call_found(monkeypatch):
    model = packed()
    model.begin(np.array([4, 5, 6]))
    rows = [model.catch_up(np.array([4, 5, 6, 7]), draft_vocab=True)[None]]
    choices = [model.likeliest(rows[0])]
    rows.append(model.extend(np.array([1, 2, 3]), np.array([-1, 0, -1]), draft_vocab=True))
    choices.append(model.likeliest(rows[1]))
    for ids, logits in zip(choices, rows, strict=True):
        assert torch.equal(ids, logits.argmax(-1))
    monkeypatch.setattr(torch.Tensor, "argmax", None)
    assert torch.equal(model.likeliest(rows[1]), choices[1]), "nobody searches again"


def test_an_id_that_is_never_proposed_is_not_a_choice():
    """The pass chooses among all rows of the vocabulary, the one for every other id with them."""
    first = int(plain_logits(packed().target, [1, 2, 3])[-1].argmax())  # some rows choose it
    id_map = np.where(np.arange(VOCAB) == first, -1, np.arange(VOCAB))
    model = packed(id_map=id_map)
    best = set()
    for text in [np.array([1, 2, 3]), *np.random.default_rng(1).integers(0, VOCAB, (20, 5))]:
        text = text[id_map[text] >= 0]
        model.begin(text[:-1])
        logits = model.catch_up(text, draft_vocab=True)[None]
        assert model._choices is not None
        best |= set(model._choices.tolist())
        assert torch.equal(model.likeliest(logits), logits.argmax(-1))
    assert first in best and len(best) > 1


def test_a_reduced_vocabulary_is_translated():
    id_map = np.array([-1, 9, 4, 30])  # row 0 stands for all that is not there
    model = tiny_draft(Needs(max_nodes=4), vocab_size=4, target_vocab=VOCAB, id_map=id_map)
    text = np.array([30, 17, 4])
    model.begin(text)
    logits = model.catch_up(text)
    plain = plain_logits(model.target, [3, 0, 2])[-1]
    close(logits[[9, 4, 30]], plain[1:])
    assert torch.isfinite(logits).sum() == 3
    draft_logits = model.catch_up(text, draft_vocab=True)
    assert torch.isneginf(draft_logits[0])
    assert model.to_target_ids(draft_logits.argmax()).item() == logits.argmax().item()
    probs = draft_logits.softmax(-1)
    close(model.to_target_vocab(probs), logits.softmax(-1))
    ids = torch.tensor([9, 21])
    close(
        model.extend(ids, np.array([-1, 0])).gather(1, torch.tensor([[4], [4]])).flatten(),
        torch.stack([plain_logits(model.target, [3, 0, 2, 1, 0])[i][2] for i in (3, 4)]),
    )


@pytest.mark.parametrize(
    "id_map", [[0, 1, 2, 3, 4], [0, 0, 1], [-1, -1, 2], [0, 1, VOCAB], [-1]], ids=str
)
def test_a_map_of_another_model_is_refused(id_map):
    with pytest.raises(ConfigurationError, match="id_map"):
        tiny_draft(Needs(max_nodes=1), vocab_size=4, target_vocab=VOCAB, id_map=np.array(id_map))


def test_draws_follow_the_law_and_never_take_the_impossible():
    model = draft("llama")
    model.begin(np.arange(3), seed=5)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    drawn = torch.cat([model.draw(probs.expand(1000, -1)) for _ in range(20)])
    counts = torch.bincount(drawn, minlength=6)
    assert (counts[[0, 2, 5]] == 0).all()
    expected = probs * len(drawn)
    statistic = float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    assert statistic < 18.4  # chi-square, 2 degrees of freedom, false alarm 1e-4
    model.begin(np.arange(3), seed=5)
    again = torch.cat([model.draw(probs.expand(1000, -1)) for _ in range(20)])
    assert torch.equal(drawn, again)
    # A verifier with the same seed must not see the numbers the draft has seen.
    generator = torch.Generator().manual_seed(5)
    other = torch.rand(1000, dtype=torch.float64, generator=generator)
    assert not torch.equal(drawn[:1000], torch.searchsorted(probs.cumsum(0).double(), other))


def test_a_draft_reads_no_more_than_its_context():
    model = tiny_draft(Needs(max_nodes=4), context_length=8)
    model.begin(np.arange(10))
    assert model.free_rows(10) < 0
    assert model.free_rows(5) == 3
