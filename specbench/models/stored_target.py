"""What a model's files say without its network: embedding, LM head, configuration.

Heads are replayed beside recorded states, so of the target they need no more. Two matrices are read
out of the weight files, and nothing else of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specbench.arrays import Array
from specbench.config.schema import FLOAT32_WEIGHTS, ModelConfig
from specbench.errors import NeedsNotMet, WeightsNotFound
from specbench.kernels.packed_linear import product_of
from specbench.models.checkpoints import int8, weights

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_LM_HEADS = ("lm_head", "embed_out")
_CONFIG = "config.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")


class StoredEmbeddings:
    """``specbench.decoding.protocols.TargetEmbeddings`` out of a model's files."""

    def __init__(
        self,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        lm_head_bias: torch.Tensor | None,
        draft_weights: str,
    ) -> None:
        self.embedding, self.lm_head, self.lm_head_bias = embedding, lm_head, lm_head_bias
        # In float32 on a CPU, as a live run has it: drafting is timed in a replay.
        self.packed = draft_weights
        self._product = product_of(lm_head, lm_head_bias, FLOAT32_WEIGHTS)

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[..., vocab]`` of states ``[..., hidden]`` after the final norm."""
        logits: torch.Tensor = self._product(states)
        return logits


class StoredTarget:
    """``specbench.decoding.protocols.TargetInfo`` out of a model's files.

    Args:
        model: the ``model`` node.
        device, dtype: where the matrices are wanted, and as what.
        draft_weights: as what heads are read on a CPU, see ``engine.draft_weights``.

    Raises:
        WeightsNotFound: the files are not to be had, or have no such matrices.
    """

    max_nodes = 0

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        draft_weights: str = FLOAT32_WEIGHTS,
    ) -> None:
        self.device, self.dtype, self._draft_weights = device, dtype, draft_weights
        self._model = model
        with weights.translated(model):
            whole = json.loads(_file(model, _CONFIG).read_text(encoding="utf-8"))
            self.config: dict[str, Any] = whole.get("text_config") or whole
            tied = self.config.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
            self.embeddings = self._ends(dict(_files(model)), bool(tied))
        self.vocab_size = len(self.embeddings.lm_head)

    @property
    def n_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def n_parameters(self) -> int:
        raise self._needs_model("the number of the target's parameters")

    @property
    def graph_tokens(self) -> int:
        return 0

    def fingerprint(self) -> Array:
        raise self._needs_model("a sample of the target's weights")

    def _ends(self, files: dict[str, Path], tied: bool) -> StoredEmbeddings:
        named = [key for key in files if key.endswith(_EMBEDDINGS)]
        if len(named) != 1:
            raise self._lacks(f"{len(named)} matrices are named as an embedding is", files)
        rows = self._read(files, named[0])
        own = [key for key in files if key.rpartition(".")[0] in _LM_HEADS]
        head = {key.rpartition(".")[2]: key for key in own}
        if tied or "weight" not in head:
            return StoredEmbeddings(rows, rows, None, self._draft_weights)
        bias = self._read(files, head["bias"]) if "bias" in head else None
        lm_head = self._read(files, head["weight"])
        return StoredEmbeddings(rows, lm_head, bias, self._draft_weights)

    def _read(self, files: dict[str, Path], key: str) -> torch.Tensor:
        file = files[key]
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            scale = f"{key}.scale"
            with safe_open(file, framework="pt") as stored:
                found = {name: stored.get_tensor(name) for name in (key, scale) if name in files}
            tensor = int8.restored(found, file)[key]
        else:
            tensor = _loaded(file)[key]
        return tensor.to(self.device, self.dtype)

    def _lacks(self, what: str, files: dict[str, Path]) -> WeightsNotFound:
        named = ", ".join(sorted({file.name for file in files.values()}))
        return WeightsNotFound(
            f"{weights.key_of(self._model)}={self._model.id}: {what} in {named}. A replay of heads "
            "reads one; run the method live (runner=offline)."
        )

    def _needs_model(self, what: str) -> NeedsNotMet:
        return NeedsNotMet(
            f"{what} is not known in a replay, which loads no model. Run it live (runner=offline)."
        )


def _files(model: ModelConfig) -> Iterator[tuple[str, Path]]:
    """The file of each tensor; of the hub's only those that are listed in no index are fetched."""
    place, _ = weights.source(model)
    for name in _INDEXES:
        index = _file(model, name, optional=True)
        if index is not None:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            kept = {key: file for key, file in named.items() if _is_end(key)}
            fetched = {file: _file(model, file) for file in set(kept.values())}
            yield from ((key, fetched[file]) for key, file in kept.items())
            return
    if isinstance(place, Path):
        files = [path for kind in ("*.safetensors", "*.bin") for path in sorted(place.glob(kind))]
    else:
        files = [path for n in _WHOLE if (path := _file(model, n, optional=True)) is not None][:1]
    for file in files:
        yield from ((key, file) for key in _keys(file) if _is_end(key))


def _is_end(key: str) -> bool:
    key = key.removesuffix(".scale")
    return key.endswith(_EMBEDDINGS) or key.rpartition(".")[0] in _LM_HEADS


def _file(model: ModelConfig, name: str, optional: bool = False) -> Any:
    """A file of the model; None where it may be missing and is."""
    place, options = weights.source(model)
    if isinstance(place, Path):
        file = place / name
        return file if file.is_file() or not optional else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(place, name, revision=options["revision"]))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        if optional:
            return None
        raise


def _keys(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as stored:
            return list(stored.keys())
    return list(_loaded(file))


def _loaded(file: Path) -> dict[str, Any]:
    mapped: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return mapped
