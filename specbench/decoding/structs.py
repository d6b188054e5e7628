"""Data passed between drafter, target, verifier and engine.

Arrays a drafter builds on the host are numpy; arrays it builds on the model's device are tensors.
This module imports no torch, so that replaying drafters against a recorded output needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from specbench.arrays import BoolArray, FloatArray, IntArray
from specbench.decoding.protocols import DraftLM, TargetInfo
from specbench.decoding.sampling import GREEDY, Sampling

if TYPE_CHECKING:
    import torch


NO_TOKENS: IntArray = np.empty(0, dtype=np.int64)
AFTER_FINAL_NORM = -1  # number of the hidden states that the LM head reads, of any model


@dataclass(frozen=True, slots=True)
class Proposal:
    """The distributions that draft nodes were drawn from, for a ratio test."""

    q: torch.Tensor  # ``[m, vocab]`` float32 on the device, after temperature and filters
    # ``[n]`` int64 on the host: node i was drawn from ``q[row[i]]``. Siblings share a row, in the
    # order in which they were drawn.
    row: IntArray
    # Siblings are independent draws (a token may occur twice); otherwise each was drawn from the
    # row without its elder siblings.
    replacement: bool = True

    def take(self, nodes: IntArray) -> Proposal:
        return Proposal(self.q, self.row[nodes], self.replacement)


@dataclass(frozen=True, slots=True)
class BonusProposal:
    """A draw for the token after a tree's last node, made while the target reads the tree.

    It is too late to be a node, because the pass has not read it. A ratio test against the target's
    distribution there lets it replace the target's token as often as two draws can agree.
    """

    token: int  # the draw
    q: torch.Tensor  # ``[vocab]`` its distribution, after temperature and filters


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens below the root (the last committed token, which is not a node itself)."""

    # ``[n]`` int64 token ids; a device tensor where the drafter works on the device
    tokens: IntArray | torch.Tensor
    # ``[n]`` int64 on the host; -1 is the root; a parent comes before its children
    parents: IntArray
    # ``[n]`` bool, or None for no such node. Auxiliary nodes ride along in the target pass but are
    # never candidates (Lookahead's window). A candidate's parent is a candidate.
    aux: BoolArray | None = None
    # ``(k, w)`` where the nodes are k unmerged chains of w tokens in row order, which the batch
    # layout runs as a batch of k; None for any other tree.
    rows: tuple[int, int] | None = None
    # The nodes' distributions; None means every child is a deterministic function of the context
    # (or of the drafter's random numbers, as long as the verifier's are not among them).
    probs: Proposal | None = None
    # ``[n]`` int64 source of each node, in the drafter's numbering, or in a fixed tree its rank; or
    # None.
    sources: IntArray | None = None
    # ``[n]`` float64 on the host: the drafter's probability that each node and all above it are
    # accepted, at most its parent's; None if the drafter gives none.
    path_probs: FloatArray | None = None
    # For the token after the last node (the root, in an empty tree), or None. A verifier may use
    # it or not: the token follows the target's distribution either way.
    bonus: BonusProposal | None = None

    def __len__(self) -> int:
        return len(self.parents)

    @staticmethod
    def empty() -> DraftTree:
        """Return no draft: the step becomes one autoregressive step."""
        return _EMPTY

    @staticmethod
    def chain(tokens: IntArray | torch.Tensor) -> DraftTree:
        """Build a single branch: ``tokens[0]`` follows the root, and so on."""
        n = len(tokens)
        return DraftTree(tokens, _CHAIN[:n] if n <= len(_CHAIN) else np.arange(-1, n - 1))

    @staticmethod
    def from_paths(paths: Iterable[Sequence[int]]) -> DraftTree:
        """Merge several continuations of the root; equal beginnings share their nodes.

        Nodes are in the order in which the paths first name them.
        """
        node_of: dict[tuple[int, int], int] = {}  # by parent and token
        for path in paths:
            parent = -1
            for token in path:
                parent = node_of.setdefault((parent, int(token)), len(node_of))
        nodes = np.array(list(node_of), dtype=np.int64).reshape(-1, 2)
        return DraftTree(nodes[:, 1].copy(), nodes[:, 0].copy())

    def nodes_above(self, depth: int) -> int:
        """Count nodes before the first one deeper than ``depth`` (the root's children have 1).

        Counts all nodes of a malformed tree, which the pass refuses.
        """
        if len(self) <= depth:
            return len(self)
        depths = [0]
        for node, parent in enumerate(self.parents.tolist()):
            if not -1 <= parent < node:
                break
            depths.append(depths[parent + 1] + 1)
            if depths[-1] > depth:
                return node
        return len(self)

    def take(self, nodes: IntArray) -> DraftTree:
        """Select nodes by ``[k]`` increasing indices, which include the parent of each.

        ``rows`` and ``bonus`` describe the whole tree, so a part of it has neither.
        """
        if len(nodes) == len(self):
            return self
        renumbered = np.full(len(self) + 1, -1, dtype=np.int64)  # by row; row 0 is the root
        renumbered[nodes + 1] = np.arange(len(nodes))
        return DraftTree(
            self.tokens[nodes],
            renumbered[self.parents[nodes] + 1],
            aux=None if self.aux is None else self.aux[nodes],
            probs=None if self.probs is None else self.probs.take(nodes),
            sources=None if self.sources is None else self.sources[nodes],
            path_probs=None if self.path_probs is None else self.path_probs[nodes],
        )


