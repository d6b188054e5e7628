"""What the engine itself costs, as ratios measured in one run: ``make bench-engine``.

1. plain decoding against transformers' ``generate``, interleaved prompt by prompt;
2. a target pass by number of rows, as the engine runs it, with the best of the libraries' products
   and with plain ones, interleaved;
3. the time of a pass outside matrix products and attention;
4. the host's work per step outside the target pass and the drafter, with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig

from specbench.config.compose import compose
from specbench.config.schema import packed_bytes
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.kernels.autotune import KERNELS, Kernel, measure_plan, pack
from specbench.kernels.fused_layers import fuse, unfuse
from specbench.kernels.packed_linear import PackedLinear, SiblingLinear, unpack_linears
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target
from specbench.system import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omegaconf import DictConfig

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
CONTEXTS = (256, 1024)
# How products are made, and what a table calls it: as the engine makes them, as it would without
# panels, and with nothing packed.
KINDS = {"packed": "packed", "libraries": "best of the libraries", "plain": "plain"}
UNITS = ("ms", "ratio")
_SMALL = 8  # inputs of a product that is called for nothing but its call
QUESTIONS = (
    "Explain how a bicycle stays upright, in simple words.",
    "Write a short letter to a neighbour about a tree that has fallen over the fence.",
    "List six ways to save water at home and say why each one works.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show your work.",
)

console = Console()


def clock_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def random_tree(nodes: int, vocab: int, seed: int) -> DraftTree:
    """A tree with branches of mixed length."""
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(max(-1, i - 8), i) for i in range(nodes)], dtype=np.int64)
    return DraftTree(rng.integers(0, vocab, nodes), parents)


class Layers:
    """The model's layers as the engine runs them, and as transformers does.

    Args:
        model: with packed linears and fused layers.
    """

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
        """Other kernels in the products' and in attention's place."""
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
        small = torch.zeros(16, _SMALL)
        kinds = {kind for linear in self._products for kind in linear.kernels.values()}
        packs = {KERNELS[kind]: pack(kind, small) for kind in kinds | {"plain"}}
        inputs = [torch.zeros(rows, _SMALL) for rows in range(max(ROWS) + 1)]

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
        """The milliseconds of each product and attention are appended to ``spent``."""

        def clocked(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def run(*args: Any, **kwargs: Any) -> torch.Tensor:
                start = time.perf_counter()
                out = call(*args, **kwargs)
                spent.append((time.perf_counter() - start) * 1e3)
                return out

            return run

        return self._kernels(clocked, clocked(torch.nn.functional.scaled_dot_product_attention))

    @torch.inference_mode()
    def plan_libraries(self) -> dict[str, dict[int, str]]:
        """Measure what the engine would choose if it had no panels: kernel by shape and rows."""
        weights = [linear.weight.detach() for linear in self._products]
        plan = measure_plan(weights, without=["panels"])
        for linear in self._products:
            kernels = plan[f"{linear.out_features}x{linear.in_features}"]
            self._libraries[linear] = PackedLinear(linear, kernels).by_rows
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


def against_generate(
    target: Target, tokenizer: Any, eos: frozenset[int], tokens: int
) -> dict[str, Any]:
    """Tokens/s of plain decoding here and by ``generate``, turn about."""
    model: PreTrainedModel = target.model
    template = PromptTemplate(tokenizer)
    engine = Engine(target, GreedyVerifier(), eos_ids=eos)
    plain = Drafter(name="ar")
    layers = Layers(model)
    ours: list[float] = []
    theirs: list[float] = []
    equal = 0

    for i, question in enumerate((*QUESTIONS[:1], *QUESTIONS)):
        ids = np.array(template.render([(question, None)]))

        def run_ours(ids: np.ndarray[Any, Any] = ids) -> tuple[float, list[int]]:
            layers.pack()
            start = time.perf_counter()
            out = engine.decode(ids, plain, max_new_tokens=tokens).output_ids
            return len(out) / (time.perf_counter() - start), out

        def run_theirs(ids: np.ndarray[Any, Any] = ids) -> tuple[float, list[int]]:
            layers.unpack("sdpa")
            batch = torch.from_numpy(ids)[None]
            start = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    max_new_tokens=tokens,
                    do_sample=False,
                    eos_token_id=sorted(eos),
                    pad_token_id=0,
                )[0, len(ids) :].tolist()
            return len(out) / (time.perf_counter() - start), out

        order = (run_ours, run_theirs) if i % 2 else (run_theirs, run_ours)
        found = {call.__name__: call() for call in order}
        if i == 0:
            continue  # warm-up
        ours.append(found["run_ours"][0])
        theirs.append(found["run_theirs"][0])
        equal += found["run_ours"][1] == found["run_theirs"][1]
    layers.pack()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "new_tokens": tokens,
        "ours_tokens_per_s": statistics.median(ours),
        "generate_tokens_per_s": statistics.median(theirs),
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "equal_outputs": f"{equal}/{len(ours)}",
    }


def pass_by_rows(target: Target, layers: Layers, repeats: int) -> list[dict[str, Any]]:
    """Median milliseconds of a pass over rows by each of ``KINDS``, interleaved."""
    found = []
    for context in CONTEXTS:
        prompt = np.random.default_rng(context).integers(100, 1000, context)
        target.prefill(prompt)
        times: dict[tuple[str, int], list[float]] = {}
        for kind in [*KINDS] * repeats:
            if kind == "plain":
                layers.unpack()
            else:
                layers.pack()
            with layers.by_libraries() if kind == "libraries" else nullcontext():
                for rows in ROWS:
                    tree = random_tree(rows - 1, target.vocab_size, rows)

                    def one(tree: DraftTree = tree) -> object:
                        return target.forward(7, tree).greedy()

                    if not times.get((kind, rows)):
                        one()
                    times.setdefault((kind, rows), []).extend(clock_ms(one) for _ in range(4))
        layers.pack()
        medians = {key: statistics.median(values) for key, values in times.items()}
        for rows in ROWS:
            found.append(
                {
                    "context": context,
                    "rows": rows,
                    **{f"{kind}_ms": medians[kind, rows] for kind in KINDS},
                    **{f"{kind}_ratio": medians[kind, rows] / medians[kind, 1] for kind in KINDS},
                }
            )
    return found


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
    tree = random_tree(rows - 1, target.vocab_size, rows)

    def one() -> object:
        return target.forward(7, tree).greedy()

    times: dict[str, list[float]] = {"whole": [], "left": [], "called": [], "around": []}
    for _ in range(rounds):
        one()
        times["whole"].extend(clock_ms(one) for _ in range(20))
        for part in ("left", "called"):
            with layers.without_arithmetic(calls=part == "called"):
                one()
                times[part].extend(clock_ms(one) for _ in range(20))
        spent: list[float] = []
        with layers.timed(spent):
            for _ in range(20):
                spent.clear()
                times["around"].append(clock_ms(one) - sum(spent))
    found = {f"{part}_ms": statistics.median(values) for part, values in times.items()}
    found["calls_ms"] = found.pop("called_ms") - found["left_ms"]
    share = max(found["left_ms"], found["around_ms"]) / found["whole_ms"]
    return {"rows": rows, **found, "share": share}


class _Scripted(Drafter):
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
    call = target._call

    def timed_call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = call(*args, **kwargs)
        inside.append(time.perf_counter() - start)
        return out

    target._call = timed_call  # type: ignore[method-assign]
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    drafter = _Scripted(name="scripted")
    drafter.tree = random_tree(nodes, 512, 0)
    prompt = np.random.default_rng(0).integers(0, 512, 1000)
    engine.decode(prompt, drafter, max_new_tokens=20)
    inside.clear()
    result = engine.decode(prompt, drafter, max_new_tokens=steps)
    outside = [s - p for s, p in zip(result.timings.step_s, inside[1:], strict=True)]
    return {"nodes": nodes, "outside_us": statistics.median(outside) * 1e6}


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    g = results["against_generate"]
    console.print(
        f"plain decoding [bold]{g['ours_tokens_per_s']:.1f}[/] tokens/s, generate "
        f"{g['generate_tokens_per_s']:.1f}: [bold]{g['ratio']:.2f}x[/] "
        f"(equal outputs {g['equal_outputs']})"
    )
    table = Table(title="a target pass by rows (ratio to its own 1-row pass)")
    for column in ("context", "rows", *(f"{n} {u}" for n in KINDS.values() for u in UNITS)):
        table.add_column(column, justify="right")
    for row in results["pass_by_rows"]:
        times = ((f"{row[f'{kind}_ms']:.1f}", f"{row[f'{kind}_ratio']:.2f}") for kind in KINDS)
        table.add_row(str(row["context"]), str(row["rows"]), *chain.from_iterable(times))
    console.print(table)
    for row in results["outside_arithmetic"]:
        console.print(
            f"a pass of {row['rows']} rows: {row['whole_ms']:.1f} ms; with products and attention "
            f"left out {row['left_ms']:.2f} ms, around them {row['around_ms']:.2f} ms: "
            f"[bold]{row['share']:.1%}[/] at most; products' calls alone {row['calls_ms']:.2f} ms"
        )
    for row in results["host_work"]:
        console.print(
            f"host work per step outside pass and drafter, {row['nodes']} nodes: "
            f"[bold]{row['outside_us']:.0f} µs[/]"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2_135m", help="a name of conf/model")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=4, help="rounds over packed and plain")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()

    config: DictConfig = compose([f"model={args.model}"])
    tokenizer = load_tokenizer(config)
    loaded = load_model(config, tokenizer)
    target = Target(
        loaded.model,
        max_len=max(CONTEXTS) + 512,
        max_nodes=max(ROWS),
        packed_bytes=packed_bytes(config.engine.packed),
        cache_dir=Path(config.cache_dir),
    )
    layers = Layers(target.model)
    results = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment.describe(),
        "packing": target.packed_weights,
        "against_generate": against_generate(target, tokenizer, loaded.eos_ids, args.tokens),
        "libraries_plan": layers.plan_libraries(),
        "pass_by_rows": pass_by_rows(target, layers, args.repeats),
        "outside_arithmetic": [outside_arithmetic(target, rows) for rows in (1, 16)],
        "host_work": [host_work(nodes) for nodes in (0, 8, 32, 96)],
    }
    show(results)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))
        console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
