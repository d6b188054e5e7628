"""What the engine itself costs, as ratios measured in one run.

    python -m scripts.bench engine [--repeats 4] [--parts PART ...]

Parts: rows (a target pass by number of rows, layer by layer, with packed products, the best of the
libraries' and plain ones, interleaved; ``passes`` compares it with one call), outside (the time of
a pass outside matrix products and attention) and host (the host's work per step outside the target
pass and the drafter, with a tiny model).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

from scripts.bench import console, print_table
from specbench.config.compose import compose, typed
from specbench.config.schema import packed_bytes
from specbench.decoding.device import seconds
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.kernels.autotune import KERNELS, Kernel, measure_plan, pack
from specbench.kernels.fused_layers import fuse, unfuse
from specbench.kernels.packed_linear import PackedLinear, SiblingLinear, unpack_linears
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target

CPU = torch.device("cpu")
MOST_ROWS = 128
SMALL = 8  # inputs of a product that is called for nothing but its call
PARTS = ("rows", "outside", "host")
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, MOST_ROWS)
CONTEXTS = (256, 1024)
# How products are made, and what a table calls it: as the engine makes them, as it would without
# panels, and with nothing packed.
KINDS = {"packed": "packed", "libraries": "best of the libraries", "plain": "plain"}


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

    def unpack(self) -> None:
        """With the linears and the small steps of transformers."""
        unfuse(self._model)
        unpack_linears(self._model)

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
        plain = {linear: linear.unpacked() for linear in self._products}
        plan = measure_plan(
            [linear.weight.detach() for linear in plain.values()], without=["panels"]
        )
        for linear, whole in plain.items():
            kernels = plan[f"{linear.out_features}x{linear.in_features}"]
            self._libraries[linear] = PackedLinear(whole, kernels).by_rows
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


def random_tree(nodes: int, vocab: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(max(-1, i - 8), i) for i in range(nodes)], dtype=np.int64)
    return DraftTree(rng.integers(0, vocab, nodes), parents)


def milliseconds(call: Callable[[], object], times: int) -> list[float]:
    return [1e3 * seconds(call, CPU) for _ in range(times)]


def pass_by_rows(target: Target, layers: Layers, repeats: int) -> list[dict[str, Any]]:
    """Median milliseconds of a pass over rows by each of ``KINDS``, interleaved."""
    found = []
    for context in CONTEXTS:
        target.prefill(np.random.default_rng(context).integers(100, 1000, context))
        times = {(kind, rows): list[float]() for kind in KINDS for rows in ROWS}
        for kind in [*KINDS] * repeats:
            if kind == "plain":
                layers.unpack()
            else:
                layers.pack()
            with layers.by_libraries() if kind == "libraries" else nullcontext():
                for rows in ROWS:
                    one = pass_over(target, rows)
                    if not times[kind, rows]:
                        one()
                    times[kind, rows] += milliseconds(one, 4)
        layers.pack()
        medians = {key: statistics.median(values) for key, values in times.items()}
        for rows in ROWS:
            by_kind = {f"{kind}_ms": medians[kind, rows] for kind in KINDS}
            by_kind |= {f"{kind}_ratio": medians[kind, rows] / medians[kind, 1] for kind in KINDS}
            found.append({"context": context, "rows": rows, **by_kind})
    return found


def pass_over(target: Target, rows: int) -> Callable[[], object]:
    """A pass over a token and a tree of ``rows`` - 1 nodes."""
    tree = random_tree(rows - 1, target.vocab_size, rows)
    return lambda: target.forward(7, tree).greedy()


def outside_arithmetic(target: Target, rows: int, rounds: int = 4) -> dict[str, Any]:
    """What a pass spends outside products and attention, in two ways, interleaved.

    ``left`` is the time of a pass without both; what the other steps read is then always in the
    caches. ``around`` is a pass less the times of its products and attentions, and so counts the
    clock around each of them too. The share is of the larger.

    Neither counts what the products' own calls take: their output's memory, the call into compiled
    code, its threads' start and end. ``calls`` is what a pass without arithmetic takes longer where
    each product is called on next to nothing.
    """
    layers = Layers(target.model)
    target.prefill(np.random.default_rng(0).integers(100, 1000, CONTEXTS[0]))
    one = pass_over(target, rows)
    times: dict[str, list[float]] = {"whole": [], "left": [], "called": [], "around": []}
    for _ in range(rounds):
        one()
        times["whole"] += milliseconds(one, 20)
        for part in ("left", "called"):
            with layers.without_arithmetic(calls=part == "called"):
                one()
                times[part] += milliseconds(one, 20)
        spent: list[float] = []
        with layers.timed(spent):
            for _ in range(20):
                spent.clear()
                times["around"].append(1e3 * (seconds(one, CPU) - sum(spent)))
    found = {f"{part}_ms": statistics.median(values) for part, values in times.items()}
    found["calls_ms"] = found.pop("called_ms") - found["left_ms"]
    share = max(found["left_ms"], found["around_ms"]) / found["whole_ms"]
    return {"rows": rows, **found, "share": share}


class Scripted(Drafter):
    """Drafts the same tree every step; its own time is not the engine's."""

    tree: DraftTree

    def propose(self, state: Any) -> DraftTree:
        return self.tree