_CHAIN: IntArray = np.arange(-1, 1023, dtype=np.int64)
_EMPTY = DraftTree(NO_TOKENS, NO_TOKENS)


class DecodeState:
    """The committed tokens of one turn, as drafters see them.

    Attributes:
        buffer: int64 array that holds prompt and output; only ``buffer[:length]`` is committed.
        length: committed tokens, prompt included. ``buffer[length - 1]`` is the root.
        last_committed: tokens committed by the last step (1 after prefill).
        step: target passes done after prefill.
        remaining: new tokens that may still be committed.
        n_seen: tokens at the start of the prompt that the drafter saw in the case's earlier turns
            and may still remember; 0 in a first turn and after a reset. Later tokens are new to it.
        seed: the turn's seed, for drafters that draw random numbers.
        stop_when: early-stop test set by an outer drafter: ``(token_prob, path_prob) -> stop``. A
            drafter that drafts token by token then gives path probabilities, and stops after the
            first token for which the test returns true.
    """

    __slots__ = (
        "buffer",
        "last_committed",
        "length",
        "n_prompt",
        "n_seen",
        "remaining",
        "seed",
        "step",
        "stop_when",
    )

    def __init__(
        self, prompt: IntArray, max_new_tokens: int, seed: int = 0, seen: IntArray = NO_TOKENS
    ) -> None:
        self.buffer: IntArray = np.empty(len(prompt) + max_new_tokens, dtype=np.int64)
        self.buffer[: len(prompt)] = prompt
        self.length = self.n_prompt = len(prompt)
        self.last_committed = 0
        self.step = 0
        self.remaining = max_new_tokens
        self.seed = seed
        self.stop_when: Callable[[float, float], bool] | None = None
        common = min(len(seen), len(prompt))
        differs = np.flatnonzero(np.asarray(seen[:common]) != self.buffer[:common])
        self.n_seen = int(differs[0]) if len(differs) else common

    @property
    def tokens(self) -> IntArray:
        """``[length]`` view of the committed ids, prompt included."""
        return self.buffer[: self.length]

    @property
    def new_tokens(self) -> IntArray:
        """``[n_new]`` view of the committed ids after the prompt."""
        return self.buffer[self.n_prompt : self.length]

    @property
    def root(self) -> int:
        return int(self.buffer[self.length - 1])

    def commit(self, tokens: IntArray) -> None:
        end = self.length + len(tokens)
        self.buffer[self.length : end] = tokens
        self.length = end
        self.remaining -= len(tokens)
        self.last_committed = len(tokens)


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The verifier's decision."""

    path: IntArray  # ``[a]`` indices of the accepted nodes, from the root's child downwards
    # ``[a + 1]`` the accepted tokens and the target's token after them, on the host
    tokens: IntArray
    # ``[n + 1]`` the target's greedy token at the root and at each node, also under sampling: a
    # drafter that saw drawn tokens of other rows would know the verifier's random numbers.
    next_tokens: IntArray


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A finished step, as ``observe`` sees it; read-only."""

    tree: DraftTree  # the draft that was verified (after the engine's cuts, if any)
    path: IntArray  # ``[a]`` indices of the accepted nodes
    committed: IntArray  # ``[m]`` tokens committed by this step, after the stop rules
    # ``[n + 1]`` the target's greedy token at the root (row 0) and at each node (row i + 1),
    # auxiliary nodes included, see ``AcceptedPath``; None if unknown.
    next_tokens: IntArray | None
    # ``[n + 1, vocab]`` on the device, only if ``needs.logits`` is set
    logits: torch.Tensor | None = None
    # ``[m, hidden]`` on the device, by number, for ``needs.hidden_layers``: the former root and
    # the committed tokens except the last, which is the next step's root
    hidden: Mapping[int, torch.Tensor] | None = None
    # ``[n + 1, hidden]`` of every row, rejected ones too, if ``needs.tree_hidden`` is set. The next
    # pass may overwrite them, as it does logits.
    tree_hidden: Mapping[int, torch.Tensor] | None = None
    finished: bool = False  # whether this step ended the turn


# A value of a drafter's report on a turn; a list has one entry per step.
ReportValue: TypeAlias = float | str | Sequence[float | str | None]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that a method needs besides the model (table, datastore, automaton, weights)."""

    name: str  # e.g. ``frozen_table``; also the key under ``DraftContext.artifacts``
    # ``module:function``, called as ``build(tokenizer, path, **params)`` for the bundled model
    builder: str
    command: str  # the command line that builds it for another model
    path: str | None = None  # the file the user named, or None for the default place in the cache
    # keyword arguments of the builder; part of the default file's name
    params: Mapping[str, Any] = field(default_factory=dict)
    # tied to one model's weights instead of to every model with the tokenizer
    per_model: bool = False

    def command_for(self, model: str) -> str:
        """Insert the model's name, as `specbench.config.compose.build_model` gives it."""
        return self.command.replace("MODEL", model)


