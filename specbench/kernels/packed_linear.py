"""Linear layers whose weights are packed once for a CPU's matrix library.

A draft tree turns matrix-vector products into products with 2 to 128 columns. Called with plain
row-major weights, the CPU libraries behind torch repack them on every call, and between 2 and 64
rows that costs more than the arithmetic. Weights packed once (for oneDNN, or in panels for our
own product, whichever is faster on this machine) make draft rows nearly free until arithmetic
becomes the limit.

Linears that read the same input (query, key and value; gate and up) become one product: a matrix
of a few hundred rows is too small for these libraries to read at the memory's speed.

Which kernel serves which number of rows is measured (``autotune``). ``engine.packed.enabled=false``
leaves every product to plain torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from specbench.errors import ConfigurationError
from specbench.kernels.architectures import SIBLINGS
from specbench.kernels.autotune import (
    KERNELS,
    PACKED,
    ROW_BUCKETS,
    Kernel,
    available_kernels,
    load_plan,
    pack,
    plain,
)
from specbench.kernels.panel_kernels import FLOAT32, form_of
from specbench.kernels.weight_forms import (
    form_of_all,
    give_back,
    note_form,
    noted_form,
    round_to,
    short_bytes,
    unchanged_regions,
)

MAX_PREFILL_ROWS_PACKED = 512
_BESIDE_BYTES = 1 << 30  # that packed copies for a draft may take


class PackedLinear(nn.Module):
    """Stands in for ``nn.Linear``: shares its parameters, chooses a kernel by the number of rows.

    ``kernels`` holds a name by row bucket, the last one for anything longer. With ``parts`` the
    linear's weights are theirs, below one another, and no copy is kept besides the packed one.
    """

    def __init__(
        self, linear: nn.Linear, kernels: dict[int, str], parts: Sequence[nn.Linear] = ()
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self._parts = linear.weight, linear.bias, tuple(parts)
        self.kernels = kernels
        whole = _below([part.weight for part in parts]) if parts else linear.weight
        packs = {kind: pack(kind, whole) for kind in set(kernels.values())}
        self.packed_bytes = _packed_bytes(whole, kernels)
        # Else longer prompts read plain weights, which need not be in memory where panels are.
        self._whole_prompts = set(kernels.values()) == {"panels"}
        self.panels = packs.get("panels")  # for whoever runs several products in one call
        unpacked: tuple[Kernel, torch.Tensor] = (plain, linear.weight.detach())
        self.by_rows = [unpacked] * (MAX_PREFILL_ROWS_PACKED + 1)
        buckets = sorted(kernels)
        for rows in range(1, MAX_PREFILL_ROWS_PACKED + 1):
            bucket = next((b for b in buckets if rows <= b), buckets[-1])
            self.by_rows[rows] = (KERNELS[kernels[bucket]], packs[kernels[bucket]])

    def unpacked(self) -> nn.Linear:
        """A plain linear with these weights."""
        linear = _as_linear(self)
        if self._parts:
            linear.weight = _below([part.weight for part in self._parts])
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        rows = x.numel() // self.in_features
        long = rows > MAX_PREFILL_ROWS_PACKED and not self._whole_prompts
        if long or is_compiling():  # a trace follows torch's own
            return nn.functional.linear(x, self.weight, self.bias)
        kernel, pack = self.by_rows[min(rows, MAX_PREFILL_ROWS_PACKED)]
        out = kernel(x.reshape(rows, self.in_features), self.weight, pack, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


def _packed_bytes(weight: torch.Tensor, kernels: Mapping[int, str]) -> int:
    return short_bytes(weight) if set(kernels.values()) & set(PACKED) else 0


def _as_linear(module: PackedLinear | SiblingLinear) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.in_features, linear.out_features = module.in_features, module.out_features
    linear.weight, linear.bias = module.weight, module.bias
    return linear


class SiblingLinear(nn.Module):
    """One of several linears with the same input, which share one product.

    The first one called computes all; the others return their part of it. A sibling that is given
    any other tensor computes anew, so the order of calls costs time but never correctness.
    ``start`` is the first output of ``linear`` within the product.
    """

    def __init__(self, linear: nn.Linear, product: SharedProduct, start: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.product = product  # no module, or its weights would count twice
        self._part = slice(start, start + linear.out_features)

    def unpacked(self) -> nn.Linear:
        """The linear for which this one stands."""
        return _as_linear(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``, a view of the common product."""
        if is_compiling():  # a trace shall not keep an output for the siblings
            return nn.functional.linear(x, self.weight, self.bias)
        return self.product.of(x)[..., self._part]


