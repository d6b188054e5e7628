"""What a run writes to disk: case records, step traces, manifest. Free of torch.

Every table is a function of these files, so what their numbers mean is defined here, once.

Definitions:
    new tokens: everything after the prompt up to and including the first EOS or the limit.
    step: one target pass after prefill; it commits the accepted draft tokens and one more.
    MAT (mean accepted tokens, tau): new tokens after the first divided by steps, pooled over a
        set of turns: sum(n_new - 1) / sum(n_target_passes). 1.00 for plain decoding. A turn
        without a step counts in neither sum; a step with an empty draft counts.
    tokens/s: sum(n_new - 1) / sum(decode_s); end to end: sum(n_new) / sum(wall_s).
    prefill_s: the target's pass over the prompt alone. decode_s: everything after it, all work of
        the drafter included, of which drafter_setup_s is the part outside the steps.
        wall_s = prefill_s + decode_s.
    block: all labels and turns of one case in one repeat; the unit of interleaving and of resume.

Files of a run folder:
    manifest.json, cases.jsonl, errors.jsonl, disturbed.jsonl (measurements that were made again),
    dialogue.jsonl, candidates.jsonl (with record=true), states/ (with record=states), steps.jsonl
    (until the run is complete), steps.parquet, summary.json, DONE (last).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from specbench.results.record_checks import check_record
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"
CASES = "cases.jsonl"
ERRORS = "errors.jsonl"
DISTURBED = "disturbed.jsonl"
DIALOGUE = "dialogue.jsonl"
CANDIDATES = "candidates.jsonl"
STEPS_LOG = "steps.jsonl"
STEPS = "steps.parquet"
SUMMARY = "summary.json"
DONE = "DONE"
LEFT = (CASES, ERRORS, DISTURBED, STEPS, SUMMARY)  # what tables are made of

# Counts in ``CaseRecord.drafter``: passes that ran eagerly where a CUDA graph was meant to be.
EAGER_PASSES, EAGER_DRAFT_PASSES = "eager_passes", "eager_draft_passes"

STATUSES = ("ok", "failed", "disturbed")
TIMINGS = ("measured", "predicted", "none")
PHASES = ("draft", "verify", "accept", "cache", "observe")  # of a step; ``other`` is the rest
VERDICTS = ("equal", "near_tie", "bug", "not_audited")
DIFFERS = "differs"  # the verdict on another engine's output that is not its own plain one
OWN_ENGINE = "specbench"
LOSSY_VERIFIERS = ("typical",)  # their outputs do not follow the target's distribution


@dataclass(frozen=True, slots=True)
class Lossless:
    """How a greedy output compares with plain decoding.

    Attributes:
        verdict: ``equal``; ``near_tie`` (differs, but every emitted token's logit is within the
            dtype's tolerance of the maximum); ``bug`` (anything else); ``not_audited``. Of another
            engine's answer ``differs``: it is not the same server's plain one, and nobody here can
            say whether rounding is why.
        first_diff: index into ``output_ids`` of the first difference, None where there is none.
        gap: largest ``max(logits) - logits[token]`` over the output, None where not computed.
    """

    verdict: str = "not_audited"
    first_diff: int | None = None
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """One turn of one case, decoded by one method: a line of ``cases.jsonl``.

    Its key within a run is ``(repeat, case_id, turn, label)``. Times are seconds.

    Attributes:
        run_key: hash of the configuration that may move a number.
        label: unique name of the entry in this run (default: the method's name).
        method: the method's name; ``method_version``: raised when its numbers may move.
        model: the model's name in ``conf/model``; ``dataset`` in ``conf/dataset``.
        task: one of Spec-Bench's six where that applies, else the data set's own word.
        case_id: the data set's own id.
        turn: from 0; ``repeat``: from 0.
        stream_index: place of the block in the run's order, over all repeats and shards.
        position: place of the label in the block's order (0 ran first).
        n_prompt: tokens of the prompt; ``n_new``: new tokens, EOS included.
        finish_reason: ``eos``, ``length`` or ``context``; None for a failed turn.
        n_target_passes: steps; prefill is not one.
        n_drafted: draft nodes over all steps, auxiliary nodes (``n_aux``) not counted.
        accepted_per_step: tokens committed by each step, bonus included; sums to ``n_new - 1``.
        output_ids: ``[n_new]`` the new tokens.
        timing: where the times come from: ``measured``; ``predicted`` by a cost surface (the
            target's part; drafting is measured); ``none``: a replay without a surface, all zero.
        phase_s: seconds by phase, only under ``measure=phases``.
        drafter: what the drafter counted in the turn, in its own words (``Drafter.report``):
            forwards of a draft model, age of a store, which row of a step won.
        state_scope: how long the drafter kept what it learnt: ``turn``, ``prompt`` or ``run``.
        verifier: who decided acceptance.
        seed: the turn's seed, derived from the run's; the same for all labels.
        cpu_steal, cpu_waiting, cpu_others, cpu_load, gpu: what else the machine did while the turn
            ran, see :class:`specbench.system.interference.Interference`; None where unknown.
        energy_j: joules the GPUs took over the turn, only under ``measure=energy``.
        attempt: earlier measurements of the block that were disturbed; they are in
            ``disturbed.jsonl``.
        disturbed_by: what disturbed the turn, in words; else empty. The status is ``disturbed``
            where counters say so, and ``ok`` where it only slowed together with the baseline.
        started_at: UTC, ISO 8601. ``host``: the machine's name.
        n_retokenized: of plain decoding, the tokens that Spec-Bench's ``speed.py`` counts in the
            output: those of its text tokenized again, minus one; None where nobody counted.
        engine: what decoded: ours, or another one with its version (``runner=serve``), whose
            turns may lack ids and single steps; ``numerics``: what that one keeps weights in.
        served: what a server's turn says besides, see `specbench.results.statistics.served.Served`.
        prompt_sha, output_sha: SHA-256 of ids that were not kept (``scripts/keep_run.py``).
        forced_resume: whether the run was resumed with ``resume=force`` on other hardware,
            versions or code before this record was made.
    """

    schema_version: int = SCHEMA_VERSION
    run_key: str
    label: str
    method: str
    method_version: int = 1
    model: str
    dataset: str
    task: str
    category: str
    case_id: str
    turn: int
    repeat: int
    stream_index: int
    position: int = 0
    status: str = "failed"  # until `finished`
    n_prompt: int = 0
    n_new: int = 0
    finish_reason: str | None = None
    n_target_passes: int = 0
    n_drafted: int = 0
    n_aux: int = 0
    accepted_per_step: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafter_setup_s: float = 0.0
    wall_s: float = 0.0
    timing: str = "measured"
    phase_s: Mapping[str, float] | None = None
    drafter: Mapping[str, Any] = field(default_factory=dict)
    state_scope: str
    verifier: str = "greedy"
    seed: int
    lossless: Lossless = field(default_factory=Lossless)
    cpu_steal: float | None = None
    cpu_waiting: float | None = None
    cpu_others: float | None = None
    cpu_load: float | None = None
    gpu: Sequence[JsonObject] | None = None
    energy_j: float | None = None
    attempt: int = 0
    disturbed_by: str = ""
    started_at: str = ""
    host: str = ""
    n_retokenized: int | None = None
    engine: str = OWN_ENGINE
    numerics: str = ""
    served: JsonObject | None = None
    prompt_sha: str = ""
    output_sha: str = ""
    forced_resume: bool = False

    def finished(
        self, output_ids: Sequence[int], committed: Sequence[int], **measured: Any
    ) -> CaseRecord:
        """The same turn decoded; ``committed`` has each step's tokens, bonus included."""
        return replace(
            self,
            status="ok",
            n_new=len(output_ids),
            output_ids=output_ids,
            n_target_passes=len(committed),
            accepted_per_step=committed,
            **measured,
        )

    @property
    def lossy(self) -> bool:
        """Whether the verifier changes the distribution that the output follows."""
        return self.verifier in LOSSY_VERIFIERS

    @property
    def key(self) -> tuple[int, str, int, str]:
        return (self.repeat, self.case_id, self.turn, self.label)

    @property
    def turn_id(self) -> JsonObject:
        """The key as the lines of other files spell it."""
        return {name: getattr(self, name) for name in ("label", "case_id", "turn", "repeat")}

    def to_json(self) -> JsonObject:
        """A plain dict for one line of ``cases.jsonl``; a gap that is not finite becomes None."""
        line = asdict(self)
        gap = self.lossless.gap
        if gap is not None and not math.isfinite(gap):
            line["lossless"]["gap"] = None
        if self.engine == OWN_ENGINE:
            for name in ("engine", "numerics", "served"):
                del line[name]
        if not self.output_sha:
            del line["prompt_sha"], line["output_sha"]
        for name in ("accepted_per_step", "prompt_ids", "output_ids"):
            line[name] = [int(value) for value in line[name]]
        return line

    @staticmethod
    def from_json(line: JsonObject) -> CaseRecord:
        """The record of a line. Keys this version does not know are ignored.

        Raises:
            ValueError: a field is missing or the counts contradict each other.
        """
        version = line.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, this program reads {SCHEMA_VERSION}")
        values = {name: line[name] for name in _RECORD_FIELDS if name in line}
        missing = _REQUIRED_FIELDS - values.keys()
        if missing:
            raise ValueError(f"no field {', '.join(sorted(missing))}")
        values["lossless"] = Lossless(
            **{k: line["lossless"].get(k) for k in ("verdict", "first_diff", "gap")}
        )
        record = CaseRecord(**values)
        record._check()
        return record

    def _check(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} must be one of {', '.join(STATUSES)}")
        if self.timing not in TIMINGS:
            raise ValueError(f"timing {self.timing!r} must be one of {', '.join(TIMINGS)}")
        if self.lossless.verdict not in (*VERDICTS, DIFFERS):
            verdict = self.lossless.verdict
            raise ValueError(f"verdict {verdict!r} must be one of {', '.join(VERDICTS)}")
        check_record(self)
        foreign = self.engine != OWN_ENGINE
        without = not self.output_ids and (foreign or self.output_sha)
        if len(self.output_ids) != self.n_new and not without:
            raise ValueError(f"n_new is {self.n_new}, output_ids has {len(self.output_ids)}")
        if foreign and not self.accepted_per_step:
            return  # a server that counts says totals
        if len(self.accepted_per_step) != self.n_target_passes:
            raise ValueError(
                f"n_target_passes is {self.n_target_passes}, "
                f"accepted_per_step has {len(self.accepted_per_step)}"
            )
        if self.n_new and sum(self.accepted_per_step) != self.n_new - 1:
            raise ValueError(
                f"accepted_per_step sums to {sum(self.accepted_per_step)}, "
                f"n_new - 1 is {self.n_new - 1}"
            )


_RECORD_FIELDS = tuple(f.name for f in fields(CaseRecord))
# All but these are promised to every reader of the files.
_OPTIONAL_FIELDS = (
    "method_version position n_aux timing phase_s drafter verifier cpu_steal cpu_waiting "
    "cpu_others cpu_load gpu energy_j attempt disturbed_by started_at host n_retokenized "
    "engine numerics served prompt_sha output_sha forced_resume"
)
_REQUIRED_FIELDS = frozenset(_RECORD_FIELDS) - set(_OPTIONAL_FIELDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The steps of one turn of one label; every list has one entry per step.

    Attributes:
        drafted: draft nodes (auxiliary ones not counted); ``depth``: of the deepest one.
        committed: tokens committed, bonus included.
        sources: for each step the source id of each accepted node, or None.
        step_s: seconds per step, None where the clock does not give them.
    """

    label: str
    case_id: str
    turn: int
    repeat: int
    drafted: Sequence[int]
    depth: Sequence[int]
    committed: Sequence[int]
    sources: Sequence[Sequence[int]] | None = None
    step_s: Sequence[float] | None = None

    def to_json(self) -> JsonObject:
        return asdict(self)


def write_steps(path: Path, traces: Iterable[JsonObject]) -> None:
    """Write traces (as :meth:`StepTrace.to_json` gives them) as parquet, one row per step."""
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
        n = len(trace["committed"])
        for name in ("label", "case_id", "turn", "repeat"):
            columns[name].extend([trace[name]] * n)
        columns["step"].extend(range(n))
        for name in ("drafted", "depth", "committed"):
            columns[name].extend(trace[name])
        for name in ("sources", "step_s"):
            columns[name].extend(trace.get(name) or [None] * n)
    temporary = path.with_name(path.name + ".tmp")
    with jsonl.reporting(path):
        pq.write_table(pa.table(columns, schema=schema), temporary)
        os.replace(temporary, path)


def read_steps(path: Path) -> list[JsonObject]:
    """The traces that `write_steps` wrote; turns without a step are not in them.

    Raises:
        specbench.storage.jsonl.RecordError: the file is no such table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    traces: dict[tuple[Any, ...], JsonObject] = {}
    try:
        for row in pq.read_table(path).to_pylist():
            turn = {name: row[name] for name in ("label", "case_id", "turn", "repeat")}
            trace = traces.setdefault(tuple(turn.values()), turn)
            for name in ("drafted", "depth", "committed", "sources", "step_s"):
                trace.setdefault(name, []).append(row[name])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise jsonl.RecordError(f"{path} cannot be read: {error}.") from error
    for trace in traces.values():
        for name in ("sources", "step_s"):
            if trace[name][0] is None:
                trace[name] = None
    return list(traces.values())


def read_records(
    path: Path, *, run_key: str | None = None, labels: Collection[str] = ()
) -> tuple[list[CaseRecord], bool]:
    """The records of a ``cases.jsonl``, or of the folder that holds it; each key is there once.

    Args:
        path: the file or the folder; in ``disturbed.jsonl`` a key may stand once an attempt.
        run_key: of the run that all of them must be of; None takes any.
        labels: of that run; where there are none, any.

    Returns:
        The records and whether the last line was cut off (and is left out).

    Raises:
        specbench.storage.jsonl.RecordError: a line is no valid record, of another run, or of a turn
            that an earlier line has already.
    """
    path = path / CASES if path.is_dir() else path
    objects, truncated = jsonl.read_jsonl(path)
    records: list[CaseRecord] = []
    lines: dict[tuple[Any, ...], int] = {}
    for number, line in enumerate(objects, start=1):
        try:
            record = CaseRecord.from_json(line)
            if run_key is not None and record.run_key != run_key:
                raise ValueError(f"run_key is {record.run_key!r}, this folder's run is {run_key!r}")
            if labels and record.label not in labels:
                raise ValueError(f"label {record.label!r} is not one of {', '.join(labels)}")
            key = (*record.key, record.attempt if path.name == DISTURBED else 0)
            if (first := lines.setdefault(key, number)) != number:
                raise ValueError(
                    f"label {record.label}, case {record.case_id}, turn {record.turn}, repeat "
                    f"{record.repeat} is in line {first} already"
                )
        except (ValueError, TypeError, AttributeError) as error:
            raise jsonl.damaged(path, number, error) from error
        records.append(record)
    return records, truncated
