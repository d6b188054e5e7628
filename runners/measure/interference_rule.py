"""Find the cases that other work on the machine disturbed, and choose those to measure again.

A rule that judged a turn by its speed would favor a method's fast turns: only evidence from
outside the run counts (``measure.disturbed``; docs/metrics.md). CPU shares are judged by block,
because one burst is a larger share of a short turn than of a long one: a limit for turns would flag
fast methods and spare the baseline. A label may lose three times the limit, of its own time or of
the labels' mean where that is longer; else a burst over few of many labels would pass. A disturbed
block is measured again, whole, after all others, because a burst on a shared host lasts minutes.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from runners.job import CaseBlock, Job
from specbench.config.schema import NoiseConfig
from specbench.results.records import CaseRecord, group_by
from specbench.results.statistics.summary import most_left_out

log = logging.getLogger(__name__)

_HARMFUL_THROTTLING = frozenset(
    {"hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake"}
)


def by_counters(
    records: Iterable[CaseRecord], limits: NoiseConfig
) -> dict[tuple[int, str, int, str], str]:
    """Find the disturbed turns of whole blocks: why, by key. A failed turn is never disturbed."""
    reasons = {}
    for block in group_by(records, lambda turn: turn.block).values():
        turns = [turn for turn in block if turn.status != "failed"]
        if math.fsum(turn.wall_s for turn in turns) < limits.shortest_s:
            continue
        cpu = []
        for counter, limit, who in (
            ("cpu_steal", limits.steal, "the hypervisor"),
            ("cpu_others", limits.others, "other processes"),
        ):
            lost: dict[str, float] = defaultdict(float)
            wall: dict[str, float] = defaultdict(float)
            for turn in turns:
                if (share := getattr(turn, counter)) is not None:
                    lost[turn.label] += share * turn.wall_s
                    wall[turn.label] += turn.wall_s
            taken, total = math.fsum(lost.values()), math.fsum(wall.values())
            if limit is None or not total:
                continue
            mean = total / len(lost)
            shares = {label: lost[label] / max(mean, wall[label]) for label in lost}
            worst = max(shares, key=lambda label: shares[label])
            if taken > limit * total:
                cpu.append(f"{who} took {taken / total:.0%} of the case's CPU time")
            elif shares[worst] > 3 * limit:
                share = lost[worst] / wall[worst]
                cpu.append(f"{who} took {share:.0%} of {worst}'s CPU time")
        for turn in turns:
            if reason := "; ".join([*cpu, *_gpu_reasons(turn)]):
                reasons[turn.key] = reason
    return reasons


def _gpu_reasons(turn: CaseRecord) -> Iterator[str]:
    for gpu in turn.gpu or ():
        throttle = sorted(_HARMFUL_THROTTLING.intersection(gpu.get("throttle") or ()))
        if throttle:
            yield f"the GPU throttled ({', '.join(throttle)})"
        if gpu.get("other_processes"):
            yield f"{gpu['other_processes']} other processes on the GPU"


def to_measure_again(job: Job, records: Sequence[CaseRecord], n_superseded: int) -> list[CaseBlock]:
    """Choose the disturbed blocks that may still be measured again, the least measured first.

    Within one attempt they keep the run's order: to choose the most disturbed would favor short
    answers, of whose time a burst takes most. None are chosen where, even if each came out quiet,
    more would stay disturbed than may be left out: their times count all the same.
    ``n_superseded`` counts the measurements of blocks that were made again already.
    """
    measure, blocks = job.config.measure, job.blocks()
    attempts = {(r.repeat, r.case_id): r.attempt for r in records if r.status == "disturbed"}
    disturbed = [block for block in blocks if block.key in attempts]
    again = [block for block in disturbed if attempts[block.key] < measure.reruns]
    again.sort(key=lambda block: attempts[block.key])
    again = again[: max(0, math.ceil(measure.rerun_share * len(blocks)) - n_superseded)]
    fewest, max_left_out = len(disturbed) - len(again), most_left_out(len(blocks))
    if again and fewest > max_left_out:
        log.warning(
            "%d of %d cases are disturbed, and measuring again (measure.rerun_share=%g) leaves %d "
            "at the least, where %d may be left out: it ends here, and their times count.",
            len(disturbed),
            len(blocks),
            measure.rerun_share,
            fewest,
            max_left_out,
        )
        return []
    return again
