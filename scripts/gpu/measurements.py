"""What the GPU check measures of models alone: bandwidth, plain decoding, passes by rows, drafts.

Each function takes the check, which knows the device, the time left and where files go, and
returns plain data for ``scripts/gpu/report.py`` to show.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import yaml
from transformers import PreTrainedModel

from scripts.gpu.progress import Progress
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.models.draft.model import DraftModel
from specbench.models.graph_target import GraphTarget
from specbench.models.loading import shape_model
from specbench.models.target import Target
from specbench.paths import CONF_DIR, SURFACES
from specbench.replay.cost_surface import CostSurface, Grid
from specbench.system import bandwidth, environment

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
PROMPT = 128
DRAFT_NODES = (1, 4, 16, 64)
DRAFT_TEXT = 512
POINT_S = 3.0  # no point of a loop is begun with less time left


class OutOfTime(RuntimeError):
    """The rest of a loop would take time that is kept for something else."""


def ask(check: Progress, needs_s: float = POINT_S) -> None:
    """Go on only with so much time left.

    Raises:
        OutOfTime: there is less.
    """
    left = check.left_s
    if left < needs_s:
        raise OutOfTime(f"{max(0.0, left):.0f} s were left")


def load(check: Progress, name: str) -> PreTrainedModel:
    """The shape of a model of ``conf/model`` with random weights, in bfloat16 on a GPU."""
    shape = TINY
    if name != "tiny":
        text = (CONF_DIR / "model" / f"{name}.yaml").read_text(encoding="utf-8")
        shape = yaml.safe_load(text)["shape_config"]
    dtype = torch.bfloat16 if check.device.type == "cuda" else torch.float32
    model = shape_model(shape, dtype=dtype, device=check.device)
    model.eval().requires_grad_(False)
    return model


def memory_speed(check: Progress) -> dict[str, float]:
    """GB/s of a copy within the device's memory, and of the fastest read of it."""
    read = bandwidth.FastestRead(check.device, bandwidth.COPY_BYTES[check.device.type])
    read.measure()
    return {
        "copy_gb_per_s": bandwidth.copy_bandwidth(check.device) / 1e9,
        "read_gb_per_s": read.bytes_per_s / 1e9,
    }


def engines(check: Progress, model: PreTrainedModel, **sizes: Any) -> dict[str, Target]:
    """Both engines over one model."""
    capture = check.device.type == "cuda"
    return {
        "eager": Target(model, **sizes),
        "graph": GraphTarget(model, capture=capture, **sizes),
    }


