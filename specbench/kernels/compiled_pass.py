"""Which models have their passes run by one call (``pass_kernels``), and what that call is given.

All of this must hold, or passes go through transformers' layers as those of any other model do:

- the classes are a family's of ``architectures.FAMILIES``, unchanged by subclasses or hooks;
- float32 on the CPU, and every product stands packed in panels;
- rotations are those of a fixed table of positions, over whole heads;
- the gate is SiLU;
- no key of the pass lies outside a sliding window.

The formulas are the modules' own. Their tensors are used where they lie, and nothing is copied but
the tables of cosines and sines.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specbench.arrays import IntArray
from specbench.kernels import pass_kernels
from specbench.kernels.architectures import (
    ATTENTION,
    FAMILIES,
    GATED,
    NORM,
    inputs_of,
    known_part,
)
from specbench.kernels.autotune import available_kernels, choose_distances
from specbench.kernels.compiled_call import CompiledCall, Segment
from specbench.kernels.fused_layers import count_fused, fuse, is_fused
from specbench.kernels.packed_linear import (
    PackedLinear,
    SiblingLinear,
    pack_linears,
    packed_weights,
    panels_of,
)
from specbench.kernels.panel_kernels import WIDTH

ONE_CALL = "one call"  # of a manifest's packed weights, ``pass``; else why not
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """What a pass gives, in memory of its own as long as somebody holds it."""

    logits: torch.Tensor  # [kept, vocab]
    choices: IntArray  # [kept] their greedy ids, -1 where the largest logit is not finite
    hidden: Mapping[int, torch.Tensor]  # [rows, hidden] by number


class CompiledPass(CompiledCall):
    """The passes of one model; one at a time.

    Args:
        max_len: rows of a cache.
        max_rows: of a pass, of all segments together.
        windows: sizes of the layers' sliding windows.
    """

    def __init__(
        self, model: PreTrainedModel, max_len: int, max_rows: int, windows: Sequence[int] = ()
    ) -> None:
        network: Any = model
        decoder = network.model
        layers = list(decoder.layers)
        attention, config = layers[0].self_attn, model.config
        self._most_keys, self._most_rows = min([max_len, *windows]), max_rows
        head = network.lm_head
        self._vocab = head.out_features
        self._device = decoder.norm.weight.device
        epsilons = [
            decoder.norm.variance_epsilon,
            getattr(getattr(attention, "q_norm", None), "variance_epsilon", 0.0),
        ]
        super().__init__(
            pass_kernels.compiled(),
            len(layers),
            hidden=int(config.hidden_size),
            inner=int(config.intermediate_size),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            numbers=[*epsilons, attention.scaling],
        )
        self._table[:] = [self._layer(layer) for layer in layers]
        self._n_layers = len(layers)
        words = self._words
        words[pass_kernels.VOCAB] = self._vocab
        with torch.inference_mode():
            positions = torch.arange(max_len, device=self._device)[None]
            like = torch.empty(1, dtype=torch.float32, device=self._device)
            turned = decoder.rotary_emb(like, position_ids=positions)
            self._turned = [values[0].contiguous() for values in turned]
        self._embedding = decoder.embed_tokens.weight.detach()
        words[pass_kernels.FINAL_NORM] = self._address(decoder.norm.weight)
        words[pass_kernels.LM_HEAD : pass_kernels.LM_HEAD_BIAS + 1] = self._product(head)
        self._reserve(max_rows, max_len)
        self._logits = np.empty((0, 0), dtype=np.float32)
        self._lent: Callable[[], object] = lambda: None  # the part of it that a tensor still holds

    def _memory_of_logits(self, rows: int) -> torch.Tensor:
        """``[rows, vocab]``, padded; the last pass's again, where nobody holds that any more.

        The system gives pages to a large tensor and takes them back, which costs milliseconds.
        """
        width = -(-self._vocab // WIDTH) * WIDTH
        if self._lent() is not None:
            return torch.empty(rows, width, dtype=torch.float32)
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, width, dtype=torch.float32).numpy()
        lent = self._logits[:rows]
        self._lent = weakref.ref(lent)
        return torch.from_numpy(lent)

    def _layer(self, layer: Any) -> list[int]:
        products: Any = products_of_layer(layer)
        norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        return self._layer_words(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            products,
            [None if norm is None else norm.weight for norm in norms],
        )

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        *,
        keep: int = 0,
        hidden_layers: Sequence[int] = (),
    ) -> PassOutputs | None:
        """The pass over ``ids [rows]`` at ``positions [rows]``, the segments' rows in a line.

        None where it has more rows or keys than this is for: then nothing has been written.

        Args:
            keep: rows at the end whose logits are wanted; 0 for all.
            hidden_layers: numbers of hidden states, see ``Needs.hidden_layers``.
        """
        words, rows = self._words, len(ids)
        keys = max(segment.keys for segment in segments)
        if rows > self._most_rows or keys > self._most_keys:
            return None
        kept = keep or rows
        # By torch, which refuses what is outside.
        states = self._embedding.index_select(0, ids)
        cos, sin = (table.index_select(0, positions) for table in self._turned)
        logits = self._memory_of_logits(kept)
        choices = np.empty(kept, dtype=np.int64)
        self._wanted[:] = 0
        hidden = {
            i % (self._n_layers + 1): torch.empty(rows, self._hidden, dtype=torch.float32)
            for i in hidden_layers
        }
        for number, values in hidden.items():
            self._wanted[number] = values.data_ptr()
        words[pass_kernels.KEPT] = kept
        words[pass_kernels.LOGITS] = logits.data_ptr()
        words[pass_kernels.CHOICES] = choices.ctypes.data
        self._call(states, cos, sin, segments)
        by_number = {i: hidden[i % (self._n_layers + 1)] for i in hidden_layers}
        return PassOutputs(logits[:, : self._vocab], choices, by_number)


# -- for which models ------------------------------------------------------------------------------


def prepare(
    model: PreTrainedModel, memory_bytes: int, cache_dir: Path | None, one_call: bool
) -> dict[str, Any]:
    """Pack ``model``'s linears and fuse its layers, where there is memory for it.

    Returns:
        What stands packed in it (another target may have packed it before), as ``pass`` whether
        its passes are run by one call, and as ``ahead`` how many bytes ahead its panels are asked
        for, by form and rows; for the run's manifest.
    """
    found = packed_weights(model)
    reason = why_not(model) if one_call else "layer by layer, as asked"
    if memory_bytes:
        # One call needs all in panels; what is to go through its layers takes what is fastest.
        kernel = None if reason else "panels"
        found = pack_linears(model, memory_bytes=memory_bytes, cache_dir=cache_dir, kernel=kernel)
        found["fused"] = fuse(model)
    elif found["layers"]:
        found["fused"] = count_fused(model)
    if found["layers"]:
        if reason is None and not _all_in_panels(model):
            reason = "some products are not packed in panels"
        found["pass"] = reason or ONE_CALL
        found["ahead"] = choose_distances(panels_of(model))
    return found


def why_not(model: PreTrainedModel) -> str | None:
    """Why passes of ``model`` cannot be run by one call; None where they can, once it is packed."""
    network: Any = model
    kind = type(model).__name__
    family = kind.removesuffix("ForCausalLM")
    if family == kind or family not in FAMILIES or not _unchanged(network, family):
        return f"{kind} is not, or no longer, a model whose steps are all known"
    decoder, config = network.model, model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _FIXED_ROTATIONS:
        return f"rotations of kind {rope['rope_type']} change with the text"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a part of each head is not rotated"
    if config.hidden_act not in ("silu", "swish"):
        return f"the gate is {config.hidden_act}"
    parts = [dict(layer.mlp.named_children()) for layer in decoder.layers]
    gates = {type(p.get("act_fn", p.get("activation_fn"))).__name__ for p in parts}
    if not gates <= {"SiLU", "SiLUActivation"}:  # somebody put another there
        return f"the gate is {', '.join(sorted(gates))}"
    weights = (decoder.norm.weight, decoder.embed_tokens.weight)
    if any(weight.dtype != torch.float32 or not weight.is_cpu for weight in weights):
        return "weights are not float32 on the CPU"
    if "panels" not in available_kernels():
        return "this build of torch has no panels"
    return None


def _all_products(model: Any) -> list[PackedLinear | None]:
    products = [part for layer in model.model.layers for part in products_of_layer(layer)]
    return [*products, _joined([model.lm_head])]


def _all_in_panels(model: Any) -> bool:
    products = _all_products(model)
    return all(product is not None and product.panels is not None for product in products)


def _unchanged(network: Any, family: str) -> bool:
    """Whether each part is of the family's class, with nobody's hook on it."""
    expected = {f"{family}{part}" for part in (NORM, ATTENTION, GATED)}
    expected |= {f"{family}{part}" for part in ("ForCausalLM", "Model", "DecoderLayer")}
    found = set()
    for module in network.modules():
        if "forward" in vars(module) and not is_fused(module):
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        found.add(type(module).__name__)
        if known_part(module)[0] is None and type(module).__name__.startswith(family):
            ours = type(module).__module__.startswith("transformers.models.")
            if not ours or type(module).__name__ not in {*expected, f"{family}RotaryEmbedding"}:
                return False
    return expected <= found


def products_of_layer(layer: Any) -> list[PackedLinear | None]:
    """Of attention's input and output, and of the gated product's; None where there is none."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        _joined(inputs_of(attention)),
        _joined([attention.o_proj]),
        _joined(inputs_of(mlp)),
        _joined([mlp.down_proj]),
    ]


def _joined(linears: list[Any]) -> PackedLinear | None:
    """The one product that computes all of ``linears``; None where they have none."""
    if len(linears) == 1:
        return linears[0] if isinstance(linears[0], PackedLinear) else None
    products = {id(linear.product): linear.product for linear in linears if _is_sibling(linear)}
    if len(products) != 1 or not all(map(_is_sibling, linears)):
        return None
    (product,) = products.values()
    packed: PackedLinear = product.packed
    return packed


def _is_sibling(linear: Any) -> bool:
    return isinstance(linear, SiblingLinear)
