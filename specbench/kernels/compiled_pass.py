"""Which models have their passes run by one call (``pass_kernels``), and what that call is given.

All of this must hold, or passes go through transformers' layers as those of any other model do:

- the classes are a family's of ``architectures.FAMILIES``, unchanged by subclasses or hooks;
- float32 on the CPU, and there is memory for every product in panels;
- rotations are those of a fixed table of positions, over whole heads;
- the gate is SiLU;
- no key of the pass lies outside a sliding window.

The formulas are the modules' own, and the modules stay as they are: what is not run by one call
goes through transformers' layers and their weights.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from specbench.kernels.compiled_call import CompiledCall, Segment
from specbench.kernels.packed_linear import Product
from specbench.kernels.panel_kernels import FLOAT32, WIDTH, available, form_of
from specbench.kernels.prefetch import choose_distances
from specbench.kernels.weight_forms import give_back, is_quantised, short_bytes, unchanged_regions

ONE_CALL = "one call"  # of a manifest's packed weights, ``pass``; else why not
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_PACKED = "_specbench_packed"  # the model's attribute


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model's products in panels, packed once for all who run its passes.

    Attributes:
        layers: by layer, of attention's input and output, of the gated product's input and output.
    """

    layers: tuple[tuple[Product, ...], ...]
    lm_head: Product

    @property
    def panels(self) -> list[torch.Tensor]:
        """Panels of all products."""
        products = [product for layer in self.layers for product in layer]
        return [product.panels for product in (*products, self.lm_head)]


def packed_model(model: Any) -> PackedModel | None:
    """Get what `prepare` packed of ``model``; None if its passes go through its layers."""
    return getattr(model, _PACKED, None)


