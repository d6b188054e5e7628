"""Adaptive drafts: decide at each step how much of another method's draft to verify.

Four published rules, each a ``policy``, around one drafter that reports how likely its nodes are
(``DraftTree.path_probs``: a draft model's probabilities, a suffix tree's counts):

threshold   transformers' assisted generation since 4.45. Reference code studied:
            huggingface/transformers 5.23, ``generation/candidate_generator.py``
            (``AssistedCandidateGenerator``) and ``ConfidenceCriteria``. The draft ends after a
            token less likely than ``confidence``. Once the target has judged more than five
            tokens, accepted and rejected ones, the threshold becomes the one with the fewest false
            positives + 3 times false negatives (there: if scikit-learn is installed).
survival    SpecDec++, arXiv 2405.19715; Kaffaljidhmah2/SpecDec_pp ``hf_generation.py``. The draft
            ends after the token at which the product of the probabilities is below ``least`` (1 -
            its ``stop_threshold``), but not before ``shortest`` tokens.
marginal    vLLM's adaptive verification, vllm-project/vllm PR 47808,
            ``v1/worker/gpu/spec_decode/adaptive_verification.py``, for one sequence: as many of the
            likeliest nodes as give the most tokens for the time of a step. ``objective: plain``
            takes a node while its path probability times an AR step's time exceeds its cost.
            With ``batch.budget=global`` nodes are chosen over the drafts of all sequences that are
            decoded at once, and scaled by the acceptance of the group's last nodes; without it
            each sequence pays alone. Every 8 steps the group checks on the surface whether a token
            each would pay at that acceptance, and drafts nothing if not.
            A sequence that is last and whose drafts do not pay rests for some steps.
bandit      BanditSpec, arXiv 2505.15141; sail-sg/BanditSpec ``generate_utils.py``
            (``ucb_length_spec_generate``): the draft's depth, 1 to ``arms``, by an upper confidence
            bound on tokens per second.

A step whose draft is cut to nothing is an AR step, plus the time of drafting. In the records
``offered_per_step`` counts drafted tokens and ``n_drafted`` verified ones. Draft models that draft
token by token (sps) stop early by the first two rules and by the bandit's depth; other drafts are
cut when they are complete.
Where ours differs, and why:
    - All rules take trees: a rule judges a node's path, and the target has judged the children of
      accepted nodes. For chains this equals the reference codes.
    - threshold: transformers' documentation says that the threshold lasts over calls; its code
      works on a copy that ends with the call. Ours ends with the turn.
    - survival: SpecDec++ trains a head that estimates how likely a token is, one token late (it
      reads the state of the token that was fed). Ours uses the drafter's probability, at once.
    - marginal: the cost comes from a cost surface of this machine, measured beforehand, not from a
      profile at start; for one sequence we use this step's probabilities, where vLLM sizes a batch
      by the last step's.
    - A sampled draft must not be cut before a token because of that token: the rest would be
      biased. There ``marginal`` is ``plain`` and, like the first two, cuts after the token.
    - bandit: the code divides its exploration by the steps of all arms together, so that the bonus
      is the same for all and the arm with the best mean always wins (``counts: all``); ``arm`` is
      UCB1's. ``reward: priced`` takes a step's cost from a surface, which can be replayed;
      measured seconds cannot.
Checked: steps identical to the authors' code: threshold in 13,037 of 13,037, bandit in 8,519 of
    8,522, marginal in 3,000 of 3,000; survival follows the paper's text.
    ``tests/methods/test_adaptive.py`` restates the rules in plain code.
Example: suffix decoding drafts a b c d after "x" with probabilities .9, .5, .9, .4, so their paths
    survive with .9, .45, .41, .16. ``survival`` with ``least`` .42 verifies a b c: c is the first
    token below it and ends the draft. ``bandit`` with the depth 2 verifies a b.
State kept: thresholds and arms for a turn, as in the codes; the drafter's own as ``state_scope``
    says (paper: ``run``, which is the default drafter's).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from specbench.arrays import BoolArray, FloatArray, IntArray
from specbench.config.schema import Count, NotNegative, Positive, Share
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.protocols import ModelCall, ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface

_LONGEST_REST = 16  # steps of a sequence without a draft
_LOOK = 8  # steps after which a group checks again whether any draft could pay
_CONTEXTS = 64  # a cost holds for so many cached tokens
_DOUBT = 4  # right tokens that a group is credited with before it has verified any


@dataclass(kw_only=True, eq=False)
class Adaptive(Composite):
    """Adaptive: another method's draft, cut at each step by a published rule.

    Attributes:
        drafter: the method that drafts: its name in a configuration (which turns it into a
            drafter), or a drafter.
        policy: ``threshold``, ``survival``, ``marginal`` or ``bandit``, see the module's text.
        confidence: threshold: its initial value.
        refit: threshold: whether it is refitted.
        least: survival: path probability below which a draft ends.
        shortest: survival: first tokens of a draft that this rule never cuts.
        surface: marginal, and bandit with priced steps: a cost surface of this machine and model.
        objective: marginal: ``rate`` (tokens per second of the step) or ``plain``.
        arms: bandit: depths to choose from.
        exploration: bandit: factor of the logarithm of the step under the root.
        counts: bandit: ``all`` or ``arm``, the steps that the bonus is divided by.
        reward: bandit: tokens by ``measured`` seconds, or by ``priced`` ones.

    Raises:
        ConfigurationError: a value is out of range, the drafter does not report how likely its
            nodes are, or a needed surface is missing.
    """

    name: str = "adaptive"
    version: int = 4
    paper_scope: Scope = "run"  # suffix decoding's
    drafter: Any = "suffix_decoding"
    policy: Literal["threshold", "survival", "marginal", "bandit"] = "threshold"
    confidence: Share = 0.4
    refit: bool = True
    least: Share = 0.7
    shortest: Count = 2
    surface: str | None = None
    objective: Literal["rate", "plain"] = "rate"
    arms: Positive = 4
    exploration: NotNegative = 6.0
    counts: Literal["all", "arm"] = "all"
    reward: Literal["measured", "priced"] = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._priced = self.policy == "marginal" or (
            self.policy == "bandit" and self.reward == "priced"
        )
        if self._priced and self.surface is None:
            raise ConfigurationError(
                f"method={self.name} with policy={self.policy} needs this machine's pass times. "
                "Measure them: python run.py runner=cost output_dir=COST; then type "
                "method.surface=COST/surface.json."
            )
        if isinstance(self.drafter, Drafter):
            needs = self.drafter.needs
            if not needs.path_probs or needs.overlap:
                raise ConfigurationError(
                    f"method={self.name} cannot hold {self.drafter.name}: it does not report "
                    "how likely its nodes are. Type e.g. method.drafter=suffix_decoding, sps, "
                    "opt_tree or eagle2."
                )
        self._tree = DraftTree.empty()  # the part's draft of this step
        self._verified = NO_TOKENS  # its nodes that are verified
        self._node_probs: list[float] = []  # of the tokens that a part drafted one by one
        self._offered: list[float] = []
        self._forget()

    @property
    def entries(self) -> list[Any]:
        return [self.drafter]

    @property
    def own_needs(self) -> Needs:
        clock = self.policy == "bandit" and self.reward == "measured"
        nodes = self.parts[0].needs.max_nodes
        return Needs(max_nodes=nodes, clock=clock, verify_cost=self.policy == "marginal")

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        needs = self.parts[0].needs
        self._drafts_by_model, self._tokens_suffice = needs.draft_model, needs.tokens_only
        self._shares = context.budget_shared and self.policy == "marginal"
        if self._priced:
            surface = self._read_surface(context)
            self._budget = RowBudget(surface, needs.max_nodes, plain=self.objective == "plain")
            if self._shares:
                self._budget.seconds(2, 0)  # refuses a surface without passes of several sequences

    def _read_surface(self, context: DraftContext) -> CostSurface:
        assert self.surface is not None
        surface = CostSurface.read(Path(self.surface))
        target = context.target
        if target is not None:
            here = {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type}
            for key, value in here.items():
                measured = str(surface.model.get(key)).partition(":")[0]
                if measured != value:
                    raise ConfigurationError(
                        f"method.surface={self.surface} was measured with {key} {measured}, "
                        f"and this run has {value}. Measure one: python run.py runner=cost"
                    )
        return surface

    def _forget(self) -> None:
        self._confidence = self.confidence
        self._judged: list[tuple[float, bool]] = []  # probability, whether it was accepted
        self._arm, self._step = 0, 0
        self._means, self._calls = np.zeros(self.arms), np.zeros(self.arms)
        self._started = 0.0
        self._pays = True  # whether any draft of the group could pay
        self._history = History()
        self._rested = False  # whether the part drafted nothing in this step
        self._unpaid, self._rest = 0, 0  # drafts in a row that did not pay; steps without one

    def begin(self, state: DecodeState) -> None:
        self._forget()
        self._offered = []
        self._n_seen = state.length  # tokens of the sequence that the part has seen
        super().begin(state)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        self._node_probs = []
        part_state = copy.copy(state)
        if self.policy != "bandit":
            part_state.stop_when = self._stops
        else:
            self._started = time.perf_counter()
            self._choose()
            # Nothing deeper than the arm could be committed then, so that draft models stop there.
            part_state.remaining = min(state.remaining, self._arm + 2)
        if self._shares and not state.step % _LOOK:
            self._pays = yield self._call(self._budget.worth_drafting, DraftTree.empty(), state)
            self._history = self._history.decay()
        rests, self._rest = self._rest > 0, max(self._rest - 1, 0)
        self._rested = rests or not self._pays
        tree = DraftTree.empty()
        if not self._rested:
            self._catch_up(state)
            tree = yield from self.parts[0].drafting(part_state)
        self._tree = tree
        self._offered.append(len(tree))
        if not self._pays:
            return tree
        if self._shares:
            allocation = yield self._call(self._budget.allocate, tree, state)
            selected = allocation.selected
            if allocation.last and not rests:
                self._unpaid = 0 if allocation.pays else self._unpaid + 1
                self._rest = min(2**self._unpaid // 4, _LONGEST_REST)  # 0, 1, 2, 4, ..
        else:
            selected = self._selected(tree, state.length) if len(tree) else NO_TOKENS
        self._verified = np.flatnonzero(selected)
        return tree.take(self._verified) if len(self._verified) else DraftTree.empty()

    def _call(self, answer: Callable[..., Any], tree: DraftTree, state: DecodeState) -> ModelCall:
        """Ask for an answer over all sequences that are decoded at once."""
        bid = DraftBid(tree, state.length, state.remaining, self._history)
        return ModelCall((answer.__name__, self.surface), bid, answer, choice=True)

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        verified = outcome.tree
        if self.policy == "threshold" and self.refit and len(verified):
            self._learn(verified, outcome.path)
        if self._shares and len(verified):
            self._history = self._history.plus(verified, len(outcome.path))
        seen = outcome
        if self._drafts_by_model and len(verified) < len(self._tree):
            # Its cache holds the whole draft: nodes that were not verified count as rejected.
            path = self._verified[outcome.path]
            seen = replace(outcome, tree=self._tree, path=path, next_tokens=None)
        if self._rested and self._tokens_suffice:
            return  # it catches up when it drafts again
        self._n_seen = state.length
        super().observe(state, seen)
        if self.policy == "bandit":
            self._reward(len(outcome.path) + 1, len(verified), state.length)

    def end(self, state: DecodeState) -> None:
        self._catch_up(state)
        super().end(state)

    def _catch_up(self, state: DecodeState) -> None:
        """Show the part the tokens committed while it rested."""
        if self._n_seen < state.length:
            unseen_tokens, self._n_seen = state.tokens[self._n_seen :].copy(), state.length
            super().observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, unseen_tokens, None))

    def report(self) -> dict[str, ReportValue]:
        return {**super().report(), "offered_per_step": self._offered}

    # -- which nodes of a draft are verified -----------------------------------------------------

    def _selected(self, tree: DraftTree, context: int) -> BoolArray:
        """Select the nodes to verify, ``[n]``; a selected node's parent is selected, too."""
        if self.policy == "bandit":
            return _depths(tree.parents) <= self._arm + 1
        if self.policy == "marginal":
            return self._budget.allocate([DraftBid(tree, context, 1)])[0].selected
        nodes = zip(self._token_probs(tree), _path_probs(tree), _depths(tree.parents), strict=True)
        return _not_ended(tree.parents, np.array([self._ends(*node) for node in nodes]))

    def _stops(self, token_prob: float, path_prob: float) -> bool:
        self._node_probs.append(token_prob)
        return self._ends(token_prob, path_prob, len(self._node_probs))

    def _ends(self, token_prob: float, path_prob: float, depth: int) -> bool:
        """Return whether the draft ends after a node at this depth, counted from 1."""
        if self.policy == "threshold":
            return token_prob < self._confidence
        return self.policy == "survival" and path_prob < self.least and depth >= self.shortest

    def _token_probs(self, tree: DraftTree) -> FloatArray:
        """Return the probability of each node given its parent, ``[n]``."""
        if len(self._node_probs) >= len(tree):  # a chain: as reported, not a rounded quotient
            return np.array(self._node_probs[: len(tree)])
        path_probs = _path_probs(tree)
        above = np.append(path_probs, 1.0)[tree.parents]  # -1, the root, is the last one
        return np.divide(path_probs, above, out=np.zeros_like(path_probs), where=above > 0)

    # -- threshold -------------------------------------------------------------------------------

    def _learn(self, verified: DraftTree, path: IntArray) -> None:
        accepted = np.zeros(len(verified) + 1, dtype=np.bool_)  # the root is the last one
        accepted[path] = accepted[-1] = True
        token_probs = self._token_probs(verified)
        for node in np.flatnonzero(accepted[verified.parents]):
            self._judged.append((float(token_probs[node]), bool(accepted[node])))
        if len(self._judged) > 5 and len({right for _, right in self._judged}) == 2:
            self._confidence = best_threshold(*map(np.array, zip(*self._judged, strict=True)))

    # -- bandit ----------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose the arm of this step; arm i stands for a draft of depth i + 1."""
        self._step += 1
        if self._step < 2 * self.arms:
            self._arm = (self._step - 1) % self.arms
            return
        steps = self._calls.sum() if self.counts == "all" else self._calls
        with np.errstate(divide="ignore"):
            bonus = np.sqrt(self.exploration * math.log(self._step) / np.asarray(steps))
        self._arm = int((self._means + bonus).argmax())

    def _reward(self, tokens: int, nodes: int, context: int) -> None:
        if self.reward == "measured":
            seconds = time.perf_counter() - self._started
        else:
            seconds = float(self._budget.seconds(1, context)[nodes])
        calls = self._calls[self._arm]
        self._means[self._arm] = (self._means[self._arm] * calls + tokens / seconds) / (1 + calls)
        self._calls[self._arm] += 1


