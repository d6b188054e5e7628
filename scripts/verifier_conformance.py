"""Whether a verifier keeps the target's law, and how much it accepts: all that can happen, summed.

    python -m scripts.verifier_conformance                                ours, and transformers'
    python -m scripts.verifier_conformance MODULE:FUNCTION --rule block   yours

A toy pair is a target and a draft whose distributions are tables over a few tokens. Every draft
that can be drawn is given to the verifier, and of every random number that it draws every outcome
is tried, each with its exact probability. What it commits is continued by the target. The law of
these texts must be the target's, and of a chain the accepted length must be the rule's, which is a
closed form:

    token   sum over prefixes of q(prefix) * product of min(1, p/q)
    block   sum over prefixes of q(prefix) * w, with w(i) = min(1, w(i-1) p/q)   (arXiv 2403.10444)

and nothing that keeps the law accepts more than block. A verifier of yours is a function::

    def verify(draft: Draft, chance: Chance) -> tuple[Sequence[int], int]:
        # the accepted nodes from the top, and the token after them

With --trees it is given siblings, too. It takes random numbers from ``chance.uniform()`` (compare
it with <=, <, >=, >) and ``chance.choice(weights)``, or from torch inside ``with chance.torch():``
(rand, rand_like, multinomial). The sums are exact up to rounding, 1e-15 or so. A verifier that
computes with its numbers, besides comparing them and searching for them in a cumulative sum, is
refused and can be sampled with --draws N: its law is then wrong if a text's frequency is off by 6
standard errors.

Exit code 1 if a verifier is not what it says: lossless, unless it says that it is lossy.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from scripts.every_outcome import Chance, Draws, Numbers
from specbench.arrays import FloatArray, IntArray
from specbench.config.schema import VERIFIERS, VerifierConfig
from specbench.decoding.sampling import Sampling, Uniforms
from specbench.decoding.structs import BonusProposal, DraftTree, Proposal
from specbench.decoding.verify.choice import build_verifier
from specbench.errors import ConfigurationError
from specbench.models.scores import Scores

EXACT = 1e-12  # how far sums of exact probabilities may be off
ERRORS = 6.0  # standard errors by which a sampled frequency may be off

Text: TypeAlias = tuple[int, ...]
Outcome: TypeAlias = tuple[Sequence[int], int]


# -- toy pairs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """What a verifier is given.

    Attributes:
        tokens: ``[n]`` node by node, a parent before its children.
        parents: ``[n]``, -1 for the root; of a chain -1, 0, 1, ..
        q: ``[n, vocab]`` float64, what each node was drawn from (siblings: the same row, before
            its elder siblings were taken out).
        p: ``[n + 1, vocab]`` float64, the target's at the root and at each node.
        replacement: whether siblings are independent draws.
    """

    tokens: IntArray
    parents: IntArray
    q: FloatArray
    p: FloatArray
    replacement: bool


Verify: TypeAlias = Callable[[Draft, Chance], Outcome]


@dataclass(frozen=True, eq=False)
class ToyPair:
    """A target and a draft: next-token distributions by what was committed before.

    Attributes:
        target: by every text shorter than the longest one, the depth and a token more.
        draft: likewise; texts as deep as the tree are not asked.
        parents: the shape of the draft.
    """

    name: str
    target: Callable[[Text], FloatArray]
    draft: Callable[[Text], FloatArray]
    parents: tuple[int, ...]
    replacement: bool = True
    vocabulary: int = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", len(self.target(())))
        object.__setattr__(self, "depth", max(depths_of(self.parents)))

    @property
    def chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def drafts(self) -> Iterator[tuple[float, Draft]]:
        """Every draft and its probability."""
        for tokens in itertools.product(range(self.vocabulary), repeat=len(self.parents)):
            texts: list[Text] = [()]
            for parent, token in zip(self.parents, tokens, strict=True):
                texts.append((*texts[parent + 1], token))
            probability = 1.0
            for node, parent in enumerate(self.parents):
                q = self.draft(texts[parent + 1]).copy()
                if not self.replacement:
                    q[[tokens[i] for i in range(node) if self.parents[i] == parent]] = 0.0
                probability *= q[tokens[node]] / q.sum() if q.sum() > 0 else 0.0
            if probability > 0:
                yield (
                    probability,
                    Draft(
                        np.array(tokens, dtype=np.int64),
                        np.array(self.parents, dtype=np.int64),
                        np.stack([self.draft(texts[parent + 1]) for parent in self.parents]),
                        np.stack([self.target(text) for text in texts]),
                        self.replacement,
                    ),
                )

    def law(self, start: Text = ()) -> FloatArray:
        """``[vocab] * (depth + 1 - len(start))`` how the target continues ``start``."""
        if len(start) > self.depth:
            return np.ones(())
        rest = [self.law((*start, token)) for token in range(self.vocabulary)]
        return np.stack([p * law for p, law in zip(self.target(start), rest, strict=True)])

    def accepted(self, rule: str) -> float:
        """Tokens of a chain that ``token`` or ``block`` accepts, by its closed form."""
        total = 0.0
        for probability, draft in self.drafts():
            weight = 1.0
            for i, token in enumerate(draft.tokens):
                ratio = draft.p[i, token] / draft.q[i, token]
                weight = min(1.0, weight * ratio) if rule == "block" else weight * min(1.0, ratio)
                total += probability * weight
        return total


def depths_of(parents: Sequence[int] | IntArray) -> list[int]:
    """Of the root and of each node."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def random_pair(
    name: str, parents: Sequence[int], vocabulary: int, seed: int, **more: Any
) -> ToyPair:
    """Tables drawn from a Dirichlet law: ``spread`` is its parameter, small for peaked ones.

    ``cut`` leaves the target, and ``cut_draft`` the draft, this many tokens of a row.
    """
    spread, cut, cut_draft = more.pop("spread", 1.0), more.pop("cut", 0), more.pop("cut_draft", 0)

    def tables(which: int, keep: int) -> Callable[[Text], FloatArray]:
        @cache
        def table(text: Text) -> FloatArray:
            numbers = np.random.default_rng([seed, which, len(text), *text])
            drawn: FloatArray = numbers.dirichlet(np.full(vocabulary, spread))
            if keep:
                drawn = np.where(drawn >= np.sort(drawn)[-keep], drawn, 0.0)
            row: FloatArray = drawn / drawn.sum()
            return row

        return table

    return ToyPair(name, tables(0, cut), tables(1, cut_draft), tuple(parents), **more)


