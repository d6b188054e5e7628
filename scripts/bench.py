"""Measure what no run of ``run.py`` shows; what is compared takes turns in one process.

    python -m scripts.bench passes             # a CPU's pass by one call and form of weights
    python -m scripts.bench steps              # a step's time outside the pass, part by part
    python -m scripts.bench others             # plain decoding in transformers and llama.cpp, too
    python -m scripts.bench gpu PART [KEY=VALUE ...]   # a part of make gpu-check
    python -m scripts.bench vllm RUN --model FOLDER    # our drafters inside vLLM (docs/servers.md)

Compare ratios of one call, not numbers of two. ``--help`` after a section says more.
"""

import argparse
import importlib
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import hydra.utils
import numpy as np
import pandas as pd
import torch
from rich.console import Console
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one
from analysis.runs.cli import add_command, parser_of, reporting_errors
from analysis.runs.load import load_runs
from methods.eagle import Eagle2
from specbench.config.compose import compose, to_config
from specbench.config.schema import (
    FLOAT32_WEIGHTS,
    WEIGHTS,
    LlamacppConfig,
    RunConfig,
    packed_bytes,
)
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.device import seconds, synchronize
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.protocols import TargetInfo
from specbench.decoding.structs import AFTER_FINAL_NORM, DecodeState, DraftContext, DraftTree
from specbench.decoding.turn import DecodeResult
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import NeedsNotMet, first_line
from specbench.kernels.cuda_graphs import check_device
from specbench.models.checkpoints.bundled import find_gguf
from specbench.models.graph_target import GraphTarget
from specbench.models.heads import eagle
from specbench.models.heads import folder as head_folder
from specbench.models.heads.layer_shape import read_shape
from specbench.models.loading import choose_device, load_model, load_tokenizer, shape_model
from specbench.models.target import Target
from specbench.results.fitted_table import FittedTable
from specbench.results.jsonl_schema import StepTrace, read_steps
from specbench.results.records import STEPS
from specbench.servers.client import Client
from specbench.servers.llamacpp import LlamacppProcess, flags, wheel_version
from specbench.storage import jsonl
from specbench.system import bandwidth, cuda_settings, environment
from specbench.system.clock import PREFILL, SETUP

MODEL = "smollm2_135m"
QUESTIONS = (
    "Explain how a bicycle stays upright, in simple words.",
    "Write a short letter to a neighbour about a tree that has fallen over the fence.",
    "List six ways to save water at home and say why each one works.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show your work.",
)
Options: TypeAlias = argparse.Namespace
Add: TypeAlias = Callable[..., Any]  # an option to a section's parser
Results: TypeAlias = Iterator[dict[str, Any]]  # as they grow; "rows" makes the table