@dataclass(frozen=True, slots=True)
class Needs:
    """A drafter's requirements, and what its trees contain; checked before weights are loaded."""

    # -- of the target's pass --
    tokens_only: bool = True  # drafts depend on committed tokens only (replay is then exact)
    logits: bool = False  # ``StepOutcome.logits`` of every row
    prompt_logits: bool = False  # logits of every prompt position, handed to ``observe_prompt``
    # logits of its last position, which decide the first token; handed to ``observe_prompt``
    first_logits: bool = False
    # Hidden states to hand over, numbered as in transformers: i is the input of layer i (0 the
    # embedding's output); the number of layers, or ``AFTER_FINAL_NORM``, is the LM head's input.
    # The prompt's go to ``observe_prompt_hidden``, those of steps are in ``StepOutcome``.
    hidden_layers: tuple[int, ...] = ()
    tree_hidden: bool = False  # also ``StepOutcome.tree_hidden``, of rejected rows
    # -- loaded besides the target --
    draft_model: bool = False  # a second model, named by the ``pair`` group
    draft_nodes: int = 0  # most nodes that the draft model holds at once; 0 for ``max_nodes``
    heads: tuple[str, ...] = ()  # trained heads: names in ``pair.heads``, folders or hub ids
    artifacts: tuple[Artifact, ...] = ()  # files besides the model
    reference: bool = False  # the turn's plain greedy output, handed over before ``begin`` (oracle)
    # -- of the engine --
    max_nodes: int = 128  # most nodes of a draft tree; sizes the engine's buffers
    path_probs: bool = False  # trees have ``DraftTree.path_probs``
    layout: str = "tree"  # ``tree`` or ``batch`` (the drafter's trees then carry ``rows``)
    batch: int = 1  # most rows of the batch layout (the cache's batch size)
    overlap: bool = False  # call ``overlap`` while the target pass runs
    clock: bool = False  # drafts depend on measured step times, so no run repeats another
    verify_cost: bool = False  # cuts drafts by the verification cost of rows, see ``batch.budget``
    sampling: bool = True  # works at temperature > 0
    eager: bool = False  # its passes run eagerly, whatever the run's engine


HeadCache: TypeAlias = dict[Hashable, Any]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A drafter's inputs, given once, before the first case."""

    vocab_size: int  # ids are in ``[0, vocab_size)``
    eos_ids: frozenset[int]  # ids that end an output
    tokenizer_hash: str = ""  # tokenizer that tables and datastores must match
    max_len: int = 0  # committed tokens plus draft nodes never exceed this
    # resolved files by ``Artifact.name``
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    seed: int = 0  # the run's seed
    budget_shared: bool = False  # rows are chosen over the drafts of all sequences of a batch
    # How the target's logits become probabilities; a draft model draws from its own logits treated
    # the same way.
    sampling: Sampling = GREEDY
    target: TargetInfo | None = None  # public facts of the target; None under replay
    draft_model: DraftLM | None = None  # the second model, if ``needs.draft_model`` is set
    # Live, with a draft model: how many draft passes fit into a target pass, by a knob's name, rows
    # of the target's pass and rows of the draft's. Measured once per knob of a run, in ``setup``.
    latency_ratio: Callable[[str, int, int], int] | None = None
    # folders of trained heads, by name as in ``needs.heads``
    heads: Mapping[str, Path] = field(default_factory=dict)
    # heads loaded by drafters of this run, by the key of their weights
    head_cache: HeadCache = field(default_factory=dict)