def fixed_pair(name: str, p: Sequence[float], q: Sequence[float], depth: int) -> ToyPair:
    """Distributions that do not look at the text."""
    target, draft = np.array(p) / sum(p), np.array(q) / sum(q)
    return ToyPair(name, lambda _: target, lambda _: draft, tuple(range(-1, depth - 1)))


CHAIN = (-1, 0, 1, 2)
PAIRS = (
    fixed_pair("the paper's example", [1, 2], [2, 1], 2),
    fixed_pair("nothing in common", [1, 1, 0, 0], [0, 0, 1, 1], 2),
    fixed_pair("the same law", [1, 2, 1], [1, 2, 1], 2),
    random_pair("1 deep", CHAIN[:1], 4, 1),
    random_pair("2 deep", CHAIN[:2], 4, 2),
    random_pair("2 deep, peaked", CHAIN[:2], 4, 3, spread=0.3),
    random_pair("3 deep", CHAIN[:3], 3, 4),
    random_pair("3 deep, target cut to 2", CHAIN[:3], 3, 5, cut=2),
    random_pair("3 deep, draft cut to 2", CHAIN[:3], 3, 6, cut_draft=2),
    random_pair("4 deep", CHAIN, 2, 7),
    random_pair("4 deep, peaked", CHAIN, 2, 8, spread=0.3),
    random_pair("siblings with replacement", (-1, -1, 0, 1), 3, 9),
    random_pair("siblings without", (-1, -1, 0, 0), 3, 10, replacement=False),
)


