"""Where a model's weights come from: an installed wheel, a local folder, or the hub.

Neither torch nor transformers is imported, so that a model which cannot be had is refused in a
second.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from specbench.arrays import Array
from specbench.config.schema import ModelConfig, RunConfig
from specbench.errors import ConfigurationError, SpecBenchError, WeightsNotFound, first_line
from specbench.models.checkpoints import bundled
from specbench.paths import typed_path
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


_REMEDY = "model=local model.path=/path/to/folder, or model=smollm2_135m, which needs no download"

# Seconds until a hub that does not answer counts as out of reach.
_HUB_TIMEOUT_S = 5

_SAMPLED = 4  # values of each parameter

# transformers passes over one of these that it cannot read, and over the stop tokens in it.
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def model_node(config: RunConfig | ModelConfig) -> ModelConfig:
    """The ``model`` node of a whole configuration; a model node is returned as it is."""
    return cast("ModelConfig", getattr(config, "model", config))


def is_bundled(model: ModelConfig) -> bool:
    """Whether the weights come with the wheel; who names another id wants those."""
    return bool(model.embedded) and model.id == bundled.HUB_ID


def local_folder(model: ModelConfig) -> Path | None:
    """The folder that ``model.id`` names, which may be missing; None for a hub id."""
    text = str(model.id)
    folder = typed_path(text)
    looks_local = text.startswith((".", "/", "~", "\\")) or text.count("/") > 1
    return folder if folder.is_dir() or looks_local or folder.is_absolute() else None


def key_of(model: ModelConfig) -> str:
    """What a user types to name these weights; nodes of draft models say so themselves."""
    return str(getattr(model, "key", "model.path" if model.path else "model.id"))


def remedy_of(model: ModelConfig) -> str:
    """What else a user could type."""
    return str(getattr(model, "remedy", _REMEDY))


def source(model: ModelConfig) -> tuple[str | Path, dict[str, Any]]:
    """What ``from_pretrained`` is given: a folder or hub id, and the arguments that go with it.

    Raises:
        WeightsNotFound: the folder is missing or not complete, or the wheel is not installed.
    """
    if is_bundled(model):
        cache = Path(model.cache_dir)
        folder = bundled.converted_folder(str(model.gguf_package), str(model.gguf_file), cache)
        return folder, {"local_files_only": True}
    local = local_folder(model)
    if local is not None:
        check_folder(local, key_of(model), remedy_of(model))
        return local, {"local_files_only": True}
    cached = _cached_snapshot(model) is not None
    return str(model.id), {"revision": model.revision, "local_files_only": cached}


def check_folder(folder: Path, key: str = "model.id", remedy: str = _REMEDY) -> None:
    """Refuse a folder that lacks a config or one of its weight files."""

    def refuse(reason: str) -> WeightsNotFound:
        return WeightsNotFound(
            f"{key}={folder}: {reason}. Name a folder that holds config.json, the tokenizer's "
            f"files and *.safetensors (or pytorch_model*.bin). Type {remedy}."
        )

    if not folder.is_dir():
        raise refuse("there is no such folder")
    if not (folder / "config.json").is_file():
        raise refuse("there is no config.json in it")
    for name in _SETTINGS:
        if (folder / name).is_file():
            try:
                jsonl.read_json(folder / name)
            except jsonl.RecordError as error:
                raise refuse(f"{name} is damaged ({first_line(error)})") from error
    if not any(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        raise refuse("there are no weights in it")
    for index in folder.glob("*.index.json"):
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            shards = {str(name) for name in named}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise refuse(f"{index.name} is damaged ({first_line(error)})") from error
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise refuse(f"{index.name} names {', '.join(missing)}, which are missing")


def check_loaded(model: ModelConfig, loaded: Mapping[str, Any], layers: int | None) -> None:
    """Refuse a model of which transformers drew weights at random, or left layers out.

    Args:
        model: its node.
        loaded: what ``from_pretrained`` says with ``output_loading_info``.
        layers: how many its config says, where it does.
    """
    if missing := sorted(loaded["missing_keys"]):
        raise _not_found(
            model,
            f"{len(missing)} weights that its config.json asks for are missing, e.g. {missing[0]}",
        )
    own = re.compile(r"(?:model\.|transformer\.)*(?:layers|h)\.(\d+)\.")  # no vision tower's
    numbers = {name: own.match(name) for name in loaded["unexpected_keys"]}
    beyond = [name for name, found in numbers.items() if found and int(found[1]) >= (layers or 0)]
    if layers is not None and beyond:
        raise _not_found(
            model, f"its config.json has {layers} layers, its weights more ({min(beyond)})"
        )


def commit(model: ModelConfig) -> str | None:
    """The commit of a model that was just loaded from the hub; else the revision asked for."""
    folder = _snapshot(model)
    return folder.name if folder is not None else model.revision


def _snapshot(model: ModelConfig) -> Path | None:
    """The folder of the revision in the hub's cache, perhaps not complete; it is the commit's."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(str(model.id), "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None


def _cached_snapshot(model: ModelConfig) -> Path | None:
    """The folder of a complete download in the hub's cache, or None."""
    folder = _snapshot(model)
    if folder is None:
        return None
    try:
        check_folder(folder)
    except WeightsNotFound:
        return None
    return folder if any(folder.glob("tokenizer*")) else None


