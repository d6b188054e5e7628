"""MTP heads: the layers for tokens further ahead that a model was trained with.

Paper: "DeepSeek-V3 Technical Report", arXiv 2412.19437. Upstream: huggingface/transformers 5.23,
``modeling_layers.py`` (``MtpModel``), ``generation/candidate_generator.py``
(``MTPCandidateGenerator``). They lie in the model's own checkpoint, which is the head's folder.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, TargetInfo
from specbench.errors import ConfigurationError, WeightsNotFound, first_line
from specbench.kernels import attention
from specbench.models.heads.decoder import TrainedHead
from specbench.models.heads.row_cache import Rows


class MtpHead(TrainedHead):
    """The MTP layers of one checkpoint, run with our cache.

    Row j of layer k reads row j of layer k - 1 (layer 0: the target's state) and token j + k + 1.
    Where that is not committed yet it is the token drafted from layer k - 1, so the last rows are
    read again in the next step. Positions count from 0 in each layer: only distances matter.

    Args:
        mtp: transformers' ``MtpModel``.
        shape: what ``RowCache`` reads of a ``LayerShape``.

    Attributes:
        drafted: ``[3, layers]`` of several layers: the tokens after the root, the nodes above
            them, and the probabilities of the paths.
    """

    compilable = False

    def __init__(self, target: TargetEmbeddings, mtp: Any, shape: Any) -> None:
        super().__init__(target, shape)
        self.layers = mtp.layers
        self.norm = mtp.shared_post_norm if mtp.use_shared_post_norm else torch.nn.Identity()
        self.drafted = torch.empty(3, 0)
        self._layer = 0
        self._reread: tuple[torch.Tensor, torch.Tensor] | None = None  # ids and states

    def catching_up(self, ids: torch.Tensor, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        n_layers, n_new = len(self.layers), len(ids)
        if n_layers == 1:
            return (yield from super().catching_up(ids, states))
        if self._reread is not None and self.cache.length:
            self.cache.truncate(self.cache.length - len(self._reread[0]))
            ids, states = (torch.cat(p) for p in zip(self._reread, (ids, states), strict=True))
        start, self._reread = self.cache.length, (ids[1 - n_layers :], states[1 - n_layers :])
        outputs, logits = [states], []
        for self._layer in range(n_layers):
            self.cache.truncate(start)
            rows = self.cache.committed_rows(len(ids))
            outputs.append((yield self._call(ids, outputs[-1], rows)))
            logits.append((yield from self.scoring(outputs[-1][-1:])))
            ids = torch.cat([ids[1:], self.to_target_ids(logits[-1].argmax(-1))])
        probs, tokens = torch.cat(logits).double().softmax(-1).max(-1)
        above = torch.arange(-1, n_layers - 1, device=ids.device)
        tokens = self.to_target_ids(tokens).double()
        self.drafted = torch.stack([tokens, above, probs.cumprod(0)])
        return outputs[1][-n_new:]

    def _call(self, ids: torch.Tensor, features: torch.Tensor, rows: Rows) -> ModelCall:
        key = self.key("layer", self._layer)
        return ModelCall(key, (ids, features, rows, self.cache), self._answer)

    def _read(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        out: torch.Tensor = self.layers[self._layer](
            tokens[None], features[None], position_embeddings=(rows.cos[None], rows.sin[None]),
            attention_mask=None, position_ids=None, past_key_values=rows, plan=rows.plan,
        )  # fmt: skip
        return self.norm(out[0])  # type: ignore[no-any-return]


def load(folder: Path, target: TargetInfo) -> MtpHead:
    """Load the MTP layers of the model in ``folder``.

    Raises:
        ConfigurationError: it is not the target, or has no MTP layers that are read here.
        WeightsNotFound: their weights are missing or damaged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    hidden = target.embeddings.embedding.shape[1]
    if not getattr(config, "num_mtp_layers", None) or config.hidden_size != hidden:
        raise ConfigurationError(
            f"method.head must be the target's own checkpoint, of a model whose MTP layers "
            f"(num_mtp_layers) transformers reads, got {folder}. Type method.head=FOLDER."
        )
    config.dtype = target.dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        mtp = MtpModel.from_pretrained(model, device_map={"": target.device})
    except (RuntimeError, ValueError, OSError) as error:
        raise WeightsNotFound(f"{folder} has no MTP layers: {first_line(error)}") from error
    config = mtp.config
    if mtp.has_per_layer_rope or {*(getattr(config, "layer_types", None) or ())} - {
        "full_attention"
    }:
        raise ConfigurationError(f"{folder}: MTP layers with windows or states are not read here.")
    attention.install(mtp)
    if target.dtype == torch.float64:
        mtp.set_experts_implementation("eager")  # the others multiply no float64
    rotary = type(model.get_decoder().rotary_emb)(config=config)
    rows = ((config.num_key_value_heads, config.head_dim),) * 2
    if getattr(config, "kv_lora_rank", None):  # the latents of keys and values, and the rotated key
        rows = ((1, config.kv_lora_rank), (1, config.qk_rope_head_dim))
    shape = SimpleNamespace(
        hidden_size=hidden, window=None, cached_rows=rows,
        inverse_frequencies=lambda: (rotary.inv_freq.double(), rotary.attention_scaling),
    )  # fmt: skip
    return MtpHead(target.embeddings, mtp.eval().requires_grad_(False), shape)