def in_turns(
    calls: Mapping[str, Callable[[Any], Any]], items: Iterable[Any], warm_ups: int = 1
) -> dict[str, list[tuple[float, Any]]]:
    """Time each call with each item; returns seconds and results after the warm-ups.

    All are called with an item before the next one, every other time backwards.
    """
    timed: dict[str, list[tuple[float, Any]]] = {name: [] for name in calls}
    for number, item in enumerate(items):
        for name, call in [*calls.items()][:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            result = call(item)
            timed[name].append((time.perf_counter() - start, result))
    return {name: taken[warm_ups:] for name, taken in timed.items()}


def target_of(config: RunConfig, model: PreTrainedModel, **more: Any) -> Target:
    """Make a target like a run on this CPU."""
    packed = packed_bytes(config.engine.packed)
    return Target(model, packed_bytes=packed, **more)


# A target pass by one call, of weights in several forms, against the pass layer by layer.

LAYERS = "layers"  # float32, layer by layer: what the others are compared with


def passes(options: Options) -> Results:
    """Compare a target pass by one call, per form of weights, with the pass layer by layer.

    For each number of threads, context and rows all take turns. Milliseconds are medians; ratio is
    to float32 layer by layer in the same turn, and the share of the memory's speed is bytes of
    weights by time over the fastest read in this process.
    """
    sizes = {"max_len": max(options.contexts) + 64, "max_nodes": max(options.rows)}
    targets: dict[str, Target] = {}
    read: dict[str, int] = {}  # bytes that a pass of one row reads
    for kind in dict.fromkeys([FLOAT32_WEIGHTS, *options.weights]):
        config = to_config(compose([f"model={options.model}", f"engine.weights={kind}"]))
        model = load_model(config, load_tokenizer(config)).model
        target = target_of(config, model, **sizes)
        if kind == FLOAT32_WEIGHTS:
            packed, read[LAYERS] = model, bandwidth.streamed_bytes(model)
            targets[LAYERS] = Target(load_model(config, load_tokenizer(config)).model, **sizes)
        if kind in options.weights:
            targets[kind], read[kind] = target, bandwidth.streamed_bytes(model)
    rows: dict[str, Any] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        fastest = bandwidth.FastestRead(torch.device("cpu"), read[LAYERS], model=packed)
        fastest.measure()
        for context in options.contexts:
            for target in targets.values():
                target.prefill(np.random.default_rng(context).integers(100, 1000, context))
            for n in options.rows:
                calls = {name: pass_over(target, n) for name, target in targets.items()}
                taken = in_turns(calls, range(options.turns + 2), warm_ups=2)
                spent = {name: np.array([s for s, _ in timed]) for name, timed in taken.items()}
                fastest.measure_between()
                for name, values in spent.items():
                    middle = float(np.median(values))
                    rows[f"{threads} threads, {context} tokens, {n} rows, {name}"] = {
                        "ms": 1e3 * middle,
                        "fastest_ms": 1e3 * float(values.min()),
                        "ratio": float(np.median(values / spent[LAYERS])),
                        "share": read[name] / middle / fastest.bytes_per_s,
                    }
                yield {"rows": rows, "weight_bytes": read}


def pass_over(target: Target, rows: int) -> Callable[[object], object]:
    """Make a pass over a token and a tree of ``rows`` - 1 nodes, two children each."""
    nodes = np.arange(rows - 1)
    tree = DraftTree(nodes + 100, (nodes - 2) // 2)
    return lambda _: target.forward(7, tree).greedy()


# A step's time outside the target's pass.

DRAFTS: dict[str, dict[str, Any]] = {  # methods, and knobs other than a run's
    "ar": {},
    "eagle2": {"total": 2, "depth": 0, "top_k": 1},
    "token_recycling": {},
    "suffix_decoding": {},
}
Call: TypeAlias = Callable[[Any], DecodeResult]  # of a prompt's ids


def steps(options: Options) -> Results:
    """Measure what a step takes, part by part.

    Plain decoding, EAGLE-2 with one token, Token Recycling and suffix decoding decode the same
    answers turn about. Microseconds of a step by the phases of measure=phases; of answers the
    median.
    """
    config = to_config(compose([f"model={options.model}", "method=eagle2"]))
    tokenizer = load_tokenizer(config)
    loaded = load_model(config, tokenizer)
    eos, max_len = frozenset(loaded.eos_ids), options.tokens + 512
    calls: dict[str, Call] = {}
    first = target_of(config, loaded.model, max_len=max_len, max_nodes=96)
    for name, knobs in DRAFTS.items():
        node = to_config(compose([f"model={options.model}", f"method={name}"])).method
        settings = {key: value for key, value in node.items() if key not in ("label", "search")}
        drafter, target = hydra.utils.instantiate({**settings, **knobs}), first.clone()
        target.draft_weights = config.engine.draft_weights
        named, model = config.pair.heads, config.model
        head_paths = {head: head_folder.find(head, named, model) for head in drafter.needs.heads}
        heads = {head: path for head, path in head_paths.items() if path}
        sizes: dict[str, Any] = {"max_len": max_len, "heads": heads, "target": target}
        drafter.setup(DraftContext(target.vocab_size, eos, **sizes))
        engine = Engine(target, GreedyVerifier(), eos_ids=eos, phases=True)
        call = partial(decode, engine=engine, drafter=drafter, tokens=options.tokens)
        calls[name] = call
    template, rows = PromptTemplate(tokenizer), dict[str, Any]()
    prompts = [np.array(template.render([(q, None)])) for q in QUESTIONS[: options.questions]]
    for threads in options.threads:
        torch.set_num_threads(threads)
        taken = in_turns(calls, [prompts[0], *prompts])
        for name, answers in taken.items():
            rows[f"{threads} threads, {name}"] = step_of([decoded for _, decoded in answers])
        outputs = [[decoded.output_ids for _, decoded in answers] for answers in taken.values()]
        assert all(ids == outputs[0] for ids in outputs), "labels decoded different answers"
        yield {"rows": rows}


def decode(prompt: Any, engine: Engine, drafter: Drafter, tokens: int) -> DecodeResult:
    drafter.reset()
    return engine.decode(prompt, drafter, max_new_tokens=tokens)


def plain_decoding(target: Target, eos_ids: Iterable[int], tokens: int) -> Call:
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset(eos_ids))
    return partial(decode, engine=engine, drafter=Drafter(name="ar"), tokens=tokens)


def step_of(answers: Sequence[DecodeResult]) -> dict[str, float]:
    """Compute microseconds of a step by phase, as the median over answers."""
    phases = pd.DataFrame([answer.timings.phase_s for answer in answers])
    steps = [len(answer.timings.step_s) for answer in answers]
    inside = phases.drop(columns=[PREFILL, SETUP]).div(steps, axis=0)
    return {f"{name}_us": 1e6 * s for name, s in inside.median().items()}


# Plain decoding here, in transformers' generate and in llama.cpp.

Answer: TypeAlias = Callable[[list[int]], list[int]]  # of a prompt's ids, the new ones


def others(options: Options) -> Results:
    """Compare AR decoding here, in transformers' generate and in llama.cpp, prompt by prompt.

    All decode the bundled model greedily from the same ids, with as many threads; float32
    and stored are this engine's (engine.weights). Times are of whole answers. llama.cpp
    computes with the 4-bit file itself, whose values the others hold in float32, so its outputs
    differ by rounding.
    """
    threads, tokens = torch.get_num_threads(), options.tokens
    facts: dict[str, Any] = {"threads": threads, "new_tokens": tokens}
    answers: dict[str, Answer] = {}
    with ExitStack() as stack:
        for name in options.only:
            if name == "generate":
                loaded = load_model(to_config(compose([f"model={MODEL}"])))
                ends = sorted(loaded.eos_ids)
                answers[name] = partial(generate, loaded.model, tokens=tokens, eos_token_id=ends)
            elif name != "llamacpp":
                answers[name] = ours(name, tokens)
            else:
                try:
                    server = llamacpp(threads)
                except NeedsNotMet as error:
                    print(f"left out: {error}", file=sys.stderr)
                    continue
                stack.callback(server.stop)
                facts[name] = {"wheel": wheel_version(), "simd": server.simd}
                answers[name] = partial(server_answer, Client(server.url, 300.0, 64.0), tokens)
        template = PromptTemplate(load_tokenizer(to_config(compose([f"model={MODEL}"]))))
        prompts = [template.render([(question, None)]) for question in QUESTIONS]
        yield facts | {"rows": compare_with_first(answers, prompts, options.rounds)}


def ours(weights: str, tokens: int) -> Answer:
    config = to_config(compose([f"model={MODEL}", f"engine.weights={weights}"]))
    loaded = load_model(config)
    target = target_of(config, loaded.model, max_len=tokens + 512)
    answer = plain_decoding(target, loaded.eos_ids, tokens)
    return lambda ids: answer(np.array(ids)).output_ids


@torch.inference_mode()
def generate(model: Any, ids: Iterable[int], tokens: int, **more: Any) -> list[int]:
    """Decode greedily with transformers' own loop; returns the new ids."""
    batch = torch.tensor([[*ids]], device=model.device)
    settled = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens}
    out = model.generate(batch, attention_mask=torch.ones_like(batch), **settled, **more)
    return out[0, batch.shape[1] :].tolist()  # type: ignore[no-any-return]


