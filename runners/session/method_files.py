"""Files that methods draft from: artifacts and trained heads, found before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.session.method_runs import MethodRun
from specbench.artifacts import resolve
from specbench.config.schema import RunConfig
from specbench.models.checkpoints import weights
from specbench.models.heads import folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_artifacts(
    config: RunConfig, run: MethodRun, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, Path]:
    """The artifacts of a label by name, built where they are missing and may be built.

    Raises:
        NeedsNotMet: one is missing and cannot be built here.
    """
    needed = run.drafter.needs.artifacts
    per_model = any(artifact.per_model for artifact in needed)
    return resolve.resolve(
        needed,
        tokenizer=tokenizer,
        bundled=config.model.embedded,
        cache_dir=Path(config.cache_dir),
        model_key=weights.model_key(config) if per_model else None,
    )


def find_heads(config: RunConfig, run: MethodRun) -> dict[str, Path]:
    """The folders of a label's heads by name, downloaded where only the hub has them.

    Raises:
        WeightsNotFound: one is not to be had.
    """
    wanted = run.drafter.needs.heads
    found = {n: folder.find(n, run.entry.heads, config.model, fetch=True) for n in wanted}
    return {name: path for name, path in found.items() if path is not None}


def describe_files(
    files: Mapping[str, Mapping[str, Path]], heads: Mapping[str, Mapping[str, Path]]
) -> dict[str, dict[str, Any]]:
    """By label what the manifest says of its artifacts, and of the weights of its heads."""
    found: dict[str, dict[str, Any]] = {}
    for label, artifacts in files.items():
        weight_files = {f"head {n}": folder.weight_file(p) for n, p in heads[label].items()}
        read = {**artifacts, **{n: file for n, file in weight_files.items() if file is not None}}
        if read:
            found[label] = {name: dict(resolve.describe(path)) for name, path in read.items()}
    return found
