"""The draft model that a ``pair`` file names."""

from __future__ import annotations

from specbench.config.schema import DraftConfig, DraftWeights, ModelConfig
from specbench.paths import PROJECT, typed_path


def draft_weights(draft: DraftConfig, model: ModelConfig) -> DraftWeights | None:
    """Which weights the draft model of a target has; None where no draft model is named.

    The target's dtype and device hold unless the draft names its own.
    """
    weights = DraftWeights(
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
        weights.id = str(path.absolute() if path.exists() or not own.exists() else own)
    elif not draft.id:
        if draft.random is None or not draft.random.layers:
            return None
        weights.id, weights.shape, weights.seed = "random", True, draft.random.seed
    return weights
