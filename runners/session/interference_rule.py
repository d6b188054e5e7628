"""Which turns are disturbed by something else on the machine: the rule, and nothing besides.

A rule that judged a turn by its own speed would favor what a method is fast at. So only evidence
from outside disturbs (``measure.disturbed``), in a block (a case's turns in a repeat, all labels
together) that took at least ``shortest_s``:

- ``steal``: the hypervisor gave more than this share of the block's CPU time to other machines.
- ``others``: other processes of this machine took more than this share of it.
- A GPU of the run throttled in a turn for heat, power supply or hardware reasons, or another
  process computed on it. (Running into the ordinary power cap is no disturbance.)
- ``slowdown``: in one turn of one block the steps of the baseline and of more than half of the
  other labels took more than this many times what they should have. This catches a host that takes
  the CPU away without saying so. What a step should take is the median over turns of the same
  label's steps with about as many rows and about as long a context (:data:`_ROWS_PER_OCTAVE`,
  :data:`_CONTEXTS_PER_OCTAVE`). It needs :data:`_TURNS` such turns, so it is judged when all blocks
  are measured. The blocks measured right before and after are disturbed, too: where such a stretch
  begins and ends it hits some labels of a block only.

The CPU's shares are judged by block and not by turn, because the same burst is a larger share of a
short turn than of a long one: a limit for turns names a fast method's turns and not the
baseline's, a limit in seconds those in which several bursts add up, and both choose among blocks by
how the label's time compares with others'. Over a block each label loses in proportion to its
time, whatever the limit.

A label that is slow alone is never disturbed, nor is the baseline, nor threads of the run itself
that wait for a CPU (``cpu_waiting`` in the records): two of a method's own threads may share one.

What follows from it: the whole block is measured again when the others are done, for a burst on a
shared host lasts minutes: at most ``measure.reruns`` times, and ``measure.rerun_share`` of the
run's blocks in all. What the counters still call disturbed then has the status ``disturbed``; how
it counts is stated in :mod:`specbench.results.statistics.summary`. What was only slow together with
the baseline stays ``ok`` and counts: if it is slow again, that is the prompt's doing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from runners.job import CaseBlock, Job
from specbench.config.schema import NoiseConfig
from specbench.results.lines import StepTrace
from specbench.results.records import CaseRecord
from specbench.results.statistics.aggregate import by_block

_HARMFUL_THROTTLING = frozenset(
    {"hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake"}
)
_ROWS_PER_OCTAVE = 4
_CONTEXTS_PER_OCTAVE = 2
_TURNS = 5
# Of a turn's step time, what must have like steps in other turns to judge it by.
_JUDGED_SHARE = 0.5

Key = tuple[int, str, int, str]


def by_counters(records: Iterable[CaseRecord], limits: NoiseConfig) -> dict[Key, str]:
    """By key why the counters of interference call turns disturbed; others are left out.

    A failed turn is never disturbed.

    Args:
        records: of whole blocks.
    """
    found: dict[Key, str] = {}
    for block in by_block(records).values():
        turns = [turn for turn in block if turn.status != "failed"]
        if math.fsum(turn.wall_s for turn in turns) < limits.shortest_s:
            continue
        shared = [
            f"{who} took {share:.0%} of the case's CPU time"
            for who, share, limit in (
                ("the hypervisor", _share(turns, "cpu_steal"), limits.steal),
                ("other processes", _share(turns, "cpu_others"), limits.others),
            )
            if share is not None and limit is not None and share > limit
        ]
        reasons = {turn.key: "; ".join([*shared, *_by_gpu(turn)]) for turn in turns}
        found |= {key: why for key, why in reasons.items() if why}
    return found


def _share(turns: Sequence[CaseRecord], name: str) -> float | None:
    """The share of all turns' time that a counter of theirs gives; None where none has it."""
    known = [(getattr(turn, name), turn.wall_s) for turn in turns]
    known = [(share, seconds) for share, seconds in known if share is not None and seconds > 0]
    whole = math.fsum(seconds for _, seconds in known)
    return math.fsum(share * seconds for share, seconds in known) / whole if whole else None


def _by_gpu(turn: CaseRecord) -> Iterator[str]:
    for gpu in turn.gpu or ():
        throttle = sorted(_HARMFUL_THROTTLING.intersection(gpu.get("throttle") or ()))
        if throttle:
            yield f"the GPU throttled ({', '.join(throttle)})"
        if gpu.get("other_processes"):
            yield f"{gpu['other_processes']} other processes on the GPU"


