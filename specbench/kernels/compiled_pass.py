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

from collections.abc import Mapping, Sequence
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
from specbench.kernels.autotune import available_kernels
from specbench.kernels.fused_layers import count_fused, fuse, is_fused
from specbench.kernels.packed_linear import (
    PackedLinear,
    SiblingLinear,
    pack_linears,
    packed_weights,
)
from specbench.kernels.panel_kernels import WIDTH, form_of

ONE_CALL = "one call"  # of a manifest's packed weights, ``pass``; else why not
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of a pass that continue one text.

    Attributes:
        storage: ``[2 * layers, batch, kv_heads, max_len, head_dim]``, see ``KVCache``.
        text: which of the batch is this text's.
        past: rows of the cache that all rows see.
        held: rows behind them that ``visible`` tells of.
        rows: that are read now; their keys and values are written behind.
        visible: ``[rows, held + rows]`` bool, which of held and own rows each sees; None where
            each sees all before it and itself.
    """

    storage: torch.Tensor
    text: int
    past: int
    held: int
    rows: int
    visible: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """What a pass gives, in new memory."""

    logits: torch.Tensor  # [kept, vocab]
    choices: IntArray  # [kept] their greedy ids, -1 where the largest logit is not finite
    hidden: Mapping[int, torch.Tensor]  # [rows, hidden] by number


class CompiledPass:
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
        size = attention.head_dim
        self._most_keys, self._most_rows = min([max_len, *windows]), max_rows
        self._n_layers, self._hidden = len(layers), int(config.hidden_size)
        head = network.lm_head
        self._vocab = head.out_features
        self._device = decoder.norm.weight.device
        self._run = pass_kernels.compiled()
        self._threads = 0
        self._kept: list[Any] = []  # whatever the addresses are of
        self._words = np.zeros(pass_kernels.CALL_WORDS, dtype=np.intp)
        words = self._words
        words[pass_kernels.LAYERS], words[pass_kernels.HIDDEN] = len(layers), self._hidden
        words[pass_kernels.HEADS] = config.num_attention_heads
        words[pass_kernels.KV_HEADS] = config.num_key_value_heads
        words[pass_kernels.HEAD_DIM], words[pass_kernels.VOCAB] = size, self._vocab
        inner = words[pass_kernels.INNER] = int(config.intermediate_size)
        table = np.array([self._layer(layer) for layer in layers], dtype=np.intp)
        numbers = np.array(
            [
                decoder.norm.variance_epsilon,
                getattr(getattr(attention, "q_norm", None), "variance_epsilon", 0.0),
                attention.scaling,
            ]
        )
        with torch.inference_mode():
            positions = torch.arange(max_len, device=self._device)[None]
            like = torch.empty(1, dtype=torch.float32, device=self._device)
            turned = decoder.rotary_emb(like, position_ids=positions)
            self._turned = [values[0].contiguous() for values in turned]
        self._embedding = decoder.embed_tokens.weight.detach()
        self._wanted = np.zeros(len(layers) + 1, dtype=np.intp)
        for place, value in (
            (pass_kernels.WEIGHTS, table),
            (pass_kernels.NUMBERS, numbers),
            (pass_kernels.WANTED, self._wanted),
            (pass_kernels.FINAL_NORM, decoder.norm.weight),
        ):
            words[place] = self._address(value)
        words[pass_kernels.LM_HEAD : pass_kernels.LM_HEAD_BIAS + 1] = self._product(head)
        wide = max(
            (words[pass_kernels.HEADS] + 2 * words[pass_kernels.KV_HEADS]) * size,
            2 * inner,
            self._hidden,
        )
        queries = int(words[pass_kernels.HEADS]) * size
        for place, columns in (
            (pass_kernels.NORMED, self._hidden),
            (pass_kernels.PRODUCT, int(wide) + WIDTH),
            (pass_kernels.QUERIES, queries),
            (pass_kernels.ATTENDED, queries),
            (pass_kernels.GATED, int(inner)),
        ):
            words[place] = self._address(torch.empty(max_rows, columns, dtype=torch.float32))
        words[pass_kernels.MEETING] = self._address(np.zeros(256, dtype=np.uint8))
        words[pass_kernels.SCRATCH_BYTES] = pass_kernels.scratch_bytes(size, max_len)

    def _address(self, value: Any) -> int:
        """Of a tensor or an array, which is kept from now on; 0 for None."""
        if value is None:
            return 0
        self._kept.append(value)
        return int(value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr())

    def _layer(self, layer: Any) -> list[int]:
        products: Any = _products(layer)
        qkv, out, gate_up, down = products
        norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        return [
            self._address(layer.input_layernorm.weight),
            *self._product(qkv),
            *(self._address(None if norm is None else norm.weight) for norm in norms),
            *self._product(out),
            self._address(layer.post_attention_layernorm.weight),
            *self._product(gate_up),
            *self._product(down),
        ]

    def _product(self, product: Any) -> list[int]:
        """The words of a product: its panels, their form and its bias."""
        panels = self._address(product.panels)
        return [panels, form_of(product.panels).number, self._address(product.bias)]

    def _use_threads(self) -> None:
        """Scratch for each of torch's threads."""
        threads = torch.get_num_threads()
        if threads == self._threads:
            return
        self._threads = threads
        each = int(self._words[pass_kernels.SCRATCH_BYTES])
        self._scratch = torch.empty(threads * each, dtype=torch.uint8)
        self._best = torch.empty(threads * self._most_rows * WIDTH * 8, dtype=torch.uint8)
        self._words[pass_kernels.SCRATCH] = self._scratch.data_ptr()
        self._words[pass_kernels.BEST] = self._best.data_ptr()

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
        keys = max(segment.past + segment.held + segment.rows for segment in segments)
        if rows > self._most_rows or keys > self._most_keys:
            return None
        self._use_threads()
        kept = keep or rows
        # By torch, which refuses what is outside.
        states = self._embedding.index_select(0, ids)
        cos, sin = (table.index_select(0, positions) for table in self._turned)
        table = np.zeros((len(segments), pass_kernels.SEGMENT_WORDS), dtype=np.intp)
        seen = []  # until the pass is over
        first = 0
        for segment, place in zip(segments, table, strict=True):
            storage, visible = segment.storage, segment.visible
            per_kind, per_text, per_head = storage.stride()[:3]
            if visible is not None and visible.stride(1) != 1:
                visible = visible.contiguous()
            seen.append(visible)
            place[:] = (
                first,
                segment.rows,
                storage.data_ptr() + 4 * segment.text * per_text,
                per_head,
                per_kind,
                2 * per_kind,
                segment.past,
                segment.held,
                0 if visible is None else visible.data_ptr(),
                0 if visible is None else visible.stride(0),
            )
            first += segment.rows
        logits = torch.empty(kept, -(-self._vocab // WIDTH) * WIDTH, dtype=torch.float32)
        choices = np.empty(kept, dtype=np.int64)
        self._wanted[:] = 0
        hidden = {
            i % (self._n_layers + 1): torch.empty(rows, self._hidden, dtype=torch.float32)
            for i in hidden_layers
        }
        for number, values in hidden.items():
            self._wanted[number] = values.data_ptr()
        words[pass_kernels.ROWS], words[pass_kernels.KEPT] = rows, kept
        words[pass_kernels.STATES] = states.data_ptr()
        words[pass_kernels.COSINES], words[pass_kernels.SINES] = cos.data_ptr(), sin.data_ptr()
        words[pass_kernels.SEGMENTS] = len(segments)
        words[pass_kernels.SEGMENT_TABLE] = table.ctypes.data
        words[pass_kernels.LOGITS] = logits.data_ptr()
        words[pass_kernels.CHOICES] = choices.ctypes.data
        self._run(words.ctypes.data, self._threads)
        by_number = {i: hidden[i % (self._n_layers + 1)] for i in hidden_layers}
        return PassOutputs(logits[:, : self._vocab], choices, by_number)


# -- for which models ------------------------------------------------------------------------------


def prepare(
    model: PreTrainedModel, memory_bytes: int, cache_dir: Path | None, one_call: bool
) -> dict[str, Any]:
    """Pack ``model``'s linears and fuse its layers, where there is memory for it.

    Returns:
        What stands packed in it (another target may have packed it before), and as ``pass``
        whether its passes are run by one call; for the run's manifest.
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


def products_of(model: Any) -> list[PackedLinear]:
    """The products of a pass in their order, of a model whose pass is one call."""
    return [product for product in _all_products(model) if product is not None]


def _all_products(model: Any) -> list[PackedLinear | None]:
    products = [part for layer in model.model.layers for part in _products(layer)]
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


def _products(layer: Any) -> list[PackedLinear | None]:
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
