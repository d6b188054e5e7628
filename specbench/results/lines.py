"""What the fields of a run's files must be before a number is made of them. Free of torch.

Whoever edits a line by hand, or joins files, can make one that says something else than what was
measured. The types below are checked where a line is read (`specbench.storage.jsonl.read_jsonl`),
not where the program makes one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

_MOST = 2**31 - 1  # ids and counts are kept as 32-bit numbers
_HUGE = 1e18

Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, le=_MOST)]
Seed = Annotated[int, Strict(), Field(ge=0)]  # of 56 bits
Number = Annotated[float, Strict(), Field(gt=-_HUGE, lt=_HUGE, allow_inf_nan=False)]
Seconds = Annotated[float, Strict(), Field(ge=0, lt=_HUGE, allow_inf_nan=False)]
Ids = list[Count]
OutputIds = list[Annotated[int, Strict(), Field(ge=-1, le=_MOST)]]  # -1: an imported id
Committed = list[Annotated[int, Strict(), Field(ge=1, le=_MOST)]]  # tokens by step
Sources = list[Annotated[int, Strict(), Field(ge=-_MOST, le=_MOST)]]


def one_of(names: Collection[str]) -> AfterValidator:
    """The check of a text that is one of a few."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return name

    return AfterValidator(check)


@with_config(ConfigDict(extra="allow"))
class TurnLine(TypedDict):
    """The turn that a line of a side file is about; such a line may say more."""

    label: Text
    case_id: Text
    turn: Count
    repeat: Count


@with_config(ConfigDict(extra="allow"))
class ErrorLine(TurnLine):
    """A line of ``errors.jsonl``."""

    during: Text
    type: Text
    message: Text
    traceback: NotRequired[Text]
    at: NotRequired[Text]


@with_config(ConfigDict(extra="allow"))
class AnswerLine(TypedDict):
    """A line of ``dialogue.jsonl``: the plain greedy output of a prompt."""

    case_id: Text
    turn: Count
    prompt_sha: Text
    output_ids: Ids


turn_line: Callable[[object], TurnLine] = TypeAdapter(TurnLine).validate_python
error_line: Callable[[object], ErrorLine] = TypeAdapter(ErrorLine).validate_python
answer_line: Callable[[object], AnswerLine] = TypeAdapter(AnswerLine).validate_python


# -- traces of steps: steps.jsonl while it grows, steps.parquet in the end -------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The steps of one turn of one label; every list has one entry per step.

    Attributes:
        drafted: draft nodes (auxiliary ones not counted); ``depth``: of the deepest one.
        committed: tokens committed, bonus included.
        sources: for each step the source id of each accepted node, or None.
        step_s: seconds per step, None where the clock does not give them.
    """

    label: Text
    case_id: Text
    turn: Count
    repeat: Count
    drafted: Ids
    depth: Ids
    committed: Committed
    sources: list[Sources | None] | None = None
    step_s: list[Seconds] | None = None

    @staticmethod
    def from_json(line: object) -> StepTrace:
        """The trace of a line of ``steps.jsonl``.

        Raises:
            ValueError: names the field.
        """
        trace = _parse_trace(line)
        n = len(trace.committed)
        for name in ("drafted", "depth", "sources", "step_s"):
            values = getattr(trace, name)
            if values is not None and len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries for {n} steps")
        return trace

    @property
    def key(self) -> tuple[int, str, int, str]:
        return (self.repeat, self.case_id, self.turn, self.label)

    def to_json(self) -> JsonObject:
        return asdict(self)


_parse_trace: Callable[[object], StepTrace] = TypeAdapter(StepTrace).validate_python


def write_steps(path: Path, traces: Iterable[StepTrace]) -> None:
    """Write traces as parquet, one row per step."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            *((name, pa.string()) for name in ("label", "case_id")),
            *((name, pa.int32()) for name in ("turn", "repeat", "step")),
            *((name, pa.int32()) for name in ("drafted", "depth", "committed")),
            ("sources", pa.list_(pa.int32())),
            ("step_s", pa.float64()),
        ]
    )
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for trace in traces:
        n = len(trace.committed)
        for name in ("label", "case_id", "turn", "repeat"):
            columns[name].extend([getattr(trace, name)] * n)
        columns["step"].extend(range(n))
        for name in ("drafted", "depth", "committed", "sources", "step_s"):
            columns[name].extend(getattr(trace, name) or [None] * n)
    temporary = path.with_name(path.name + ".tmp")
    with jsonl.reporting(path):
        pq.write_table(pa.table(columns, schema=schema), temporary)
        os.replace(temporary, path)


def read_steps(path: Path) -> list[StepTrace]:
    """The traces that `write_steps` wrote; turns without a step are not in them.

    Raises:
        specbench.storage.jsonl.RecordError: the file is not such a table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    turn = ("label", "case_id", "turn", "repeat")
    traces: dict[tuple[Any, ...], dict[str, Any]] = {}
    try:
        for row in pq.read_table(path).to_pylist():
            trace = traces.setdefault(tuple(row[name] for name in turn), {})
            for name in ("drafted", "depth", "committed", "sources", "step_s"):
                trace.setdefault(name, []).append(row[name])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise jsonl.RecordError(f"{path} cannot be read: {error}.") from error
    for columns in traces.values():
        for name in ("sources", "step_s"):
            if columns[name][0] is None:
                del columns[name]
    return [StepTrace(**dict(zip(turn, key, strict=True)), **c) for key, c in traces.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """Of a turn that was decoded in lock-step with others (``batch.size`` above 1).

    Its times are the group's until it ended, so the longest of them is the group's own.

    Attributes:
        size: what was asked for; ``at_once``: texts of the group that were decoded in this turn.
        group: which group, of the same cases in every repeat; ``place``: the turn's seat in it.
        full_s: seconds of the steps in which all of them ran.
        model_s: seconds of passes of the drafters' models in the group's steps, heads' and draft
            models', and ``model_passes`` how many; None: not counted.
        pass_s: seconds of the target's passes in the group's steps; None where a device ran them.
    """

    size: Count
    at_once: Count
    group: Count
    place: Count
    full_s: Seconds
    model_s: Seconds | None = None
    model_passes: Count | None = None
    pass_s: Seconds | None = None
