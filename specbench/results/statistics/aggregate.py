"""The cases of a run, turns and repeats added up, and which of them drop out.

The rules are stated in :mod:`specbench.results.statistics.summary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from specbench.arrays import FloatArray
from specbench.results.estimate import FEWEST
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord
from specbench.results.tasks import OVERALL

BlockKey: TypeAlias = tuple[int, str]  # repeat and case, or the group that it was decoded in

# Of the blocks, how many may be left out of times; in a small run one.
LEFT_OUT_SHARE = 0.05

# Columns of a label's totals per case.
(
    COMMITTED, STEPS, TIMED_COMMITTED, DECODE, TIMED_NEW, WALL, ENERGY, ENERGY_NEW, SPEC_BENCH_NEW,
    REQUESTS, REQUEST_MATS, TOKEN_MATS,
) = range(12)  # fmt: skip


def noisy_blocks(records: Iterable[CaseRecord]) -> set[BlockKey]:
    """Every block that holds a disturbed turn."""
    return {(r.repeat, r.unit) for r in records if r.status == "disturbed"}


def untimed_blocks(records: Iterable[CaseRecord]) -> set[BlockKey]:
    """The blocks that count in no time: the disturbed ones, where these are few.

    Few are :data:`LEFT_OUT_SHARE` of all, or one. Of more, all count: what takes long is hit more
    often, so a run without many of them, or without the worst, is one of shorter answers.
    """
    turns = by_block(records)
    noisy = {place for place, own in turns.items() if noisy_blocks(own)}
    return noisy if len(noisy) <= most_left_out(len(turns)) else set()


def most_left_out(n_blocks: int) -> int:
    """Compute how many disturbed blocks of a run its times may leave out."""
    return max(1, math.floor(LEFT_OUT_SHARE * n_blocks)) if n_blocks > FEWEST else 0


def by_block(records: Iterable[CaseRecord]) -> dict[BlockKey, list[CaseRecord]]:
    """The turns of each case, or group of cases, in each repeat, all labels together."""
    blocks: dict[BlockKey, list[CaseRecord]] = {}
    for record in records:
        blocks.setdefault((record.repeat, record.unit), []).append(record)
    return blocks


def timed_turns(records: Iterable[CaseRecord], labels: Sequence[str]) -> list[CaseRecord]:
    """The turns that count in times: what rows, pairs, tables and figures go by.

    Those of cases that did not drop out, without the blocks that :func:`untimed_blocks` takes from
    what is left then.

    Args:
        records: of a whole run.
        labels: those compared; turns of others are left out.
    """
    counted = counted_turns(records, labels)
    untimed = untimed_blocks(counted)
    return [turn for turn in counted if (turn.repeat, turn.unit) not in untimed]


def counted_turns(records: Iterable[CaseRecord], labels: Sequence[str]) -> list[CaseRecord]:
    """The turns of cases that did not drop out: all numbers but times come from them."""
    by_case = _by_case(records, labels)
    return [turn for turns in by_case.values() if is_complete(turns, labels) for turn in turns]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The cases of a run, added up.

    Attributes:
        cases, tasks, categories: ``[n]`` of each case that did not drop out. Of turns decoded at
            once they are groups, whose cases may be of several tasks: then that of the whole run.
        sizes: ``[n]`` cases of each.
        totals: by label ``[1 + R, n, 12]``, first over all repeats, then in each of the R; see the
            column constants.
        dropped, noisy: tasks of the cases that dropped out, or hold a disturbed turn.
        noisy_counted: whether some of the disturbed ones count in times all the same.
        verdicts: by label, ``(task, verdict)`` of every turn that did not fail; ``lossy`` where
            the verifier is.
        methods: by label.
        state_scopes: by label.
        timings: where each label's times come from (``measured``, ``predicted``, ``none``).
        prediction_errors: of labels whose times are predicted, the speedup's relative error; plain
            decoding, which speedups are over, has none.
        phases: by label and task seconds by phase, of timed turns.
    """

    cases: list[str]
    tasks: list[str]
    categories: list[str]
    sizes: list[int]
    totals: dict[str, FloatArray]
    dropped: list[str]
    noisy: list[str]
    noisy_counted: bool
    verdicts: dict[str, list[tuple[str, str]]]
    methods: dict[str, str]
    state_scopes: dict[str, str]
    timings: dict[str, str]
    prediction_errors: dict[str, float]
    phases: dict[str, dict[str, dict[str, float]]]

    def of_task(self, task: str) -> Pooled:
        of_it = self.only([i for i, name in enumerate(self.tasks) if name == task])
        return replace(
            of_it,
            dropped=[name for name in self.dropped if name == task],
            noisy=[name for name in self.noisy if name == task],
            verdicts={
                label: [pair for pair in pairs if pair[0] == task]
                for label, pairs in self.verdicts.items()
            },
            phases={
                label: {task: phases[task]} if task in phases else {}
                for label, phases in self.phases.items()
            },
        )

    def only(self, chosen: Sequence[int]) -> Pooled:
        """Of some of the cases; what is counted by turn stays."""
        return replace(
            self,
            cases=[self.cases[i] for i in chosen],
            tasks=[self.tasks[i] for i in chosen],
            categories=[self.categories[i] for i in chosen],
            sizes=[self.sizes[i] for i in chosen],
            totals={label: totals[:, chosen] for label, totals in self.totals.items()},
        )


