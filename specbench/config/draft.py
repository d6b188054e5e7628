"""The draft model that a ``pair`` file names."""

from __future__ import annotations

import re

from specbench.config.schema import DraftConfig, DraftWeights, ModelConfig, RandomDraftConfig
from specbench.errors import ConfigurationError, unknown_name
from specbench.paths import PROJECT, typed_path

VOCABULARIES = ("same", "intersection")


def draft_weights(draft: DraftConfig, model: ModelConfig) -> DraftWeights | None:
    """Which weights the draft model of a target has; None where no draft model is named.

    The target's dtype and device hold unless the draft names its own.

    Raises:
        ConfigurationError: a number of ``pair.draft.random`` is out of range, ``device`` is no
            device, or ``vocabulary`` is unknown.
    """
    if draft.device:
        remedy = "e.g. pair.draft.device=cuda:1, or null for the target's"
        check_device("pair.draft.device", draft.device, remedy)
    if draft.vocabulary not in VOCABULARIES:
        raise unknown_name("pair.draft.vocabulary", draft.vocabulary, VOCABULARIES)
    found = DraftWeights(
        name=f"the draft of {model.name}",
        key="pair.draft.path" if draft.path else "pair.draft.id",
        remedy="pair.draft.path=FOLDER, or pair=random_draft, which needs no weights",
        id=draft.id or "",
        revision=draft.revision,
        dtype=draft.dtype or model.dtype,
        device=draft.device or model.device,
        attention=model.attention,
        cache_dir=model.cache_dir,
    )
    if draft.path:
        path = typed_path(draft.path)
        own = PROJECT / path
        found.id = str(path.absolute() if path.exists() or not own.exists() else own)
    elif not draft.id:
        if draft.random is None or not draft.random.layers:
            return None
        _check_random(draft.random)
        found.id, found.shape, found.seed = "random", True, draft.random.seed
    return found


def _check_random(random: RandomDraftConfig) -> None:
    for key in ("layers", "hidden", "heads"):
        if getattr(random, key) < 1:
            raise ConfigurationError(
                f"pair.draft.random.{key}={getattr(random, key)} is out of range: it must be at "
                "least 1."
            )
    if random.hidden % (2 * random.heads):
        raise ConfigurationError(
            f"pair.draft.random.hidden={random.hidden} is out of range: it must be an even "
            f"multiple of pair.draft.random.heads={random.heads}."
        )


def check_device(key: str, name: str, remedy: str) -> None:
    """Refuse what is neither the CPU nor a CUDA device: passes are written for these two."""
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", name):
        raise ConfigurationError(f"{key}={name!r} must be cpu, cuda or cuda:N. Type {remedy}.")
