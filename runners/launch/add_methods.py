"""Add methods later to a finished run: ``'add=[sam]' output_dir=FOLDER``.

They are measured interleaved with plain decoding again, on the same prompts, in a separate folder
below the run's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runners.launch import sweep
from runners.run_folder import folder
from specbench.config.entries import compose_entry
from specbench.errors import ConfigurationError
from specbench.results import records
from specbench.results.cells import NumberCell
from specbench.results.manifest import BASELINE, RunManifest

_FOLDER = "added"


def whole_command(cfg: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the run's command with the new overrides, which ``add`` with the folder stands for."""
    path = Path(str(cfg.output_dir))
    if cfg.output_dir is None or not (path / records.MANIFEST).exists():
        return tuple(overrides)  # a later check explains what is wrong with the folder
    new_keys = {_key(override) for override in (*overrides, "fresh=")}
    earlier = [text for text in RunManifest.read(path).overrides if _key(text) not in new_keys]
    return (*earlier, *overrides)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def job_of(cfg: DictConfig, path: Path) -> DictConfig:
    """Configure the job that measures ``add`` into the finished run at ``path``.

    Raises:
        ConfigurationError: the run is not finished or has no plain decoding; an unknown method.
    """
    if not folder.is_complete(path):
        raise ConfigurationError(
            f"add measures methods into a finished run, and {path} is not one. Type "
            "output_dir=FOLDER of one, or measure it first: the command without add."
        )
    manifest = RunManifest.read(path)
    if manifest.baseline != BASELINE:
        raise ConfigurationError(
            f"{path} was measured with baseline=false, so what is added could not be compared. "
            "Measure all methods in one run: compare=[...]."
        )
    entries: Any = OmegaConf.to_container(cfg.add, resolve=True)
    job = compose_entry(cfg, entries[0])
    label = str(job.method.get("label") or job.method.name)
    if label in manifest.labels:
        raise ConfigurationError(
            f"{path} has the label {label!r} already. Name this one: "
            f"'add=[{{method: {job.method.name}, label: {label}_2}}]'."
        )
    changes = {"add": [], "compare": entries[1:], "output_dir": str(path / _FOLDER)}
    for key, value in changes.items():
        OmegaConf.update(job, key, value)
    return job


def show_added(path: Path) -> None:
    """Print the table of the run at ``path`` and all that was added to it.

    Below it, say whether plain decoding was as fast there as in the run.
    """
    folders = [later for later in sorted((path / _FOLDER).glob("*")) if folder.is_complete(later)]
    if not folders:
        return
    sys.stdout.write(f"\nwith the methods added later, each over its own {BASELINE}:\n")
    sys.stdout.flush()
    sweep.run_analysis("tables", path, *folders)
    for later in folders:
        sys.stdout.write(f"{BASELINE} in {later} over {BASELINE} in {path}: ")
        sys.stdout.write(f"{_compare_baselines(path, later)}.\n")


def _compare_baselines(path: Path, later: Path) -> str:
    from specbench.results.statistics.pairs import rank_labels

    before, again = (
        [r for r in records.read_records(folder)[0] if r.label == BASELINE]
        for folder in (path, later)
    )
    again = [record.replace(label="again", method="again") for record in again]
    pairs = rank_labels([*before, *again], [BASELINE, "again"]).pairs
    if not pairs or not pairs[0]["ratio"]:
        return "no cases to compare"
    pair = pairs[0]
    verdicts = {
        "tie": "the two agree",
        "faster": "it was FASTER there: do not compare ratios across the two",
        "slower": "it was SLOWER there: do not compare ratios across the two",
    }
    unknown = "the cases are too few to tell whether the two agree"
    ratio_cell = NumberCell(pair["ratio"], pair["ratio_ci"])
    return f"{ratio_cell}; {verdicts.get(pair['verdict'], unknown)}"
