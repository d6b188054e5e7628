"""Head checkpoints: a folder with config.json and one weight file, every key accounted for.

The published loaders ignore what they miss. A missing bias or a norm too many costs half of the
accepted tokens and raises nothing, so modules here have the names of the files' keys, and each key
must be there.
"""

from __future__ import annotations

import json
import logging
import re
import textwrap
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

EMBEDDING = "embed_tokens.weight"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it lies in its folder."""

    file: Path  # the weight file
    config: Mapping[str, Any]  # of config.json
    tensors: Mapping[str, torch.Tensor]  # in the file's dtypes

    def refuse(self, reason: str) -> WeightsNotFound:
        """Make the error ``FILE reason``."""
        return WeightsNotFound(f"{self.file} {reason}")

    def weight(self, key: str, target: TargetInfo) -> torch.Tensor:
        """Give a weight in the target's dtype, on its device.

        Raises:
            WeightsNotFound: it is no matrix of real numbers, or not finite in that dtype.
        """
        tensor = self.tensors[key]
        if tensor.dtype not in _FLOATS or tensor.layout != torch.strided or tensor.is_meta:
            raise self.refuse(
                f"has {key} as {tensor.dtype}, {tensor.layout} on {tensor.device}, which is no "
                "matrix of real numbers without a scale. Save it as float32, float16 or bfloat16, "
                "or fetch the head again."
            )
        value = tensor.to(target.device, target.dtype)
        if not value.isfinite().all():
            if not tensor.isfinite().all():
                raise self.refuse(f"is damaged: {key} is not finite. Fetch it again.")
            raise self.refuse(
                f"has numbers up to {float(tensor.abs().max()):.3g} in {key}, too large for "
                f"{str(target.dtype)[6:]}. Type model.dtype=bfloat16 or model.dtype=float32."
            )
        return value


def read(folder: Path, names: Sequence[str]) -> Checkpoint:
    """Read the first of the files ``names`` that ``folder`` has, and its config.json.

    Files that end in ``.safetensors`` are read as such, all others as torch's, weights only.
    Matrices that are kept as bytes with scales (``checkpoints/int8.py``) come as float32.

    Raises:
        WeightsNotFound: folder, config or weights are missing or damaged.
    """
    remedy = f"Name a folder that holds config.json and {' or '.join(names)}."
    config = read_json(folder, remedy)
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise WeightsNotFound(f"{folder} has no weights of such a head. {remedy}")
    return Checkpoint(file, config, _tensors(file))


def read_json(folder: Path, remedy: str = "Fetch it again.") -> dict[str, Any]:
    """Read the folder's config.json; ``remedy`` tells what to do where it is damaged.

    Raises:
        WeightsNotFound: it cannot be read, or is no object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsNotFound(f"{file} cannot be read: {first_line(error)}. {remedy}") from error
    if not isinstance(config, dict):
        raise WeightsNotFound(f"{file} is not a JSON object. {remedy}")
    return config


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    safe = file.suffix == ".safetensors"
    try:
        stored: Any = load_file(file) if safe else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a damaged byte leads to
        raise WeightsNotFound(
            f"{file} is damaged, or holds more than weights: {first_line(error)}. Fetch it again."
        ) from error
    items = stored.items() if isinstance(stored, dict) else [(None, None)]
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in items):
        raise WeightsNotFound(f"{file} does not hold named tensors. Fetch it again.")
    return int8.restored(stored, file) if safe else dict(stored)


