"""Settings measured on the model: small runs, all settings and plain decoding interleaved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from runners.search.entries import mapping_of
from runners.search.halving import Candidate, CaseCost
from specbench.config.run_key import key_of
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import read_records
from specbench.results.statistics.counted import left_out, wrong_outputs

# Runs plain decoding and the entries of a ``compare`` on cases, into a folder.
Run: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[str], Path], None]


class LiveRuns:
    """Measures candidates by runs of their own; a `runners.search.halving.Measure`.

    Args:
        run: makes a run, or what is missing of it.
        folder: holds the runs' folders.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder

    def __call__(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        asked = [one for one in candidates if not one.refused]
        missing = [case for case in cases if any(case not in one.costs for one in asked)]
        if not asked or not missing:
            return
        labels = {f"{one.method}_{number}": one for number, one in enumerate(asked)}
        items = [mapping_of(one.method, one.knobs, label) for label, one in labels.items()]
        folder = self._folder / key_of([items, missing])
        self._run(items, missing, folder)
        fill_in(labels, folder, missing)


def fill_in(labels: Mapping[str, Candidate], folder: Path, cases: Sequence[str]) -> None:
    """Note what a run's folder says of candidates, by label, and of plain decoding."""
    spent: dict[tuple[str, str], tuple[int, float]] = {}
    failed: set[tuple[str, str]] = set()
    records, _ = read_records(folder)
    for record in records:
        key = (record.label, record.case_id)
        tokens, seconds = spent.get(key, (0, 0.0))
        spent[key] = tokens + max(0, record.n_new - 1), seconds + record.decode_s
        if record.status == "failed":
            failed.add(key)
    missing = left_out(records, RunManifest.read(folder))
    wrong = wrong_outputs(records, labels)
    for label, one in labels.items():
        for case in cases:
            own, plain = (label, case), (BASELINE, case)
            if own in spent and plain in spent and not failed & {own, plain}:
                one.costs[case] = CaseCost(*spent[own], *spent[plain])
        if label in wrong:
            one.refused = f"its outputs are not what plain decoding gives (see {folder})"
        elif label in missing or not one.costs:
            one.refused = missing.get(label, f"it failed on every case (see {folder})")
