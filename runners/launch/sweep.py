"""The end of a sweep: one table over its jobs, its figures, what failed and how to go on."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runners.launch.analysis_process import run_analysis
from specbench.results import records


class JobOutcome(int):
    """The exit code of a job and what a sweep's end says of it; registers where it arrives.

    A launcher may run jobs in other processes and Hydra keeps the values they return to itself.
    They come back pickled, so unpickling is where the process that must exit learns of them.

    Attributes:
        overrides: what was typed for the job; a job that arrives twice is one.
        folder: where its files are, once that was known.
        error: the first line of what went wrong; "" where nothing was raised.
    """

    overrides: tuple[str, ...]
    folder: Path | None
    error: str

    def __new__(
        cls, code: int, overrides: tuple[str, ...] = (), folder: Path | None = None, error: str = ""
    ) -> JobOutcome:
        outcome = super().__new__(cls, code)
        outcome.overrides, outcome.folder, outcome.error = overrides, folder, error
        arrived[overrides] = outcome
        return outcome

    def __reduce__(self) -> tuple[type[JobOutcome], tuple[object, ...]]:
        return (JobOutcome, (int(self), self.overrides, self.folder, self.error))


arrived: dict[tuple[str, ...], JobOutcome] = {}


def finish_sweep(outcomes: Sequence[JobOutcome]) -> None:
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
        if outcome:
            sys.stdout.write(_failure(outcome, varied))
    if len(done) < len(outcomes):
        sys.stdout.write(
            "to go on: type the same command again. Finished jobs are shown, not repeated; the "
            "others go on where they stopped.\n"
        )
    sys.stdout.flush()


def _typed(outcome: JobOutcome) -> dict[str, str]:
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


def _failure(outcome: JobOutcome, varied: Sequence[str]) -> str:
    typed = _typed(outcome)
    job = " ".join(f"{key}={typed[key]}" for key in varied if key in typed) or "a job"
    if outcome.error:
        return f"failed: {job}: {outcome.error}\n"
    return (
        f"failed: {job}: cases failed ({records.ERRORS}) or outputs differ from plain decoding's "
        f"(verdict bug in {records.CASES}), in {outcome.folder}\n"
    )
