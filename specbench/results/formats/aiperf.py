"""AIPerf's engine-neutral acceptance record of a request. Free of torch.

The schema is ``SpecDecodeAcceptanceRecord`` of AIPerf 0.13 (ai-dynamo/aiperf,
``src/aiperf/common/models/spec_decode_models.py``; no code taken). Its models take further keys,
so ours says which turn it was and under which conditions in ``specbench``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specbench.storage import jsonl

_TOLERANCE = 1e-9

Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class AcceptanceRecord(BaseModel):
    """Acceptance of one request.

    Attributes:
        engine: what decoded.
        mean_acceptance_length: tokens of a step, bonus included.
        draft_acceptance_rate: accepted over drafted tokens; of a tree, all nodes are drafted.
        acceptance_histogram: steps by the draft tokens that they accepted, the bonus not counted.
        num_spec_steps: target passes after the prompt's, those with an empty draft included.
        num_spec_tokens: fixed limit of a draft; None where there is none.
        completion_tokens: new tokens, the prompt pass's included.
        per_step_accepted, per_step_drafted: in order, a number per step.
    """

    model_config = ConfigDict(extra="allow")

    engine: str
    mean_acceptance_length: Finite
    draft_acceptance_rate: Finite
    acceptance_histogram: dict[Count, Count]
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    num_spec_steps: Count
    num_spec_tokens: Count | None = None
    completion_tokens: Count | None = None
    per_step_accepted: list[Count] | None = None
    per_step_drafted: list[Count] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, accepted = self.num_spec_steps, self.num_accepted_draft_tokens
        if sum(self.acceptance_histogram.values()) != steps:
            raise ValueError("acceptance_histogram does not add up to num_spec_steps")
        if sum(j * n for j, n in self.acceptance_histogram.items()) != accepted:
            raise ValueError("acceptance_histogram does not give num_accepted_draft_tokens")
        if accepted > self.num_draft_tokens:
            raise ValueError("num_accepted_draft_tokens is above num_draft_tokens")
        each, drafted = self.per_step_accepted, self.per_step_drafted
        if each is not None and Counter(each) != Counter(self.acceptance_histogram):
            raise ValueError("per_step_accepted are not acceptance_histogram's")
        if drafted is not None and (len(drafted), sum(drafted)) != (steps, self.num_draft_tokens):
            raise ValueError("per_step_drafted do not add up to num_draft_tokens in all steps")
        # At least so many tokens: the shares of steps, added up, are the mean but for the bonus.
        shares = [
            sum(n for j, n in self.acceptance_histogram.items() if j > depth) / steps
            for depth in range(max(self.acceptance_histogram, default=0))
        ]
        if steps and abs(1 + sum(shares) - self.mean_acceptance_length) > _TOLERANCE * (1 + steps):
            raise ValueError("mean_acceptance_length is not 1 + the sum of its positions' shares")
        return self


def write(path: Path, records: Sequence[AcceptanceRecord]) -> None:
    """Write a line per request.

    Raises:
        specbench.storage.jsonl.DiskError: the disk is full or broken.
    """
    jsonl.rewrite_jsonl(path, (record.model_dump(mode="json") for record in records))


def read(path: Path) -> list[AcceptanceRecord]:
    """The records of a file of such lines.

    Raises:
        specbench.storage.jsonl.RecordError: a line is not such a record.
    """
    parse: Any = AcceptanceRecord.model_validate
    records, cut = jsonl.read_jsonl(path, parse)
    if cut:
        raise jsonl.RecordError(f"{path}: the last line is cut off.")
    return records
