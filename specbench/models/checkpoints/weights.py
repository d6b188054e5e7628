"""Where a model's weights come from: an installed wheel, a local folder, or the hub.

Neither torch nor transformers is imported, so that a model which cannot be had is refused in a
second.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from specbench.arrays import Array
from specbench.config.schema import ModelConfig, RunConfig
from specbench.errors import SpecBenchError, WeightsNotFound, first_line
from specbench.models.checkpoints import bundled
from specbench.paths import typed_path
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

if TYPE_CHECKING:
    from torch import nn

_REMEDY = "model=local model.path=/path/to/folder, or model=smollm2_135m, which needs no download"
_HUB_TIMEOUT_S = 5  # until a hub that does not answer counts as out of reach
_SAMPLED = 4  # values of each parameter
# transformers passes over one of these that it cannot read, and over the stop tokens in it.
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_INDEX = ".index.json"


def model_node(config: RunConfig | ModelConfig) -> ModelConfig:
    """Take the ``model`` node of a whole configuration; a model node is returned as it is."""
    return cast("ModelConfig", getattr(config, "model", config))


def is_bundled(model: ModelConfig) -> bool:
    """Say whether the weights come with the wheel; who names another id wants those."""
    return bool(model.embedded) and model.id == bundled.HUB_ID


def local_folder(model: ModelConfig) -> Path | None:
    """Give the folder that ``model.id`` names, which may be missing; None for a hub id."""
    text = str(model.id)
    folder = typed_path(text)
    looks_local = text.startswith((".", "/", "~", "\\")) or text.count("/") > 1
    return folder if folder.is_dir() or looks_local or folder.is_absolute() else None


def gguf_of(model: ModelConfig) -> str | None:
    """Give the name of a GGUF file in the folder; None where a wheel or none has it."""
    return None if model.gguf_package else model.gguf_file


def key_of(model: ModelConfig) -> str:
    """Say what a user types to name these weights; nodes of draft models say so themselves."""
    return str(getattr(model, "key", "model.path" if model.path else "model.id"))


def remedy_of(model: ModelConfig) -> str:
    """Say what else a user could type."""
    return str(getattr(model, "remedy", _REMEDY))


def source(model: ModelConfig) -> tuple[str | Path, dict[str, Any]]:
    """Give ``from_pretrained``'s arguments: a folder or hub id, and those that go with it.

    Raises:
        WeightsNotFound: the folder is missing or not complete, or the wheel is not installed.
    """
    if is_bundled(model):
        cache = Path(model.cache_dir)
        folder = bundled.converted_folder(str(model.gguf_package), str(model.gguf_file), cache)
        return folder, {"local_files_only": True}
    if local_folder(model) is not None or gguf_of(model):
        file = {"gguf_file": gguf} if (gguf := gguf_of(model)) else {}
        return check_folder(model), {"local_files_only": True, **file}
    cached = _cached_snapshot(model) is not None
    return str(model.id), {"revision": model.revision, "local_files_only": cached}


def check_folder(model: ModelConfig) -> Path:
    """Give the folder that a model names; refuse one that lacks a config or a weight file.

    Raises:
        WeightsNotFound: says what is missing or damaged.
    """
    folder, gguf = local_folder(model), gguf_of(model)
    if gguf and (folder is None or not (folder / gguf).is_file()):
        raise WeightsNotFound(
            f"model.gguf_file={gguf} is no file in the folder {key_of(model)}={model.id}. Type "
            "hf download ID FILE --local-dir FOLDER, then model=local model.path=FOLDER "
            "model.gguf_file=FILE."
        )
    assert folder is not None
    if gguf:
        return folder
    if fault := _fault(folder):
        raise WeightsNotFound(
            f"{key_of(model)}={folder}: {fault}. Name a folder that holds config.json, the "
            f"tokenizer's files and *.safetensors (or pytorch_model*.bin). Type {remedy_of(model)}."
        )
    return folder


def _fault(folder: Path) -> str:
    """Say what is wrong with the files of a folder; "" for nothing."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / "config.json").is_file():
        return "there is no config.json in it"
    if not any(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        return "there are no weights in it"
    for path in (*(folder / name for name in _SETTINGS), *folder.glob(f"*{_INDEX}")):
        if not path.is_file():
            continue
        try:
            content = jsonl.read_json(path)
            shards = content["weight_map"].values() if path.name.endswith(_INDEX) else ()
        except (jsonl.RecordError, KeyError, AttributeError) as error:
            return f"{path.name} is damaged ({first_line(error)})"
        if missing := sorted({str(name) for name in shards if not (folder / str(name)).is_file()}):
            return f"{path.name} names {', '.join(missing)}, which are missing"
    return ""


def check_loaded(model: ModelConfig, loaded: Mapping[str, Any], layers: int | None) -> None:
    """Refuse a model of which transformers drew weights at random, or left layers out.

    Args:
        model: its node.
        loaded: what ``from_pretrained`` says with ``output_loading_info``.
        layers: how many its config says, where it does.

    Raises:
        WeightsNotFound: names such a weight.
    """
    if missing := sorted(loaded["missing_keys"]):
        raise _not_found(
            model,
            f"{len(missing)} weights that its config.json asks for are missing, e.g. {missing[0]}",
        )
    layer = re.compile(r"(?:model\.|transformer\.)*(?:layers|h)\.(\d+)\.")  # no vision tower's
    numbers = {name: layer.match(name) for name in loaded["unexpected_keys"]}
    beyond = [
        name for name, number in numbers.items() if number and int(number[1]) >= (layers or 0)
    ]
    if layers is not None and beyond:
        raise _not_found(
            model, f"its config.json has {layers} layers, its weights more ({min(beyond)})"
        )


def commit(model: ModelConfig) -> str | None:
    """Give the commit of a model that was loaded from the hub; else the revision asked for."""
    folder = _snapshot(model)
    return folder.name if folder is not None else model.revision


def _snapshot(model: ModelConfig) -> Path | None:
    """Find the revision's folder in the hub's cache, named by commit, perhaps incomplete."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(str(model.id), "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None


def _cached_snapshot(model: ModelConfig) -> Path | None:
    """Find the folder of a complete download in the hub's cache, or None."""
    folder = _snapshot(model)
    complete = folder is not None and not _fault(folder) and any(folder.glob("tokenizer*"))
    return folder if complete else None


def at_hand(model: ModelConfig) -> bool:
    """Say whether its weights are on this machine, so that nothing is fetched."""
    local = is_bundled(model) or local_folder(model) is not None
    return local or _cached_snapshot(model) is not None


def check_hub(model: ModelConfig) -> None:
    """Refuse a model that neither the hub's cache nor the hub has.

    It is asked for one small file that gated models refuse, too. Only once, with a short limit: the
    hub's client would go on trying for half a minute.

    Raises:
        WeightsNotFound: quotes the hub and says what to type.
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
    except GatedRepoError as error:
        raise WeightsNotFound(
            f"{key_of(model)}={model.id} is gated: accept its licence at "
            f"{constants.ENDPOINT}/{model.id}, then type: hf auth login"
        ) from error
    except Exception as error:
        # Which library speaks to the hub, and so what a dead network raises, differs by version.
        invalid = isinstance(error, HFValidationError)
        why = "this is not a valid hub id" if invalid else "the hub refused or did not answer"
        raise _not_found(model, f"{why}: {first_line(error)}") from error


def _not_found(model: ModelConfig, reason: str) -> WeightsNotFound:
    from huggingface_hub import constants

    subject, remedy = f"{key_of(model)}={model.id}", f"{remedy_of(model)}."
    if is_bundled(model):
        remedy = f"rm -r {model.cache_dir}/models: the next run converts them again."
    elif local_folder(model) is None:
        hub = "" if constants.is_offline_mode() else " and on the hub"
        subject += f" (revision {model.revision})"
        reason += f". Looked in {constants.HF_HUB_CACHE}{hub}"
        remedy = (
            f"hf download {model.id} (gated models: accept the licence on the hub, then hf auth "
            f"login), {remedy}"
        )
    return WeightsNotFound(f"no weights for {subject}: {reason}. Type {remedy}")


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
    except Exception as error:
        unreadable = isinstance(error, SafetensorError | pickle.UnpicklingError)
        why = "a weight file is corrupt or unsafe: " if unreadable else ""
        raise _not_found(model, why + first_line(error)) from error


def model_key(config: RunConfig | ModelConfig) -> str:
    """Tell a model's weights from others': their hash if local, else hub id and commit.

    Raises:
        WeightsNotFound: a folder is missing or not complete, or the wheel is not installed.
    """
    model = model_node(config)
    location, _ = source(model)
    if isinstance(location, Path):
        return weights_hash(location, Path(model.cache_dir), gguf_of(model))
    return f"{location}@{commit(model)}"


def weights_hash(folder: Path, cache_dir: Path, gguf: str | None = None) -> str:
    """Hash name and content of a folder's weight files, or of its GGUF file, as SHA-256 hex."""
    digest = hashlib.sha256()
    for pattern in (glob.escape(gguf),) if gguf else _WEIGHT_FILES:
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name}:{file_sha256(path, cache_dir / 'hashes')}\n".encode())
    return digest.hexdigest()


def sample_weights(model: nn.Module) -> Array:
    """Take ``[m]`` a few values of every parameter, evenly spaced, in float32.

    They are the same for a model in any dtype, up to rounding; of packed ones they are values of
    what is stored, in buffers, too.
    """
    from specbench.kernels.weight_forms import is_quantised, stored_parts

    values = []
    buffers = model.named_buffers() if is_quantised(model) else ()
    for _, tensor in sorted([*model.named_parameters(), *buffers], key=lambda item: item[0]):
        for part in stored_parts(tensor.detach()):
            flat = part.reshape(-1)
            step = max(1, len(flat) // _SAMPLED)
            values.append(flat[::step][:_SAMPLED].float().cpu().numpy())
    return np.concatenate(values)
