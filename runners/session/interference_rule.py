"""Which turns are noisy, disturbed by something else on the machine: the rule, and nothing besides.

A turn of at least ``shortest_s`` is noisy where one of these holds (``measure.disturbed``):

- ``steal``: the hypervisor gave more than this share of the machine's CPU time to others.
- ``waiting``: this process's threads waited for a CPU for more than this many seconds per second.
- A GPU of the run throttled for heat, power supply or hardware reasons, or another process
  computed on it. (Running into the ordinary power cap is no disturbance.)
- ``slowdown``: its steps took more than this many times what they should have. What a step should
  take is the median over turns of the same label's steps with about as many rows and about as long
  a context (:data:`_ROWS_PER_OCTAVE`, :data:`_CONTEXTS_PER_OCTAVE`). This catches a host that takes
  the CPU away without saying so. It needs :data:`_TURNS` such turns, so it is judged when all
  blocks are measured.

What follows from it: the whole block (all labels of the case and repeat) is measured again when
the others are done, for a burst on a shared host lasts minutes: at most ``measure.reruns`` times,
and ``measure.rerun_share`` of the run's blocks in all. Where more than half of the blocks are
noisy, that is the machine's ordinary state and nothing is measured again. How a block that
stays noisy counts is stated in :mod:`specbench.results.statistics.summary`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from runners.job import CaseBlock, Job
from specbench.config.schema import NoiseConfig
from specbench.results.records import CaseRecord
from specbench.results.statistics.aggregate import untimed_blocks

_HARMFUL_THROTTLING = frozenset(
    {"hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake"}
)
_ROWS_PER_OCTAVE = 4
_CONTEXTS_PER_OCTAVE = 2
_TURNS = 5
# Of a turn's step time, what must have like steps in other turns to judge it by.
_JUDGED_SHARE = 0.5

Key = tuple[int, str, int, str]


def by_counters(record: CaseRecord, limits: NoiseConfig) -> str:
    """Why the record's counters of interference call it noisy; empty if they do not.

    A failed turn is never noisy.
    """
    if record.status == "failed" or record.wall_s < limits.shortest_s:
        return ""
    reasons = []
    if _above(record.cpu_steal, limits.steal):
        reasons.append(f"the hypervisor took {record.cpu_steal:.0%} of the CPU time")
    if _above(record.cpu_waiting, limits.waiting):
        reasons.append(f"waited {record.cpu_waiting:.2f} s per second for a CPU")
    for gpu in record.gpu or ():
        throttle = sorted(_HARMFUL_THROTTLING.intersection(gpu.get("throttle") or ()))
        if throttle:
            reasons.append(f"the GPU throttled ({', '.join(throttle)})")
        if gpu.get("other_processes"):
            reasons.append(f"{gpu['other_processes']} other processes on the GPU")
    return "; ".join(reasons)


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def judge(
    records: Sequence[CaseRecord],
    traces: Iterable[Mapping[str, Any]],
    limits: NoiseConfig,
) -> dict[Key, CaseRecord]:
    """By key the records whose verdict changes when all turns are looked at together.

    Args:
        records: of the whole run.
        traces: its lines of ``steps.jsonl``.
        limits: ``measure.disturbed`` of the configuration.
    """
    slow = slowdowns(records, traces)
    changed = {}
    for record in records:
        if record.status == "failed":
            continue
        reasons = [by_counters(record, limits)]
        factor = slow.get(record.key)
        if record.wall_s >= limits.shortest_s and _above(factor, limits.slowdown):
            reasons.append(f"steps took {factor:.2f} times what like steps take")
        why = "; ".join(filter(None, reasons))
        if why != record.disturbed_by:
            status = "disturbed" if why else "ok"
            changed[record.key] = replace(record, status=status, disturbed_by=why)
    return changed


class _Kind(NamedTuple):
    """Steps that should take as long as each other."""

    label: str
    rows: int
    context: int


def slowdowns(
    records: Sequence[CaseRecord], traces: Iterable[Mapping[str, Any]]
) -> dict[Key, float]:
    """Time of each turn's steps over the time that like steps of its label take in this run.

    Turns of which too little can be compared are left out.
    """
    prompts = {record.key: record.n_prompt for record in records if record.status != "failed"}
    by_turn: dict[Key, dict[_Kind, list[float]]] = {}
    for trace in traces:
        key = (trace["repeat"], trace["case_id"], trace["turn"], trace["label"])
        if key in prompts and trace.get("step_s"):
            by_turn[key] = _by_kind(trace, prompts[key])
    medians: dict[_Kind, list[float]] = defaultdict(list)
    for kinds in by_turn.values():
        for kind, seconds in kinds.items():
            medians[kind].append(float(np.median(seconds)))
    usual = {kind: float(np.median(found)) for kind, found in medians.items()}
    factors = {}
    for key, kinds in by_turn.items():
        known = {kind: s for kind, s in kinds.items() if len(medians[kind]) >= _TURNS}
        spent = math.fsum(sum(seconds) for seconds in known.values())
        expected = math.fsum(len(seconds) * usual[kind] for kind, seconds in known.items())
        total = math.fsum(sum(seconds) for seconds in kinds.values())
        if expected > 0 and spent >= _JUDGED_SHARE * total:
            factors[key] = spent / expected
    return factors


def _by_kind(trace: Mapping[str, Any], n_prompt: int) -> dict[_Kind, list[float]]:
    kinds: dict[_Kind, list[float]] = defaultdict(list)
    context = n_prompt + 1
    steps = zip(trace["drafted"], trace["committed"], trace["step_s"], strict=True)
    for drafted, committed, seconds in steps:
        rows = round(_ROWS_PER_OCTAVE * math.log2(1 + drafted))
        length = round(_CONTEXTS_PER_OCTAVE * math.log2(context))
        kinds[_Kind(trace["label"], rows, length)].append(seconds)
        context += committed
    return kinds


def to_measure_again(job: Job, records: Sequence[CaseRecord], n_superseded: int) -> list[CaseBlock]:
    """The noisy blocks that may be measured again, in the order of the run.

    Args:
        job: its ``measure`` node has the limits.
        records: judged, of the whole run.
        n_superseded: blocks that were measured again already.
    """
    measure = job.config.measure
    blocks = job.blocks()
    places = untimed_blocks(records)
    tried = {(r.repeat, r.case_id): r.attempt for r in records}
    left = math.ceil(measure.rerun_share * len(blocks)) - n_superseded
    again = [
        block
        for block in blocks
        if (place := block.place) in places and tried[place] < measure.reruns
    ]
    return again[: max(0, left)]