# -- verdicts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a verifier does on a pair.

    Attributes:
        difference: between its law and the target's, the largest of a text.
        accepted: draft tokens of a step, on average.
        runs: courses that were tried, or drawn.
        errors: the largest difference in standard errors; 0 where nothing was drawn.
    """

    difference: float
    accepted: float
    runs: int
    errors: float = 0.0


def examine(pair: ToyPair, verify: Verify, draws: int = 0) -> Found:
    """Enumerate what ``verify`` does on a pair, or sample it ``draws`` times.

    Raises:
        NotEnumerable: it must be sampled.
        ValueError: what it returns is no path of the draft, or no token.
    """
    law = np.zeros((pair.vocabulary,) * (pair.depth + 1))
    continued = cache(pair.law)
    accepted, runs = 0.0, 0
    chance: Chance = Draws(0) if draws else Chance()
    drafts = list(pair.drafts())
    if draws:
        odds = np.array([probability for probability, _ in drafts])
        chosen = np.random.default_rng(1).choice(len(drafts), draws, p=odds / odds.sum())
        drafts = [(1.0 / draws, drafts[i][1]) for i in chosen]
    for drafted, draft in drafts:
        for probability, (path, token) in chance.runs(partial(verify, draft, chance)):
            nodes = [int(node) for node in path]
            if [int(draft.parents[node]) for node in nodes] != [-1, *nodes][: len(nodes)]:
                raise ValueError(f"the verifier's path {nodes} is none of {draft.parents.tolist()}")
            text = (*(int(draft.tokens[node]) for node in nodes), int(token))
            law[text] += drafted * probability * continued(text)
            accepted += drafted * probability * len(nodes)
            runs += 1
    expected = pair.law()
    errors = 0.0
    if draws:
        # What is committed is continued exactly, so this is an upper bound of the true error.
        error = np.sqrt(np.maximum(expected, 1.0 / draws) / draws)
        errors = float((np.abs(law - expected) / error).max())
    return Found(float(np.abs(law - expected).max()), accepted, runs, errors)


def verdict(pair: ToyPair, found: Found, rule: str, draws: int = 0) -> str:
    """``right``, or what is wrong: with the law, or with the length that ``rule`` accepts."""
    wrong = []
    if found.errors > ERRORS if draws else found.difference > EXACT:
        wrong.append("another law")
    if pair.chain:
        slack = ERRORS * pair.depth / math.sqrt(draws) if draws else EXACT
        token, block = pair.accepted("token"), pair.accepted("block")
        wanted = {"token": token, "block": block}.get(rule)
        if wanted is not None and abs(found.accepted - wanted) > slack:
            as_token = rule == "block" and abs(found.accepted - token) <= slack
            wrong.append(
                "accepts as token-wise" if as_token else f"accepts {wanted:.3f} by its rule"
            )
        elif not wrong and found.accepted > block + slack:
            wrong.append("accepts more than can be")
    return ", ".join(wrong) or "right"


# -- verifiers -------------------------------------------------------------------------------------

OURS = tuple(name for name in VERIFIERS if name not in ("auto", "greedy"))


def transformers(draft: Draft, chance: Chance) -> Outcome:
    """The one of transformers' assisted generation, for chains."""
    from transformers.generation.utils import _speculative_sampling

    with chance.torch():
        tokens, matches = _speculative_sampling(
            torch.tensor(draft.tokens)[None],
            torch.tensor(draft.q).log()[None],
            len(draft.tokens),
            torch.tensor(draft.p).log()[None],
        )
    return range(int(matches)), int(tokens[0, -1])


