"""The runs that a search stands on: passes timed, plain decoding recorded, settings tried live."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runners.launch import prerequisites
from runners.launch.dispatch import Invocation, execute
from runners.run_folder.folder import is_complete
from runners.search.space import Candidate, CaseCost
from specbench.config import compose
from specbench.config.run_key import key_of, run_key
from specbench.config.schema import RECORD_STATES
from specbench.data.cases import Case
from specbench.errors import SpecBenchError
from specbench.paths import file_name
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import SURFACE, read_records
from specbench.results.statistics.counted import left_out, wrong_outputs
from specbench.storage import jsonl
from specbench.system import environment

# A surface in a minute: predictions between its points are within a few percent, and say so.
GRID: Mapping[str, list[int]] = {
    "contexts": [64, 512],
    "tree_rows": [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64],
    "batch_contexts": [256],
    "batch_k": [1, 4, 16],
    "batch_w": [1, 4, 12],
}
_PASSES = 3


class Bench:
    """Makes runs of one model on chosen cases, in processes of their own; none twice.

    ``cfg``: a run's configuration; its method is plain decoding.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def surface(self) -> Path:
        """Give the file of the machine's cost surface, measured where there is none yet."""
        job, path = surface_job(self.cfg)
        return _execute(job, path, "timing passes") / SURFACE

    def record(self, cases: Sequence[Case], path: Path) -> None:
        """Run plain decoding into the folder, with what replays read."""
        job = self._plain(cases, path)
        job.record, job.measure.rerun_minutes = RECORD_STATES, 0.0  # no time of it counts
        _execute(job, path, "plain decoding")

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> None:
        """Run plain decoding and the entries of a ``compare`` into the folder, interleaved."""
        job = self._plain(cases, path)
        OmegaConf.update(job, "record", False)
        job.compare = list(items)
        _execute(job, path, "a live run", may_fail=True)

    def _plain(self, cases: Sequence[Case], path: Path) -> DictConfig:
        """Plain decoding on these cases alone, which are written beside the folder."""
        file = path.with_name(f"{path.name}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl.rewrite_jsonl(
            file,
            [
                {"question_id": case.case_id, "category": case.category, "turns": list(case.turns)}
                for case in cases
            ],
        )
        cfg = self.cfg.copy()
        cfg.dataset = compose.compose(["dataset=jsonl"]).dataset
        cfg.dataset.path = str(file)
        for key in ("raw", "task", "special_tokens", "dialogue"):
            cfg.dataset[key] = self.cfg.dataset[key]
        return prerequisites.recording(cfg)


def surface_job(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """Give the run that times passes, and the folder that is its on this machine."""
    job, limit = prerequisites.measurement(cfg), cfg.model.context_length
    for key, values in GRID.items():
        fitting = [value for value in values if limit is None or value < limit]
        job.runner[key] = fitting if "contexts" in key else list(values)
    job.runner.passes = _PASSES
    machine = key_of(environment.fingerprint(environment.describe()))
    name = f"{file_name(cfg.model.name)}-{run_key(job)}-{machine}"
    return job, Path(cfg.cache_dir) / "surfaces" / name


def _execute(job: DictConfig, path: Path, what: str, may_fail: bool = False) -> Path:
    """Run a job to its end, unless that was reached before."""
    if is_complete(path):
        return path
    job.output_dir = str(path)
    with contextlib.redirect_stdout(io.StringIO()):  # a search has one table, at its end
        code, _ = execute(job, Invocation())
    if code and not may_fail:
        raise SpecBenchError(f"{what} failed: see {path}.")
    return path


class LiveRuns:
    """Measures candidates by runs below a folder; a `runners.search.space.Measure`."""

    def __init__(self, bench: Bench, cases: Sequence[Case], folder: Path) -> None:
        self._bench, self._folder = bench, folder
        self._cases = {case.case_id: case for case in cases}

    def __call__(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        usable = [candidate for candidate in candidates if not candidate.refused]
        missing = [case for case in cases if any(case not in c.costs for c in usable)]
        if usable and missing:
            path = self._path(usable, missing)
            self._bench.live(_items(usable), [self._cases[case] for case in missing], path)
            _read_costs(path, usable, missing)

    def is_done(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> bool:
        """Tell whether such candidates were measured on the cases before."""
        return is_complete(self._path(candidates, cases))

    def _path(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> Path:
        return self._folder / key_of([_items(candidates), list(cases)])


def _items(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """What ``compare`` takes, with a label for each."""
    return [
        {"method": c.method, "label": f"{c.method}_{number}", **c.knobs}
        for number, c in enumerate(candidates)
    ]


def _read_costs(folder: Path, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
    """Note what a run's folder says of the candidates, and of plain decoding."""
    records, _ = read_records(folder)
    spent: dict[tuple[str, str], tuple[int, float]] = {}
    for record in records:
        tokens, seconds = spent.get(key := (record.label, record.case_id), (0, 0.0))
        spent[key] = tokens + record.n_decoded, seconds + record.decode_s
    for record in records:
        if record.status == "failed":
            spent.pop((record.label, record.case_id), None)
    labels = [str(item["label"]) for item in _items(candidates)]
    missing = left_out(records, RunManifest.read(folder))
    wrong = wrong_outputs(records, labels)
    for label, candidate in zip(labels, candidates, strict=True):
        for case in cases:
            if {(label, case), (BASELINE, case)} <= spent.keys():
                candidate.costs[case] = CaseCost(*spent[label, case], *spent[BASELINE, case])
        if label in wrong:
            candidate.refused = f"its outputs are not what plain decoding gives (see {folder})"
        elif label in missing or not candidate.costs:
            candidate.refused = missing.get(label, f"it failed on every case (see {folder})")