def fill(
    module: nn.Module, checkpoint: Checkpoint, target: TargetInfo, *, ignored: str = ""
) -> None:
    """Give ``module`` (made on the meta device) the weights of a checkpoint, and freeze it.

    A module with several names has one weight, and the file a copy for each.

    Args:
        target: whose head it is; products are packed where its own are.
        ignored: a pattern of keys that the file may have besides.

    Raises:
        WeightsNotFound: names keys that are missing, unknown, of another shape, or not finite.
    """
    names = module.state_dict().keys()
    state = {
        key: checkpoint.weight(key, target) if key in names else tensor
        for key, tensor in checkpoint.tensors.items()
        if key in names or not re.fullmatch(ignored, key)
    }
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reasons = textwrap.shorten(str(error).partition("\n")[2], 600)
        raise checkpoint.refuse(
            f"is not the head that its config.json and the target describe. {reasons} "
            "Take the head of this target, with its own config.json."
        ) from error
    for key, weight in module.state_dict().items():
        if weight.data_ptr() != state[key].data_ptr() and not torch.equal(weight, state[key]):
            raise checkpoint.refuse(f"has {key} as another matrix than its copies. Fetch it again.")
    module.eval().requires_grad_(False)
    if packed := target.embeddings.packed:  # a head reads as much for a token
        pack_linears(module, packed)


def count(keys: Iterable[str], pattern: str) -> int:
    """Count items by the first group of ``pattern``, a number that counts from 0.

    Configurations say it too, and some of them wrongly. Let the group have two digits at most: for
    a number without end a file would name too many modules to make.
    """
    return max((int(m[1]) for m in map(re.compile(pattern).match, keys) if m), default=-1) + 1


def own_embedding(checkpoint: Checkpoint, target: TargetInfo, width: int) -> torch.Tensor | None:
    """Give the head's embedding where it is not the target's; mostly it is a copy.

    Args:
        width: numbers that the head reads of each id.

    Raises:
        WeightsNotFound: it has not one such row for each of the target's ids, is not finite, or is
            missing where the target's has another width.
    """
    ends = target.embeddings.embedding
    vocab, hidden = ends.shape
    tensor = checkpoint.tensors.get(EMBEDDING)
    if tensor is None and width == hidden:
        return None
    if tensor is None or tensor.shape != (vocab, width):
        raise checkpoint.refuse(
            f"has {EMBEDDING} as {'nothing' if tensor is None else list(tensor.shape)}, where "
            f"config.json and the target ask for {[vocab, width]}. Take the head of this target."
        )
    weight = checkpoint.weight(EMBEDDING, target)
    table = ends.to(target.device, target.dtype)
    # One of the two may have been rounded to float16, the other to bfloat16.
    if weight.shape == table.shape and torch.allclose(weight, table, rtol=1e-2, atol=1e-5):
        return None
    log.warning("%s has another token embedding than the target; its own is used", checkpoint.file)
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
        """Compute logits ``[..., n]`` of states ``[..., hidden]`` after the final norm."""
        logits: torch.Tensor = self._product(states)
        return logits


def ends_of(
    target: TargetInfo, vocabulary: str | None
) -> tuple[TargetEmbeddings, torch.Tensor | None]:
    """Give a target's ends, and the ids that its logits are of; None for all.

    Args:
        vocabulary: ``method.vocabulary``: a folder with the list of a draft model's ids.

    Raises:
        WeightsNotFound: there is no such list.
        ConfigurationError: it is damaged, or of another vocabulary.
    """
    if vocabulary is None:
        return target.embeddings, None
    folder = Path(vocabulary).expanduser()
    listed = read_id_map(folder if folder.is_dir() else PROJECT / folder)
    if listed is None:
        raise WeightsNotFound(
            f"method.vocabulary={vocabulary}: there is no {ID_MAP_FILE} in that folder. Name a "
            "draft model's folder that has one, or type method.vocabulary=null for all ids."
        )
    ids = torch.from_numpy(listed[listed >= 0]).to(target.device)
    if not len(ids) or int(ids.max()) >= target.vocab_size:
        raise ConfigurationError(
            f"method.vocabulary={vocabulary} lists ids of another vocabulary than the target's "
            f"{target.vocab_size}. Type method.vocabulary=null for all ids."
        )
    return ShortList(target.embeddings, ids), ids
