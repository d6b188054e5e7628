"""A pass of fixed shape in few kernels: ten a layer instead of 40 to 58.

One row of a 7B model reads 13 GB of weights and launches 1,300 kernels in transformers' layers, of
which most touch a few thousand numbers: each costs its launch and little else. Here query, key and
value are one product, and so are gate and up; what lies between products is
`specbench.kernels.row_kernels` on a GPU, or the same in torch. Modules stay as they are, but that
weights of one product become views of one matrix: other programs with the same model run its own
layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specbench.kernels.architectures import sliding_window
from specbench.kernels.attention import AttentionPlan, attend
from specbench.kernels.compiled_pass import layers_not_known, linears_of_layer
from specbench.kernels.cuda_graphs import isolated
from specbench.kernels.static_rows import uses_triton, write_rows
from specbench.paths import file_name

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias
Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
_FUSED = "_specbench_fused"  # the model's attribute
_CALLS, _CACHE_BYTES = 64, 1 << 27  # of a timed product; twice the cache of an H200


def add_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two tensors ``[..., size]``, and norm the sum (RMS); both results."""
    if uses_triton(x):
        from specbench.kernels import row_kernels

        return row_kernels.add_norm(x, added, weight, eps)
    total = x if added is None else x + added
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, weight * scaled.to(total.dtype)


def gate(joined: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(first half) * second half`` of ``joined [..., 2 * size]``."""
    if uses_triton(joined):
        from specbench.kernels import row_kernels

        return row_kernels.gate(joined)
    first, second = joined.chunk(2, -1)
    return nn.functional.silu(first) * second


def rotate(
    joined: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: torch.Tensor | None,
    eps: float, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Rotate queries and keys of a joined product, and write keys and values to the cache.

    Args:
        joined: ``[batch, rows, (heads + 2 * kv_heads) * size]``: queries, keys and values.
        cos, sin: ``[batch, rows, rotated]`` as the model's rotary embedding gives them.
        norms: ``[2, size]`` weights of the heads' norms of queries and keys; None: not normed.
        keys, values: the layer's cache ``[batch, kv_heads, cache rows, size]``.
        first: ``[batch]`` the slot of the first row.

    Returns:
        Queries ``[batch, rows, heads, size]``.
    """
    if uses_triton(joined):
        from specbench.kernels import row_kernels

        return row_kernels.rotate(joined, cos, sin, norms, eps, keys, values, first)
    batch, rows, _ = joined.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    every = joined.view(batch, rows, -1, size)
    heads = every.shape[2] - 2 * kv_heads
    turned, new = every[:, :, : heads + kv_heads], every[:, :, heads + kv_heads :]
    if norms is not None:
        weights = torch.cat([norms[:1].expand(heads, -1), norms[1:].expand(kv_heads, -1)])
        turned = add_norm(turned, None, weights, eps)[1]
    rotated = cos.shape[-1]
    part = turned[..., :rotated]
    ahead, behind = part.chunk(2, -1)
    across = torch.cat((-behind, ahead), -1) * sin[:, :, None]
    turned = torch.cat((part * cos[:, :, None] + across, turned[..., rotated:]), -1)
    write_rows(keys, first, turned[:, :, heads:].transpose(1, 2))
    write_rows(values, first, new.transpose(1, 2))
    return turned[:, :, :heads]


class Products:
    """Multiplies by a linear's weights with the kernel that was the fastest, or by one for all.

    Args:
        exact: use one kernel for all numbers of rows, whose tile adds in one order.
        folder: where the fastest kernels are kept, by GPU; None keeps none.
    """

    def __init__(self, exact: bool = False, folder: Path | None = None) -> None:
        self.exact = exact
        self._folder = folder
        self._fastest: dict[str, str] = {}
        self._file: Path | None = None

    def __call__(self, x: torch.Tensor, pair: Pair) -> torch.Tensor:
        """Compute ``x [..., inner]`` times ``pair``, ``[..., outputs]``."""
        if not uses_triton(x):
            return linear(x, *pair)
        from specbench.kernels import row_kernels

        if self.exact:
            return row_kernels.product(x, *pair)
        rows = x.numel() // x.shape[-1]
        ways: dict[str, Product] = {"library": linear}
        if rows == 1:
            ways["row"] = row_kernels.row_product
        if rows <= row_kernels.TILE[0]:
            ways["tile"] = row_kernels.product
        if rows <= row_kernels.FEW[0]:
            ways["few"] = partial(row_kernels.product, tile=row_kernels.FEW)
        return ways[self._choice(ways, x, pair, rows)](x, *pair)

    def _choice(self, ways: Mapping[str, Product], x: torch.Tensor, pair: Pair, rows: int) -> str:
        """Time all ``ways`` once per shape and GPU; a capture's warm-ups come before it."""
        if not x.is_cuda or len(ways) == 1:
            return "library"
        self._read_saved(x.device)
        key = f"{rows} x {x.shape[-1]} x {len(pair[0])} {str(x.dtype).removeprefix('torch.')}"
        if key not in self._fastest:
            if torch.cuda.is_current_stream_capturing():
                return "library"
            times = {name: _seconds(way, x, pair) for name, way in ways.items()}
            self._fastest[key] = min(times, key=times.__getitem__)
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                partial = self._file.with_suffix(".partial")
                partial.write_text(json.dumps(_saved(self._file) | self._fastest, indent=1))
                partial.replace(self._file)
        way = self._fastest[key]
        return way if way in ways else "library"

    def _read_saved(self, device: torch.device) -> None:
        if self._folder is not None and self._file is None:
            name = f"{torch.cuda.get_device_name(device)}-{torch.__version__}"
            self._file = self._folder / f"{file_name(name)}.json"
            self._fastest = _saved(self._file)


def _saved(file: Path) -> dict[str, str]:
    """Read what earlier runs found to be the fastest; nothing of a damaged file."""
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError):
        saved = {}
    return saved if isinstance(saved, dict) else {}


