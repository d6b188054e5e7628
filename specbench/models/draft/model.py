"""A second, smaller model that drafts: its own cache, fed with text and with trees that grow.

A step of a method that has one::

    logits = model.catch_up(state.tokens)     # feeds what was committed since, one or two tokens
    logits = model.extend(tokens, parents)    # nodes of a tree, layer by layer, or one by one
    ...
    model.commit_path(fed nodes on the accepted path)

Rows of accepted nodes stay in the cache, so nothing is ever computed twice. Ids are the target's
everywhere outside this class: a draft with another padding of the same vocabulary, with a reduced
one or one of its own, is translated here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import IntArray
from specbench.decoding.device import seconds, to_device
from specbench.decoding.protocols import Ids, ModelCall, ModelWork, run_to_completion
from specbench.decoding.sampling import sample
from specbench.decoding.structs import NO_TOKENS, DraftTree
from specbench.decoding.tree import visibility
from specbench.errors import ConfigurationError
from specbench.models.batch_target import NewRows, read_rows
from specbench.models.draft.vocabulary import SharedVocabulary
from specbench.models.graph_target import GraphTarget
from specbench.models.scores import Scores
from specbench.models.target import Target

_TIMED_TEXT = np.zeros(64, dtype=np.int64)  # what both models have read while passes are timed
_TIMED_PASSES = 5
_DRAWS = 0xD12AF7  # keeps a draft's random numbers apart from a verifier's of the same seed


class DraftModel:
    """A small causal LM that drafts, see ``DraftLM``; wraps a ``Target`` of its own.

    Args:
        target_vocab: logits of a row of the model that verifies.
        id_map: ``[draft vocab]`` the target's id of each of the draft's, -1 for the row that
            stands for every other id; None where ids agree.
        shared: of a draft with a vocabulary of its own, instead of ``id_map``.
        max_nodes: nodes of a tree that are held at once.
        context_length: tokens that the draft can read; None where nothing limits them.
        devices_asked: of the configuration, for both models together.
        devices: that both models are on.
    """

    def __init__(
        self,
        target: Target,
        *,
        target_vocab: int,
        id_map: IntArray | None = None,
        shared: SharedVocabulary | None = None,
        max_nodes: int = 128,
        context_length: int | None = None,
        devices_asked: int = 1,
        devices: int = 1,
    ) -> None:
        self.target = target
        self.network: PreTrainedModel = target.model
        self.n_parameters = target.n_parameters
        self.device = target.device
        self.target_vocab = target_vocab
        self.context_length = context_length
        self.devices_asked, self.devices = devices_asked, devices
        # Not counted is the pass over the prompt, as the target's is not among its passes.
        self.forwards = self.tokens = 0
        self._ids: torch.Tensor | None = None  # [vocab_size] draft id -> target id
        self._never: torch.Tensor | None = None  # draft ids that are read but never proposed
        self._never_ids: frozenset[int] = frozenset()  # the same
        self.shared = shared
        self._extra = 0  # draft ids of the text beyond the target's
        # Each token committed after a text may become several draft ids: root and bonus.
        self._spare = 0 if shared is None else 2 * (int(np.diff(shared.begins).max()) - 1)
        if shared is not None:
            id_map = shared.ids
        # Ids it can propose from, in its own numbering.
        self.vocab_size = min(target.vocab_size, target_vocab) if id_map is None else len(id_map)
        draft_ids: IntArray | None = None  # [target_vocab] target id -> draft id
        if id_map is not None:
            draft_ids = self._map_ids(id_map)
        elif self.vocab_size < target_vocab:
            draft_ids = np.arange(target_vocab)
            draft_ids[self.vocab_size :] = 0
        self._host_draft_ids = draft_ids
        self._draft_ids = None if draft_ids is None else torch.from_numpy(draft_ids).to(self.device)
        self._generator = torch.Generator(self.device)
        self._last: Scores | None = None  # of the row after the committed text, if computed
        self._choices: IntArray | None = None  # of the rows handed out last, where their pass tells
        self._count = 0  # nodes held
        self._chain = True  # each held node is the child of the one before
        self._max_nodes = 0
        self._reserve_nodes(max_nodes)

    def _map_ids(self, id_map: IntArray) -> IntArray:
        """Map each of the target's ids to the draft's, ``[target_vocab]``."""
        in_target = id_map >= 0
        never = np.flatnonzero(~in_target)
        repeated = len(np.unique(id_map[in_target])) != in_target.sum()
        fits = len(id_map) <= self.target.vocab_size and id_map.max(initial=-1) < self.target_vocab
        if not fits or repeated or not in_target.any() or (self.shared is None and len(never) > 1):
            raise ConfigurationError(
                f"id_map must be at most {self.target.vocab_size} ids, each once, below the "
                f"target's {self.target_vocab}, got {len(id_map)} with {len(never)} times -1: it "
                "belongs to another model."
            )
        if len(never):
            self._never = torch.from_numpy(never).to(self.device)
            self._never_ids = frozenset(never.tolist())
            self._in_target = torch.from_numpy(np.flatnonzero(in_target)).to(self.device)
        draft_ids = np.full(self.target_vocab, never[0] if len(never) else 0, dtype=np.int64)
        draft_ids[id_map[in_target]] = np.flatnonzero(in_target)
        self._ids = torch.from_numpy(np.where(in_target, id_map, 0)).to(self.device)
        return draft_ids

    def clone(self) -> DraftModel:
        """Copy the draft for another sequence; the two share weights and no cache."""
        other = copy.copy(self)
        other.target = self.target.clone()
        other._generator = torch.Generator(self.device)
        other._visible, other._depths = self._visible.clone(), self._depths.clone()
        return other

    def report(self) -> dict[str, int]:
        return {
            "draft_forwards": self.forwards,
            "draft_tokens": self.tokens,
            "devices": self.devices,
            "devices_asked": self.devices_asked,
        }

    def reserve(self, max_len: int, max_nodes: int | None = None) -> None:
        """Allocate for texts of ``max_len`` tokens and trees of ``max_nodes`` nodes; untimed.

        What the cache holds is lost where it must grow, so call it between turns.
        """
        self._reserve_nodes(self._max_nodes if max_nodes is None else max_nodes)
        if self.shared is not None:
            max_len += max_len // 2  # some tokens are read as several
        self.target.reserve(max_len + self._max_nodes, self._max_nodes)

    def _reserve_nodes(self, max_nodes: int) -> None:
        if max_nodes > self._max_nodes:
            self._max_nodes = max_nodes
            # Row i + 1 belongs to node i; row 0 to "no node", which sees none.
            self._visible = torch.zeros(
                max_nodes + 1, max_nodes, dtype=torch.bool, device=self.device
            )
            self._depths = torch.zeros(max_nodes + 1, dtype=torch.int64, device=self.device)
            self._depths[0] = -1
            self._numbers = torch.arange(max_nodes, device=self.device)

    # -- a turn ----------------------------------------------------------------------------------

    def begin(self, tokens: IntArray, seed: int = 0) -> None:
        self.forwards = self.tokens = 0
        own_seed = int(np.random.SeedSequence([seed, _DRAWS]).generate_state(1, np.uint64)[0] >> 1)
        self._generator.manual_seed(own_seed)
        self.target.cache.reset()
        self._count, self._chain, self._last = 0, True, None
        text = self._read(tokens)
        if self.free_rows(len(tokens)) >= 0:
            self._last = _last_row(self.target.prefill(text))

    def _read(self, tokens: IntArray) -> IntArray:
        """Translate a text to the draft's ids; a token may become several of them."""
        text = self._host_ids(tokens) if self.shared is None else self.shared.expand(tokens)
        self._extra = len(text) - len(tokens)
        return text

    def free_rows(self, length: int) -> int:
        rows = self.target.cache.max_len - self._max_nodes
        return min(rows, self.context_length or rows) - length - self._extra - self._spare

    def catch_up(self, tokens: IntArray, *, draft_vocab: bool = False) -> torch.Tensor:
        return run_to_completion(self.catching_up(tokens, draft_vocab=draft_vocab))

    def catching_up(
        self, tokens: IntArray, *, draft_vocab: bool = False
    ) -> ModelWork[torch.Tensor]:
        self.drop_nodes()
        # It holds a prefix of the text: `commit_path` commits none but accepted nodes.
        cache = self.target.cache
        text = tokens if self.shared is None else self._read(tokens)
        if cache.length > len(text):
            cache.truncate(len(text))
            self._last = None
        if cache.length == len(text) and self._last is None:
            cache.truncate(len(text) - 1)
        if cache.length < len(text):
            unread = text[cache.length :]  # alone: a step's work must not grow with the text
            new = to_device(self._host_ids(unread) if self.shared is None else unread, self.device)
            self.forwards += 1
            self.tokens += len(new)
            self._last = _last_row((yield self._call(NewRows(self.target, new))))
        assert self._last is not None
        return self._outgoing(self._last, draft_vocab)[0]

    def expect_chain(self, count: int) -> None:
        if isinstance(self.target, GraphTarget) and self.shared is None:
            ids = torch.arange(self.vocab_size, self.target.vocab_size, device=self.device)
            never = ids if self._never is None else torch.cat([ids, self._never])
            self.target.expect_chain(count, never)

    def likeliest_chain(self, tokens: IntArray, count: int) -> torch.Tensor | None:
        self.drop_nodes()
        unread = tokens[self.target.cache.length :]
        if self.shared is not None or not len(unread) or not isinstance(self.target, GraphTarget):
            return None
        ids = self.target.chain(self._host_ids(unread), count)
        if ids is None:
            return None
        self._last, self._count = None, count - 1
        self.forwards += count
        self.tokens += len(unread) + count - 1
        return self.to_target_ids(ids)

    def extend(self, tokens: Ids, parents: Ids, *, draft_vocab: bool = False) -> torch.Tensor:
        return run_to_completion(self.extending(tokens, parents, draft_vocab=draft_vocab))

    def extending(
        self, tokens: Ids, parents: Ids, *, draft_vocab: bool = False
    ) -> ModelWork[torch.Tensor]:
        n, first = len(parents), self._count
        end = first + n
        if end > self._max_nodes:
            raise ValueError(
                f"{end} draft nodes exceed the {self._max_nodes} reserved; state the method's "
                "largest number in needs.draft_nodes"
            )
        if isinstance(tokens, np.ndarray):
            ids = to_device(self._host_ids(tokens), self.device)
        else:
            ids = tokens if self._draft_ids is None else self._draft_ids[tokens]
        branch = False
        if isinstance(parents, np.ndarray):
            if (parents >= np.arange(first, end)).any():
                raise ValueError("a draft node's parent does not come before it")
            branch = self._chain and bool((parents == np.arange(first - 1, end - 1)).all())
        if branch:
            # It needs no mask, and its geometry is written down only if it forks later.
            visible, depths = None, self._numbers[:end]
        else:
            visible, depths = self._grow(parents, first, end)
        self._count = end
        self.forwards += 1
        self.tokens += n
        scores = yield self._call(NewRows(self.target, ids, visible, depths))
        return self._outgoing(scores, draft_vocab)

    def _call(self, rows: NewRows) -> ModelCall:
        return ModelCall(id(self.network), rows, read_rows)

    def _grow(
        self, parents: IntArray | torch.Tensor, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute which nodes the new ones see ``[n, end]``, and all depths ``[end]``."""
        if self._chain:
            self._visible[1 : first + 1] = self._numbers[None, :] <= self._numbers[:first, None]
            self._depths[1 : first + 1] = self._numbers[:first]
            self._chain = False
        inside = isinstance(parents, np.ndarray) and bool((parents >= first).any())
        above = to_device(parents, self.device)
        if not inside:
            seen = self._visible[above + 1]
            depth = self._depths[above + 1] + 1
        else:
            # Parents within this call: what the topmost of a node's new ancestors hangs below.
            new_visible, new_depth = visibility(torch.where(above >= first, above - first, -1))
            outside = torch.where(above >= first, -1, above)
            new_visible = new_visible[1:, 1:]
            seen = (new_visible.float() @ self._visible[outside + 1].float()) > 0
            seen[:, first:end] |= new_visible
            hung = torch.where(above >= first, 0, self._depths[outside + 1])
            depth = new_depth[1:] + (new_visible.long() * hung).sum(1)
        rows = self._numbers[: end - first]
        seen[rows, rows + first] = seen.new_ones(())  # as in `visibility`
        self._visible[first + 1 : end + 1] = seen
        self._depths[first + 1 : end + 1] = depth
        return seen[:, :end], self._depths[1 : end + 1]

    def commit_path(self, path: IntArray, survivors: IntArray | None = None) -> None:
        surviving = NO_TOKENS if survivors is None else survivors
        held = len(surviving)
        if len(path):
            self._last = None
        if not held and (not len(path) or int(path[-1]) == len(path) - 1):
            self.target.cache.commit(None, len(path))
        else:
            rows = to_device(np.concatenate([path, surviving]), self.device)
            self.target.cache.commit(rows, len(path), held)
        self._count = held
        if not held:
            self._chain = True
        elif not self._chain:
            below = to_device(surviving, self.device)
            seen = self._visible[below + 1]
            self._visible[1 : held + 1] = False
            self._visible[1 : held + 1, :held] = seen[:, below]
            self._depths[1 : held + 1] = self._depths[below + 1] - len(path)
        elif (surviving != np.arange(len(path), len(path) + held)).any():
            raise ValueError("survivors of a single branch follow the path without a gap")

    def drop_nodes(self) -> None:
        self.target.cache.retained = 0
        self._count, self._chain = 0, True

    # -- ids and random numbers ------------------------------------------------------------------

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        numbers = torch.rand(
            len(probs), dtype=torch.float64, device=self.device, generator=self._generator
        )
        return sample(probs, 1.0 - numbers)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self._ids is None else self._ids[ids]

    def to_target_vocab(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        if self._ids is not None:
            out = values.new_full((*values.shape[:-1], self.target_vocab), fill)
            if self._never is None:
                return out.index_copy_(-1, self._ids, values)
            return out.index_copy_(-1, self._ids[self._in_target], values[..., self._in_target])
        missing = self.target_vocab - self.vocab_size
        return torch.nn.functional.pad(values, (0, missing), value=fill) if missing else values

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose ``[n]`` ids of largest logits, of the rows ``[n, draft vocab]`` returned last."""
        choices = self._choices
        if (
            choices is None
            or len(choices) != len(logits)
            or choices.min() < 0
            or not self._never_ids.isdisjoint(choices.tolist())
        ):
            return logits.argmax(-1)
        return torch.from_numpy(choices)

    @torch.inference_mode()
    def _outgoing(self, scores: Scores, draft_vocab: bool) -> torch.Tensor:
        logits = scores.logits[..., : self.vocab_size]
        all_ids = self.vocab_size == self.target.vocab_size
        self._choices = scores.choices if all_ids else None
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        if self._never is not None:
            logits.index_fill_(-1, self._never, -torch.inf)  # this draft alone reads these logits
        return logits if draft_vocab else self.to_target_vocab(logits, -torch.inf)

    def _host_ids(self, tokens: IntArray) -> IntArray:
        if self._host_draft_ids is not None:
            tokens = self._host_draft_ids[tokens]
        return np.ascontiguousarray(tokens, dtype=np.int64)


def _last_row(scores: Scores) -> Scores:
    choices = scores.choices
    return Scores(scores.logits[-1:], choices=None if choices is None else choices[-1:])


# -- how long its passes take ----------------------------------------------------------------------


def latency_ratio(
    target: Target,
    draft: DraftModel,
    measured: dict[str, int],
    knob: str,
    target_rows: int,
    draft_rows: int,
) -> int:
    """Count the draft passes that fit into one target pass: CARD's r, PEARL's gamma.

    ``measured`` holds what an earlier start of the run found for ``knob``, or gets what is measured
    now: ``ceil(t_target / t_draft)``, at least 1, of passes with so many rows. That empties both
    caches. The root is one of ``target_rows``; they are fewer where the target has no room.
    """
    if knob in measured:
        return measured[knob]
    # In a union the tree that all parts share may be smaller than a part's own.
    chain = DraftTree.chain(np.zeros(min(target_rows - 1, target.max_nodes), dtype=np.int64))
    nodes, parents = np.zeros(draft_rows, dtype=np.int64), np.full(draft_rows, -1)

    def draft_pass() -> None:
        draft.extend(nodes, parents, draft_vocab=True)  # as the methods that ask call it
        draft.drop_nodes()

    def median_seconds(run: Callable[[], object], device: torch.device) -> float:
        """Time passes, after one that warms up."""
        return median([seconds(run, device) for _ in range(1 + _TIMED_PASSES)][1:])

    target.prefill(_TIMED_TEXT)
    target_s = median_seconds(lambda: target.forward(0, chain), target.device)
    target.cache.reset()
    draft.begin(_TIMED_TEXT)
    draft_s = median_seconds(draft_pass, draft.device)
    draft.begin(_TIMED_TEXT[:1])
    measured[knob] = max(math.ceil(target_s / draft_s), 1)
    return measured[knob]
