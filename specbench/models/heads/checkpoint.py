"""Head checkpoints: a folder with config.json and one weight file, every key accounted for.

The published loaders ignore what they miss. A missing bias or a norm too many costs half of the
accepted tokens and raises nothing, so here each key must be expected, and each expected key there.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbench.decoding.protocols import TargetEmbeddings, TargetInfo
from specbench.errors import ConfigurationError, WeightsNotFound, first_line
from specbench.kernels.packed_linear import pack_linears, product_of
from specbench.models.checkpoints import int8
from specbench.models.draft.loading import ID_MAP_FILE, read_id_map
from specbench.paths import PROJECT

log = logging.getLogger(__name__)

_NAMED = 6  # keys in a message at most
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it lies in its folder."""

    file: Path  # the weight file
    config: Mapping[str, Any]  # of config.json
    tensors: Mapping[str, torch.Tensor]  # in the file's dtypes

    def refuse(self, reason: str) -> WeightsNotFound:
        """The error for what is wrong with the file: ``FILE reason``."""
        return WeightsNotFound(f"{self.file} {reason}")


def read(folder: Path, names: Sequence[str]) -> Checkpoint:
    """Read the first of the files ``names`` that ``folder`` has, and its config.json.

    Files that end in ``.safetensors`` are read as such, all others as torch's, weights only.
    Matrices that are kept as bytes with scales (``checkpoints/int8.py``) come as float32.

    Raises:
        WeightsNotFound: folder, config or weights are missing or damaged.
    """
    wanted = f"Name a folder that holds config.json and {' or '.join(names)}."
    if not folder.is_dir():
        raise WeightsNotFound(f"{folder}: there is no such folder. {wanted}")
    config = read_json(folder, wanted)
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise WeightsNotFound(f"{folder} has no weights of such a head. {wanted}")
    return Checkpoint(file, config, _tensors(file))


def read_json(folder: Path, wanted: str = "Fetch it again.") -> dict[str, Any]:
    """The folder's config.json; ``wanted`` tells what to do where it is damaged.

    Raises:
        WeightsNotFound: it cannot be read, or is no object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsNotFound(f"{file} cannot be read: {first_line(error)}. {wanted}") from error
    if not isinstance(config, dict):
        raise WeightsNotFound(f"{file} is not a JSON object. {wanted}")
    return config


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            stored = load_file(file)
        else:
            stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a damaged byte leads to
        raise WeightsNotFound(
            f"{file} is damaged, or holds more than weights: {first_line(error)}. Fetch it again."
        ) from error
    items = stored.items() if isinstance(stored, dict) else [(None, None)]
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in items):
        raise WeightsNotFound(f"{file} does not hold named tensors. Fetch it again.")
    return int8.restored(stored, file) if file.suffix == ".safetensors" else dict(stored)


def fill(
    module: nn.Module,
    names: Mapping[str, str],
    found: Checkpoint,
    target: TargetEmbeddings,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ignored: str = "",
) -> None:
    """Give ``module`` (made on the meta device) the weights of a checkpoint, and freeze it.

    Args:
        names: the module's name of each key that the file must have. Keys of one name are copies
            of one weight and must be equal.
        target: whose head it is; products are packed where its own are.
        ignored: a pattern of keys that the file may have besides.

    Raises:
        WeightsNotFound: names keys that are missing, unknown, of another shape, or not finite.
    """
    tensors = found.tensors
    missing = [key for key in names if key not in tensors]
    unknown = [k for k in tensors if k not in names and not re.fullmatch(ignored, k)]
    if missing or unknown:
        parts = ["is not the head that its config.json describes"]
        parts += [f"missing: {_some(missing)}"] if missing else []
        parts += [f"unknown: {_some(unknown)}"] if unknown else []
        raise found.refuse(f"{'; '.join(parts)}. Take the head's own config.json.")
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    state: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        value = _weight(found, key, shapes[name], dtype=dtype, device=device)
        if name in state and not torch.equal(state[name], value):
            raise found.refuse(f"has {key} as another matrix than its copies. Fetch it again.")
        state[name] = value
    module.load_state_dict(state, assign=True)
    module.eval().requires_grad_(False)
    if target.packed:  # a head reads as much for a token
        pack_linears(module, target.packed)


def _weight(
    found: Checkpoint, key: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A weight in the dtype that the head computes with.

    Raises:
        WeightsNotFound: it is no matrix of real numbers of this shape, or not finite in ``dtype``.
    """
    tensor = found.tensors[key]
    if tensor.dtype not in _FLOATS or tensor.layout != torch.strided or tensor.is_meta:
        kind = ", ".join(str(x) for x in (tensor.dtype, tensor.layout, tensor.device))
        raise found.refuse(
            f"has {key} as {kind}, which is no matrix of real numbers without a scale. Save it "
            "as float32, float16 or bfloat16, or fetch the head again."
        )
    if tuple(tensor.shape) != shape:
        raise found.refuse(
            f"has {key} as {list(tensor.shape)}, where config.json and the target say "
            f"{list(shape)}. Take the head of this target, with its own config.json."
        )
    value = tensor.to(device, dtype)
    if not value.isfinite().all():
        if not tensor.isfinite().all():
            raise found.refuse(f"is damaged: {key} is not finite. Fetch it again.")
        largest = float(tensor.abs().max())
        raise found.refuse(
            f"has numbers up to {largest:.3g} in {key}, too large for {str(dtype)[6:]}. Type "
            "model.dtype=bfloat16 or model.dtype=float32."
        )
    return value


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(sorted(keys)[:_NAMED]) + more


