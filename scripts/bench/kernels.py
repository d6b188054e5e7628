"""How many kernels a pass launches on a GPU, with a layer's steps fused and without.

    python -m scripts.bench kernels [--models MODEL ...] [--rows ROWS ...]

Counted without a GPU: passes of fixed shape are traced on the meta device, where a tensor has a
shape and no memory. An operation that gives a view launches nothing, and any other one kernel, or
two where it first copies what it changes. Attention and the fused norm count as the one kernel
that they are on CUDA. Libraries may split a product into two; that only a GPU can tell.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig

from scripts.bench import print_table
from specbench.kernels import gpu_layers
from specbench.models.graph_target import GraphTarget
from specbench.models.static_pass import StaticPass
from specbench.paths import CONF_DIR

MODELS = ("vicuna7b", "llama3_8b", "qwen3_8b", "phi3_mini")
ROWS = (1, 64)
KEYS = 1024
_DEPTHS = (1, 3)  # a layer is what passes of these differ by

_FREE = (
    *("empty", "empty_like", "empty_strided", "new_empty"),
    *("_unsafe_view", "detach", "lift_fresh"),
)
_COPY_FIRST = ("index_copy", "masked_fill", "index_put", "scatter")


class KernelCount(TorchDispatchMode):
    """Counts the kernels that operations would launch, ``by_name`` of the operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and name not in _FREE:
            self.by_name[name] += 2 if name in _COPY_FIRST else 1
        return func(*args, **(kwargs or {}))

    def as_one(self, name: str, result: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any, **_: Any) -> torch.Tensor:
            self.by_name[name] += 1
            return result(*args)

        return call


def kernels_of(make_pass: Callable[[], object]) -> Counter[str]:
    """Kernels of ``make_pass``, a computation on the meta device."""
    count = KernelCount()

    def attended(query: torch.Tensor, *_: Any) -> torch.Tensor:
        batch, heads, rows, size = query.shape  # as CUDA's kernels lay it out: rows before heads
        return query.new_empty(batch, rows, heads, size).transpose(1, 2)

    functional = torch.nn.functional
    patches = [
        (functional, "scaled_dot_product_attention", count.as_one("attention", attended)),
        (gpu_layers, "rms_norm", count.as_one("rms_norm", lambda x, *_: torch.empty_like(x))),
    ]
    # Not in inference mode, where an operation made of others is seen as one.
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(torch.no_grad())
        stack.enter_context(count)
        make_pass()
    return count.by_name


def count_pass(shape: dict[str, Any], layers: int, rows: int, *, fused: bool) -> Counter[str]:
    """Kernels of a pass over ``rows`` rows of a model of ``shape`` with ``layers`` layers."""
    numbers = shape | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(numbers.pop("model_type"), **numbers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    target = GraphTarget(model, capture=False, fused=fused, max_len=KEYS, max_nodes=rows)
    return kernels_of(StaticPass(target, rows, KEYS).device_part)


def measure_model(name: str, rows: int) -> dict[str, Any]:
    """Kernels of a layer and of a whole pass, stock and fused."""
    text = (CONF_DIR / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    shape = yaml.safe_load(text)["shape_config"]
    depth = shape["num_hidden_layers"]
    counts: dict[str, Any] = {"model": name, "rows": rows, "layers": depth}
    for kind in ("stock", "fused"):
        few, more = (count_pass(shape, layers, rows, fused=kind == "fused") for layers in _DEPTHS)
        layer, left = divmod(more.total() - few.total(), _DEPTHS[1] - _DEPTHS[0])
        assert left == 0
        counts[f"layer_{kind}"] = layer
        counts[f"pass_{kind}"] = few.total() + (depth - _DEPTHS[0]) * layer
    return counts


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), help="names of conf/model")
    add("--rows", nargs="+", type=int, default=list(ROWS), help="rows of a pass")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield {"kernels": [measure_model(n, rows) for n in options.models for rows in options.rows]}


def show(results: dict[str, Any]) -> None:
    cells = "{model}|{rows}|{layer_stock}|{layer_fused}|{pass_stock}|{pass_fused}"
    rows = [cells.format_map(row).split("|") for row in results["kernels"]]
    columns = ["model", "rows", "a layer", "fused layer", "a pass", "fused pass"]
    print_table("kernels that a pass launches (traced on the meta device)", columns, rows)
