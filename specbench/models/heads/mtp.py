"""MTP heads: the layers for tokens further ahead that a model was trained with.

Paper: "DeepSeek-V3 Technical Report", arXiv 2412.19437. Upstream: huggingface/transformers 5.23,
``modeling_layers.py`` (``MtpModel``), ``generation/candidate_generator.py``
(``MTPCandidateGenerator``). They lie in the model's own checkpoint, which is the head's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbench.decoding.protocols import ModelCall, ModelWork, TargetEmbeddings, TargetInfo
from specbench.errors import ConfigurationError, WeightsNotFound, first_line
from specbench.kernels import attention
from specbench.models.heads.decoder import TrainedHead
from specbench.models.heads.layer_shape import LayerShape
from specbench.models.heads.row_cache import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape(LayerShape):
    rotary: Any  # the model's rotary embedding

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        return self.rotary.inv_freq.double(), self.rotary.attention_scaling


class MtpHead(TrainedHead):
    """The MTP layers of one checkpoint, run with our cache.

    Row j of layer k reads row j of layer k - 1 (layer 0: the target's state) and token j + k + 1.
    Where that is not committed yet it is the token drafted from layer k - 1, so the last rows are
    read again in the next step. Positions count from 0 in each layer: only distances matter.

    Args:
        mtp: transformers' ``MtpModel``.

    Attributes:
        drafted: ``[3, layers]`` of several layers: the ids after the root, as they were read with
            it, the numbers of the nodes above, and the probabilities of the path down to each.
    """

    compilable = False

    def __init__(self, target: TargetEmbeddings, mtp: Any, shape: LayerShape) -> None:
        super().__init__(target, shape)
        self.layers = mtp.layers
        self.norm = mtp.shared_post_norm if mtp.use_shared_post_norm else torch.nn.Identity()
        self.drafted = torch.empty(3, 0)
        self._layer = 0
        self._reread: tuple[torch.Tensor, torch.Tensor] | None = None  # ids and states

    def catching_up(self, ids: torch.Tensor, states: torch.Tensor) -> ModelWork[torch.Tensor]:
        if len(self.layers) == 1:
            return (yield from super().catching_up(ids, states))
        n_new = len(ids)
        if self._reread is not None and self.cache.length:
            self.cache.truncate(self.cache.length - len(self._reread[0]))
            ids, states = (torch.cat(p) for p in zip(self._reread, (ids, states), strict=True))
        start, n_again = self.cache.length, len(self.layers) - 1
        self._reread = ids[-n_again:], states[-n_again:]
        outputs, tokens, probs = [states], [], [torch.ones((), dtype=torch.float64)]
        for layer in range(len(self.layers)):
            self._layer = layer
            self.cache.truncate(start)
            rows = self.cache.committed_rows(len(ids))
            outputs.append((yield self._call(ids, outputs[-1], rows)))
            prob, token = (yield from self.scoring(outputs[-1][-1:])).double().softmax(-1).max(-1)
            tokens.append(self.to_target_ids(token))
            probs.append(probs[-1] * prob)
            ids = torch.cat([ids[1:], tokens[-1]])
        above = torch.arange(-1, len(tokens) - 1, device=ids.device)
        self.drafted = torch.stack([torch.cat(tokens).double(), above, torch.cat(probs[1:])])
        return outputs[1][-n_new:]

    def _call(self, ids: torch.Tensor, features: torch.Tensor, rows: Rows) -> ModelCall:
        key = self.key("layer", self._layer)
        return ModelCall(key, (ids, features, rows, self.cache), self._answer)

    def _read(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        out: torch.Tensor = self.layers[self._layer](
            tokens[None],
            features[None],
            position_embeddings=(rows.cos[None], rows.sin[None]),
            attention_mask=None,
            position_ids=None,
            past_key_values=rows,
            plan=rows.plan,
        )
        return self.norm(out[0])  # type: ignore[no-any-return]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[..., vocab]`` of features, which include the layer's last norm."""
        return self.target.logits(features)


def load(folder: Path, target: TargetInfo) -> MtpHead:
    """Load the MTP layers of the model in ``folder``.

    Raises:
        ConfigurationError: the model has none that transformers reads, they have windows, or it is
            not the target.
        WeightsNotFound: their weights are missing or damaged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    hidden = target.embeddings.embedding.shape[1]
    for key, wanted in (("num_mtp_layers", None), ("hidden_size", hidden)):
        if not (value := getattr(config, key, None)) or value != (wanted or value):
            raise ConfigurationError(
                f"{folder}: `{key}` must be {wanted or 'at least 1'}, got {value}. Name the "
                "target's own checkpoint, of a model with MTP layers: method.head=FOLDER."
            )
    config.dtype = target.dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    attention.install(model)
    try:
        mtp = MtpModel.from_pretrained(model, device_map={"": target.device})
    except (RuntimeError, ValueError, OSError) as error:
        raise WeightsNotFound(f"{folder} has no MTP layers: {first_line(error)}") from error
    own = mtp.config
    if mtp.has_per_layer_rope or {*(getattr(own, "layer_types", None) or ())} - {"full_attention"}:
        raise ConfigurationError(f"{folder}: MTP layers with windows or states are not read here.")
    attention.install(mtp)
    if target.dtype == torch.float64:
        mtp.set_experts_implementation("eager")  # the others multiply no float64
    mtp.eval().requires_grad_(False)
    rotary = type(model.get_decoder().rotary_emb)(config=config)
    shape = _Shape(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        n_heads=own.num_attention_heads,
        n_kv_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        rms_norm_eps=own.rms_norm_eps,
        rope_theta=0.0,
        rotary=rotary,
    )
    return MtpHead(target.embeddings, mtp, shape)
