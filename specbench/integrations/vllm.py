"""Our methods as vLLM's drafter: ``--speculative-config`` with ``method: custom_class``.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "specbench.integrations.vllm.pld", "num_speculative_tokens": 10}'

The last part names the method; its knobs are in ``--additional-config '{"specbench": {…}}'``.
vLLM gives a drafter the sampled ids of each row of its batch and the rows' token ids, but no
request ids. Rows move when others end, and a preempted request returns later in any row. So a row
belongs to the sequence whose tokens it continues; a row that continues none is a new sequence.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import hydra.utils
import numpy as np

from specbench.arrays import IntArray
from specbench.artifacts import resolve
from specbench.config.compose import compose, option_names
from specbench.config.entries import method_node
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.decoding.turn import StopRules
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.models.loading import tokenizer_hash

KNOBS = "specbench"  # key in vLLM's ``additional_config``
_INTERFACE = "vllm.v1.spec_decode.custom_class_proposer"
_FACTORY = "create_custom_proposer"  # earlier drafts of the interface had none
_VERSION = "0.32"  # the version that this was written from and tested with
_log = logging.getLogger(__name__)

# vLLM's configuration: its class cannot be imported where vLLM is not installed.
VllmConfig: TypeAlias = Any


class _Sequence:
    """One request's tokens, its drafter, and the last draft given to vLLM."""

    def __init__(self, drafter: Drafter, state: DecodeState) -> None:
        self.drafter, self.state = drafter, state
        self.tree, self.chain = DraftTree.empty(), np.empty(0, np.int64)

    def equals(self, ids: IntArray) -> bool:
        return self.state.length == len(ids) and np.array_equal(self.state.tokens, ids)

    def drafted(self) -> IntArray:
        return np.asarray(self.tree.tokens, dtype=np.int64)[self.chain]

    def observe(self, committed: IntArray, n_accepted: int, finished: bool) -> None:
        self.state.commit(committed)
        self.state.step += 1
        outcome = StepOutcome(
            tree=self.tree,
            path=self.chain[:n_accepted],
            committed=committed.astype(np.int64),
            next_tokens=None,  # vLLM gives none of rejected rows
            finished=finished,
        )
        self.drafter.observe(self.state, outcome)


class VllmDrafter:
    """vLLM's drafter interface around one of our methods.

    Args:
        config: vLLM's.
        method: its name, as in ``method=<name>``.

    Raises:
        NeedsNotMet: the method needs more than tokens, or this vLLM hands drafters something else.
        ConfigurationError: an unknown knob.
    """

    def __init__(self, config: VllmConfig, method: str) -> None:
        _check_vllm(config)
        knobs = (config.additional_config or {}).get(KNOBS, {})
        node = method_node(method, knobs)
        try:
            self._drafter: Drafter = hydra.utils.instantiate(node, _convert_="all")
        except hydra.errors.InstantiationException as error:
            if isinstance(error.__cause__, ConfigurationError):
                raise error.__cause__ from None
            raise
        _check_tokens_suffice(self._drafter)
        self._longest_draft = int(config.speculative_config.num_speculative_tokens)
        self._max_len = int(config.model_config.max_model_len)
        self._context = _context(self._drafter, config.model_config)
        # As many may wait, preempted or not scheduled, as can run; older ones are dropped.
        self._max_sequences = 2 * int(config.scheduler_config.max_num_seqs)
        self._rules = StopRules(self._context.eos_ids)
        self._sequences: dict[_Sequence, None] = {}  # an ordered set, the last one seen at its end
        self._rows: list[_Sequence | None] = []  # of the last call
        self._idle = [self._new_drafter()]  # compiles now instead of during a request
        self._warned = False

    def load_model(self, *_: object, **__: object) -> None:
        """Do nothing; vLLM calls it after its own model is loaded."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int] | IntArray,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft a chain for each row, empty if there is nothing to draft.

        Args:
            sampled_token_ids: tokens committed by each row's last pass; none while its prompt is
                still being read.
            num_tokens_no_spec: ``[rows]`` tokens of each row, these included.
            token_ids_cpu: ``[rows, longest]`` their ids; old drafts follow them.
            slot_mappings: unused.
        """
        ids = np.asarray(token_ids_cpu)
        drafts: list[list[int]] = []
        rows: list[_Sequence | None] = []
        taken: set[_Sequence] = set()
        for row, sampled in enumerate(sampled_token_ids):
            sequence = None
            if n := len(sampled):
                tokens = ids[row, : int(num_tokens_no_spec[row])]
                sequence = self._advance(self._find(row, tokens[:-n], taken), tokens, n)
            rows.append(sequence)
            taken.update([sequence] if sequence else [])
            drafts.append(self._draft(sequence) if sequence else [])
        self._rows = rows
        waiting = [sequence for sequence in self._sequences if sequence not in taken]
        n_dropped = len(self._sequences) - self._max_sequences
        for sequence in waiting[: max(n_dropped, 0)]:  # one that returns later is a new sequence
            self._end(sequence)
        return drafts

    def _find(self, row: int, ids: IntArray, taken: set[_Sequence]) -> _Sequence | None:
        """Find the sequence that a row continues: usually that row's at the last call."""
        last = [sequence for sequence in self._rows[row : row + 1] if sequence]
        for sequence in (*last, *reversed(self._sequences)):
            if sequence in self._sequences and sequence not in taken and sequence.equals(ids):
                return sequence
        return None

    def _advance(
        self, sequence: _Sequence | None, tokens: IntArray, n_sampled: int
    ) -> _Sequence | None:
        """Show a drafter the last tokens of a sequence; None if it ended."""
        sampled = tokens[-n_sampled:]
        committed = self._rules.cut(sampled)
        finished = int(committed[-1]) in self._context.eos_ids
        n_accepted = n_sampled - 1
        if sequence and np.array_equal(sequence.drafted()[:n_accepted], sampled[:-1]):
            del self._sequences[sequence]
            sequence.observe(committed, n_accepted, finished)
        else:
            if sequence:  # vLLM verified something other than the draft
                self._end(sequence)
            sequence = self._begin(tokens[: len(tokens) - n_sampled + len(committed)])
        self._sequences[sequence] = None
        if finished or sequence.state.remaining < 2:
            self._end(sequence)
            return None
        return sequence

    def _begin(self, tokens: IntArray) -> _Sequence:
        state = DecodeState(tokens[:-1].astype(np.int64), self._max_len - len(tokens) + 1)
        drafter = self._idle.pop() if self._idle else self._new_drafter()
        if drafter.starts_empty(0):
            drafter.reset()
        state.commit(tokens[-1:])
        drafter.begin(state)
        return _Sequence(drafter, state)

    def _draft(self, sequence: _Sequence) -> list[int]:
        sequence.tree = sequence.drafter.propose(sequence.state)
        chain = best_chain(sequence.tree)
        if len(chain) < len(sequence.tree) and not self._warned:
            self._warned = True
            _log.warning(
                "method=%s drafts trees, and vLLM verifies chains: each tree's best chain is "
                "taken. Its numbers here are not the tree's.",
                sequence.drafter.name,
            )
        sequence.chain = chain[: min(self._longest_draft, sequence.state.remaining - 1)]
        draft: list[int] = sequence.drafted().tolist()
        return draft

    def _end(self, sequence: _Sequence) -> None:
        del self._sequences[sequence]
        sequence.drafter.end(sequence.state)
        self._idle.append(sequence.drafter)

    def _new_drafter(self) -> Drafter:
        drafter = copy.deepcopy(self._drafter)  # before setup a drafter holds only its knobs
        drafter.setup(self._context)
        return drafter


