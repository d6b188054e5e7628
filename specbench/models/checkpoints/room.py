"""Whether disk, host and GPUs have room for a model: asked before it is fetched and loaded.

A download of hours, or a load of minutes, is not begun where its end is known. Sizes are estimates
of ``specbench.models.memory``; a model whose shape no configuration tells is not asked about.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.schema import ModelConfig, RunConfig
from specbench.errors import ConfigurationError
from specbench.models import memory
from specbench.models.checkpoints import weights
from specbench.system import memory as host

if TYPE_CHECKING:
    import torch

_GIB = 2**30


def check(config: RunConfig | ModelConfig, device: torch.device) -> None:
    """Refuse a model for which there is no room, with what it takes and what there is.

    Raises:
        ConfigurationError: says where room is missing, and what to type.
    """
    model = weights.model_node(config)
    shape = _shape(model)
    if shape is None:
        return
    model = copy.copy(model)
    model.shape_config = shape
    size = memory.weight_bytes(model)
    if not model.shape:
        if not weights.at_hand(model):
            _check_disk(model)
        if device.type == "cuda" and not model.device_map:
            _check_host(model, size, "The weights pass through it on their way to the GPU.")
    if device.type != "cuda":
        held = size + memory.text_bytes(model)
        _check_host(model, held, "It holds the weights and the keys and values of a text.")
    elif hasattr(config, "runner"):
        whole: Any = copy.copy(config)
        whole.model = model
        _check_gpus(model, memory.run_bytes(whole), device)


def _shape(model: ModelConfig) -> dict[str, Any] | None:
    """Of its own config.json where it is a folder, which the yaml may not describe."""
    folder = weights.local_folder(model)
    told: Any = getattr(model, "shape_config", None)  # a draft's has none
    if folder is not None and not model.shape:
        try:
            told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # said elsewhere
            return None
    known = isinstance(told, Mapping) and all(isinstance(told.get(k), int) for k in memory.SIZES)
    return dict(told) if known else None


def _check_disk(model: ModelConfig) -> None:
    from huggingface_hub import constants

    folder, wanted = Path(constants.HF_HUB_CACHE), memory.file_bytes(model)
    there = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise ConfigurationError(
            f"model={model.name}: its files take about {_gib(wanted)} and {folder} has "
            f"{_gib(free)} free. Make room, set HF_HOME to a folder on another disk, or type "
            f"{weights.remedy_of(model)}."
        )


def _check_host(model: ModelConfig, wanted: int, why: str) -> None:
    free = host.free_bytes()
    if wanted > free:
        raise ConfigurationError(
            f"model={model.name} takes {_gib(wanted)} of this machine's memory in {model.dtype}, "
            f"and {_gib(free)} are free. {why} Type model.dtype=bfloat16 if it is not, a smaller "
            "model, or model.device_map=auto, which loads onto GPUs layer by layer."
        )


def _check_gpus(model: ModelConfig, wanted: int, device: torch.device) -> None:
    import torch

    numbers: list[Any] = [device]
    if model.device_map:
        numbers = list(range(torch.cuda.device_count()))
    free = sum(torch.cuda.mem_get_info(n)[0] + torch.cuda.memory_reserved(n) for n in numbers)
    if wanted > free:
        where = f"the {len(numbers)} GPUs have" if len(numbers) > 1 else "the GPU has"
        raise ConfigurationError(
            f"a run with model={model.name} takes about {_gib(wanted)} on the GPU in "
            f"{model.dtype}, and {where} {_gib(free)} free (nvidia-smi shows who holds the rest). "
            "Type engine=eager, which keeps no graphs, model.dtype=bfloat16 if it is not, "
            "model.device_map=auto to spread it over several GPUs, or a smaller model."
        )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
