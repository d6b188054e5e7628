"""Which cases a search takes first, and which it leaves for the confirmation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbench.data.cases import Case


def mixed(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases in a seeded order in which every beginning holds each task as often as it can."""
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[Case]] = {}
    for index in rng.permutation(len(cases)):
        by_task.setdefault(cases[index].task, []).append(cases[index])
    places = [
        (number, task_number, case)
        for task_number, members in enumerate(by_task.values())
        for number, case in enumerate(members)
    ]
    return [case for _, _, case in sorted(places, key=lambda place: place[:2])]


def halves(cases: Sequence[Case], seed: int) -> tuple[list[Case], list[Case]]:
    """Cases to choose by and cases to confirm on: disjoint, tasks divided as evenly as it goes."""
    by_task: dict[str, list[Case]] = {}
    for case in mixed(cases, seed):
        by_task.setdefault(case.task, []).append(case)
    ordered = [case for members in by_task.values() for case in members]
    return mixed(ordered[::2], seed), mixed(ordered[1::2], seed)