def packed_memory(model: PreTrainedModel) -> list[torch.Tensor]:
    """List the memory of ``model``'s float32 panels, float32 ``[n]`` for each mapping."""
    packed = packed_model(model)
    spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for panels in packed.panels if packed else ():
        if form_of(panels) is not FLOAT32:
            continue
        storage = panels.untyped_storage()
        begin = panels.data_ptr() - storage.data_ptr()
        _, first, last = spans.get(storage.data_ptr(), (storage, begin, begin))
        span = (storage, min(first, begin), max(last, begin + panels.nbytes))
        spans[storage.data_ptr()] = span
    return [
        torch.empty(0).set_(storage, first // 4, ((last - first) // 4,))  # type: ignore[call-overload]
        for storage, first, last in spans.values()
    ]


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """Outputs of a pass, in memory that is not reused while they are referenced."""

    logits: torch.Tensor  # [kept, vocab]
    choices: IntArray  # [kept] their greedy ids, -1 where the largest logit is not finite
    hidden: Mapping[int, torch.Tensor]  # [rows, hidden] by number


class CompiledPass(CompiledCall):
    """The passes of one model; one at a time.

    Args:
        max_len: rows of a cache.
        max_rows: of a pass, of all segments together.
        windows: sizes of the layers' sliding windows.

    Attributes:
        most_keys: of a pass.
    """

    def __init__(
        self, model: PreTrainedModel, max_len: int, max_rows: int, windows: Sequence[int] = ()
    ) -> None:
        network: Any = model
        decoder = network.model
        layers = list(decoder.layers)
        attention, config = layers[0].self_attn, model.config
        self.most_keys, self._most_rows = min([max_len, *windows]), max_rows
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
        packed = packed_model(model)
        assert packed is not None, "prepare() packs a model's products"
        self._table[:] = list(map(self._layer, layers, packed.layers))
        self._n_layers = len(layers)
        fields = self._fields
        fields[pass_kernels.VOCAB] = self._vocab
        with torch.inference_mode():
            positions = torch.arange(max_len, device=self._device)[None]
            like = torch.empty(1, dtype=torch.float32, device=self._device)
            turned = decoder.rotary_emb(like, position_ids=positions)
            self._turned = [values[0].contiguous() for values in turned]
        self._embedding = decoder.embed_tokens.weight.detach()
        fields[pass_kernels.FINAL_NORM] = self._address(decoder.norm.weight)
        fields[pass_kernels.LM_HEAD : pass_kernels.LM_HEAD_BIAS + 1] = self._product(packed.lm_head)
        self._reserve(max_rows, max_len)
        self._logits = np.empty((0, 0), dtype=np.float32)
        self._lent: Callable[[], object] = lambda: None  # the part of it that a tensor still holds

    def _memory_of_logits(self, rows: int) -> torch.Tensor:
        """Get memory ``[rows, vocab]``, padded; reuses the last pass's once it is released.

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

    def _layer(self, layer: Any, products: Sequence[Product]) -> list[int]:
        norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        return self._layer_fields(
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
        """Run the pass over ``ids [rows]`` at ``positions [rows]``, segment after segment.

        None where it has more rows or keys than this is for: then nothing has been written.

        Args:
            keep: rows at the end whose logits are wanted; 0 for all.
            hidden_layers: numbers of hidden states, see ``Needs.hidden_layers``.
        """
        fields, rows = self._fields, len(ids)
        keys = max(segment.keys for segment in segments)
        if rows > self._most_rows or keys > self.most_keys:
            return None
        logit_rows = keep or rows
        # By torch, which refuses what is outside.
        states = self._embedding.index_select(0, ids)
        cos, sin = (table.index_select(0, positions) for table in self._turned)
        logits = self._memory_of_logits(logit_rows)
        choices = np.empty(logit_rows, dtype=np.int64)
        self._state_addresses[:] = 0
        hidden = {
            i % (self._n_layers + 1): torch.empty(rows, self._hidden, dtype=torch.float32)
            for i in hidden_layers
        }
        for number, values in hidden.items():
            self._state_addresses[number] = values.data_ptr()
        fields[pass_kernels.KEPT] = logit_rows
        fields[pass_kernels.LOGITS] = logits.data_ptr()
        fields[pass_kernels.CHOICES] = choices.ctypes.data
        self._call(states, cos, sin, segments)
        by_number = {i: hidden[i % (self._n_layers + 1)] for i in hidden_layers}
        return PassOutputs(logits[:, : self._vocab], choices, by_number)


# -- for which models ------------------------------------------------------------------------------


def prepare(model: PreTrainedModel, memory_bytes: int) -> dict[str, Any]:
    """Pack ``model``'s products where its passes can be run by one call and memory suffices.

    Args:
        memory_bytes: that panels may take; 0 packs nothing.

    Returns:
        How many products are packed now (another target may have packed them), their bytes and
        forms; as ``pass`` whether passes are run by one call, else why not; as ``ahead`` how many
        bytes ahead panels are asked for, by form and rows. For the run's manifest.
    """
    reason = None
    if packed_model(model) is None and memory_bytes:
        reason = why_not(model) or _too_large(model, memory_bytes)
        if reason is None:
            _pack(model)
    packed = packed_model(model)
    panels = [] if packed is None else packed.panels
    described: dict[str, Any] = {
        "products": len(panels),
        "bytes": sum(part.nbytes for part in panels),
        "forms": dict(Counter(form_of(part).name for part in panels)),
    }
    if reason is not None or panels:
        described["pass"] = reason or ONE_CALL
    if panels:
        described["ahead"] = choose_distances(panels)
    return described


@torch.inference_mode()
def _pack(model: PreTrainedModel) -> None:
    network: Any = model
    regions = unchanged_regions()
    layers = []
    for layer in network.model.layers:
        linears = linears_of_layer(layer)
        layers.append(tuple(map(Product.from_linears, linears)))
        for linear in _flat(linears):
            give_back(linear.weight, regions)
    lm_head = Product.from_linears([network.lm_head])
    if network.lm_head.weight is not network.model.embed_tokens.weight:
        give_back(network.lm_head.weight, regions)
    setattr(model, _PACKED, PackedModel(tuple(layers), lm_head))


def _too_large(model: Any, memory_bytes: int) -> str | None:
    linears = [linear for layer in model.model.layers for linear in _flat(linears_of_layer(layer))]
    required = sum(short_bytes(linear.weight) for linear in (*linears, model.lm_head))
    if required <= memory_bytes:
        return None
    return f"engine.packed.memory_gb={memory_bytes / 1e9:g} is less than {required / 1e9:.2g}"


def layers_not_known(model: PreTrainedModel) -> str | None:
    """Say why the steps of ``model``'s layers are not known; None if they all are."""
    network: Any = model
    if is_quantised(model):
        return "its weights are quantised"
    kind = type(model).__name__
    family = kind.removesuffix("ForCausalLM")
    if family == kind or family not in FAMILIES or not _unchanged(network, family):
        return f"{kind} is not, or no longer, a model whose steps are all known"
    if model.config.hidden_act not in ("silu", "swish"):
        return f"the gate is {model.config.hidden_act}"
    parts = [dict(layer.mlp.named_children()) for layer in network.model.layers]
    gates = {type(p.get("act_fn", p.get("activation_fn"))).__name__ for p in parts}
    if not gates <= {"SiLU", "SiLUActivation"}:  # replaced by the caller
        return f"the gate is {', '.join(sorted(gates))}"
    return None


def why_not(model: PreTrainedModel) -> str | None:
    """Say why passes of ``model`` cannot be run by one call; None if they can, once packed."""
    if reason := layers_not_known(model):
        return reason
    network: Any = model
    decoder, rope = network.model, getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _FIXED_ROTATIONS:
        return f"rotations of kind {rope['rope_type']} change with the text"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a part of each head is not rotated"
    weights = (decoder.norm.weight, decoder.embed_tokens.weight)
    if any(weight.dtype != torch.float32 or not weight.is_cpu for weight in weights):
        return "weights are not float32 on the CPU"
    if not available():
        return "this build of torch has no panels"
    return None


def _unchanged(network: Any, family: str) -> bool:
    """Return True if all parts have the family's classes, without hooks."""
    expected = {f"{family}{part}" for part in (NORM, ATTENTION, GATED)}
    expected |= {f"{family}{part}" for part in ("ForCausalLM", "Model", "DecoderLayer")}
    classes = set()
    for module in network.modules():
        if "forward" in vars(module):
            return False
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        classes.add(type(module).__name__)
        if known_part(module)[0] is None and type(module).__name__.startswith(family):
            ours = type(module).__module__.startswith("transformers.models.")
            if not ours or type(module).__name__ not in {*expected, f"{family}RotaryEmbedding"}:
                return False
    return expected <= classes


def linears_of_layer(layer: Any) -> tuple[list[Any], ...]:
    """List the linears of attention's input and output, and the gated product's, as in the call."""
    attention, mlp = layer.self_attn, layer.mlp
    return inputs_of(attention), [attention.o_proj], inputs_of(mlp), [mlp.down_proj]


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [linear for group in groups for linear in group]