def llamacpp(threads: int) -> LlamacppProcess:
    wheel_version()  # refuses here, with what to type
    model = to_config(compose([f"model={MODEL}"])).model
    gguf = find_gguf(str(model.gguf_package), str(model.gguf_file))
    log = Path(tempfile.mkdtemp(), "server.log")
    server = LlamacppProcess(flags(LlamacppConfig(threads=threads), gguf), log)
    server.start()
    return server


def server_answer(client: Client, tokens: int, ids: list[int]) -> list[int]:
    request: dict[str, Any] = {"prompt": ids, "n_predict": tokens, "return_tokens": True}
    request |= {"temperature": 0.0, "cache_prompt": False}
    reply: Any = client.post_json("/completion", request)
    return [int(token) for token in reply["tokens"]]


def compare_with_first(
    answers: Mapping[str, Answer], prompts: Sequence[list[int]], rounds: int
) -> dict[str, dict[str, Any]]:
    """Give by name the median tokens/s, and the geometric mean of the ratios to the first."""
    taken = in_turns(answers, [prompts[0], *[*prompts] * rounds])
    rates = {name: np.array([len(out) / s for s, out in timed]) for name, timed in taken.items()}
    outputs = {name: [out for _, out in timed] for name, timed in taken.items()}
    first = next(iter(taken))
    return {
        name: {
            "tokens_per_s": float(np.median(rate)),
            "ratio": statistics.geometric_mean(rate / rates[first]),
            "equal": f"{equal_answers(outputs[name], outputs[first])}/{len(rate)}",
        }
        for name, rate in rates.items()
    }