def judge(
    records: Sequence[CaseRecord],
    traces: Iterable[StepTrace],
    limits: NoiseConfig,
    baseline: str | None,
) -> dict[Key, CaseRecord]:
    """By key the records whose verdict changes when all turns are looked at together.

    Args:
        records: of the whole run.
        traces: its lines of ``steps.jsonl``.
        limits: ``measure.disturbed`` of the configuration.
        baseline: the label without which no slowness is a disturbance.
    """
    together = _slowed_together(records, slowdowns(records, traces), limits, baseline)
    counters = by_counters(records, limits)
    changed = {}
    for record in records:
        if record.status == "failed":
            continue
        counted = counters.get(record.key, "")
        status = "disturbed" if counted else "ok"
        why = "; ".join(filter(None, [counted, together.get(record.key, "")]))
        if (status, why) != (record.status, record.disturbed_by):
            changed[record.key] = replace(record, status=status, disturbed_by=why)
    return changed


def _slowed_together(
    records: Sequence[CaseRecord],
    factors: Mapping[Key, float],
    limits: NoiseConfig,
    baseline: str | None,
) -> dict[Key, str]:
    """By key why a turn is in or beside a stretch that was slow for most labels at once.

    A block that was measured again has shown what it is.
    """
    turns: dict[tuple[int, int], dict[int, list[CaseRecord]]] = defaultdict(dict)
    for record in records:
        if record.status != "failed" and not record.attempt:
            block = turns[record.repeat, record.stream_index]
            block.setdefault(record.turn, []).append(record)
    slow = {
        record.key
        for record in records
        if limits.slowdown is not None
        and record.wall_s >= limits.shortest_s
        and factors.get(record.key, 0.0) > limits.slowdown
    }
    found: dict[Key, str] = {}
    beside: list[CaseRecord] = []
    for (repeat, index), block in turns.items():
        for labels in block.values():
            hit = [record for record in labels if record.key in slow]
            others = sum(record.label != baseline for record in hit)
            if others < len(hit) and 2 * others > len(labels) - 1:
                words = ", ".join(f"{r.label} {factors[r.key]:.2f}" for r in hit)
                for record in hit:
                    found[record.key] = f"steps took longer than their like at once ({words})"
                for near in (index - 1, index + 1):
                    for neighbors in turns.get((repeat, near), {}).values():
                        beside += neighbors
    for record in beside:
        # Fast or slow: to look at its time would choose by it.
        found.setdefault(record.key, "beside a case whose steps took longer for most labels")
    return found


class _Kind(NamedTuple):
    """Steps that should take as long as each other."""

    label: str
    rows: int
    context: int


def slowdowns(records: Sequence[CaseRecord], traces: Iterable[StepTrace]) -> dict[Key, float]:
    """Time of each turn's steps over the time that like steps of its label take in this run.

    Turns of which too little can be compared are left out.
    """
    prompts = {record.key: record.n_prompt for record in records if record.status != "failed"}
    by_turn: dict[Key, dict[_Kind, list[float]]] = {}
    for trace in traces:
        if trace.key in prompts and trace.step_s:
            by_turn[trace.key] = _by_kind(trace, prompts[trace.key])
    medians: dict[_Kind, list[float]] = defaultdict(list)
    for kinds in by_turn.values():
        for kind, seconds in kinds.items():
            medians[kind].append(median(seconds))
    usual = {kind: median(found) for kind, found in medians.items()}
    factors = {}
    for key, kinds in by_turn.items():
        known = {kind: s for kind, s in kinds.items() if len(medians[kind]) >= _TURNS}
        spent = math.fsum(sum(seconds) for seconds in known.values())
        expected = math.fsum(len(seconds) * usual[kind] for kind, seconds in known.items())
        total = math.fsum(sum(seconds) for seconds in kinds.values())
        if expected > 0 and spent >= _JUDGED_SHARE * total:
            factors[key] = spent / expected
    return factors


def _by_kind(trace: StepTrace, n_prompt: int) -> dict[_Kind, list[float]]:
    kinds: dict[_Kind, list[float]] = defaultdict(list)
    context = n_prompt + 1
    steps = zip(trace.drafted, trace.committed, trace.step_s or (), strict=True)
    for drafted, committed, seconds in steps:
        rows = round(_ROWS_PER_OCTAVE * math.log2(1 + drafted))
        length = round(_CONTEXTS_PER_OCTAVE * math.log2(context))
        kinds[_Kind(trace.label, rows, length)].append(seconds)
        context += committed
    return kinds


def to_measure_again(job: Job, records: Sequence[CaseRecord], n_superseded: int) -> list[CaseBlock]:
    """The disturbed blocks that may be measured again, in the order of the run.

    Where not all of them may, the first ones: those of whose time others took most are the shorter
    ones among them, and to choose these would favor short answers.

    Args:
        job: its ``measure`` node has the limits.
        records: judged, of the whole run.
        n_superseded: measurements of blocks that were made again already.
    """
    measure, blocks = job.config.measure, job.blocks()
    left = math.ceil(measure.rerun_share * len(blocks)) - n_superseded
    disturbed = {
        (record.repeat, record.case_id)
        for record in records
        if record.disturbed_by and record.attempt < measure.reruns
    }
    return [block for block in blocks if block.place in disturbed][: max(0, left)]
