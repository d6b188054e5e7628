"""Lines of a run's files as typed values, checked where they are read. Free of torch.

The checks catch lines that were edited by hand, or damaged when files were joined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator, with_config
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

_MOST = 2**31 - 1  # ids and counts are kept as 32-bit numbers
_HUGE = 1e18

Count = Annotated[int, Field(ge=0, le=_MOST)]
Seed = Annotated[int, Field(ge=0)]  # of 56 bits
Number = Annotated[float, Field(gt=-_HUGE, lt=_HUGE, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, lt=_HUGE, allow_inf_nan=False)]
Ids = list[Count]
OutputIds = list[Annotated[int, Field(ge=-1, le=_MOST)]]  # -1: an imported id
Committed = list[Annotated[int, Field(ge=1, le=_MOST)]]  # tokens by step

STRICT = ConfigDict(strict=True, protected_namespaces=())  # no text for a number, no 1 for true


class Line(BaseModel):
    """A JSON object of a run's files. Keys that a class does not list are ignored."""

    model_config = STRICT | ConfigDict(frozen=True, populate_by_name=True, serialize_by_alias=True)

    @classmethod
    def from_json(cls, line: Mapping[str, object]) -> Self:
        """Make the value of a file's JSON object.

        Raises:
            ValueError: names the field (`specbench.errors.field_error`).
        """
        return cls.model_validate(line)

    def to_json(self) -> JsonObject:
        """Make a plain dict for the file."""
        return self.model_dump(warnings=False)

    def replace(self, **changes: Any) -> Self:
        """Return the same with other values, which are taken as they are."""
        return self.model_copy(update=changes)


class TurnKey(Line):
    """The key of a turn in its run."""

    label: str
    case_id: str
    turn: Count
    repeat: Count

    @property
    def key(self) -> tuple[int, str, int, str]:
        return (self.repeat, self.case_id, self.turn, self.label)

    @property
    def turn_id(self) -> JsonObject:
        """The key as the lines of other files spell it."""
        return {name: getattr(self, name) for name in TurnKey.model_fields}


@with_config(STRICT | ConfigDict(extra="allow"))
class ErrorLine(TypedDict):
    """A line of ``errors.jsonl``: the turn, and what failed."""

    label: str
    case_id: str
    turn: Count
    repeat: Count
    during: str
    type: str
    message: str
    traceback: NotRequired[str]
    at: NotRequired[str]


@with_config(STRICT | ConfigDict(extra="allow"))
class AnswerLine(TypedDict):
    """A line of ``dialogue.jsonl``: the plain greedy output of a prompt."""

    case_id: str
    turn: Count
    prompt_sha: str
    output_ids: Ids


error_line: Callable[[object], ErrorLine] = TypeAdapter(ErrorLine).validate_python
answer_line: Callable[[object], AnswerLine] = TypeAdapter(AnswerLine).validate_python


class Batched(Line):
    """The static batch that a turn was decoded in (``batch.size`` above 1).

    Its times are the group's until it ended, so the longest of them is the group's own.
    """

    size: Count
    at_once: Count
    """Sequences of the group that were decoded in this turn."""

    group: Count
    """Number of the group, which has the same cases in every repeat."""

    place: Count
    full_s: Seconds
    """Seconds of the steps in which all sequences ran."""

    model_s: Seconds | None = None
    """Seconds of passes of heads and draft models in the group's steps; None: not counted."""

    model_passes: Count | None = None
    pass_s: Seconds | None = None
    """Seconds of the target's passes in the group's steps; None where a device ran them."""


# -- traces of steps: steps.jsonl while it grows, steps.parquet in the end -------------------------

_BY_STEP = ("drafted", "depth", "committed", "sources", "step_s")


class StepTrace(TurnKey):
    """The steps of one turn of one label; every list has one entry per step."""

    drafted: Ids
    """Draft nodes, auxiliary ones not counted."""

    depth: Ids
    committed: Committed
    """Tokens committed, bonus included."""

    sources: list[list[Annotated[int, Field(ge=-_MOST, le=_MOST)]] | None] | None = None
    """For each step the source id of each accepted node, or None."""

    step_s: list[Seconds] | None = None
    """Seconds; None where the clock does not give them."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        n = len(self.committed)
        for name in _BY_STEP:
            if len(getattr(self, name) or self.committed) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} steps")
        return self


def write_steps(path: Path, traces: Iterable[StepTrace]) -> None:
    """Write traces as parquet, one row per step."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        **dict.fromkeys(("label", "case_id"), pa.string()),
        **dict.fromkeys(("turn", "repeat", "step", "drafted", "depth", "committed"), pa.int32()),
        "sources": pa.list_(pa.int32()),
        "step_s": pa.float64(),
    }
    rows = [
        {
            **trace.turn_id,
            "step": step,
            **{name: (values := getattr(trace, name)) and values[step] for name in _BY_STEP},
        }
        for trace in traces
        for step in range(len(trace.committed))
    ]
    temporary = path.with_name(path.name + ".tmp")
    with jsonl.reporting(path):
        pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(types)), temporary)
        os.replace(temporary, path)


def read_steps(path: Path) -> list[StepTrace]:
    """Read the traces that `write_steps` wrote; turns without a step are not in them.

    Raises:
        specbench.storage.jsonl.RecordError: the file is not such a table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    turn = (*TurnKey.model_fields,)
    traces: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    try:
        for row in pq.read_table(path).to_pylist():
            steps = {name: row[name] for name in _BY_STEP}
            traces.setdefault(tuple(row[name] for name in turn), []).append(steps)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise jsonl.RecordError(f"{path} cannot be read: {error}.") from error
    read = []
    for key, rows in traces.items():
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in _BY_STEP}
        columns |= {name: None for name in _BY_STEP if rows[0][name] is None}
        read.append(StepTrace(**dict(zip(turn, key, strict=True)), **columns))
    return read