# What `make gpu-check` asks of a GPU, with run.py's models and random weights.

PROMPT, PROFILED = 128, 5
FAMILIES = {  # by the first that a kernel's name matches
    "attention": r"attention|attend|merge|flash|fmha|sdpa",
    "product": r"product|gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|(add)?mm\b|linear",
    "norm": r"norm|rsqrt|mean|pow",
    "copy": r"memcpy|memset|copy|index|gather|scatter|cat",
    "choice": r"argmax|reduce|topk|sort",
    "other": "",
}


def gpu(options: Options) -> Results:
    """Measure bandwidth, loops or kernels of a GPU, or, as a trial, of a CPU.

    bandwidth: reads of the memory. loops: plain decoding eagerly, over graphs and in
    transformers' generate; and the clock of CUDA events against the wall. static: generate with its
    compiled static cache, which does not leave the GPU's memory as it was, alone. kernels:
    microseconds of a pass by family of kernels. passes: milliseconds of passes in torch's, Triton's
    and exact kernels, in turns. heads: of EAGLE-2's drafts by a random head.
    """
    cuda_settings.fix()
    with torch.inference_mode():
        for results in GPU_PARTS[options.part](options):
            yield results | {"trial": options.trial, "cuda_settings": cuda_settings.in_force()}


def random_model(overrides: list[str]) -> PreTrainedModel:
    model = to_config(compose([*overrides, "model.shape=true"])).model
    dtype, device = getattr(torch, str(model.dtype)), choose_device(str(model.device))
    network = shape_model(model.shape_config, dtype=dtype, device=device)
    return network.eval().requires_grad_(False)  # type: ignore[no-any-return]


def measure_bandwidth(options: Options) -> Results:
    device = choose_device(str(compose(options.overrides).model.device))
    read = bandwidth.FastestRead(device, 1 << 30)
    rows: dict[str, Any] = {"read": {"bytes_per_s": []}}
    for _ in range(options.repeats):
        read.measure()
        rows["read"]["bytes_per_s"].append(read.bytes_per_s)
        yield {"rows": rows}


