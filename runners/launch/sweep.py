"""The end of a sweep: one table over its jobs, its figures, the failures and how to go on.

A launcher may run jobs in other processes, on other machines: each leaves a file in a folder of the
sweep, which is removed when the sweep has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specbench.paths import PROJECT, file_name
from specbench.results import records
from specbench.storage import jsonl
from specbench.storage.jsonl import JsonObject

_files: list[Path] = []  # outcome files of a sweep's jobs
_single: list[JsonObject] = []  # the outcome of a job outside a sweep


def _outcome_file(folder: str, number: int) -> Path:
    return Path(folder, f"{number:06d}.json")


class SweepCallback(Callback):
    """Hydra's callback that lists a sweep's jobs, counted as Hydra's sweeper does."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        hydra = config.hydra
        folder = os.path.join(hydra.sweep.dir, hydra.sweep.subdir)
        _files.append(_outcome_file(folder, 0))  # at least one, if the next lines raise
        typed = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
        # As typed: only a job may be able to resolve their interpolations.
        typed += cast("list[str]", OmegaConf.to_container(hydra.overrides.task, resolve=False))
        running = GlobalHydra.instance()
        loader = running.config_loader() if running.is_initialized() else None
        overrides = OverridesParser.create(loader).parse_overrides(typed)
        jobs = sum(map(len, BasicSweeper.split_arguments(overrides, None)))
        _files.extend(_outcome_file(folder, number) for number in range(1, jobs))


def save_outcome(
    code: int, overrides: Sequence[str], folder: Path | None, error: str, logger: Any = None
) -> None:
    """Save how a job ended for the process that must exit, which may be another one.

    ``folder`` is None if the job raised an error, and ``error`` is "" if it raised none.
    """
    typed = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    outcome: JsonObject = {"code": code, "typed": typed, "folder": folder and str(folder)}
    outcome |= {"error": error, "logger": logger}
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        jsonl.write_json(_outcome_file(hydra.runtime.output_dir, hydra.job.num), outcome)
    else:
        _single.append(outcome)


def outcomes(whole: bool = True) -> list[JsonObject]:
    """Return what `save_outcome` saved for this process's job, or for its sweep's jobs, in order.

    In a ``whole`` sweep, which came to its end, a job without an outcome file has failed.
    """
    ended = list(_single)
    for file in _files:
        error = f"{file.name} is missing in {file.parent}: the job of that number was killed, or "
        error += "runs on a machine that does not see this folder"
        lost: JsonObject = {"code": 1, "typed": {}, "folder": None, "error": error}
        if file.exists() or whole:
            ended.append(jsonl.read_json(file) if file.exists() else lost)
    return ended


def remove_outcomes() -> None:
    """Remove what `save_outcome` wrote, and nothing else."""
    for file in _files:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.parent.rmdir()
    _files.clear()
    _single.clear()


def finish(ended: Sequence[JsonObject]) -> None:
    """Print the table of all jobs, write its figures, and report the failures."""
    if len(ended) < 2:
        return
    override_dicts = [job["typed"] for job in ended if job["typed"]]
    keys = dict.fromkeys(key for overrides in override_dicts for key in overrides)
    varied = [key for key in keys if len({overrides.get(key) for overrides in override_dicts}) > 1]
    folders = [Path(job["folder"]) for job in ended if job["folder"]]
    done = [folder for folder in folders if (folder / records.DONE).exists()]
    measured = [folder for folder in dict.fromkeys(done) if (folder / records.CASES).exists()]
    sys.stdout.write(f"\nsweep of {len(ended)} jobs: {len(done)} done\n")
    sys.stdout.flush()
    if "shard" in varied:
        sys.stdout.write("parts of runs: python -m analysis.merge joins them\n")
    elif measured:
        run_analysis("sweep", *measured, "-o", _sweep_folder(measured, varied))
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
    # A new session: a terminal's Ctrl-C reaches only this process, which ends the child.
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, check=False, start_new_session=True).returncode


def _sweep_folder(folders: Sequence[Path], varied: Sequence[str]) -> Path:
    """Name a folder next to the jobs'; a repeated sweep of the same jobs overwrites it."""
    names = "\n".join(sorted(folder.name for folder in folders))
    keys = file_name("-".join(key.rpartition(".")[2] for key in varied))
    name = f"sweep-{keys}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return Path(os.path.commonpath([folder.parent for folder in folders])) / name
