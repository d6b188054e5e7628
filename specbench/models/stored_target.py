"""A target without its network, from a model's files: embedding, LM head, configuration.

A replay of heads reads recorded states, so it needs nothing else of the target. Only two matrices
are read from the weight files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specbench.arrays import Array
from specbench.config.schema import FLOAT32_WEIGHTS, ModelConfig
from specbench.errors import NeedsNotMet, WeightsNotFound
from specbench.kernels.packed_linear import product_of
from specbench.models.checkpoints import int8, weights
from specbench.models.hidden_states import Embeddings

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_LM_HEADS = ("lm_head", "embed_out")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")


class StoredTarget:
    """``specbench.decoding.protocols.TargetInfo`` out of a model's files.

    Args:
        model: the ``model`` node.
        device, dtype: where the matrices are wanted, and as what.
        draft_weights: as what heads are read on a CPU, see ``engine.draft_weights``.

    Raises:
        WeightsNotFound: the files are not to be had, or have no such matrices.
    """

    max_nodes = graph_tokens = 0

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        draft_weights: str = FLOAT32_WEIGHTS,
    ) -> None:
        self.device, self.dtype = device, dtype
        with weights.translated(model):
            whole = json.loads(_files(model, "config.json")[0].read_text(encoding="utf-8"))
            files = _end_files(model)
            ends = {key: value for file in files for key, value in _ends_of(file).items()}
        self.config: dict[str, Any] = whole.get("text_config") or whole
        embeddings = [value for key, value in ends.items() if key.endswith(_EMBEDDINGS)]
        if len(embeddings) != 1:
            raise WeightsNotFound(
                f"{weights.key_of(model)}={model.id}: {len(embeddings)} matrices are named as an "
                f"embedding is in {', '.join(sorted({file.name for file in files}))}. A replay of "
                "heads reads one; run the method live (runner=offline)."
            )
        head = {
            name: value.to(device, dtype)
            for key, value in ends.items()
            for lm_head, _, name in [key.rpartition(".")]
            if lm_head in _LM_HEADS
        }
        rows = embeddings[0].to(device, dtype)
        if self.config.get("tie_word_embeddings", whole.get("tie_word_embeddings")):
            head = {}
        bias = head.get("bias") if "weight" in head else None
        lm_head = head.get("weight", rows)
        # In float32 on a CPU, as a live run has it: drafting is timed in a replay.
        product = product_of(lm_head, bias, FLOAT32_WEIGHTS)
        self.embeddings = Embeddings(rows, lm_head, bias, draft_weights, product)
        self.vocab_size = len(lm_head)

    @property
    def n_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def n_parameters(self) -> int:
        raise _needs_model("the number of the target's parameters")

    def fingerprint(self) -> Array:
        raise _needs_model("a sample of the target's weights")


def _needs_model(subject: str) -> NeedsNotMet:
    return NeedsNotMet(
        f"{subject} is not known in a replay, which loads no model. Run it live (runner=offline)."
    )


def _end_files(model: ModelConfig) -> list[Path]:
    """List the weight files with embedding or LM head; only those are fetched from the hub."""
    for index in _files(model, *_INDEXES):
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return _files(model, *sorted({file for key, file in named.items() if _is_end(key)}))
    folder_or_id, _ = weights.source(model)
    if isinstance(folder_or_id, Path):
        return [p for kind in ("*.safetensors", "*.bin") for p in sorted(folder_or_id.glob(kind))]
    return _files(model, *_WHOLE)[:1]


def _files(model: ModelConfig, *names: str) -> list[Path]:
    """Find those of the files ``names`` that the model has."""
    from transformers.utils.hub import cached_file

    folder_or_id, options = weights.source(model)
    options |= {"_raise_exceptions_for_missing_entries": False}
    paths = (cached_file(folder_or_id, name, **options) for name in names)
    return [Path(path) for path in paths if path is not None]


def _is_end(key: str) -> bool:
    key = key.removesuffix(".scale")
    return key.endswith(_EMBEDDINGS) or key.rpartition(".")[0] in _LM_HEADS


def _ends_of(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as stored:
            ends = {key: stored.get_tensor(key) for key in stored.keys() if _is_end(key)}  # noqa: SIM118
        return int8.restored(ends, file)
    mapped = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {key: value for key, value in mapped.items() if _is_end(key)}