def measure_loops(options: Options) -> Results:
    """Measure tokens/s of whole calls, prompt included; ``decode_s`` comes from CUDA events."""
    tokens, is_static = 8 if options.trial else 128, options.part == "static"
    prompt = np.random.default_rng(0).integers(3, 200, PROMPT)
    results: dict[str, Any] = {"tokens": tokens, "rows": {}, "clock_over_wall": [], "failed": {}}
    stock = random_model(options.overrides)
    same = {"min_new_tokens": tokens, "eos_token_id": None}
    theirs = partial(generate, stock, prompt, tokens, **same)
    calls: dict[str, Callable[[], Any]] = {"generate": theirs}
    if is_static:
        calls = {"static": partial(theirs, cache_implementation="static")}
    else:
        model = random_model(options.overrides)
        sizes: dict[str, Any] = {"max_len": PROMPT + tokens, "max_nodes": 1}
        capture = model.device.type == "cuda"
        graph = GraphTarget(model, capture=capture, fused=True, **sizes)  # as a run has it
        for name, target in {"graph": graph, "eager": Target(model, **sizes)}.items():
            calls[name] = partial(plain_decoding(target, (), tokens), prompt)
        results["weight_bytes"] = bandwidth.streamed_bytes(model)
    before = "nothing"
    for turn in range(options.repeats + 1):  # the first one warms up, and compiles
        for name in [n for n in calls if n not in results["failed"]][:: 1 - 2 * (turn % 2)]:
            synchronize(stock.device)
            start = time.perf_counter()
            try:
                decoded = calls[name]()
                synchronize(stock.device)
            except (RuntimeError, ValueError) as error:  # one way that fails ends no other
                results["failed"][name] = first_line(error)
                check_device(stock.device, error, name, before)
                continue
            wall, before = time.perf_counter() - start, name
            row = results["rows"].setdefault(name, {"tokens_per_s": [], "passes_per_s": []})
            if turn:
                row["tokens_per_s"].append(tokens / wall)
            if turn and name in ("graph", "eager"):
                row["passes_per_s"].append((tokens - 1) / decoded.timings.decode_s)
                results["clock_over_wall"].append(decoded.timings.wall_s / wall)
        yield results | ({} if is_static else {"described": graph.describe()})


def measure_kernels(options: Options) -> Results:
    model = random_model(options.overrides)
    on_gpu = model.device.type == "cuda"
    contexts, many = ((32,), (1, 8)) if options.trial else ((128, 960), (1, 8, 64))
    sizes: dict[str, Any] = {"max_len": max(contexts) + 64, "max_nodes": max(many)}
    target = GraphTarget(model, capture=on_gpu, fused=True, **sizes)  # as runs have it
    rows: dict[str, Any] = {}
    for context in contexts:
        target.prefill(np.arange(3, 3 + context) % 200)
        for n in many:
            rows[f"{n} rows after {context} tokens"] = profile_pass(target, n)
            yield {"rows": rows, "described": target.describe()}


def profile_pass(target: GraphTarget, rows: int) -> dict[str, Any]:
    """Measure microseconds of a pass: wall, by family of kernels, and of the longest kernels."""
    tree, on_gpu = DraftTree.chain(np.arange(rows - 1)), target.device.type == "cuda"

    def run_pass() -> None:
        GreedyVerifier().verify(tree, target.forward(7, tree))

    run_pass()
    wall = statistics.median(seconds(run_pass, target.device) for _ in range(PROFILED))
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profile:
        for _ in range(PROFILED):
            run_pass()
        synchronize(target.device)
    spent, launches, names = (defaultdict[str, float](float) for _ in range(3))
    for event in profile.key_averages():
        event_us: float = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event_us > 0:
            family = next(f for f, p in FAMILIES.items() if re.search(p, event.key.lower()))
            spent[family] += event_us / PROFILED
            launches[family] += event.count / PROFILED
            names[event.key[:120]] += event_us / PROFILED
    longest = dict(sorted(names.items(), key=lambda item: -item[1])[:12])
    times = {"wall_us": 1e6 * wall, "us": dict(spent), "launches": dict(launches)}
    return times | {"longest_us": longest}