def host_work(nodes: int, steps: int = 300) -> dict[str, Any]:
    """Median microseconds of a step outside the model's forward and the drafter."""
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    target = Target(model, max_len=1024 + steps, max_nodes=max(nodes, 1))
    inside: list[float] = []
    target._call = clocked(target._call, inside)  # type: ignore[method-assign]
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    drafter = Scripted(name="scripted")
    drafter.tree = random_tree(nodes, 512, 0)
    prompt = np.random.default_rng(0).integers(0, 512, 1000)
    engine.decode(prompt, drafter, max_new_tokens=20)
    inside.clear()
    result = engine.decode(prompt, drafter, max_new_tokens=steps)
    outside = [s - p for s, p in zip(result.timings.step_s, inside[1:], strict=True)]
    return {"nodes": nodes, "outside_us": statistics.median(outside) * 1e6}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2_135m", help="a name of conf/model")
    add("--repeats", type=int, default=4, help="rounds over kinds of products")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = typed(compose([f"model={options.model}"]))
    results: dict[str, Any] = {}
    if {"rows", "outside"} & {*options.parts}:
        tokenizer = load_tokenizer(config)
        loaded = load_model(config, tokenizer)
        target = Target(
            loaded.model,
            max_len=max(CONTEXTS) + 512,
            max_nodes=max(ROWS),
            packed_bytes=packed_bytes(config.engine.packed),
            cache_dir=Path(config.cache_dir),
        )
        # What the other parts swap in and out are layers' modules, so passes must go through them.
        layered = Target(
            loaded.model, max_len=max(CONTEXTS) + 512, max_nodes=max(ROWS), one_call=False
        )
        results["packing"] = target.packed_weights
    if "rows" in options.parts:
        layers = Layers(target.model)
        results["libraries_plan"] = layers.plan_libraries()
        results["pass_by_rows"] = pass_by_rows(layered, layers, options.repeats)
    if "outside" in options.parts:
        results["outside_arithmetic"] = [outside_arithmetic(layered, rows) for rows in (1, 16)]
    if "host" in options.parts:
        results["host_work"] = [host_work(nodes) for nodes in (0, 8, 32, 96)]
    yield results


def show(results: dict[str, Any]) -> None:
    if "pass_by_rows" in results:
        columns = ["context", "rows"]
        cell = "{context}|{rows}"
        for kind, name in KINDS.items():
            columns += [f"{name} ms", f"{name} ratio"]
            cell += f"|{{{kind}_ms:.1f}}|{{{kind}_ratio:.2f}}"
        cells = [cell.format_map(row).split("|") for row in results["pass_by_rows"]]
        print_table("a target pass by rows (ratio to its own 1-row pass)", columns, cells)
    for row in results.get("outside_arithmetic", ()):
        console.print(
            f"a pass of {row['rows']} rows: {row['whole_ms']:.1f} ms; with products and attention "
            f"left out {row['left_ms']:.2f} ms, around them {row['around_ms']:.2f} ms: "
            f"[bold]{row['share']:.1%}[/] at most; products' calls alone {row['calls_ms']:.2f} ms"
        )
    for row in results.get("host_work", ()):
        console.print(
            f"host work per step outside pass and drafter, {row['nodes']} nodes: "
            f"[bold]{row['outside_us']:.0f} µs[/]"
        )
