"""llama.cpp's n-gram methods against their rules in the plainest form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.ngram_map import NgramMap
from methods.ngram_mod import _EMPTY, NgramMod
from specbench.decoding.structs import DraftContext
from specbench.errors import ConfigurationError
from tests.methods import toy_turns

CONTEXT = DraftContext(6, frozenset())


class PlainMod:
    """A dictionary by n-gram: where no two n-grams have one hash, that is the table."""

    def __init__(self, n_match, n_max, n_min):
        self.n, self.most, self.least = n_match, n_max, n_min
        self.after = {}

    def enter(self, text):
        for i in range(self.read, len(text) - self.n):
            self.after[tuple(text[i : i + self.n])] = text[i + self.n]
        self.read = len(text) - self.n

    def begin(self, prompt):
        self.read = self.low = self.drafted = 0
        if len(prompt) >= self.n:
            self.enter(prompt)

    def draft(self, text):
        self.drafted = 0
        if len(text) - 1 < self.n:
            return []
        if self.read + 32 < len(text) - 1:
            self.enter(text[:-1])
        tokens = text[-self.n :]
        while len(tokens) < self.n + self.most and tuple(tokens[-self.n :]) in self.after:
            tokens = [*tokens, self.after[tuple(tokens[-self.n :])]]
        if len(tokens) - self.n < self.least:
            return []
        self.drafted = len(tokens) - self.n
        return tokens[self.n :]

    def accepted(self, count):
        if self.drafted:
            self.low = self.low + 1 if count / self.drafted < 0.25 else 0
            if self.low == 5:
                self.after, self.low, self.read = {}, 0, 0


class PlainMap:
    """The rules with lists of places; a key is a tuple."""

    def __init__(self, size_n, size_m, min_hits, variant):
        self.n, self.m, self.min_hits, self.variant = size_n, size_m, min_hits, variant

    def begin(self, prompt):
        self.n_prompt, self.position_of, self.keys, self.last = len(prompt), {}, {}, None
        self.indexed = 0

    def draft(self, text):
        n, m = self.n, self.m
        self.last, before = None, text[:-1]
        if len(before) < 2 * n + m:
            return []
        key, newest = tuple(text[-n:]), len(before) - n - m - 1
        new = [*range(self.n_prompt - n - m - 1, self.indexed, -1)]
        new += range(newest, max(self.indexed, self.n_prompt), -1)
        gram = {at: tuple(before[at : at + n]) for at in new}
        position = self.position_of.get(key, newest)
        if position >= newest:
            position = next((at for at in new if gram[at] == key), None)
        for at in new:
            self.position_of.setdefault(gram[at], at)
        self.indexed = max(self.indexed, newest)
        if position is None:
            return []
        entry = self.keys.setdefault(key, {"hits": 0, "from": 0, "counts": {}, "limits": {}})
        entry["hits"] += 1
        value = "any"
        if self.variant == "k4v":
            if entry["hits"] < self.min_hits:
                return []
            counts = entry["counts"]
            for at in range(entry["from"], position + 1):
                if tuple(before[at : at + n]) == key:
                    value = tuple(before[at + n : at + n + m])
                    if value in counts or len(counts) < 4:
                        counts[value] = counts.get(value, 0) + 1
            entry["from"] = position
            value = max(counts, key=counts.get)
            if counts[value] < 2 * (sum(counts.values()) - counts[value]):
                return []
        self.last = entry["limits"], value
        return before[position + n : position + n + min(m, entry["limits"].get(value, m))]

    def accepted(self, count):
        if self.last:
            limits, value = self.last
            limits[value] = count


def compare(ours, plain, seed, lengths):
    """Every draft of some turns; how many tokens were drafted and accepted in all."""
    ours.setup(CONTEXT)
    ours.reset()
    propose, observe = ours.propose, ours.observe
    totals = np.zeros(2, dtype=int)

    def proposed(state):
        tree = propose(state)
        expected = plain.draft(state.tokens.tolist())[: max(0, state.remaining - 1)]
        assert toy_turns.pairs(tree) == [(t, i - 1) for i, t in enumerate(expected)]
        return tree

    def observed(state, outcome):
        observe(state, outcome)
        totals[:] += len(outcome.tree), len(outcome.path)
        if len(outcome.tree):
            plain.accepted(len(outcome.path))

    ours.propose, ours.observe = proposed, observed
    for turn, length in enumerate(lengths):
        # The text changes its mind in the middle: drafts fail too.
        rules = [toy_turns.markov_rule(seed + turn + k, 3, 3) for k in (0, 1)]
        prompt = np.random.default_rng(seed + turn).integers(0, 3, length).tolist()

        def rule(text, rules=rules, half=length + 40):
            return rules[len(text) >= half](text)

        plain.begin(prompt)
        answer, _ = toy_turns.play(ours, prompt, 80, rule)
        assert answer == toy_turns.continued(rule, prompt, 80)
    return totals


LENGTHS = st.lists(st.integers(3, 60), min_size=1, max_size=3)


@given(
    seed=st.integers(0, 999),
    lengths=LENGTHS,
    n_match=st.integers(1, 5),
    n_max=st.integers(1, 9),
    n_min=st.integers(0, 2),
)
def test_ngram_mod_is_the_plain_rule(seed, lengths, n_match, n_max, n_min):
    knobs = {"n_match": n_match, "n_max": n_max, "n_min": min(n_min, n_max)}
    compare(NgramMod(entries=2**16 + 1, **knobs), PlainMod(**knobs), seed, lengths)


@given(
    seed=st.integers(0, 999),
    lengths=LENGTHS,
    size_n=st.integers(1, 4),
    size_m=st.integers(1, 6),
    min_hits=st.integers(1, 3),
    variant=st.sampled_from(["k4v", "k"]),
)
def test_ngram_map_is_the_plain_rule(seed, lengths, size_n, size_m, min_hits, variant):
    knobs = {"size_n": size_n, "size_m": size_m, "min_hits": min_hits, "variant": variant}
    compare(NgramMap(**knobs), PlainMap(**knobs), seed, lengths)


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (NgramMod(n_match=3, n_max=8, n_min=1), PlainMod(3, 8, 1)),
        (NgramMap(size_n=3, size_m=4), PlainMap(3, 4, 1, "k4v")),
    ],
)
def test_drafts_of_a_text_that_repeats_itself_are_accepted(ours, plain):
    drafted, accepted = compare(ours, plain, 5, [60, 60])
    assert drafted > accepted > 15


def test_a_table_that_is_a_quarter_full_is_emptied():
    drafter = NgramMod(n_match=1, n_max=4, n_min=0, entries=16)
    drafter.setup(CONTEXT)
    drafter.reset()
    toy_turns.play(drafter, [1, 2, 3, 4], 3, lambda text: 0)
    assert np.count_nonzero(drafter._table != _EMPTY) == 3
    toy_turns.play(drafter, [5, 0, 5], 3, lambda text: 0)
    assert np.count_nonzero(drafter._table != _EMPTY) == 0


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigurationError, match=r"`method\.n_min` must be at most n_max=8"):
        NgramMod(n_max=8, n_min=9)
    with pytest.raises(ConfigurationError, match="k4"):
        NgramMap(variant="k4")
