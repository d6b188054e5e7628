"""What was measured of settings, kept on disk: a search that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runners.search.halving import Candidate, CaseCost, Measure
from specbench.storage import jsonl

OUT_OF_TIME = "the minutes ended before it was tried"


def remembered(
    measure: Measure,
    path: Path,
    after: Callable[[Candidate], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Measure:
    """``measure``, one candidate at a time, with what the file at ``path`` has of it filled in.

    Args:
        after: called with each candidate that was measured.
        stop: where it says yes nothing more is measured: what is missing is `OUT_OF_TIME`.
    """
    known: dict[tuple[str, str], Mapping[str, Any]] = {}
    for line in jsonl.mend_jsonl(path, dict):
        costs = {**known.get(_key(line), {}).get("costs", {}), **line["costs"]}
        known[_key(line)] = {**line, "costs": costs}

    def one_by_one(candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        for one in candidates:
            before = known.get(_key({"method": one.method, "knobs": one.knobs}))
            if before is not None:
                costs = before["costs"]
                found = {case: CaseCost(**costs[case]) for case in cases if case in costs}
                one.costs = {**found, **one.costs}
                one.refused = before["refused"]
            missing = [case for case in cases if case not in one.costs]
            if one.refused or not missing:
                continue
            if stop():
                one.refused = OUT_OF_TIME  # for now: it is not written
                continue
            measure([one], cases)
            line = {
                "method": one.method,
                "knobs": one.knobs,
                "refused": one.refused,
                "costs": {case: asdict(one.costs[case]) for case in missing if case in one.costs},
            }
            jsonl.append_jsonl(path, [line])
            after(one)

    return one_by_one


def _key(line: Mapping[str, Any]) -> tuple[str, str]:
    return line["method"], json.dumps(line["knobs"], sort_keys=True)