FOREIGN: dict[str, Verify] = {"transformers": transformers}
# How much of a chain each accepts; of the others nothing is known but that block's is the most.
RULES = {"rejection": "token", "block": "block", "transformers": "token"}


def ours(name: str, bonus: bool = False) -> Verify:
    """A verifier of the ``verifier`` group, as the engine calls it.

    With ``bonus`` the chain's last token is a bonus proposal, whose row the pass has not read.
    """

    def verify(draft: Draft, chance: Chance) -> Outcome:
        class EnumeratedUniforms(Uniforms):
            def begin(self, seed: int) -> None:
                self._ids: list[int] = []

            def peek(self, n: int) -> FloatArray:
                self._ids += chance.fresh(max(0, n - len(self._ids)))
                return Numbers.of(chance, self._ids[:n])

            def take(self, n: int) -> FloatArray:
                taken = self.peek(n)
                self._ids = self._ids[n:]
                return taken

        q, n = torch.tensor(draft.q), len(draft.tokens) - bonus
        tree = DraftTree(
            draft.tokens[:n],
            draft.parents[:n],
            probs=Proposal(q[:n], np.arange(n), draft.replacement),
            bonus=BonusProposal(int(draft.tokens[n]), q[n]) if bonus else None,
        )
        depths = np.array(depths_of(tree.parents))
        scores = Scores(torch.tensor(draft.p[: n + 1]).log(), depths=depths)
        with (
            mock.patch("specbench.decoding.verify.match.Uniforms", EnumeratedUniforms),
            chance.torch(),
        ):
            verifier = build_verifier(_config(name), Sampling(1.0))
            verifier.begin(0)
            found = verifier.verify(tree, scores)
        return found.path.tolist(), int(found.tokens[-1])

    return verify


def _config(name: str) -> VerifierConfig:
    return VerifierConfig(name=name, epsilon=0.09, delta=0.3)


def load(name: str) -> Verify:
    """A verifier by its name, or the function that ``MODULE:FUNCTION`` names.

    Raises:
        ConfigurationError: there is none.
    """
    if name in OURS:
        return ours(name)
    if name in FOREIGN:
        return FOREIGN[name]
    module, _, function = name.partition(":")
    try:
        found: Verify = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"there is no verifier {name} ({error}). Type one of {', '.join((*OURS, *FOREIGN))}, "
            "or MODULE:FUNCTION, with the module's folder in PYTHONPATH."
        ) from error
    return found


def main() -> int:
    parser = parser_of(__doc__)
    known = (*OURS, *FOREIGN)
    parser.add_argument("verifiers", nargs="*", default=known, metavar="NAME|MODULE:FUNCTION")
    rules = ("token", "block", "any")
    parser.add_argument("--rule", choices=rules, default="any", help="what yours is to accept")
    parser.add_argument("--draws", type=int, default=0, help="sample yours this often")
    parser.add_argument("--trees", action="store_true", help="yours takes drafts with siblings")
    options = parser.parse_args()
    table = Table("verifier", "pair", "law off by", "accepted", "token", "block", "runs", "verdict")
    wrong = 0
    for name in options.verifiers:
        verify, rule = load(name), RULES.get(name, "any" if name in known else options.rule)
        draws = 0 if name in known else options.draws
        lossy = name in OURS and not build_verifier(_config(name), Sampling(1.0)).lossless
        for pair in PAIRS:
            if not (pair.chain or name in OURS or (options.trees and name not in known)):
                continue
            found = examine(pair, verify, draws)
            said = "lossy, as it says" if lossy else verdict(pair, found, rule, draws)
            wrong += said not in ("right", "lossy, as it says")
            forms = [f"{pair.accepted(r):.3f}" if pair.chain else "" for r in ("token", "block")]
            cells = [f"{found.difference:.1e}", f"{found.accepted:.3f}", *forms, str(found.runs)]
            table.add_row(name, pair.name, *cells, said)
    Console(width=140).print(table)
    print(f"{wrong} of {table.row_count} rows are wrong" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