def measure_passes(options: Options) -> Results:
    """Measure milliseconds of passes by kernels, rows and tokens before, in turns."""
    model = random_model(options.overrides)
    on_gpu, tokens = model.device.type == "cuda", 1 if options.trial else 20
    contexts, many = ((32,), (1, 8)) if options.trial else ((128, 448, 960, 1900), (1, 8, 64))
    sizes: dict[str, Any] = {"max_len": max(contexts) + 64, "max_nodes": 63, "capture": on_gpu}
    kernels: dict[str, dict[str, Any]] = {
        "torch": {},
        "triton": {"fused": True},
        "exact": {"fused": True, "exact": True},
    }
    targets = {name: GraphTarget(model, **sizes, **more) for name, more in kernels.items()}
    read = bandwidth.FastestRead(model.device, 1 << (20 if options.trial else 30))
    read.measure()
    times: dict[str, dict[str, float]] = {name: {} for name in targets}
    for context in contexts:
        for target in targets.values():
            target.prefill(np.arange(3, 3 + context) % 200)
        for n in many:
            calls = {name: partial(_verified_pass, target, n) for name, target in targets.items()}
            for name, timed in in_turns(calls, range(tokens + 2), warm_ups=2).items():
                times[name][f"{n}/{context}"] = 1e3 * min(s for s, _ in timed)
    if on_gpu:
        targets["exact"].compare_rows()
    yield {
        "rows": times,
        "read_ms": 1e3 * bandwidth.streamed_bytes(model) / read.bytes_per_s,
        "exact": targets["exact"].describe().get("exact", ""),
    }


def _verified_pass(target: GraphTarget, rows: int, _: int) -> None:
    tree = DraftTree.chain(np.arange(rows - 1))
    GreedyVerifier().verify(tree, target.forward(7, tree))


def measure_heads(options: Options) -> Results:
    """Measure milliseconds of EAGLE-2's drafts with a random head of the model's size."""
    model = random_model(options.overrides)
    target = GraphTarget(model, fused=True, max_len=256, max_nodes=63)
    shape = read_shape(model.config.to_dict(), options.part)

    class RandomHead(Eagle2):
        def _load(self, folder: Path, target: TargetInfo) -> eagle.EagleHead:
            with torch.device(target.device):
                return eagle.EagleHead(target.embeddings, shape).to(model.dtype).eval()

    drafter = RandomHead()
    drafter.setup(DraftContext(target.vocab_size, frozenset(), max_len=256, target=target,
                               heads={"eagle": Path()}))  # fmt: skip
    state = DecodeState(np.arange(3, 131), 64)
    state.buffer[state.length], state.length = 7, state.length + 1
    states = torch.randn(128, shape.hidden_size, dtype=model.dtype, device=model.device)
    drafter.observe_prompt_hidden(state.tokens[:-1], {AFTER_FINAL_NORM: states})
    drafter.begin(state)
    draft = partial(drafter.propose, state)
    taken = [1e3 * seconds(draft, target.device) for _ in range(options.repeats + 9)]
    yield {"rows": {"eagle2": {"draft_ms": min(taken[2:]), **drafter.report()}}}


GPU_PARTS: dict[str, Callable[[Options], Results]] = {
    "bandwidth": measure_bandwidth,
    "loops": measure_loops,
    "static": measure_loops,
    "kernels": measure_kernels,
    "passes": measure_passes,
    "heads": measure_heads,
}


# Our drafters inside vLLM, compared with vLLM without one and with our engine.

Steps: TypeAlias = list[tuple[int, int]]  # drafted and accepted tokens of steps that had a draft