def best_chain(tree: DraftTree) -> IntArray:
    """Choose ``[k]`` nodes of a tree as the chain to verify where only chains are possible.

    With ``path_probs`` it is the path with most expected tokens, otherwise every node's first
    child.
    """
    n = len(tree)
    probs = tree.path_probs
    worth = np.ones(n) if probs is None else np.asarray(probs, np.float64).copy()
    child = np.full(n + 1, -1, dtype=np.int64)  # by row; row 0 is the root
    for node in reversed(range(n)):
        if tree.aux is not None and tree.aux[node]:
            continue
        worth[node] += worth[child[node + 1]] if child[node + 1] >= 0 else 0.0
        before = child[tree.parents[node] + 1]
        # On ties the first, which is visited last.
        if before < 0 or probs is None or worth[node] >= worth[before]:
            child[tree.parents[node] + 1] = node
    path, node = [], child[0]
    while node >= 0:
        path.append(node)
        node = child[node + 1]
    return np.array(path, dtype=np.int64)


def _check_tokens_suffice(drafter: Drafter) -> None:
    needs = drafter.needs
    if not needs.tokens_only or needs.clock or needs.overlap:
        raise NeedsNotMet(
            f"method={drafter.name} needs more than tokens (logits, hidden states, a draft model "
            "or the target's choices), and vLLM shows a custom_class drafter tokens alone. Name a "
            "method that drafts from tokens: specbench.integrations.vllm.pld or .suffix_decoding."
        )
    if drafter.state_scope == "run":
        raise NeedsNotMet(
            f"method={drafter.name} learns from text to text (state_scope=run), and in vLLM "
            "several are decoded at once, each with a drafter of its own. Put state_scope: prompt "
            f"into additional_config's {KNOBS!r}."
        )


def _check_vllm(config: VllmConfig) -> None:
    try:
        has_factory = hasattr(importlib.import_module(_INTERFACE), _FACTORY)
    except ImportError:
        has_factory = False
    if not has_factory:
        raise NeedsNotMet(
            f"vLLM {importlib.import_module('vllm').__version__} has no {_INTERFACE}.{_FACTORY}: "
            f"it calls drafters in another way. Install vLLM {_VERSION} or later."
        )
    if getattr(config, "use_v2_model_runner", False):
        raise NeedsNotMet(
            "vLLM's Model Runner V2 takes no custom_class drafter. Start vLLM with "
            "VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if config.scheduler_config.async_scheduling:
        raise NeedsNotMet(
            "vLLM schedules asynchronously and would show the drafter no tokens. Start vLLM with "
            "--no-async-scheduling."
        )


def _context(drafter: Drafter, model: Any) -> DraftContext:
    eos = (model.try_get_generation_config() or {}).get("eos_token_id")
    eos = model.hf_config.eos_token_id if eos is None else eos
    artifacts, sha, files = drafter.needs.artifacts, "", dict[str, Path]()
    if artifacts:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
        sha, cache = tokenizer_hash(tokenizer), compose().cache_dir
        files = resolve.resolve(
            artifacts, tokenizer=tokenizer, bundled=False, cache_dir=cache, model_key=""
        )
    return DraftContext(
        vocab_size=int(model.get_vocab_size()),
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        tokenizer_hash=sha,
        max_len=int(model.max_model_len),
        artifacts=files,
    )


def __getattr__(name: str) -> Any:
    """Give the class that vLLM imports by a method's name, ``specbench.integrations.vllm.pld``."""
    if name.startswith("_") or name not in option_names("method"):
        raise AttributeError(
            f"{name!r} is no method. {__name__} has {', '.join(option_names('method'))}"
        )

    def __init__(self: VllmDrafter, config: VllmConfig) -> None:
        VllmDrafter.__init__(self, config, name)

    return type(name, (VllmDrafter,), {"__init__": __init__})