def best_threshold(token_probs: FloatArray, accepted: BoolArray) -> float:
    """Return the stopping threshold that costs the fewest mistakes.

    A false positive costs 1, a false negative 3, each as a share of its class; among equals the
    largest threshold wins. Both classes must occur.
    """
    thresholds = np.unique(token_probs)[::-1]
    drafted = token_probs >= thresholds[:, None]
    false_positives = (drafted & ~accepted).sum(1) / (~accepted).sum()
    false_negatives = 1 - (drafted & accepted).sum(1) / accepted.sum()
    return float(thresholds[(false_positives + 3 * false_negatives).argmin()])


# -- marginal: which nodes of drafts are worth the rows that they take in a pass -------------------


class History(NamedTuple):
    """Outcome of a sequence's nodes in its last steps.

    Attributes:
        verified: nodes that were verified.
        expected: how many of them should be right by their ``path_probs``.
        accepted: how many were right.
    """

    verified: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0

    def decay(self) -> History:
        """Halve all counts, so that old steps weigh less and less."""
        return History(*(number / 2 for number in self))

    def plus(self, tree: DraftTree, accepted: int) -> History:
        expected = self.expected + float(_path_probs(tree).sum())
        return History(self.verified + len(tree), expected, self.accepted + accepted)


class DraftBid(NamedTuple):
    """A sequence's draft after ``length`` tokens; ``remaining`` new ones may still follow."""

    tree: DraftTree
    length: int
    remaining: int
    history: History = History()