def vllm(options: Options) -> Results:
    """Compare our drafters inside vLLM with vLLM alone and our engine (docs/servers.md).

    Every label of the run drafts for vLLM with its knobs; methods must draft chains, each request
    with a state of its own (state_scope=turn). A request's steps are the same where vLLM accepted
    in each but the last, in which it drafts beyond the limit, what our engine did.
    """
    (run,) = load_runs([options.run])
    plain_records = [record for record in run.records if record.label == run.baseline]
    plain_outputs = [record.output_ids for record in plain_records]
    traces = {trace.key: trace for trace in read_steps(run.path / STEPS)}
    limit = run.max_new_tokens or max(map(len, plain_outputs))
    ask = partial(vllm_answers, options, [r.prompt_ids for r in plain_records], limit)
    plain, _ = ask(None)
    sizes = f"--tokens {options.tokens} --rows {options.rows}"
    results: dict[str, Any] = {
        "command": f"python -m scripts.bench vllm RUN --model FOLDER {sizes}",
        "vllm": str(importlib.import_module("vllm").__version__),
        "model": run.model,
        "dataset": run.dataset,
        "requests": len(plain_records),
        "plain_equal_to_ours": equal_answers(plain, plain_outputs),
        "rows": {},
    }
    for label in run.labels:
        if label == run.baseline:
            continue
        knobs = typed_knobs(run.knobs(label))
        outputs, theirs = ask(knobs)
        label_traces = [traces[*record.key[:3], label] for record in plain_records]
        drafted = [
            [(d, c - 1) for d, c in zip(trace.drafted, trace.committed, strict=True) if d]
            for trace in label_traces
        ]
        results["rows"][label] = {
            "equal_to_plain": equal_answers(outputs, plain),
            "same_steps": sum(map(same_steps, theirs, label_traces)),
            "in_vllm": counts(theirs, options.tokens),
            "here": counts(drafted, options.tokens),
            "knobs": knobs,
        }
        yield results


def typed_knobs(knobs: dict[str, Any]) -> dict[str, Any]:
    """Format recorded knobs as a user types them: a method inside them by its name."""
    values = {k: v for k, v in knobs.items() if k not in ("_target_", "paper_scope", "version")}
    for key, value in values.items():
        if isinstance(value, dict) and "_target_" in value:
            part = typed_knobs(value)
            del part["state_scope"]  # the whole's
            values[key] = {"method": part.pop("name"), **part}
    return values


