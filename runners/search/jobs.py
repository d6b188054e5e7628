"""The runs that a search stands on: plain decoding recorded, passes timed, settings tried live."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runners.launch import prerequisites
from runners.launch.dispatch import Invocation, execute
from runners.run_folder import folder
from specbench.config import compose
from specbench.config.run_key import key_of, run_key
from specbench.config.schema import RECORD_STATES
from specbench.data.cases import Case
from specbench.errors import SpecBenchError
from specbench.paths import file_name
from specbench.results.records import SURFACE
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


def asked_from(cfg: DictConfig, cases: Sequence[Case], path: Path) -> DictConfig:
    """The configuration of runs on these cases alone, which are written to ``path``."""
    lines = [
        {"question_id": case.case_id, "category": case.category, "turns": list(case.turns)}
        for case in cases
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    jsonl.write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    job = cfg.copy()
    own = compose.compose(["dataset=jsonl", f"dataset.path={json.dumps(str(path))}"]).dataset
    for key in ("raw", "task", "special_tokens", "dialogue"):
        own[key] = cfg.dataset[key]
    job.dataset = own
    return job


def record(cfg: DictConfig, path: Path) -> Path:
    """The folder of plain decoding on the configuration's questions, with what replays read."""
    job = prerequisites.recording(cfg)
    job.record, job.output_dir = RECORD_STATES, str(path)
    return _done(job, path, "plain decoding")


def try_live(cfg: DictConfig, items: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """The folder of a run of plain decoding and ``compare=items``, interleaved."""
    job = prerequisites.recording(cfg)
    OmegaConf.update(job, "record", False)
    job.compare, job.output_dir = list(items), str(path)
    return _done(job, path, "a live run", failures=True)


def measure_surface(cfg: DictConfig) -> Path:
    """The file of this machine's cost surface for the model; measured where there is none yet."""
    job, path = surface_job(cfg)
    return _done(job, path, "timing passes") / SURFACE


def surface_job(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """The run that times passes, and the folder that is its on this machine."""
    job = prerequisites.measurement(cfg)
    limit = cfg.model.context_length
    for key, values in GRID.items():
        job.runner[key] = [
            value for value in values if "contexts" not in key or limit is None or value < limit
        ]
    job.runner.passes = _PASSES
    machine = key_of(environment.fingerprint(environment.describe()))
    name = f"{file_name(cfg.model.name)}-{run_key(job)}-{machine}"
    return job, Path(cfg.cache_dir) / "surfaces" / name


def _done(job: DictConfig, path: Path, what: str, failures: bool = False) -> Path:
    """Run a job to its end, unless that was reached before."""
    if folder.is_complete(path):
        return path
    job.output_dir = str(path)
    with contextlib.redirect_stdout(io.StringIO()):  # a search has one table, at its end
        code, _ = execute(job, Invocation())
    if code and not failures:
        raise SpecBenchError(f"{what} failed: see {path}.")
    return path