class SharedProduct:
    """The product of several linears' stacked weights with their common input.

    The linears come in the order in which they are called. With ``stacked`` their weights become
    views of one matrix, which kernels can read; else they stay where they lie, and only panels hold
    them together.
    """

    def __init__(self, linears: list[nn.Linear], stacked: bool) -> None:
        self.linears = linears
        first = linears[0]
        rows = sum(linear.out_features for linear in linears)
        self.stacked = nn.Linear(first.in_features, rows, bias=False, device="meta")
        if stacked:
            self.stacked.weight = _constant(stack([linear.weight for linear in linears]))
        self._parts = () if stacked else linears
        if first.bias is not None:
            self.stacked.bias = _constant(stack([linear.bias for linear in linears]))
        self.packed: PackedLinear
        self._waiting = 0
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def pack(self, kernels: dict[int, str]) -> list[SiblingLinear]:
        self.packed = PackedLinear(self.stacked, kernels, self._parts)
        ends = accumulate(linear.out_features for linear in self.linears)
        return [
            SiblingLinear(linear, self, end - linear.out_features)
            for linear, end in zip(self.linears, ends, strict=True)
        ]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., out of all siblings]``, kept until each sibling has taken its part."""
        if x is not self._input or self._output is None:
            self._input, self._output = x, self.packed(x)
            self._waiting = len(self.linears)
        out = self._output
        self._waiting -= 1
        if self._waiting == 0:  # the next pass may bring the same tensor with other numbers
            self._input = self._output = None
        return out


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``parts`` below one another; they become views of the result, so that it takes no memory."""
    stacked = torch.cat([part.detach() for part in parts])
    start = 0
    for part in parts:
        part.data = stacked[start : start + len(part)]
        start += len(part)
    return stacked


def _below(weights: Sequence[torch.Tensor]) -> nn.Parameter:
    """``weights`` below one another in memory of their own."""
    whole = _constant(torch.cat([weight.detach() for weight in weights]))
    note_form(whole, form_of_all(weights))
    return whole


