"""What a verifier does on toy pairs, summed over all that can happen, with exact probabilities.

A toy pair is a target and a draft whose distributions are tables over a few tokens. Every draft
that can be drawn is given to the verifier, and of its random numbers every course is tried: a run
with one point tells the limits that its numbers were compared with, hence the box around the point
in which all goes the same way; what is left of the cube is tried next. What is committed is
continued by the target, so that the law of all texts can be held against the target's own.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from unittest import mock

import numpy as np
import torch
from scipy.optimize import linprog
from torch.overrides import TorchFunctionMode

from specbench.decoding.sampling import Uniforms
from specbench.decoding.structs import BonusProposal, DraftTree, Proposal
from specbench.models.scores import Scores

EXACT = 1e-12  # how far sums of exact probabilities may be off
_DUST = 1e-15  # a box this narrow is a rounding error of its borders


@dataclass(frozen=True, eq=False)
class ToyPair:
    """Next-token distributions ``[vocab]`` by the text before, and the shape of a draft.

    Siblings are draws from one row, independent ones with ``replacement``.
    """

    target: callable
    draft: callable
    parents: tuple[int, ...]
    replacement: bool = True

    @property
    def depths(self):
        depths = [0]  # of the root, then of each node
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return np.array(depths)

    def drafts(self):
        """Every draft: its probability, its tokens, and the text behind the root and each node."""
        for tokens in itertools.product(range(len(self.target(()))), repeat=len(self.parents)):
            texts, probability = [()], 1.0
            for node, parent in enumerate(self.parents):
                q = self.draft(texts[parent + 1]).copy()
                if not self.replacement:
                    q[[tokens[i] for i in range(node) if self.parents[i] == parent]] = 0.0
                probability *= q[tokens[node]] / q.sum() if q.sum() > 0 else 0.0
                texts.append((*texts[parent + 1], tokens[node]))
            if probability > 0:
                yield probability, np.array(tokens), texts

    def law(self, start=()):
        """``[vocab] * (depth + 1 - len(start))`` how the target continues ``start``."""
        if len(start) > max(self.depths):
            return np.ones(())
        p = self.target(start)
        return np.stack([p[token] * self.law((*start, token)) for token in range(len(p))])

    def accepted(self, rule):
        """Tokens of a chain that ``token`` or ``block`` (arXiv 2403.10444) accepts, in closed form.

        A prefix: with the product of its min(1, p / q), or with w, the last one's min(1, w p / q).
        """
        total = 0.0
        for probability, tokens, texts in self.drafts():
            weight = 1.0
            for text, token in zip(texts[:-1], tokens, strict=True):
                ratio = self.target(text)[token] / self.draft(text)[token]
                weight = min(1.0, weight * ratio) if rule == "block" else weight * min(1.0, ratio)
                total += probability * weight
        return total


def best_possible(pair):
    """Draft tokens that are accepted by the best rule which keeps the law: a linear program.

    Its variables are how often each draft is met with each accepted path and token after it.
    """
    probabilities, effects, lengths, drafts = [], [], [], []
    law, continued = pair.law(), cache(pair.law)
    for number, (probability, _, texts) in enumerate(pair.drafts()):
        probabilities.append(probability)
        for text, token in itertools.product(texts, range(len(pair.target(())))):
            effect = np.zeros_like(law)
            effect[(*text, token)] = continued((*text, token))
            effects.append(effect.ravel())
            lengths.append(len(text))
            drafts.append(number)
    of_draft = np.array(drafts) == np.arange(len(probabilities))[:, None]
    solved = linprog(
        -np.array(lengths, dtype=float),
        A_eq=np.vstack([np.array(effects).T, of_draft]),
        b_eq=np.concatenate([law.ravel(), probabilities]),
    )
    assert solved.success, solved.message
    return -solved.fun


def random_pair(parents, vocabulary, seed, spread=1.0, cut=0, cut_draft=0, **more):
    """Tables drawn from a Dirichlet law; ``cut`` leaves the target so many tokens of a row."""

    def tables(which, keep):
        @cache
        def table(text):
            numbers = np.random.default_rng([seed, which, len(text), *text])
            row = numbers.dirichlet(np.full(vocabulary, spread))
            row[row < np.sort(row)[-keep]] = 0.0
            return row / row.sum()

        return table

    return ToyPair(tables(0, cut), tables(1, cut_draft), tuple(parents), **more)


def fixed_pair(p, q, depth):
    target, draft = np.array(p) / sum(p), np.array(q) / sum(q)
    return ToyPair(lambda _: target, lambda _: draft, tuple(range(-1, depth - 1)))


class Chance(TorchFunctionMode):
    """Random numbers of which every course is tried; it sees what they are compared with."""

    def courses(self, function):
        """Call ``function`` once for each course; yield its probability and its result."""
        pending = [[]]
        while pending:
            self.box, self.at, self.limits = pending.pop(), [], defaultdict(set)
            with self:
                result = function()
            inside, probability = [], 1.0
            for i, at in enumerate(self.at):
                low, high = self.box[i]
                below = max([low, *(limit for limit in self.limits[i] if limit < at)])
                above = min([high, *(limit for limit in self.limits[i] if limit >= at)])
                for part in ((low, below), (above, high)):
                    if part[1] - part[0] > _DUST:
                        pending.append([*inside, part, *self.box[i + 1 :]])
                inside.append((below, above))
                probability *= above - below
            yield probability, result

    def numbers(self, start, stop):
        """Give a point within each side of the box, no two alike."""
        self.box += [(0.0, 1.0)] * (stop - len(self.box))
        for i in range(len(self.at), stop):
            low, high = self.box[i]
            self.at.append(low + (high - low) * (0.25 + 0.5 * (0.618034 * i % 1)))
        points = np.array(self.at[start:stop]).view(Watched)
        points.chance = self
        return points

    def compared(self, numbers, limits):
        numbers, limits = np.broadcast_arrays(np.asarray(numbers), np.asarray(limits))
        same = abs(np.array(self.at)[:, None] - numbers.ravel()) < _DUST
        for i, at in zip(*same.nonzero(), strict=True):
            self.limits[i].add(float(limits.flat[at]))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.searchsorted:
            mass, thresholds = args
            self.compared(thresholds / mass[..., -1:], mass / mass[..., -1:])
        elif function is torch.Tensor.le:
            self.compared(*args)
        return function(*args, **(kwargs or {}))


class Watched(np.ndarray):
    """Points that tell what they are compared with in numpy."""

    def __array_finalize__(self, made_from):
        self.chance = getattr(made_from, "chance", None)

    def __getitem__(self, index):
        return super().__getitem__((index, ...))  # watched even where it is one point

    def __le__(self, limits):
        self.chance.compared(np.asarray(self), limits)
        return np.asarray(self) <= limits


def examine(pair, make_verifier, bonus=False):
    """The law of the texts that a verifier commits, and how many draft tokens it accepts.

    With ``bonus`` the chain's last token is a bonus proposal, whose row the pass has not read.
    """
    chance, accepted = Chance(), 0.0
    law, continued = np.zeros_like(pair.law()), cache(pair.law)

    class Enumerated(Uniforms):
        def begin(self, seed):
            self.used = 0

        def peek(self, n):
            return chance.numbers(self.used, self.used + n)

        def take(self, n):
            taken, self.used = self.peek(n), self.used + n
            return taken

    def verified():
        with mock.patch("specbench.decoding.verify.match.Uniforms", Enumerated):
            verifier = make_verifier()
        verifier.begin(0)
        return verifier.verify(tree, scores)

    n = len(pair.parents) - bonus
    for drafted, tokens, texts in pair.drafts():
        q = torch.tensor(np.stack([pair.draft(texts[parent + 1]) for parent in pair.parents]))
        p = torch.tensor(np.stack([pair.target(text) for text in texts[: n + 1]]))
        tree = DraftTree(
            tokens[:n],
            np.array(pair.parents[:n], dtype=np.int64),
            probs=Proposal(q[:n], np.arange(n), pair.replacement),
            bonus=BonusProposal(int(tokens[n]), q[n]) if bonus else None,
        )
        scores = Scores(p.log(), depths=pair.depths[: n + 1])
        for probability, accepted_path in chance.courses(verified):
            text = tuple(map(int, accepted_path.tokens))
            law[text] += drafted * probability * continued(text)
            accepted += drafted * probability * len(accepted_path.path)
    return law, accepted