def _seconds(way: Product, x: torch.Tensor, pair: Pair) -> float:
    """Time a product within a graph, as passes have it; infinite where it does not fit the GPU.

    Weights are read from memory: copies of a small matrix are too many for the GPU's cache.
    """
    weight, bias = pair
    others = min(_CACHE_BYTES // weight.nbytes, _CALLS - 1)
    copies = [weight, *(weight.clone() for _ in range(others))]
    try:
        way(x, *pair)  # compiles
    except Exception as error:  # Triton's, of which a build without it has no class
        if type(error).__name__ != "OutOfResources":
            raise
        return float("inf")
    graph = torch.cuda.CUDAGraph()
    with isolated(), torch.cuda.graph(graph):
        for number in range(_CALLS):
            way(x, copies[number % len(copies)], bias)
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(min(times[1:]))


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of a Llama-like decoder layer, those of one product stacked."""

    joined: Pair  # queries, keys and values
    out: Pair
    gated: Pair  # gate and up
    down: Pair
    norm: torch.Tensor  # before the gated product
    head_norms: torch.Tensor | None  # [2, head_dim] of queries and keys
    eps: float
    scaling: float
    window: int | None

    @staticmethod
    def from_module(layer: Any) -> FusedLayer:
        """Stack the weights of ``layer``, which become views of what is stacked."""
        attention, norm = layer.self_attn, layer.post_attention_layernorm
        norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        weights = [n.weight.detach() for n in norms if hasattr(n, "weight")]
        joined, out, gated, down = map(_stacked, linears_of_layer(layer))
        head_dim = getattr(attention, "head_dim", None) or attention._size
        return FusedLayer(
            joined, out, gated, down, norm.weight.detach(),
            torch.stack(weights) if weights else None,
            getattr(norm, "variance_epsilon", None) or norm.eps,
            head_dim**-0.5, sliding_window(attention),
        )  # fmt: skip

    def run(
        self,
        total: torch.Tensor,
        normed: torch.Tensor,
        turned: tuple[torch.Tensor, torch.Tensor],
        cached: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        product: Products,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over rows of ``plan.static``.

        Args:
            total: ``[batch, rows, hidden]`` the residual stream.
            normed: what attention reads.
            turned: cosines and sines ``[batch, rows, rotated]`` of the rows' positions.
            cached: the layer's keys and values ``[batch, kv_heads, cache rows, head_dim]``.

        Returns:
            The stream after attention, and what the gated product adds to it.
        """
        assert plan.static is not None
        joined = product(normed, self.joined)
        queries = rotate(joined, *turned, self.head_norms, self.eps, *cached, plan.static.first)
        attended, _ = attend(
            None, queries.transpose(1, 2), *cached, None, self.scaling, self.window, plan=plan
        )
        added = product(attended.flatten(2), self.out)
        total, normed = add_norm(total, added, self.norm, self.eps)
        return total, product(gate(product(normed, self.gated)), self.down)


def _stacked(linears: Sequence[nn.Linear]) -> Pair:
    """Concatenate weights and biases; they become views of the result, which takes no memory."""
    if len(linears) == 1:
        bias = linears[0].bias
        return linears[0].weight.detach(), None if bias is None else bias.detach()

    def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, stacked.split([len(part) for part in parts]), strict=True):
            part.data = view
        return stacked

    biases = [projection.bias for projection in linears if projection.bias is not None]
    return stack([projection.weight for projection in linears]), stack(biases) if biases else None


class FusedPass:
    """The passes of a model of a known family, in few kernels.

    Its weights are stacked on first use, and stay so: make it before graphs read them where they
    were.
    """

    def __init__(self, model: PreTrainedModel, product: Products) -> None:
        network: Any = model
        self._embedding, self._rotary = network.model.embed_tokens, network.model.rotary_emb
        self.product, head = product, network.lm_head
        self._lm_head: Pair = head.weight.detach(), None if head.bias is None else head.bias
        if not hasattr(model, _FUSED):
            layers = tuple(FusedLayer.from_module(layer) for layer in network.model.layers)
            setattr(model, _FUSED, layers)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # where weights were, in pieces too small for others
        self._layers: tuple[FusedLayer, ...] = getattr(model, _FUSED)
        norms = [layer.input_layernorm for layer in network.model.layers] + [network.model.norm]
        self._norms = [norm.weight.detach() for norm in norms]

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        cached: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Compute logits ``[batch, rows, vocab]``, and states ``[batch * rows, hidden]`` by number.

        Args:
            cached: gives a layer's keys and values ``[batch, kv_heads, cache rows, head_dim]``.
        """
        total = self._embedding(tokens)
        turned = self._rotary(total, positions)
        eps = self._layers[0].eps
        total, normed = add_norm(total, None, self._norms[0], eps)
        count, states = len(self._layers) + 1, {}
        numbers = {i % count for i in hidden_layers}
        for number, layer in enumerate(self._layers):
            if number in numbers:
                states[number] = total
            total, added = layer.run(total, normed, turned, cached(number), plan, self.product)
            total, normed = add_norm(total, added, self._norms[number + 1], eps)
        states[count - 1] = normed
        hidden = {i: states[i % count].flatten(0, 1) for i in hidden_layers}
        return self.product(normed, self._lm_head), hidden


def fused_pass(model: PreTrainedModel, product: Products) -> FusedPass | str:
    """Make ``model``'s fused pass; or say why its passes go through transformers' layers."""
    return layers_not_known(model) or FusedPass(model, product)