class Allocation(NamedTuple):
    """Rows granted to a sequence's draft.

    Attributes:
        selected: ``[n]`` nodes to verify; a selected node's parent is selected, too.
        pays: whether the draft gains more time than its rows take.
        last: whether no other sequence has more tokens to go.
    """

    selected: BoolArray
    pays: bool
    last: bool


class RowBudget:
    """Shares the rows of a pass between the drafts of sequences that are decoded at once.

    A token is worth the time that it saves of AR decoding. A finished sequence is not replaced, so
    a group takes as long as its last sequence. Any token saves its row in a step; the rest of a
    step is saved once all sequences that are last have gained a token. As some gain much and
    others nothing, the least gain of n is taken to be their mean over the root of n (as in a
    Rayleigh law), and each sequence's part of the rest an n-th of that.

    Drafters estimate node probabilities from few counts, and mostly too high. So their estimates
    are scaled down (never up) by the acceptance of the group's last nodes.

    Args:
        surface: with passes of several sequences where there are several.
        max_nodes: of a draft.
        plain: verify a node while it pays for itself, instead of maximizing tokens per second.
    """

    def __init__(self, surface: CostSurface, max_nodes: int, *, plain: bool) -> None:
        self._surface, self._max_nodes, self._plain = surface, max_nodes, plain
        self._pass_costs: dict[tuple[int, int], FloatArray] = {}

    def worth_drafting(self, bids: Sequence[DraftBid]) -> list[bool]:
        """Return, alike for all sequences, whether a token each could pay for its row.

        Some of them must pay, at the acceptance rate of the group's last nodes.
        """
        context, n_sequences = _context(bids), len(bids)
        costs = self.seconds(n_sequences, context)[: n_sequences + 1]
        worth = np.sort(self._token_values(_last(bids), context))[::-1]
        worth = worth * _right([bid.history.verified for bid in bids], bids)
        pays = (np.cumsum(worth)[: len(costs) - 1] > costs[1:] - costs[0]).any()
        return [bool(pays)] * n_sequences

    def allocate(self, bids: Sequence[DraftBid]) -> list[Allocation]:
        """Select the most valuable nodes of all drafts while they pay; parents before children."""
        n_sequences, trees, last = len(bids), [bid.tree for bid in bids], _last(bids)
        if not any(map(len, trees)):
            none = np.empty(0, dtype=np.bool_)
            return [Allocation(none, pays=False, last=bool(is_last)) for is_last in last]
        context = _context(bids)
        costs = self.seconds(n_sequences, context)
        worth = self._token_values(last, context)
        worth = worth * _right([bid.history.expected for bid in bids], bids)
        saved_by_draft = [_path_probs(tree) * w for tree, w in zip(trees, worth, strict=True)]
        saved = np.concatenate(saved_by_draft)
        order = np.argsort(-saved, kind="stable")
        costs = costs[: len(order) + 1]
        if self._plain or any(tree.probs is not None for tree in trees):
            unpaid = saved[order] <= np.diff(costs)
            count = int(unpaid.argmax()) if unpaid.any() else len(order)
        else:
            gained = costs[0] + np.append(0.0, np.cumsum(saved[order]))
            count = int((gained / costs).argmax())
        chosen = np.zeros(len(order), dtype=np.bool_)
        chosen[order[:count]] = True
        # All rows share the additional cost of the pass equally.
        net = (saved - (costs[count] - costs[0]) / max(count, 1)) * chosen
        ends = np.cumsum([len(tree) for tree in trees])[:-1]
        return [
            Allocation(
                selected if tree.probs is None else _not_ended(tree.parents, ~selected),
                bool(gain.sum() > 0),
                bool(is_last),
            )
            for tree, selected, gain, is_last in zip(
                trees, np.split(chosen, ends), np.split(net, ends), last, strict=True
            )
        ]

    def _token_values(self, last: BoolArray, context: int) -> FloatArray:
        """Return the seconds that a token of each sequence saves, ``[sequences]``."""
        n_sequences = len(last)
        step_s = self.seconds(n_sequences, context)[0]
        share_s = row_s = step_s / n_sequences
        if n_sequences > 1:
            row_s = min(max(step_s - self.seconds(n_sequences - 1, context)[0], 0.0), share_s)
        return row_s + last * n_sequences * (share_s - row_s) / last.sum() ** 1.5

    def seconds(self, n_sequences: int, context: int) -> FloatArray:
        """Return the time of a pass over that many roots and 0, 1, .. nodes.

        Raises:
            ConfigurationError: the surface has no such passes.
        """
        key = n_sequences, context // _CONTEXTS
        if key not in self._pass_costs:
            rows = n_sequences + np.arange(n_sequences * self._max_nodes + 1.0)
            sequences, middle = np.full_like(rows, n_sequences), np.full_like(rows, key[1] + 0.5)
            self._pass_costs[key] = self._surface.joint_pass_s(sequences, rows, middle * _CONTEXTS)
        return self._pass_costs[key]