def count(keys: Iterable[str], pattern: str) -> int:
    """How many there are by the first group of ``pattern``, a number that counts from 0.

    Configurations say it too, and some of them wrongly. Let the group have two digits at most: for
    a number without end a file would name too many modules to make.
    """
    found = {int(match[1]) for match in map(re.compile(pattern).match, keys) if match}
    return max(found, default=-1) + 1


def own_embedding(
    found: Checkpoint,
    target: TargetEmbeddings,
    width: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """``embed_tokens.weight`` where it is not the target's embedding; mostly it is a copy.

    Args:
        width: numbers that the head reads of each id.

    Raises:
        WeightsNotFound: it has not one such row for each of the target's ids, or is not finite.
    """
    key = "embed_tokens.weight"
    if key not in found.tensors:
        return None
    shape = (len(target.embedding), width)
    weight = _weight(found, key, shape, dtype=dtype, device=device)
    theirs = target.embedding.to(device, dtype)
    # One of the two may have been rounded to float16, the other to bfloat16.
    if weight.shape == theirs.shape and torch.allclose(weight, theirs, rtol=1e-2, atol=1e-5):
        return None
    log.warning("%s has another token embedding than the target; its own is used", found.file)
    return weight


class ShortList:
    """The ends of a target (``TargetEmbeddings``), with logits of ``ids [n]`` alone, in order.

    A small target's LM head is a fifth of its weights, and a head's layer is far less: most of a
    draft would go into logits of ids that hardly ever occur.
    """

    def __init__(self, target: TargetEmbeddings, ids: torch.Tensor) -> None:
        bias = target.lm_head_bias
        self.embedding, self.packed = target.embedding, target.packed
        self.lm_head = target.lm_head[ids]
        self.lm_head_bias = None if bias is None else bias[ids]
        self._product = product_of(self.lm_head, self.lm_head_bias, target.packed)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` of states ``[..., hidden]`` after the final norm."""
        logits: torch.Tensor = self._product(states)
        return logits


def ends_of(
    target: TargetInfo, vocabulary: str | None
) -> tuple[TargetEmbeddings, torch.Tensor | None]:
    """A target's ends, and the ids that its logits are of; None for all.

    Args:
        vocabulary: ``method.vocabulary``: a folder with the list of a draft model's ids.

    Raises:
        WeightsNotFound: there is no such list.
        ConfigurationError: it is damaged, or of another vocabulary.
    """
    if vocabulary is None:
        return target.embeddings, None
    folder = Path(vocabulary).expanduser()
    folder = folder if folder.is_dir() else PROJECT / folder
    found = read_id_map(folder)
    if found is None:
        raise WeightsNotFound(
            f"method.vocabulary={vocabulary}: there is no {ID_MAP_FILE} in that folder. Name a "
            "draft model's folder that has one, or type method.vocabulary=null for all ids."
        )
    ids = torch.from_numpy(found[found >= 0]).to(target.device)
    if not len(ids) or int(ids.max()) >= target.vocab_size:
        raise ConfigurationError(
            f"method.vocabulary={vocabulary} lists ids of another vocabulary than the target's "
            f"{target.vocab_size}. Type method.vocabulary=null for all ids."
        )
    return ShortList(target.embeddings, ids), ids
