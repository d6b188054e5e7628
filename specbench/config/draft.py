"""What a ``pair`` file names as the draft model, in the words of a ``model`` node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigurationError
from specbench.paths import PROJECT

if TYPE_CHECKING:
    from collections.abc import Mapping


def draft_node(draft: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any] | None:
    """What names the draft model's weights, in the words of a ``model`` node.

    Args:
        draft: the ``pair.draft`` node.
        model: the ``model`` node of the target.

    Returns:
        None where no draft model is named.

    Raises:
        ConfigurationError: a number of ``pair.draft.random`` is out of range, or ``device`` is no
            device.
    """
    random = draft.get("random") or {"layers": 0}
    if draft.get("device"):
        remedy = "e.g. pair.draft.device=cuda:1, or null for the target's"
        check_device("pair.draft.device", str(draft["device"]), remedy)
    node = {
        "name": f"the draft of {model['name']}",
        "key": "pair.draft.path" if draft.get("path") else "pair.draft.id",
        "remedy": "pair.draft.path=FOLDER, or pair=random_draft, which needs no weights",
        "revision": draft.get("revision"),
        "dtype": draft.get("dtype") or model["dtype"],
        "device": draft.get("device") or model["device"],
        "device_map": None,
        "attention": model["attention"],
        "context_length": None,
        "embedded": False,
        "shape": False,
        "cache_dir": model["cache_dir"],
    }
    if draft.get("path"):
        path = Path(str(draft["path"])).expanduser()
        own = PROJECT / path
        return node | {"id": str(path.absolute() if path.exists() or not own.exists() else own)}
    if draft.get("id"):
        return node | {"id": str(draft["id"])}
    if not random["layers"]:
        return None
    _check_random(random)
    return node | {"id": "random", "shape": True, "seed": random["seed"]}


def _check_random(random: Mapping[str, Any]) -> None:
    for key in ("layers", "hidden", "heads"):
        if random[key] < 1:
            raise ConfigurationError(
                f"pair.draft.random.{key}={random[key]} is out of range: it must be at least 1."
            )
    if random["hidden"] % (2 * random["heads"]):
        raise ConfigurationError(
            f"pair.draft.random.hidden={random['hidden']} is out of range: it must be an even "
            f"multiple of pair.draft.random.heads={random['heads']}."
        )


def check_device(key: str, name: str, remedy: str) -> None:
    """Refuse what is neither the CPU nor a CUDA device: passes are written for these two."""
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", name):
        raise ConfigurationError(f"{key}={name!r} is no device that this runs on: type {remedy}.")