def at_hand(model: ModelConfig) -> bool:
    """Whether its weights are on this machine, so that nothing is fetched."""
    local = is_bundled(model) or local_folder(model) is not None
    return local or _cached_snapshot(model) is not None


def check_hub(model: ModelConfig) -> None:
    """Refuse a model that neither the hub's cache nor the hub has.

    It is asked for one small file that gated models refuse, too. Only once, with a short limit: the
    hub's client would go on trying for half a minute.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HFValidationError

    try:
        if _cached_snapshot(model) is not None:
            return
        if constants.is_offline_mode():
            raise _not_found(model, "HF_HUB_OFFLINE is set, so the hub was not asked")
        url = hf_hub_url(str(model.id), "config.json", revision=model.revision)
        get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
    except WeightsNotFound:
        raise
    except HFValidationError as error:
        raise _not_found(model, f"this is not a valid hub id ({error})") from error
    except GatedRepoError as error:
        raise WeightsNotFound(
            f"{key_of(model)}={model.id} is gated: accept its licence at "
            f"{constants.ENDPOINT}/{model.id}, then type: hf auth login"
        ) from error
    except Exception as error:
        # Which library speaks to the hub, and so what a dead network raises, differs by version.
        why = f"the hub refused or did not answer: {first_line(error)}"
        raise _not_found(model, why) from error


def _not_found(model: ModelConfig, reason: str) -> WeightsNotFound:
    from huggingface_hub import constants

    key, remedy = key_of(model), remedy_of(model)
    if is_bundled(model):
        return WeightsNotFound(
            f"no weights for model={model.name}: {reason}. They were converted into "
            f"{model.cache_dir}: remove its models folder, and the next run converts them again."
        )
    if local_folder(model) is not None:
        return WeightsNotFound(f"no weights for {key}={model.id}: {reason}. Type {remedy}.")
    asked = "" if constants.is_offline_mode() else " and on the hub"
    typed = f"model={model.name}" if key.startswith("model.") else f"{model.name} ({key})"
    return WeightsNotFound(
        f"no weights for {typed} (id {model.id}, revision {model.revision}): {reason}. Looked in "
        f"{constants.HF_HUB_CACHE}{asked}. Type: hf download {model.id} (gated models: accept the "
        f"licence on the hub, then hf auth login), {remedy}."
    )


@contextmanager
def translated(model: ModelConfig) -> Iterator[None]:
    """Turn what the hub, the network or a broken file raises into WeightsNotFound.

    A config that contradicts itself or its weights ends in any of Python's errors.
    """
    import pickle

    from safetensors import SafetensorError
    from torch import OutOfMemoryError

    try:
        yield
    except (SpecBenchError, MemoryError, OutOfMemoryError):
        raise
    except (SafetensorError, pickle.UnpicklingError) as error:
        raise _not_found(model, f"a weight file is corrupt or unsafe ({error})") from error
    except Exception as error:
        raise _not_found(model, first_line(error)) from error


def model_key(config: RunConfig | ModelConfig) -> str:
    """What tells a model's weights from others': their hash if local, else hub id and commit.

    Raises:
        WeightsNotFound: a folder is missing or not complete, or the wheel is not installed.
    """
    model = model_node(config)
    place, _ = source(model)
    if isinstance(place, Path):
        return weights_hash(place, Path(model.cache_dir))
    return f"{place}@{commit(model)}"


def weights_hash(folder: Path, cache_dir: Path) -> str:
    """SHA-256 hex over the names and contents of a folder's weight files."""
    digest = hashlib.sha256()
    for pattern in _WEIGHT_FILES:
        for path in sorted(folder.glob(pattern)):
            found = file_sha256(path, cache_dir / "hashes")
            digest.update(f"{path.name}:{found}\n".encode())
    return digest.hexdigest()


def sample_weights(model: nn.Module) -> Array:
    """``[m]`` a few values of every parameter, evenly spaced, in float32.

    They are the same for a model in any dtype, up to rounding.
    """
    values = []
    for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        step = max(1, len(flat) // _SAMPLED)
        values.append(flat[::step][:_SAMPLED].float().cpu().numpy())
    return np.concatenate(values)


def refuse_quantised(model: ModelConfig, own: PreTrainedConfig) -> None:
    """Weights in blocks of another's format are read by layers that this project does not run.

    Raises:
        ConfigurationError: ``own``, the model's configuration, names such a format.
    """
    said: Any = getattr(own, "quantization_config", None)
    if said is None:
        return
    kind = said.get("quant_method") if isinstance(said, dict) else said.quant_method
    name = str(getattr(kind, "value", kind))
    raise ConfigurationError(
        f"{key_of(model)}={model.id}: its weights are quantised ({name}), and no engine "
        f"here runs such layers. Name the model that it was made from, or type "
        f"{remedy_of(model)}."
    )


def too_large(
    model: ModelConfig, network: PreTrainedModel, device: torch.device
) -> ConfigurationError:
    """What to say where ``device`` is full before the weights are on it."""
    size = sum(p.numel() * p.element_size() for p in network.parameters()) / 2**30
    return ConfigurationError(
        f"{device} has no room for the weights of {key_of(model)}={model.id}: they are "
        f"{size:.1f} GiB in {model.dtype}, and cache and graphs come on top. Type "
        "model.dtype=bfloat16 if it is not, model.device_map=auto to spread them over several "
        "GPUs, or a smaller model. nvidia-smi shows who else holds memory there."
    )
