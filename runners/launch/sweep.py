"""The end of a sweep: one table over its jobs, its figures, what failed and how to go on.

A launcher may run jobs in other processes, on other machines: each leaves a file in a folder of the
sweep's own, which is gone when the sweep has ended.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from runners.launch.analysis_process import run_analysis
from specbench.results import records
from specbench.storage import jsonl


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: its exit code.
        overrides: what was typed for it.
        folder: where its files are, once that was known.
        error: the first line of what went wrong; "" where nothing was raised.
    """

    code: int
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    error: str = ""


class Place(Callback):
    """Hydra's callback that says in which folder a sweep's jobs leave their outcomes."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _places.append(Path(config.hydra.sweep.dir, config.hydra.sweep.subdir))


_places: list[Path] = []
_alone: list[Outcome] = []  # of a job that is no part of a sweep


def keep(outcome: Outcome) -> None:
    """Keep a job's outcome for the process that must exit, which a launcher may have started."""
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        path = Path(hydra.runtime.output_dir) / f"{hydra.job.num:06d}.json"
        jsonl.write_json(
            path, {**asdict(outcome), "folder": outcome.folder and str(outcome.folder)}
        )
    else:
        _alone.append(outcome)


def outcomes() -> list[Outcome]:
    """The outcomes of this process's job, or of its sweep's jobs in their order."""
    found = [*_alone]
    for path in sorted(file for place in _places for file in place.glob("*.json")):
        line = jsonl.read_json(path)
        folder = line["folder"] and Path(line["folder"])
        found.append(Outcome(line["code"], tuple(line["overrides"]), folder, line["error"]))
    return found


def forget() -> None:
    """Remove what `keep` kept."""
    for place in _places:
        shutil.rmtree(place, ignore_errors=True)
    _places.clear()
    _alone.clear()


def finish(outcomes: Sequence[Outcome]) -> None:
    """Print the table of all jobs, draw and write what belongs to it, and say what failed."""
    if len(outcomes) < 2:
        return
    varied = _varied([_typed(outcome) for outcome in outcomes])
    done = [o for o in outcomes if o.folder is not None and (o.folder / records.DONE).exists()]
    sys.stdout.write(f"\nsweep of {len(outcomes)} jobs: {len(done)} done\n")
    measured = list(
        dict.fromkeys(o.folder for o in done if o.folder and (o.folder / records.CASES).exists())
    )
    sys.stdout.flush()
    if "shard" in varied:
        sys.stdout.write("parts of runs: python -m analysis.merge joins them\n")
    elif measured:
        run_analysis("sweep", *measured, "-o", _home(measured, varied))
    for outcome in outcomes:
        if outcome.code:
            sys.stdout.write(_failure(outcome, varied))
    if len(done) < len(outcomes):
        sys.stdout.write(
            "to go on: type the same command again. Finished jobs are shown, not repeated; the "
            "others go on where they stopped.\n"
        )
    sys.stdout.flush()


def _typed(outcome: Outcome) -> dict[str, str]:
    pairs = (override.lstrip("+").partition("=") for override in outcome.overrides)
    return {key: value for key, _, value in pairs}


def _varied(typed: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which jobs differ, as they were typed."""
    keys = dict.fromkeys(key for one in typed for key in one)
    return [key for key in keys if len({one.get(key) for one in typed}) > 1]


def _home(folders: Sequence[Path], varied: Sequence[str]) -> Path:
    """Beside the jobs' folders; the same jobs have the same, so that a repeated sweep renews it."""
    names = "\n".join(sorted(folder.name for folder in folders))
    words = "-".join(key.rpartition(".")[2] for key in varied)
    name = f"sweep-{words}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return Path(os.path.commonpath([folder.parent for folder in folders])) / name


def _failure(outcome: Outcome, varied: Sequence[str]) -> str:
    typed = _typed(outcome)
    job = " ".join(f"{key}={typed[key]}" for key in varied if key in typed) or "a job"
    if outcome.error:
        return f"failed: {job}: {outcome.error}\n"
    return (
        f"failed: {job}: cases failed ({records.ERRORS}) or outputs differ from plain decoding's "
        f"(verdict bug in {records.CASES}), in {outcome.folder}\n"
    )
