"""Methods measured later into a finished run: ``'add=[sam]' output_dir=FOLDER``.

They are measured with plain decoding again, interleaved, on the same questions, in a folder of
their own below the run's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runners.launch import sweep
from runners.run_folder import folder
from specbench.config.compare import compose_entry
from specbench.errors import ConfigurationError
from specbench.results import records
from specbench.results.estimate import Estimate
from specbench.results.manifest import BASELINE, RunManifest

_FOLDER = "added"
_AGAIN = "ar again"


def own_command(cfg: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """What ``add`` stands for with the folder alone: the run's command, and what was typed now.

    A folder that holds no run is left to the checks behind.
    """
    path = Path(str(cfg.output_dir))
    if cfg.output_dir is None or not (path / records.MANIFEST).exists():
        return tuple(overrides)
    typed = {_key(word) for word in (*overrides, "fresh=")}
    return (*(w for w in RunManifest.read(path).overrides if _key(w) not in typed), *overrides)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def job_of(cfg: DictConfig, path: Path) -> DictConfig:
    """The configuration of the job that measures ``add`` into the finished run at ``path``.

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
    wanted: Any = OmegaConf.to_container(cfg.add, resolve=True)
    first, *others = wanted
    job = compose_entry(cfg, first)
    label = str(job.method.get("label") or job.method.name)
    if label in manifest.labels:
        raise ConfigurationError(
            f"{path} has the label {label!r} already. Name this one: "
            f"'add=[{{method: {job.method.name}, label: {label}_2}}]'."
        )
    OmegaConf.update(job, "add", [])
    OmegaConf.update(job, "compare", others)
    OmegaConf.update(job, "output_dir", str(path / _FOLDER))
    return job


def show_added(path: Path) -> None:
    """Print the whole table, of the run at ``path`` and all that was added to it.

    Below it stands whether the plain decoding beside what was added agrees with the run's.
    """
    later = [place for place in sorted((path / _FOLDER).glob("*")) if folder.is_complete(place)]
    if later:
        sys.stdout.write(f"\nwith what was added later, each over its own {BASELINE}:\n")
        sys.stdout.flush()
        sweep.run_analysis("tables", path, *later)
    for place in later:
        sys.stdout.write(f"{agreement(path, place)}\n")


def agreement(path: Path, added: Path) -> str:
    """How fast plain decoding was beside what was added, over what it was in the run; in words."""
    from specbench.results.statistics.pairs import rank_labels

    again = [r.replace(label=_AGAIN, method=_AGAIN) for r in _plain(added)]
    pairs = rank_labels([*_plain(path), *again], [BASELINE, _AGAIN]).pairs
    if not pairs or not pairs[0]["ratio"]:
        return f"{BASELINE} in {added} and in {path}: no cases to compare."
    pair = pairs[0]
    ratio = Estimate(pair["ratio"], pair["ratio_ci"])
    words = {
        "tie": "the two agree",
        "faster": "it was FASTER there: do not compare ratios across the two",
        "slower": "it was SLOWER there: do not compare ratios across the two",
    }.get(pair["verdict"], "the cases are too few to tell whether the two agree")
    return f"{BASELINE} in {added} over {BASELINE} in {path}: {ratio}; {words}."


def _plain(path: Path) -> Sequence[records.CaseRecord]:
    return [r for r in records.read_records(path)[0] if r.label == BASELINE]