def vllm_answers(
    options: Options, prompts: Sequence[list[int]], max_tokens: int, knobs: dict[str, Any] | None
) -> tuple[list[list[int]], list[Steps]]:
    """Decode these prompts greedily in a new vLLM; returns outputs, and steps of a drafter."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    theirs = importlib.import_module("vllm")
    drafting: dict[str, Any] = {}
    if knobs is not None:
        drafter = {
            "method": "custom_class",
            "model": f"specbench.integrations.vllm.{knobs['name']}",
        }
        drafting = {
            "speculative_config": drafter | {"num_speculative_tokens": options.tokens},
            "additional_config": {"specbench": knobs},
            "per_request_spec_decode_metrics": "detailed",
        }
    llm = theirs.LLM(
        model=str(options.model),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=options.rows,
        # Nearer to it vLLM asks for no drafts.
        max_model_len=max(map(len, prompts)) + max_tokens + 2 * (options.tokens + 1),
        **drafting,
    )
    sampling = theirs.SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [answer.outputs[0] for answer in llm.generate(requests, sampling, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    metrics = [output.spec_decode_metrics for output in outputs if knobs is not None]
    steps = [[*zip(n.per_step_drafted, n.per_step_accepted, strict=True)] for n in metrics]
    return [[*output.token_ids] for output in outputs], steps


def same_steps(theirs: Steps, trace: StepTrace) -> bool:
    """Tell whether vLLM accepted what our engine did in each step but the last."""
    last = len(trace.committed) - 1
    ours = [n - 1 for n, d in zip(trace.committed[:last], trace.drafted, strict=False) if d]
    accepted = [accepted for _, accepted in theirs]
    return ours in (accepted, accepted[:-1])  # in the last one vLLM may have had no draft


def counts(requests: Iterable[Steps], tokens: int) -> dict[str, Any]:
    """Count drafts and tokens of all requests, and accepted tokens by position."""
    steps = [step for request in requests for step in request]
    return {
        "drafts": len(steps),
        "drafted": sum(drafted for drafted, _ in steps),
        "accepted": sum(accepted for _, accepted in steps),
        "accepted_by_position": [sum(n > at for _, n in steps) for at in range(tokens)],
    }


def equal_answers(outputs: Sequence[list[int]], expected: Sequence[list[int]]) -> int:
    return sum(a == b for a, b in zip(outputs, expected, strict=True))


SECTIONS: dict[str, Callable[[Options], Results]] = {
    section.__name__: section for section in (passes, steps, others, gpu, vllm)
}


def add_options(section: str, add: Add) -> None:
    engines = (*WEIGHTS, "generate", "llamacpp")
    add("--out", type=Path, help="write the results as JSON, as they come")
    match section:
        case "passes":
            add("--model", default=MODEL, help="a name of conf/model")
            add("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="engine.weights")
            add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
            add("--threads", type=int, nargs="+", default=[1, 2])
            add("--contexts", type=int, nargs="+", default=[256, 800])
            add("--turns", type=int, default=30, help="of each pass, for each line of the table")
        case "steps":
            add("--model", default=MODEL, help="a name of conf/model")
            add("--tokens", type=int, default=128, help="new tokens a question")
            add("--threads", type=int, nargs="+", default=[1, 2])
            add("--questions", type=int, default=len(QUESTIONS), help=f"of {len(QUESTIONS)}")
        case "others":
            add("--tokens", type=int, default=128, help="new tokens a prompt, at most")
            add("--rounds", type=int, default=3, help="times that all prompts are asked")
            add("--only", nargs="+", choices=engines, default=engines, help="which of them")
        case "gpu":
            add("part", choices=GPU_PARTS)
            add("overrides", nargs="*", metavar="KEY=VALUE", help="of run.py, e.g. model=vicuna7b")
            add("--repeats", type=int, default=3)
            add("--trial", action="store_true", help="tiny sizes: the numbers say nothing")
        case "vllm":
            add("run", type=Path, help="folder of a run of our engine, or of a replay")
            add("--model", type=Path, required=True, help="folder of the weights that it ran with")
            add("--tokens", type=int, default=8, help="num_speculative_tokens (default: 8)")
            add("--rows", type=int, default=3, help="requests at once (default: 3)")


def format_value(value: Any) -> str:
    """Format a value; several measurements as median, smallest and largest."""
    if isinstance(value, list):
        middle = statistics.median(value or [np.nan])
        return f"{middle:.4g} [{min(value):.4g}, {max(value):.4g}]" if value else "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(results: dict[str, Any]) -> None:
    """Print a table with a line per row, then the other results."""
    print_wide = Console(width=130).print
    hidden = ("launches", "longest_us", "knobs")
    rows = results.pop("rows")
    lines = [{k: v for k, v in row.items() if k not in hidden} for row in rows.values()]
    table = pd.json_normalize(lines, sep=" ").fillna("–").map(format_value)
    table.insert(0, "", [*rows])
    print_wide(FittedTable(table, ""))
    print_wide(results, markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "scripts.bench")
    commands = parser.add_subparsers(dest="section", metavar="SECTION", required=True)
    for name, measure in SECTIONS.items():
        command = add_command(commands, name, measure.__doc__ or "")
        add_options(name, command.add_argument)
    options = parser.parse_args(argv)
    facts = {
        "command": f"python -m scripts.bench {shlex.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment.describe(),
    }
    results: dict[str, Any] = {}
    for results in SECTIONS[options.section](options):
        if options.out:  # a command that is stopped leaves what it had
            options.out.parent.mkdir(parents=True, exist_ok=True)
            jsonl.write_json(options.out, facts | results)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
