"""The end of a sweep: one table over its jobs, its figures, what failed and how to go on.

A launcher may run jobs in other processes, on other machines: each leaves a file in a folder of the
sweep's own, which is gone when the sweep has ended.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from specbench.paths import PROJECT
from specbench.results import records
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

_places: list[Path] = []
_alone: list[JsonObject] = []  # of a job that is no part of a sweep


class Place(Callback):
    """Hydra's callback that says in which folder a sweep's jobs leave their outcomes."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _places.append(Path(config.hydra.sweep.dir, config.hydra.sweep.subdir))


def keep(code: int, overrides: Sequence[str], folder: Path | None, error: str) -> None:
    """Keep how a job ended for the process that must exit, which may be another one.

    Args:
        code: its exit code.
        overrides: what was typed for it.
        folder: where its files are, once that was known.
        error: the first line of what went wrong; "" where nothing was raised.
    """
    typed = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    outcome = {"code": code, "typed": typed, "folder": folder and str(folder), "error": error}
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        jsonl.write_json(Path(hydra.runtime.output_dir) / f"{hydra.job.num:06d}.json", outcome)
    else:
        _alone.append(outcome)


def outcomes() -> list[JsonObject]:
    """What was given to `keep` for this process's job, or for its sweep's jobs, in their order."""
    files = sorted(file for place in _places for file in place.glob("*.json"))
    return [*_alone, *map(jsonl.read_json, files)]


def forget() -> None:
    """Remove what `keep` kept."""
    for place in _places:
        shutil.rmtree(place, ignore_errors=True)
    _places.clear()
    _alone.clear()


def finish(ended: Sequence[JsonObject]) -> None:
    """Print the table of all jobs, draw and write what belongs to it, and say what failed."""
    if len(ended) < 2:
        return
    keys = dict.fromkeys(key for job in ended for key in job["typed"])
    varied = [key for key in keys if len({job["typed"].get(key) for job in ended}) > 1]
    folders = [Path(job["folder"]) for job in ended if job["folder"]]
    done = [folder for folder in folders if (folder / records.DONE).exists()]
    measured = [folder for folder in dict.fromkeys(done) if (folder / records.CASES).exists()]
    sys.stdout.write(f"\nsweep of {len(ended)} jobs: {len(done)} done\n")
    sys.stdout.flush()
    if "shard" in varied:
        sys.stdout.write("parts of runs: python -m analysis.merge joins them\n")
    elif measured:
        run_analysis("sweep", *measured, "-o", _home(measured, varied))
    for job in ended:
        if job["code"]:
            name = " ".join(f"{key}={job['typed'][key]}" for key in varied if key in job["typed"])
            error = job["error"] or (
                f"cases failed ({records.ERRORS}) or outputs differ from plain decoding's "
                f"(verdict bug in {records.CASES}), in {job['folder']}"
            )
            sys.stdout.write(f"failed: {name or 'a job'}: {error}\n")
    if len(done) < len(ended):
        sys.stdout.write(
            "to go on: type the same command again. Finished jobs are shown, not repeated; the "
            "others go on where they stopped.\n"
        )
    sys.stdout.flush()


def run_analysis(module: str, *arguments: str | Path) -> int:
    """Run ``python -m analysis.MODULE ARGUMENTS`` of this checkout; its exit code."""
    command = [sys.executable, "-m", f"analysis.{module}", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which ends that one.
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, check=False, start_new_session=True).returncode


def _home(folders: Sequence[Path], varied: Sequence[str]) -> Path:
    """Beside the jobs' folders; the same jobs have the same, so that a repeated sweep renews it."""
    names = "\n".join(sorted(folder.name for folder in folders))
    words = "-".join(key.rpartition(".")[2] for key in varied)
    name = f"sweep-{words}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return Path(os.path.commonpath([folder.parent for folder in folders])) / name