def _right(counts: Sequence[float], bids: Sequence[DraftBid]) -> float:
    """Return the share of ``counts`` nodes that was accepted, at most 1."""
    accepted = sum(bid.history.accepted for bid in bids)
    return min((accepted + _DOUBT) / (sum(counts) + _DOUBT), 1.0)


def _context(bids: Sequence[DraftBid]) -> int:
    return sum(bid.length for bid in bids) // len(bids)


def _last(bids: Sequence[DraftBid]) -> BoolArray:
    """Mark the sequences with most tokens to go, ``[sequences]``."""
    remaining = np.array([bid.remaining for bid in bids])
    last: BoolArray = remaining == remaining.max()
    return last


# -- trees -----------------------------------------------------------------------------------------


def _path_probs(tree: DraftTree) -> FloatArray:
    if not len(tree):
        return np.empty(0)
    assert tree.path_probs is not None
    return tree.path_probs


def _not_ended(parents: IntArray, ended: BoolArray) -> BoolArray:
    """Mark the nodes without an ancestor that ended the draft, ``[n]``."""
    open_nodes = np.ones(len(parents) + 1, dtype=np.bool_)  # the root is the last one
    for node, parent in enumerate(parents.tolist()):
        open_nodes[node] = open_nodes[parent] and (parent < 0 or not ended[parent])
    return open_nodes[:-1]


def _depths(parents: IntArray) -> IntArray:
    """Return the depths of nodes, ``[n]``, from 1."""
    depths = np.zeros(len(parents) + 1, dtype=np.int64)  # the root is the last one
    for node, parent in enumerate(parents.tolist()):
        depths[node] = depths[parent] + 1
    return depths[:-1]
