"""Which nodes of drafts are worth the rows that they take in a pass, by a cost surface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specbench.arrays import BoolArray, FloatArray, IntArray
from specbench.decoding.structs import DraftTree
from specbench.replay.cost_surface import CostSurface

CONTEXTS = 64  # a price holds for so many cached tokens
DOUBT = 4  # right tokens that a group is credited with before it has verified any
NO_NODES = np.empty(0, dtype=np.bool_)


class Past(NamedTuple):
    """What became of a text's nodes in its last steps.

    Attributes:
        verified: nodes that were bought.
        expected: how many of them would be right by their ``survival``.
        accepted: how many were.
    """

    verified: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0

    def half(self) -> Past:
        """What is long ago counts less and less."""
        return Past(*(number / 2 for number in self))

    def plus(self, tree: DraftTree, accepted: int) -> Past:
        assert tree.survival is not None
        expected = self.expected + float(tree.survival.sum())
        return Past(self.verified + len(tree), expected, self.accepted + accepted)


class Offer(NamedTuple):
    """A text's draft, behind so many tokens; ``remaining``: new ones that it may still have."""

    tree: DraftTree
    length: int
    remaining: int
    past: Past = Past()


class Bought(NamedTuple):
    """What becomes of a text's draft.

    Attributes:
        kept: ``[n]`` which nodes are verified; a node's parent is, where it is.
        pays: whether it gains more time than it and its rows take.
        last: whether no other text has more tokens ahead of it.
    """

    kept: BoolArray
    pays: bool
    last: bool


class RowPrices:
    """Buys rows for the drafts of texts that are decoded at once.

    A token is worth the time that it saves of plain decoding. A text that ends is not replaced, so
    a group takes as long as its last text. Any token saves its own row in a step; the rest of a
    step is saved once all texts that are last have gained a token. As some texts gain much and
    others nothing, the least gain of n is taken to be their mean over the root of n (as in a
    Rayleigh law), and each text's part of the rest an n-th of that.

    How likely nodes are, drafters say from few counts, and mostly too much. So what they say is
    scaled by what became of the group's last nodes, and never up.

    Args:
        surface: with passes of several texts where there are several.
        drafter: the name of the method that drafts.
        most: nodes of a draft.
        plain: a node is bought while it pays for itself, and not for the most tokens a second.
    """

    def __init__(self, surface: CostSurface, drafter: str, most: int, *, plain: bool) -> None:
        self._surface, self._drafter, self._most, self._plain = surface, drafter, most, plain
        self._known: dict[tuple[int, int], FloatArray] = {}

    def hopes(self, offers: Sequence[Offer]) -> list[bool]:
        """For all texts alike, whether a token of each would pay for its row and its draft.

        Of some of the texts at least, and right as often as the group's last nodes were.
        """
        context, texts = _context(offers), len(offers)
        price = self.seconds(texts, context)[: texts + 1]
        worth = np.sort(self._worth(_last(offers), context))[::-1]
        worth = worth * _right([offer.past.verified for offer in offers], offers)
        worth -= self.drafting_s(context)
        return [bool((np.cumsum(worth)[: len(price) - 1] > price[1:] - price[0]).any())] * texts

    def bought(self, offers: Sequence[Offer]) -> list[Bought]:
        """The nodes worth most of all drafts, as many as pay; a parent goes before its children."""
        texts, trees, last = len(offers), [offer.tree for offer in offers], _last(offers)
        if not any(map(len, trees)):
            return [Bought(NO_NODES, pays=False, last=bool(is_last)) for is_last in last]
        context = _context(offers)
        each = [tree.survival if len(tree) else np.empty(0) for tree in trees]
        price, drafting_s = self.seconds(texts, context), self.drafting_s(context)
        worth = self._worth(last, context)
        worth = worth * _right([offer.past.expected for offer in offers], offers)
        saved = np.concatenate([s * w for s, w in zip(each, worth, strict=True)])
        order = np.argsort(-saved, kind="stable")
        price = price[: len(order) + 1]
        if self._plain or any(tree.probs is not None for tree in trees):
            unpaid = saved[order] <= np.diff(price)
            count = int(unpaid.argmax()) if unpaid.any() else len(order)
        else:
            gained = price[0] + np.append(0.0, np.cumsum(saved[order]))
            count = int((gained / (price + texts * drafting_s)).argmax())
        bought = np.zeros(len(order), dtype=np.bool_)
        bought[order[:count]] = True
        # A node's part of what the rows take is like any other's.
        net = (saved - (price[count] - price[0]) / max(count, 1)) * bought
        ends = np.cumsum([len(tree) for tree in trees])[:-1]
        return [
            Bought(
                kept if tree.probs is None else behind(tree.parents, ~kept),
                bool(gain.sum() > drafting_s),
                bool(is_last),
            )
            for tree, kept, gain, is_last in zip(
                trees, np.split(bought, ends), np.split(net, ends), last, strict=True
            )
        ]

    def _worth(self, last: BoolArray, context: int) -> FloatArray:
        """``[texts]`` seconds that a token of each saves."""
        texts = len(last)
        step_s = self.seconds(texts, context)[0]
        equal = own = step_s / texts
        if texts > 1:
            own = min(max(step_s - self.seconds(texts - 1, context)[0], 0.0), equal)
        return own + last * texts * (equal - own) / last.sum() ** 1.5

    def seconds(self, texts: int, context: int) -> FloatArray:
        """Of a pass over the roots of texts and 0, 1, .. nodes, as many as they may be.

        Raises:
            ConfigurationError: the surface has no such passes.
        """
        place = texts, context // CONTEXTS
        if place not in self._known:
            rows = texts + np.arange(texts * self._most + 1.0)
            each, middle = np.full_like(rows, texts), np.full_like(rows, place[1] + 0.5)
            self._known[place] = self._surface.joint_pass_s(each, rows, middle * CONTEXTS)
        return self._known[place]

    def drafting_s(self, context: int) -> float:
        """Seconds of a draft at the nearest context measured; 0 where none was."""
        found = [
            (abs(one["context"] - context), one["step_us"])
            for one in self._surface.drafting
            if one["method"] == self._drafter and "step_us" in one
        ]
        return min(found)[1] / 1e6 if found else 0.0


def behind(parents: IntArray, ended: BoolArray) -> BoolArray:
    """``[n]`` the nodes that no ancestor ended the draft above."""
    kept = np.ones(len(parents) + 1, dtype=np.bool_)  # the root is the last one
    for node, parent in enumerate(parents.tolist()):
        kept[node] = kept[parent] and (parent < 0 or not ended[parent])
    return kept[:-1]


def _right(of: Sequence[float], offers: Sequence[Offer]) -> float:
    """The share of so many that was accepted, at most 1."""
    accepted = sum(offer.past.accepted for offer in offers)
    return min((accepted + DOUBT) / (sum(of) + DOUBT), 1.0)


def _context(offers: Sequence[Offer]) -> int:
    return sum(offer.length for offer in offers) // len(offers)


def _last(offers: Sequence[Offer]) -> BoolArray:
    """``[texts]`` whether no other has more tokens ahead."""
    left = np.array([offer.remaining for offer in offers])
    last: BoolArray = left == left.max()
    return last
