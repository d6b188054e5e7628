"""SAM-Decoding: drafts what follows the longest suffix of the text that occurred before.

Paper: "SAM Decoding: Speculative Decoding via Suffix Automaton", ACL 2025, arXiv 2411.10666.
Reference code studied: hyx1999/SAM-Decoding at 18c41f0 (``samd``, ``samd_sam_only``), which
    Spec-Bench has a copy of (``model/samd``).
Automata: a dynamic one of prompt and output, which stores where a substring first ended, and a
    static one of a corpus, which counts occurrences. For the bundled model the static one is made
    on first use from the English of installed documentation
    (``specbench.artifacts.documentation``), elsewhere by ``scripts/build_artifact.py`` from
    texts or from the target's own outputs.
Two modes, the reference's:
    alone           the longer match wins (the static one less ``len_bias``) and drafts
                    ``int(alpha × length)`` tokens: a copy of the text, or a tree of the corpus's
                    most probable continuations.
    with auxiliary  a match of ``len_threshold`` or more drafts a chain of full length, a copy of
                    the text or of the corpus; else the auxiliary drafter drafts. All learn from
                    every step.
A copy begins after the first occurrence and ends before the root.
Where ours differs, and why:
    - The reference's sizes count the root; ours do too, so ``max_predicts`` rows hold one
      draft node less. The first draft comes after the prompt's pass, as for every method here.
    - The dynamic match is the automaton's last suffix link, which is exact. The reference
      moves a cursor, whose state can go stale when a state is cloned under it.
    - If a chain's source is short, the reference pads with id 0 (``pad_token: 0``); ours drafts
      less.
    - Ties between equally frequent continuations go to the smaller id, between equally probable
      nodes to the one pushed first; the reference's order depends on its dictionaries and heap.
Example: ``alpha`` 1, ``automata: dynamic``; after "a b c d x a b" the longest suffix that occurred
    before, "a b", has two tokens: the draft is "c d".
State kept: the dynamic automaton of one turn (a later turn's prompt repeats the dialogue), at most
    124 bytes for each of ``max_tokens``; the auxiliary's state, under our state scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt

from methods.sam.automaton import SuffixAutomaton
from methods.sam.static_automaton import StaticAutomaton, follow, grow_best_first, text_after
from specbench.arrays import IntArray
from specbench.config.schema import Count, Positive
from specbench.decoding.composite import Composite
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    Artifact,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)

_DYNAMIC, _STATIC, _AUXILIARY = 0, 1, 2
_BIAS_WITH_AUXILIARY = 5


@dataclass(kw_only=True, eq=False)
class SuffixAutomatonDecoding(Composite):
    """SAM-Decoding: drafts what followed the longest suffix that occurred before.

    Attributes:
        automata: ``both``, ``dynamic`` or ``static``.
        max_predicts: rows of the target pass at most, the root included.
        alpha: alone: rows per token of the match (plus the root).
        top_k: alone: nodes of one depth of a static draft at most (K).
        len_bias: taken from the length of a static match, for its size as for the comparison;
            None is what Spec-Bench runs, 0 alone and 5 with an auxiliary.
        len_threshold: with an auxiliary: shortest match that drafts a chain.
        pad_token: with an auxiliary: id that fills short chains up; None leaves them short.
        static_automaton: file of the static automaton; None takes the one in the cache folder.
        max_tokens: text beyond so many tokens is forgotten, the older half at a time.
        auxiliary: another drafter, by its method's name; None drafts from the automata alone.
    """

    name: str = "sam"
    version: int = 2
    automata: Literal["both", "dynamic", "static"] = "both"
    max_predicts: Annotated[int, Ge(2)] = 40
    alpha: Annotated[float, Gt(0)] = 4.0
    top_k: Positive = 8
    len_bias: Count | None = None
    len_threshold: Positive = 5
    pad_token: Count | None = None
    static_automaton: str | None = None
    max_tokens: Annotated[int, Ge(2)] = 2**17
    auxiliary: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        default_bias = 0 if self.auxiliary is None else _BIAS_WITH_AUXILIARY
        self._bias = default_bias if self.len_bias is None else self.len_bias
        self._dynamic: SuffixAutomaton | None = None
        self._static: StaticAutomaton | None = None
        self._cursor = np.zeros(2, dtype=np.int64)  # in the static one: state, length of the match
        self._max_draft = self.max_predicts - 1
        self._auxiliary_tree: DraftTree | None = None

    @property
    def entries(self) -> list[Any]:
        return [] if self.auxiliary is None else [self.auxiliary]

    @property
    def own_needs(self) -> Needs:
        command = (
            "python scripts/build_artifact.py static_automaton --model MODEL --outputs RUN_FOLDER"
        )
        static = Artifact(
            name="static_automaton",
            builder="methods.sam.static_automaton:build",
            command=command,
            path=self.static_automaton,
        )
        files = () if self.automata == "dynamic" else (static,)
        widest = max((part.needs.max_nodes for part in self.parts), default=0)
        return Needs(artifacts=files, max_nodes=max(self._max_draft, widest))

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        if self.pad_token is not None:
            inside = self.pad_token < context.vocab_size
            self._require(inside, "pad_token", f"below {context.vocab_size}")
        if self.automata != "static":
            self._dynamic = SuffixAutomaton(self.max_tokens)
        if self.automata != "dynamic":
            path = context.artifacts["static_automaton"]
            self._static = StaticAutomaton.open(path, context.tokenizer_hash or None)
        self._compile()

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._auxiliary_tree = None
        if self._dynamic is not None:
            self._dynamic.clear()
        self._cursor[:] = 0
        self._read(state, 0)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        if self.auxiliary is not None:
            return (yield from self._with_auxiliary(state))
        length, after = self._dynamic_match(state, 0)
        matched = int(self._cursor[1]) - self._bias
        if self._dynamic is not None and length >= matched:
            n_draft = min(self._max_draft, int(self.alpha * length))
            return _with_source(DraftTree.chain(_copy(state, after, n_draft)), _DYNAMIC)
        n_draft = min(self._max_draft, int(self.alpha * matched))
        if self._static is None or n_draft <= 0:
            return DraftTree.empty()
        nodes = grow_best_first(self._static.arrays, self._cursor[0], n_draft, self.top_k)
        return _with_source(DraftTree(nodes[0], nodes[1]), _STATIC)

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if self._auxiliary_tree is not None:
            # The auxiliary gets its own tree's sources back, not ours.
            sources = self._auxiliary_tree.sources
            verified = None if sources is None else sources[: len(outcome.tree)]
            super().observe(state, replace(outcome, tree=replace(outcome.tree, sources=verified)))
            self._auxiliary_tree = None
        else:
            super().observe(state, outcome)
        self._read(state, state.length - len(outcome.committed))

    def _with_auxiliary(self, state: DecodeState) -> ModelWork[DraftTree]:
        # As much room as the reference needs: two tokens more than are copied.
        length, after = self._dynamic_match(state, self._max_draft + 2)
        matched = int(self._cursor[1]) - self._bias
        if max(length, matched) < self.len_threshold:
            self._auxiliary_tree = yield from self.auxiliary.drafting(state)
            return _with_source(self._auxiliary_tree, _AUXILIARY)
        if self._static is not None and (self._dynamic is None or length < matched):
            arrays, static_state = self._static.arrays, int(self._cursor[0])
            draft, source = text_after(arrays, static_state, self._max_draft), _STATIC
        else:
            draft, source = _copy(state, after, self._max_draft), _DYNAMIC
        if self.pad_token is not None and len(draft) < self._max_draft:
            short = self._max_draft - len(draft)
            draft = np.concatenate([draft, np.full(short, self.pad_token, dtype=np.int64)])
        return _with_source(DraftTree.chain(draft), source)

    def _read(self, state: DecodeState, begin: int) -> None:
        if self._dynamic is not None:
            self._dynamic.extend(state.buffer, begin, state.length)
        if self._static is not None:
            follow(self._static.arrays, self._cursor, state.buffer, begin, state.length)

    def _dynamic_match(self, state: DecodeState, room: int) -> tuple[int, int]:
        if self._dynamic is None:
            return 0, state.length
        return self._dynamic.repeated_suffix(state.length, room)

    def _compile(self) -> None:
        """Compile, or load what was compiled before, outside any clock."""
        text = np.zeros(8, dtype=np.int64)
        if self._dynamic is not None:
            self._dynamic.extend(text, 0, 8)
            self._dynamic.repeated_suffix(8)
            self._dynamic.clear()
        if self._static is not None:
            follow(self._static.arrays, self._cursor, text, 0, 8)
            grow_best_first(self._static.arrays, self._cursor[0], 1, 1)
            self._cursor[:] = 0


@dataclass(kw_only=True, eq=False)
class SamEagle2(SuffixAutomatonDecoding):
    """SAM-Decoding with EAGLE-2: copies what followed before, else drafts EAGLE-2's tree."""

    name: str = "sam_eagle2"
    version: int = 1
    automata: Literal["both", "dynamic", "static"] = "dynamic"
    auxiliary: Any = field(
        default_factory=lambda: {
            "method": "eagle2",
            "head": "eagle",
            "total": 63,
            "depth": 5,
            "top_k": 8,
            "vocabulary": None,
        }
    )


def _copy(state: DecodeState, begin: int, count: int) -> IntArray:
    """Copy ``[≤ count]`` tokens of the text from position ``begin`` on, before the root."""
    end = min(begin + count, state.length - 1)
    return state.buffer[begin:end].copy() if begin < end else NO_TOKENS


def _with_source(tree: DraftTree, source: int) -> DraftTree:
    return replace(tree, sources=np.full(len(tree), source, dtype=np.int64))