def _constant(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def pack_linears(
    model: nn.Module, *, memory_bytes: int, cache_dir: Path | None = None, kernel: str | None = None
) -> dict[str, Any]:
    """Swap ``model``'s float32 CPU linears for packed ones, the largest weights first.

    None is touched that was given a ``forward`` by someone else (accelerate's hooks). Packed
    copies together take at most ``memory_bytes``; ``cache_dir`` keeps the measured plan. With
    ``kernel`` nothing is measured: all are packed for that one.

    Returns:
        What is packed now, as ``packed_weights`` gives it, with the plan of all these shapes.

    Raises:
        ConfigurationError: weights that are to be read in fewer bytes do not fit.
    """
    before = packed_weights(model)
    groups = _groups(model)
    if not groups:
        return before
    noted = any(noted_form(part.weight) is not None for group in groups for part in group.values())
    if noted:
        kernel = "panels"  # the libraries read float32
    regions = unchanged_regions()
    with torch.inference_mode():
        products = [
            SharedProduct(list(linears.values()), stacked=kernel != "panels")
            if len(linears) > 1
            else None
            for linears in groups
        ]
        stacked = [
            product.stacked if product else next(iter(linears.values()))
            for product, linears in zip(products, groups, strict=True)
        ]
        if kernel is not None:
            plan = {_shape(linear): dict.fromkeys(ROW_BUCKETS, kernel) for linear in stacked}
        else:
            plan = load_plan([linear.weight.detach() for linear in stacked], cache_dir)
        used = before["bytes"]
        for i in sorted(range(len(groups)), key=lambda i: -stacked[i].weight.numel()):
            linear, product = stacked[i], products[i]
            kernels = plan[_shape(linear)]
            size = sum(_packed_bytes(part.weight, kernels) for part in groups[i].values())
            if noted and used + size > memory_bytes:
                raise ConfigurationError(
                    f"engine.weights takes more than the {memory_bytes / 1e9:g} GB of "
                    "engine.packed.memory_gb. Type engine.packed.memory_gb=4, or more."
                )
            if set(kernels.values()) == {"plain"} or used + size > memory_bytes:
                continue
            parts = product.pack(kernels) if product else [PackedLinear(linear, kernels)]
            for (name, plain_one), part in zip(groups[i].items(), parts, strict=True):
                _replace(model, name, part)
                if kernel == "panels":
                    give_back(plain_one.weight, regions)
            used += size
    after = packed_weights(model)
    return {**after, "plan": plan | after["plan"]}


def pack_in_panels(module: nn.Module, form: str = FLOAT32.name) -> None:
    """Pack what drafts beside a packed model, where this build of torch has panels.

    Its weights are rounded to ``form``.
    """
    if "panels" in available_kernels():
        round_to(module, form)
        pack_linears(module, memory_bytes=_BESIDE_BYTES, kernel="panels")


def product_of(
    weight: torch.Tensor, bias: torch.Tensor | None, packed: str | None = None
) -> nn.Module:
    """A product with a matrix that lies elsewhere, packed with its values rounded to a form."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = _constant(weight)
    if bias is not None:
        linear.bias = _constant(bias)
    product = nn.Sequential(linear)
    if packed:
        pack_in_panels(product, packed)
    return product


def packed_weights(model: nn.Module) -> dict[str, Any]:
    """What stands packed in ``model``, whoever packed it; for the run's manifest.

    Linears replaced, memory of the packed copies, kernel by row bucket for each weight's shape, and
    how many products read which form of numbers.
    """
    layers = [m for m in model.modules() if isinstance(m, PackedLinear | SiblingLinear)]
    products = _products(model)
    return {
        "layers": len(layers),
        "bytes": sum(product.packed_bytes for product in products),
        "plan": {_shape(product): product.kernels for product in products},
        "forms": dict(Counter(form_of(panels).name for panels in panels_of(model))),
    }


def _products(model: nn.Module) -> list[PackedLinear]:
    """Those of siblings once."""
    found = [
        module.product.packed if isinstance(module, SiblingLinear) else module
        for module in model.modules()
        if isinstance(module, PackedLinear | SiblingLinear)
    ]
    return list({id(product): product for product in found}.values())


def panels_of(model: nn.Module) -> list[torch.Tensor]:
    """The panels of ``model``'s products, each once."""
    return [product.panels for product in _products(model) if product.panels is not None]


def packed_memory(model: nn.Module) -> list[torch.Tensor]:
    """The memory of ``model``'s panels of float32 or bfloat16, as float32 ``[n]`` a mapping."""
    spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for panels in panels_of(model):
        if not panels.is_floating_point():
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


def _shape(linear: nn.Linear | PackedLinear) -> str:
    return f"{linear.out_features}x{linear.in_features}"


def _groups(model: nn.Module) -> list[dict[str, nn.Linear]]:
    """The linears to pack by name, siblings together."""
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and "forward" not in vars(module)  # someone's hook, which a stand-in would not call
    }
    groups = []
    while found:
        name = next(iter(found))
        parent, _, child = name.rpartition(".")
        together = next((names for names in SIBLINGS if child in names), (child,))
        names = [f"{parent}.{sibling}" if parent else sibling for sibling in together]
        group = {sibling: found[sibling] for sibling in names if sibling in found}
        alike = {(linear.in_features, linear.bias is None) for linear in group.values()}
        if len(group) < len(names) or len(alike) > 1:
            group = {name: found[name]}
        groups.append(group)
        for sibling in group:
            del found[sibling]
    return groups


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def unpack_linears(model: nn.Module) -> None:
    """Undo ``pack_linears``; weights of siblings stay parts of one matrix."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear | SiblingLinear):
            _replace(model, name, module.unpacked())
