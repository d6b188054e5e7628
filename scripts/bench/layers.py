"""A model's layers with other products in their place, to tell what a pass is made of."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from specbench.kernels.autotune import KERNELS, Kernel, measure_plan, pack
from specbench.kernels.fused_layers import fuse, unfuse
from specbench.kernels.packed_linear import PackedLinear, SiblingLinear, unpack_linears

MOST_ROWS = 128
SMALL = 8  # inputs of a product that is called for nothing but its call


def clocked(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """A call that appends the seconds it takes to ``spent``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = call(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        return out

    return run


class Layers:
    """The layers of a model with packed linears: as the engine runs them, or transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._packs = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, PackedLinear | SiblingLinear)
        }
        self._products = {
            module.product.packed if isinstance(module, SiblingLinear) else module
            for module in self._packs.values()
        }
        self._libraries: dict[PackedLinear, list[tuple[Kernel, Any]]] = {}

    def pack(self) -> None:
        """As the engine runs them."""
        for name, module in self._packs.items():
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, module)
        fuse(self._model)
        self._model.set_attn_implementation("specbench")

    def unpack(self, attention: str = "specbench") -> None:
        """As transformers runs them."""
        unfuse(self._model)
        unpack_linears(self._model)
        self._model.set_attn_implementation(attention)

    @contextmanager
    def _kernels(
        self, product: Callable[[Kernel], Kernel], attention: Callable[..., torch.Tensor]
    ) -> Iterator[None]:
        with ExitStack() as stack:
            for linear in self._products:
                kernels = [(product(kernel), packed) for kernel, packed in linear.by_rows]
                stack.enter_context(mock.patch.object(linear, "by_rows", kernels))
            functional = torch.nn.functional
            stack.enter_context(
                mock.patch.object(functional, "scaled_dot_product_attention", attention)
            )
            yield

    def without_arithmetic(self, calls: bool = False) -> AbstractContextManager[None]:
        """Products and attention give what lies in some buffer, at no cost.

        With ``calls`` each product is called before that, on next to nothing.
        """
        buffers: dict[tuple[int, int], torch.Tensor] = {}
        small = torch.zeros(16, SMALL)
        kinds = {kind for linear in self._products for kind in linear.kernels.values()}
        packs = {KERNELS[kind]: pack(kind, small) for kind in kinds | {"plain"}}
        inputs = [torch.zeros(rows, SMALL) for rows in range(MOST_ROWS + 1)]

        def nothing(kernel: Kernel) -> Kernel:
            def run(x: torch.Tensor, weight: torch.Tensor, _: Any, __: Any) -> torch.Tensor:
                if calls:
                    kernel(inputs[x.shape[0]], small, packs[kernel], None)
                shape = (x.shape[0], weight.shape[0])
                if shape not in buffers:
                    buffers[shape] = torch.zeros(shape)
                return buffers[shape]

            return run

        return self._kernels(nothing, lambda q, *_, **__: q)

    def timed(self, spent: list[float]) -> AbstractContextManager[None]:
        """The seconds of each product and attention are appended to ``spent``."""
        attention = clocked(torch.nn.functional.scaled_dot_product_attention, spent)
        return self._kernels(lambda kernel: clocked(kernel, spent), attention)

    @torch.inference_mode()
    def plan_libraries(self) -> dict[str, dict[int, str]]:
        """Measure what the engine would choose if it had no panels: kernel by shape and rows."""
        weights = [linear.weight.detach() for linear in self._products]
        plan = measure_plan(weights, without=["panels"])
        for linear in self._products:
            kernels = plan[f"{linear.out_features}x{linear.in_features}"]
            self._libraries[linear] = PackedLinear(linear, kernels).by_rows  # type: ignore[arg-type]
        return plan

    @contextmanager
    def by_libraries(self) -> Iterator[None]:
        """Products as just planned and the model's own small steps: the engine before both."""
        unfuse(self._model)
        with ExitStack() as stack:
            for linear, kernels in self._libraries.items():
                stack.enter_context(mock.patch.object(linear, "by_rows", kernels))
            yield
        fuse(self._model)
