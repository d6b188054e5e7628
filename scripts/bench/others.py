"""Plain decoding here, in transformers' generate and in llama.cpp, prompt by prompt, turn about.

    python -m scripts.bench others [--tokens 128] [--rounds 3] [--only float32 llamacpp ...]

All decode the bundled model greedily from the same prompt ids, in one process with as many threads
each; llama.cpp is its own server, waiting while others decode. float32, bfloat16 and stored are
this engine's (engine.weights). Times are of whole answers, the prompt's pass among them. llama.cpp
computes with the 4-bit file itself, whose values ours and generate hold in float32, so its outputs
differ by rounding.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from scripts.bench import console, print_table
from specbench.config.compose import compose, typed
from specbench.config.schema import packed_bytes
from specbench.config.server_schema import LlamacppConfig
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import NeedsNotMet
from specbench.models.checkpoints.bundled import find_gguf
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target
from specbench.servers.client import Client
from specbench.servers.llamacpp import LlamacppProcess, flags, wheel_version

OURS = ("float32", "bfloat16", "stored")
ALL = (*OURS, "generate", "llamacpp")
MODEL = "smollm2_135m"
QUESTIONS = (
    "Explain how a bicycle stays upright, in simple words.",
    "Write a short letter to a neighbour about a tree that has fallen over the fence.",
    "List six ways to save water at home and say why each one works.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show your work.",
)
Answer: TypeAlias = Callable[[list[int]], list[int]]  # of a prompt's ids, the new ones


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, default=128, help="new tokens a prompt, at most")
    add("--rounds", type=int, default=3, help="times that all prompts are asked")
    add("--only", nargs="+", choices=ALL, default=list(ALL), help="which of them")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        answers: dict[str, Answer] = {}
        facts: dict[str, Any] = {"threads": threads, "new_tokens": options.tokens}
        for name in options.only:
            if name == "llamacpp":
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                try:
                    server = _server(folder, threads)
                except NeedsNotMet as error:
                    console.print(f"left out: {error}", markup=False, highlight=False)
                    continue
                stack.callback(server.stop)
                facts["llamacpp"] = {"wheel": wheel_version(), "simd": server.simd}
                answers[name] = _of_server(server, options.tokens)
            elif name == "generate":
                answers[name] = _generate(options.tokens)
            else:
                answers[name] = _ours(name, options.tokens)
        template = PromptTemplate(load_tokenizer(_config("float32")))
        prompts = [template.render([(question, None)]) for question in QUESTIONS]
        yield facts | {"rows": in_turns(answers, prompts, options.rounds)}


def _config(weights: str) -> Any:
    return typed(compose([f"model={MODEL}", f"engine.weights={weights}"]))


def _ours(weights: str, tokens: int) -> Answer:
    config = _config(weights)
    loaded = load_model(config)
    memory, cache = packed_bytes(config.engine.packed), Path(config.cache_dir)
    target = Target(loaded.model, max_len=tokens + 512, packed_bytes=memory, cache_dir=cache)
    engine = Engine(target, GreedyVerifier(), eos_ids=loaded.eos_ids)
    plain = Drafter(name="ar")
    return lambda ids: engine.decode(np.array(ids), plain, max_new_tokens=tokens).output_ids


def _generate(tokens: int) -> Answer:
    loaded = load_model(_config("float32"))
    model: Any = loaded.model
    ends = sorted(loaded.eos_ids)

    @torch.inference_mode()
    def answer(ids: list[int]) -> list[int]:
        batch = torch.tensor([ids])
        options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        out = model.generate(
            batch, attention_mask=torch.ones_like(batch), eos_token_id=ends, **options
        )
        return cast("list[int]", out[0, len(ids) :].tolist())

    return answer


def _server(folder: Path, threads: int) -> LlamacppProcess:
    wheel_version()  # refuses here, with what to type
    model = _config("float32").model
    gguf = find_gguf(str(model.gguf_package), str(model.gguf_file))
    server = LlamacppProcess(flags(LlamacppConfig(threads=threads), gguf), folder / "server.log")
    server.start()
    return server


def _of_server(server: LlamacppProcess, tokens: int) -> Answer:
    client = Client(server.url, 300.0, 64.0)
    wanted = {"n_predict": tokens, "temperature": 0.0, "cache_prompt": False, "return_tokens": True}

    def answer(ids: list[int]) -> list[int]:
        said = client.post_json("/completion", {"prompt": ids, **wanted})
        return cast("dict[str, list[int]]", said)["tokens"]

    return answer


def in_turns(
    answers: dict[str, Answer], prompts: list[list[int]], rounds: int
) -> dict[str, dict[str, Any]]:
    """By name tokens/s, the median, and their ratio to the first one's, the geometric mean.

    Each prompt is asked of all, who begins in turn; the first prompt once more before, to warm up.
    """
    names = [*answers]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    equal = dict.fromkeys(names, 0)
    for turn, ids in enumerate([prompts[0], *prompts * rounds]):
        out = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            out[name] = answers[name](ids)
            speed = len(out[name]) / (time.perf_counter() - start)
            if turn:
                speeds[name].append(speed)
        for name in names:
            equal[name] += bool(turn) and out[name] == out[names[0]]
    first = speeds[names[0]]
    return {
        name: {
            "tokens_per_s": statistics.median(own),
            "ratio": statistics.geometric_mean([a / b for a, b in zip(own, first, strict=True)]),
            "equal": f"{equal[name]}/{len(own)}",
        }
        for name, own in speeds.items()
    }


def show(results: dict[str, Any]) -> None:
    rows = [
        (name, f"{row['tokens_per_s']:.1f}", f"{row['ratio']:.2f}", row["equal"])
        for name, row in results["rows"].items()
    ]
    first = next(iter(results["rows"]))
    columns = ("engine", "tokens/s", f"of {first}", "equal answers")
    print_table(f"Plain decoding by {results['threads']} threads", columns, rows)
    if said := results.get("llamacpp"):
        console.print(f"llama.cpp: {said['wheel']}, SIMD {said['simd']}", highlight=False)
