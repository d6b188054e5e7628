"""Where a trained head lies: a folder of the user's, one of the project's, or the hub's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbench.config.schema import DraftWeights, ModelConfig
from specbench.errors import NeedsNotMet, WeightsNotFound
from specbench.models.checkpoints import weights
from specbench.paths import PROJECT

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_REMEDY = "method.head=FOLDER or method.head=HUB_ID"


def find(
    name: str, heads: Mapping[str, str], model: ModelConfig, *, fetch: bool = False
) -> Path | None:
    """Give the folder of the head that ``method.head`` calls ``name``.

    Args:
        heads: ``pair.heads``.
        fetch: download what only the hub has; else it is asked whether it can be had.

    Returns:
        None for a head that the hub has and this machine has not.

    Raises:
        NeedsNotMet: nothing says which head is meant.
        WeightsNotFound: it is not to be had; says what to type.
    """
    location = heads.get(name, name)
    key = f"pair.heads.{name}" if name in heads else "method.head"
    folder = Path(location).expanduser()
    folder = folder.absolute() if folder.is_dir() else PROJECT / folder
    if folder.is_dir() or weights.local_folder(ModelConfig(id=location)):
        return _checked(folder, key)
    if "/" not in location:
        raise NeedsNotMet(
            f"no file in conf/pair names a head {name!r} for model={model.name}. Type {_REMEDY}."
        )
    cached = _cached(location)
    if cached is not None:
        return cached
    node = DraftWeights(name=f"the head of {model.name}", key=key, remedy=_REMEDY, id=location)
    weights.check_hub(node)
    if not fetch:
        return None
    from huggingface_hub import snapshot_download

    with weights.translated(node):
        return Path(snapshot_download(location, allow_patterns=["config.json", *_WEIGHTS]))


def weight_file(folder: Path) -> Path | None:
    """Give the first file of weights in a folder."""
    return next((p for pattern in _WEIGHTS for p in sorted(folder.glob(pattern))), None)


def _checked(folder: Path, key: str) -> Path:
    if (folder / "config.json").is_file() and weight_file(folder) is not None:
        return folder
    train = "python -m scripts.training heads, or " if PROJECT in folder.parents else ""
    raise WeightsNotFound(
        f"{key}={folder} has no trained head (config.json and a weight file). Type {train}"
        f"{_REMEDY}."
    )


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        return None  # refused by name where the hub is asked
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and weight_file(folder) is not None else None