def _by_case(records: Iterable[CaseRecord], labels: Sequence[str]) -> dict[str, list[CaseRecord]]:
    wanted = set(labels)
    by_case: dict[str, list[CaseRecord]] = {}
    for record in records:
        if record.label in wanted:
            by_case.setdefault(record.unit, []).append(record)
    return by_case


def pool(records: Iterable[CaseRecord], labels: Sequence[str]) -> Pooled:
    """Add up turns and repeats; find what drops out."""
    by_case = _by_case(records, labels)
    cases: list[tuple[str, str, str, int]] = []  # id, task, category, size
    dropped, noisy = [], []
    totals: dict[str, list[list[list[float]]]] = {label: [] for label in labels}
    everything = [turn for turns in by_case.values() for turn in turns]
    timed_ones = timed_turns(everything, labels)
    timed = {(turn.repeat, turn.unit) for turn in timed_ones}
    # Groups are of all lengths, whatever their tasks: they are of the whole run.
    grouped = any(t.batch is not None for t in everything)
    mixed = grouped and len({t.task for t in everything}) > 1
    repeats = sorted({turn.repeat for turn in everything})
    # Sorted, so that a run that was interrupted and resumed gives the same intervals.
    for case, turns in sorted(by_case.items()):
        size = len({turn.case_id for turn in turns})
        task = OVERALL if mixed else turns[0].task
        category = OVERALL if grouped else turns[0].category
        if not is_complete(turns, labels):
            dropped += [task] * size
            continue
        if noisy_blocks(turns):
            noisy += [task] * size
        cases.append((case, task, category, size))
        for label in labels:
            own = [turn for turn in turns if turn.label == label]
            whole = _add_up(own, timed)
            each = [whole]
            if len(repeats) > 1:
                each = [_add_up([turn for turn in own if turn.repeat == r], timed) for r in repeats]
            totals[label].append([whole, *each])
    shape = (len(cases), 1 + len(repeats), TOKEN_MATS + 1)
    return Pooled(
        cases=[case for case, *_ in cases],
        tasks=[task for _, task, _, _ in cases],
        categories=[category for _, _, category, _ in cases],
        sizes=[size for *_, size in cases],
        totals={
            label: np.array(rows, dtype=np.float64).reshape(shape).swapaxes(0, 1)
            for label, rows in totals.items()
        },
        dropped=dropped,
        noisy=noisy,
        noisy_counted=bool(noisy_blocks(timed_ones)),
        verdicts={
            label: [
                (turn.task, "lossy" if turn.lossy else turn.lossless.verdict)
                for turn in everything
                if turn.label == label and turn.status != "failed"
            ]
            for label in labels
        },
        methods={turn.label: turn.method for turn in everything},
        state_scopes={turn.label: turn.state_scope for turn in everything},
        timings={turn.label: turn.timing for turn in everything},
        prediction_errors={
            turn.label: turn.prediction_error
            for turn in everything
            if turn.prediction_error and turn.method != BASELINE
        },
        phases={
            label: {
                task: _add_phases(t for t in timed_ones if (t.label, t.task) == (label, task))
                for task in {turn.task for turn in everything}
            }
            for label in labels
        },
    )


def is_complete(turns: Sequence[CaseRecord], labels: Sequence[str]) -> bool:
    """Whether every label has every turn of the case in every repeat, and none failed."""
    if any(turn.status == "failed" for turn in turns):
        return False
    asked = {turn.key[:3] for turn in turns}
    return all(asked == {t.key[:3] for t in turns if t.label == label} for label in labels)


def _add_up(turns: Sequence[CaseRecord], timed_blocks: set[BlockKey]) -> list[float]:
    timed = [turn for turn in turns if (turn.repeat, turn.unit) in timed_blocks]
    lengths = [(t.n_new - 1, t.n_target_passes) for t in turns if t.n_target_passes]
    return [
        # A turn whose server did not say its steps counts in neither.
        sum(turn.n_new - 1 for turn in turns if turn.n_target_passes),
        sum(turn.n_target_passes for turn in turns),
        sum(max(0, turn.n_new - 1) for turn in timed),
        math.fsum(_of_groups(timed, lambda turn: turn.decode_s)),
        sum(turn.n_new for turn in timed),
        math.fsum(_of_groups(timed, lambda turn: turn.wall_s)),
        math.fsum(turn.energy_j or 0.0 for turn in timed),
        sum(turn.n_new for turn in timed if turn.energy_j is not None),
        sum(_spec_bench_new(turn) for turn in timed),
        len(lengths),
        math.fsum(committed / steps for committed, steps in lengths),
        math.fsum(committed**2 / steps for committed, steps in lengths),
    ]


def _of_groups(turns: Iterable[CaseRecord], seconds: Callable[[CaseRecord], float]) -> list[float]:
    """Seconds of each turn; of those decoded at once the longest, which is the group's time."""
    found: dict[tuple[object, ...], float] = {}
    for turn in turns:
        key = turn.key if turn.batch is None else (turn.repeat, turn.unit, turn.turn, turn.label)
        found[key] = max(found.get(key, 0.0), seconds(turn))
    return list(found.values())


def _add_phases(turns: Iterable[CaseRecord]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for turn in turns:
        for name, seconds in (turn.phase_s or {}).items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _spec_bench_new(turn: CaseRecord) -> float:
    """New tokens as Spec-Bench counts them: of plain decoding, its text's; NaN where unknown."""
    if turn.method != BASELINE:
        return turn.n_new
    return math.nan if turn.n_retokenized is None else turn.n_retokenized
