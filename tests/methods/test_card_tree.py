import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.card import LayeredTree


class ToyDraft:
    """A draft model in the plainest form: every text has logits of its own, so scores never tie."""

    def __init__(self, seed, vocab_size):
        self.seed, self.vocab_size, self.cache = seed, vocab_size, {}
        self.text, self.nodes = (), []

    def logits(self, text):
        if text not in self.cache:
            random = np.random.default_rng([self.seed, *text])
            self.cache[text] = torch.from_numpy(random.normal(0, 2, self.vocab_size))
        return self.cache[text]

    def forward(self, tokens, parents):
        self.nodes += [
            (self.nodes[parent] if parent >= 0 else self.text) + (token,)
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)
        ]
        return torch.stack([self.logits(node) for node in self.nodes[-len(tokens) :]])


class PlainTree:
    """The same cache as a list of texts, with every score computed from the start."""

    def __init__(self, draft, width, text):
        self.draft, self.width, self.text, self.layers = draft, width, text, []

    def children(self, text):
        """The K most likely next tokens of a text with the logarithms of their probabilities."""
        chances = self.draft.logits(text).log_softmax(-1)
        return [((*text, t), float(chances[t])) for t in chances.argsort(descending=True).tolist()]

    def score(self, text):
        done, total = self.text, 0.0
        while done != text:
            grown = dict(self.children(done))
            done = text[: len(done) + 1]
            total += grown[done]
        return total

    def grow(self):
        above = self.layers[-1] if self.layers else [self.text]
        candidates = [new for old in above for new, _ in self.children(old)[: self.width]]
        self.layers.append(sorted(candidates, key=self.score, reverse=True)[: self.width])

    def best_path(self):
        path = self.text
        for layer in self.layers:
            below = [text for text in layer if text[:-1] == path]
            if not below:
                break
            path = max(below, key=self.score)
        return path[len(self.text) :]

    def reroot(self, text):
        below = [[t for t in layer if t[: len(text)] == text] for layer in self.layers]
        below = below[len(text) - len(self.text) :]
        self.layers = below[: next((i for i, layer in enumerate(below) if not layer), len(below))]
        self.text = text


def layer_texts(tree, root):
    """Every layer's nodes as texts, through the structure's own parents."""
    layers, above = [], [root]
    for layer in tree._layers[1:]:
        above = [
            above[p] + (t,)
            for t, p in zip(layer.tokens.tolist(), layer.parents.tolist(), strict=True)
        ]
        layers.append(above)
    return layers


def start(seed=0, vocab_size=6, width=4, layers=0):
    draft, tree = ToyDraft(seed, vocab_size), LayeredTree(width)
    draft.text = (1, 2)
    tree.restart(draft.logits(draft.text))
    for _ in range(layers):
        tree.grow(draft.forward)
    return draft, tree


def test_an_emptied_layer_is_refilled_from_the_children_its_parents_kept():
    after = torch.tensor([[0.5, 0.49, 0.01], [0.2, 0.3, 0.5], [0.4, 0.5, 0.1]]).double().log()
    fed = []

    def forward(tokens, parents):
        fed.append((tokens.tolist(), parents.tolist()))
        return after[torch.from_numpy(tokens)]

    tree = LayeredTree(2)
    tree.restart(torch.tensor([0.7, 0.2, 0.1]).double().log())
    tree.grow(forward)
    tree.grow(forward)
    assert tree.child([1], 2) is None  # 00 and 01 took both places
    assert tree.reroot([1]).tolist() == []
    assert tree.rooted and tree.depth == 0
    tree.grow(forward)
    assert fed[-1] == ([2, 1], [-1, -1])


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 7),
    vocab_size=st.integers(3, 6),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5)), max_size=5),
)
def test_the_tree_is_the_plain_tree(seed, width, vocab_size, moves):
    """Growing, choosing, finding and pruning, in any order."""
    draft, tree = start(seed, vocab_size, width)
    plain = PlainTree(draft, width, draft.text)
    for layers, accepted, token in moves:
        for _ in range(layers):
            tree.grow(draft.forward)
            plain.grow()
        assert layer_texts(tree, draft.text) == plain.layers
        assert len(tree) == len(draft.nodes) == sum(map(len, plain.layers))
        path = tree.best_path()
        assert tuple(tree.tokens(path)) == plain.best_path()
        path = path[:accepted]
        above = draft.text + tuple(tree.tokens(path).tolist())
        child = tree.child(path, token)
        in_tree = any((*above, token) in layer for layer in plain.layers)
        assert (child is not None) == in_tree
        if child is None:
            continue
        path.append(child)
        assert [draft.nodes[n] for n in tree.numbers(path)] == [
            above[: len(draft.text) + 1 + i] for i in range(len(path) - 1)
        ] + [(*above, token)]
        draft.nodes = [draft.nodes[n] for n in tree.reroot(path)]
        draft.text = (*above, token)
        plain.reroot(draft.text)


def test_ids_that_the_draft_cannot_produce_are_no_nodes():
    tree = LayeredTree(4)
    logits = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf])
    tree.restart(logits)
    tree.grow(lambda tokens, parents: logits.expand(len(tokens), -1))
    assert tree.tokens(tree.best_path()).tolist() == [2] and len(tree) == 2


@pytest.mark.parametrize("width", [1, 3])
def test_a_path_below_another_goes_on_from_it(width):
    _, tree = start(width=width, layers=4)
    whole = tree.best_path()
    for n in range(len(whole) + 1):
        assert tree.best_path(whole[:n]) == whole[n:]
        np.testing.assert_array_equal(tree.tokens(whole[n:], first=n), tree.tokens(whole)[n:])
