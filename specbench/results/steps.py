"""The traces of a run's steps: ``steps.jsonl`` while it grows, ``steps.parquet`` in the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specbench.results.lines import Committed, Count, Ids, Seconds, Sources, Text
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject


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
    def from_json(line: JsonObject) -> StepTrace:
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


_parse_trace: Callable[[JsonObject], StepTrace] = TypeAdapter(StepTrace).validate_python


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
