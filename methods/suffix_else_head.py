"""Suffix decoding where it expects enough, else a trained head.

Source: ArcticInference's way of serving (snowflakedb/ArcticInference at 9d46438,
    ``arctic_inference/vllm/model_runner.py``), described in SuffixDecoding's documentation, arXiv
    2411.04975.
Method: suffix decoding drafts where the number of tokens that it expects to be accepted reaches
    the length of the head's chain, which Arctic's heads make 3; else the head drafts.
Where ours differs, and why:
    - Arctic runs its head at every step and throws the draft away where it takes the other. Ours
      runs the head only where its draft is taken; it reads the states of the steps between then.
    - Any two methods work here whose first scores its drafts; the default head is EAGLE-2's,
      where Arctic's is a chain of its LSTM speculator.
Example: suffix decoding expects 3.4 of its tokens to be accepted: they are drafted. If it expects
    1.2, EAGLE-2's tree is drafted.
Checked: nothing; it is from the text of that code, which runs inside vLLM on a GPU alone.
State kept: the parts' state, under our state scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specbench.config.schema import NotNegative
from specbench.decoding.composite import Composite
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import DecodeState, DraftTree, Needs, StepOutcome
from specbench.errors import ConfigurationError


@dataclass(kw_only=True, eq=False)
class SuffixElseHead(Composite):
    """Suffix decoding where it expects enough accepted tokens, else a trained head.

    Attributes:
        drafters: the method that scores its drafts, then the other one, by their names in a
            configuration, or drafters.
        min_score: tokens that the first must expect to be accepted.

    Raises:
        ConfigurationError: there are not two parts, or the first gives no score.
    """

    name: str = "suffix_else_head"
    paper_scope: Scope = "run"
    drafters: list[Any] = field(default_factory=lambda: ["suffix_decoding", "eagle2"])
    min_score: NotNegative = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        two = len(self.drafters) == 2
        self._require(two, "drafters", "two methods, the one that scores its drafts first")
        first = self.drafters[0]
        if isinstance(first, Drafter) and not hasattr(first, "score"):
            raise ConfigurationError(
                f"method={self.name} needs a first method that scores its drafts, and "
                f"{first.name} does not: type 'method.drafters=[suffix_decoding,eagle2]'."
            )

    @property
    def entries(self) -> list[Any]:
        return self.drafters

    @property
    def own_needs(self) -> Needs:
        return Needs(max_nodes=max(part.needs.max_nodes for part in self.parts))

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._last_draft: tuple[Drafter, DraftTree] | None = None

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        scored, other = self.drafters
        tree, taken = (yield from scored.drafting(state)), 0
        if len(tree) == 0 or scored.score < self.min_score:
            tree, taken = (yield from other.drafting(state)), 1
        self._last_draft = self.drafters[taken], tree
        return replace(tree, sources=np.full(len(tree), taken, dtype=np.int64))

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        for part in self.parts:
            seen = outcome
            if self._last_draft is not None and self._last_draft[0] is part:
                sources = self._last_draft[1].sources  # not ours, which name the parts
                verified = None if sources is None else sources[: len(outcome.tree)]
                seen = replace(outcome, tree=replace(outcome.tree, sources=verified))
            part.observe(state, seen)
        self._last_draft = None