def decoding(check: Progress, name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Plain decoding by both engines and by ``generate``, turn about.

    Rates of all three are of whole calls, the prompt's pass among them. The engines' own records
    tell the time after it, whose share of the bandwidth is taken: n tokens take n - 1 such passes.
    ``generate`` has no such record; its share counts the prompt's pass as one more pass.
    """
    model: Any = load(check, name)
    prompt = np.random.default_rng(0).integers(3, 200, PROMPT)
    targets = engines(check, model, max_len=PROMPT + tokens, max_nodes=1)
    # Made once: an engine's clock records thousands of events when it is made.
    loops = {
        kind: Engine(target, GreedyVerifier(), eos_ids=frozenset())
        for kind, target in targets.items()
    }
    ids = torch.from_numpy(prompt)[None].to(check.device)

    def ours(engine: str) -> float:
        result = loops[engine].decode(prompt, Drafter(name="ar"), max_new_tokens=tokens)
        return result.timings.decode_s

    def theirs() -> float:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
                min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert out.shape[1] == PROMPT + tokens
        return float("nan")

    calls: dict[str, Callable[[], float]] = {
        "graph": lambda: ours("graph"), "eager": lambda: ours("eager"), "generate": theirs,
    }  # fmt: skip
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    after_prompt: dict[str, list[float]] = {kind: [] for kind in calls}
    round_s = 0.0
    for i in range(repeats + 1):
        begun = time.perf_counter()
        if i > 1 and check.left_s < round_s:  # one counted round is always wanted
            why = f"{i - 1} of {repeats} made, {max(0.0, check.left_s):.0f} s were left"
            check.missing[f"decoding {name}, more repeats"] = why
            break
        for kind in calls if i % 2 else reversed(calls):
            model.set_attn_implementation("sdpa" if kind == "generate" else "specbench")
            check.wait()
            start = time.perf_counter()
            decode_s = calls[kind]()
            check.wait()
            if i:  # the first one warms up
                times[kind].append(time.perf_counter() - start)
                after_prompt[kind].append(decode_s)
        round_s = time.perf_counter() - begun
    rates = {kind: tokens / statistics.median(values) for kind, values in times.items()}
    passes = {
        kind: (tokens - 1) / statistics.median(after_prompt[kind]) for kind in ("graph", "eager")
    } | {"generate": rates["generate"]}
    read = check.results.get("bandwidth", {}).get("read_gb_per_s")
    size = bandwidth.streamed_bytes(model)
    return {
        "tokens": tokens,
        "prompt": PROMPT,
        "weight_bytes": size,
        "tokens_per_s": rates,
        "passes_per_s": passes,
        "graph_over_generate": rates["graph"] / rates["generate"],
        "eager_over_generate": rates["eager"] / rates["generate"],
        "bandwidth_share": {
            kind: size * rate / 1e9 / read if read else None for kind, rate in passes.items()
        },
        "passes": targets["graph"].describe(),
    }


def pass_by_rows(check: Progress, name: str, contexts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds of a pass, its verdict and the cache's work, by rows, context and engine.

    The samples are a cost surface an engine, as ``runner=cost`` measures it, but for the drafting:
    written beside the report and, from a GPU, to ``surfaces/``.
    """
    targets = engines(check, load(check, name), max_len=max(contexts) + 8, max_nodes=max(ROWS) - 1)
    random = np.random.default_rng(0)
    prompts: dict[str, list[list[float]]] = {kind: [] for kind in targets}
    passes: dict[str, list[list[list[float]]]] = {kind: [] for kind in targets}
    done = 0
    try:
        for context in contexts:
            times = {kind: _by_rows(check, t, context, random) for kind, t in targets.items()}
            for kind, (of_prompt, of_passes) in times.items():
                prompts[kind].append(of_prompt)
                passes[kind].append(of_passes)
            done += 1
    except OutOfTime as error:
        if not done:
            raise
        # Tables and surfaces are rectangles: a context that was begun is left out whole.
        left_out = ", ".join(map(str, contexts[done:]))
        check.missing[f"rows {name}, contexts {left_out}"] = str(error)
    contexts = contexts[:done]
    for kind, target in targets.items():
        by_rows = np.array(passes[kind]).swapaxes(0, 1)
        surface(check, name, kind, target, contexts, np.array(prompts[kind]), by_rows)
    return [
        {"engine": kind, "context": context, "rows": rows, "ms": 1e3 * statistics.median(times)}
        for i, context in enumerate(contexts)
        for kind in targets
        for rows, times in zip(ROWS, passes[kind][i], strict=True)
    ]


def _by_rows(
    check: Progress, target: Target, context: int, random: np.random.Generator
) -> tuple[list[float], list[list[float]]]:
    """Seconds of reading a prompt of this length, and of passes behind it by `ROWS`.

    Raises:
        OutOfTime: time ran short.
    """
    verifier = GreedyVerifier()
    prompt = random.integers(3, 200, context)
    ask(check)
    of_prompt = check.seconds(lambda: target.prefill(prompt), 3)
    length = target.cache.length
    of_passes = []
    for rows in ROWS:
        parents = np.array([random.integers(max(-1, i - 8), i) for i in range(rows - 1)])
        tree = DraftTree(random.integers(3, 200, rows - 1), parents.astype(np.int64))

        def step(tree: DraftTree = tree) -> None:
            verdict = verifier.verify(tree, target.forward(7, tree))
            target.commit(tree, verdict.path)
            target.cache.truncate(length)

        ask(check)
        of_passes.append(check.seconds(step, 7))
    return of_prompt, of_passes


def surface(
    check: Progress, name: str, kind: str, target: Target, contexts: tuple[int, ...],
    prompts: Any, passes: Any,
) -> None:  # fmt: skip
    """Write a cost surface of seconds: [contexts, repeats] and [rows, contexts, repeats]."""
    on_gpu = check.device.type == "cuda"
    where = torch.cuda.get_device_name(check.device) if on_gpu else "cpu-trial"
    model = {
        "name": name,
        "id": None,
        "revision": None,
        "weights_hash": None,
        "shape": True,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "packed": target.packed_weights,
        "passes": target.describe(),
        "threads": torch.get_num_threads(),
    }
    axes = {"context": contexts}
    found = CostSurface(
        model=model,
        machine=environment.describe(),
        prefill=Grid(axes, prompts),
        tree=Grid({"rows": ROWS, **axes}, passes),
    )
    file = f"{name}-{re.sub('[^a-z0-9]+', '-', where.lower()).strip('-')}-{kind}.json"
    for folder in (check.args.out, *([SURFACES] if on_gpu else [])):
        folder.mkdir(parents=True, exist_ok=True)
        found.write(folder / file)
    check.surfaces.append(file)


def draft_passes(check: Progress, name: str) -> list[dict[str, Any]]:
    """Milliseconds of a draft model's pass over new nodes, by their number and engine."""
    model = load(check, name)
    random = np.random.default_rng(0)
    found = []
    for kind in ("eager", "graph"):
        draft = draft_model(check, model, kind, nodes=max(DRAFT_NODES), text=DRAFT_TEXT)
        draft.begin(random.integers(3, 200, DRAFT_TEXT))
        for nodes in DRAFT_NODES:
            ids, parents = random.integers(3, 200, nodes), np.full(nodes, -1)

            def step(ids: Any = ids, parents: Any = parents, draft: DraftModel = draft) -> None:
                draft.extend(ids, parents)
                draft.drop_nodes()

            try:
                ask(check)
            except OutOfTime as error:
                check.missing[f"drafts {name}, {kind}, {nodes} nodes"] = str(error)
                continue
            ms = 1e3 * statistics.median(check.seconds(step, 9))
            found.append({"engine": kind, "nodes": nodes, "ms": ms})
    return found


def draft_model(
    check: Progress, model: PreTrainedModel, engine: str, *, nodes: int, text: int, vocab: int = 0
) -> DraftModel:
    """A draft model of a text's length and so many nodes, for a target of ``vocab`` ids."""
    sizes: dict[str, Any] = {"max_len": text + nodes, "max_nodes": nodes}
    if engine == "graph":
        capture = check.device.type == "cuda"
        target: Target = GraphTarget(model, capture=capture, drafts=True, **sizes)
    else:
        target = Target(model, **sizes)
    return DraftModel(target, target_vocab=vocab or target.vocab_size, max_nodes=nodes)
