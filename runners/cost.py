"""The runner that measures what a target pass costs here, as a cost surface.

A sample is what ``runners.session.pass_times`` times: all of a step but the drafter. Every repeat
visits all points in a new order, so that a drift of the machine spreads over them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runners.job import Job
from runners.run_folder import folder
from runners.run_folder.manifest import add_start, begin, check_resume, close
from runners.run_folder.repeat import leave_repeat
from runners.runner import Runner
from runners.session.method_runs import MethodRun, build_method_runs
from runners.session.pass_times import pass_s, random_tree, texts_pass_s
from specbench.config.schema import CostConfig, RunConfig
from specbench.data.cases import Case
from specbench.decoding.device import seconds
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError, SpecBenchError
from specbench.models import loading
from specbench.models.loading import LoadedModel
from specbench.models.target import Target
from specbench.replay.cost_surface import FREE, CostSurface, Drafting, Grid
from specbench.replay.replayer import Replayer
from specbench.replay.traces import RecordedModel, RecordedTurn, Traces
from specbench.results import records
from specbench.results.manifest import BASELINE, ModelInfo, RunManifest
from specbench.results.records import SURFACE
from specbench.results.statistics.roofline import number_format
from specbench.storage import jsonl
from specbench.system import cuda_settings, environment
from specbench.system.clock import collector_at_rest
from specbench.system.noted import Machine

ROUNDS = "rounds.jsonl"

log = logging.getLogger(__name__)

_TEXTS, _TEXT_TOKENS = 5, 96  # made-up texts that drafting is timed on, and their new tokens
_PHRASES, _PHRASE_TOKENS = 24, 6  # they are made of recurring phrases
# Smallest values of the grid's lists.
_LEAST = {"contexts": 1, "tree_rows": 1, "batch_k": 1, "batch_w": 0, "texts": 1, "text_rows": 1}
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Cost(Runner):
    """``runner=cost``.

    Args:
        load: gives the model; by default the one that the configuration names.
    """

    def __init__(self, load: Callable[[RunConfig], LoadedModel] = loading.load_model) -> None:
        self._load = load

    def resolve_config(self, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Check the grid: it has points, and they fit into the model's context."""
        grid = cfg.runner
        for key, least in _LEAST.items():
            values = list(grid[key])
            if values != sorted(set(values)) or (values and values[0] < least):
                raise ConfigurationError(
                    f"runner.{key}={values} must be ascending whole numbers from {least}, "
                    f"e.g. runner.{key}=[1,2,4,8]."
                )
        if not grid.contexts or not grid.tree_rows or grid.tree_rows[0] != 1:
            raise ConfigurationError(
                "runner=cost needs runner.contexts and runner.tree_rows. The latter must "
                "begin with 1: plain decoding, which all else is compared with."
            )
        if bool(grid.batch_k) != bool(grid.batch_w) or bool(grid.batch_k) != bool(
            grid.batch_contexts
        ):
            raise ConfigurationError(
                "runner.batch_k, runner.batch_w and runner.batch_contexts go together: give all "
                "three, or leave all three empty."
            )
        longest = max([*grid.contexts, *grid.batch_contexts])
        limit = cfg.model.context_length
        if limit is not None and longest >= limit:
            raise ConfigurationError(
                f"runner.contexts goes up to {longest}, but model={cfg.model.name} holds {limit} "
                "tokens. Leave out the longest."
            )
        return cfg

    def load_cases(self, config: RunConfig) -> tuple[Case, ...]:
        """None are asked, but the model must be there."""
        loading.model_files_present(config)
        return ()

    def questions_at_hand(self, config: RunConfig) -> None:
        """None are asked."""

    def run(self, job: Job) -> int:
        """Measure the rounds that are missing and write ``surface.json``."""
        cuda_settings.fix()
        with folder.hold_folder(job.folder):
            runs = build_method_runs(job)
            machine = environment.describe()
            if (job.folder / ROUNDS).exists():
                manifest = RunManifest.read(job.folder)
                check_resume(manifest, machine, force=job.config.resume == "force")
            else:
                manifest = begin(job, {run.label: run.describe() for run in runs}, machine)
                leave_repeat(job.folder, manifest, {})
            add_start(manifest, 0, 0)
            manifest.write(job.folder)
            surface = _measure(job, runs, machine, manifest, self._load(job.config))
            surface.write(job.folder / SURFACE)
            close(manifest, "complete", 0)
            manifest.finish(job.folder, [SURFACE])
        return 0

    def show(self, path: Path, *, brief: bool = False) -> None:
        """Print a surface's table and how many draft nodes are free."""
        surface = CostSurface.read(path / SURFACE)
        console = Console(width=118, soft_wrap=False)
        hardware = surface.machine["hardware"]
        on_gpu = str(surface.model["device"]).startswith("cuda")
        where = hardware["gpus"][0]["name"] if on_gpu else hardware["cpu"]
        contexts = surface.tree.axes["context"]
        what = f"{surface.model['name']}, {number_format(surface.model)}, {where}"
        table = Table(title=Text(f"{what}: milliseconds of a pass"))
        table.add_column("cached tokens", justify="right")
        shown = [r for r in _SHOWN_ROWS if r <= surface.tree.axes["rows"][-1]]
        for rows in shown:
            table.add_column(f"{rows} row{'s' if rows > 1 else ''}", justify="right")
        table.add_column("free nodes", justify="right")
        for context in contexts:
            predicted = surface.tree.predict(np.array(shown), np.full(len(shown), context))
            table.add_row(
                str(context),
                *(f"{1e3 * value:.1f}" for value in predicted),
                str(surface.nodes_within_budget(context)),
            )
        console.print(table)
        for row in surface.drafting:
            console.print(
                f"drafting, {row['label']}, {row['context']} tokens of context: "
                + (f"{row['step_us']:.1f} µs a step" if "step_us" in row else row["skipped"]),
                markup=False,
                highlight=False,
            )
        batch, texts = (
            "none" if grid is None else f"{grid.error:.1%}"
            for grid in (surface.batch, surface.texts)
        )
        console.print(
            f"relative error of the medians: tree {surface.tree.error:.1%}, batch {batch}, "
            f"several texts {texts}, prompt {surface.prefill.error:.1%}",
            highlight=False,
        )
        free = [surface.nodes_within_budget(context) for context in contexts]
        console.print(
            f"free here: {min(free)} to {max(free)} draft nodes (a pass with them takes at most "
            f"{FREE:.0%} longer than a pass without)",
            highlight=False,
        )
        console.print(
            f"files: {path}/ ({SURFACE}, {records.MANIFEST})", markup=False, highlight=False
        )


def _measure(
    job: Job,
    runs: Sequence[MethodRun],
    machine: Machine,
    manifest: RunManifest,
    loaded: LoadedModel,
) -> CostSurface:
    # Heavy imports only where something is left to measure.
    from runners.session.loading import earlier_checks, make_target
    from specbench.models.checks import self_check
    from specbench.models.graph_target import GraphTarget

    config = job.config
    assert isinstance(config.runner, CostConfig)
    grid = config.runner
    longest = max([*grid.contexts, *grid.batch_contexts])
    most = max([*grid.tree_rows, *grid.text_rows])
    target, check = self_check.checked(
        loaded.model,
        partial(make_target, config=config, max_len=longest, max_nodes=most),
        what=f"model={config.model.name}",
        longest=longest,
        nodes=most,
        earlier=earlier_checks(config, loaded),
    )
    model = ModelInfo(
        name=config.model.name,
        id=loaded.id,
        revision=loaded.revision,
        weights_hash=loaded.weights_hash,
        shape=config.model.shape,
        dtype=loaded.dtype,
        weights=loaded.weights,
        device=loaded.device,
        packed=target.packed_weights,
        threads=torch.get_num_threads(),
        self_check=check.to_json(),
    )
    manifest.model = model
    rng = np.random.default_rng(config.seed)
    # A batch layout is captured at its first pass, once per bucket of keys: warming up captures
    # just those that are measured.
    graphs = isinstance(target, GraphTarget)
    kinds = {"tree": _tree_round(target, grid, rng)}
    if grid.batch_k:
        target.reserve(longest, max(grid.batch_k) * max(grid.batch_w), max(grid.batch_k))
        kinds["batch"] = _batch_round(target, grid, rng)
    if grid.texts and not graphs:  # no graph holds several texts
        kinds["texts"] = _texts_round(target, grid, rng)
    with collector_at_rest():
        found = _rounds(job.folder / ROUNDS, kinds, grid, warm_all=graphs)
    samples = {kind: np.stack([x["pass_s"] for x in found[kind]], axis=-1) for kind in kinds}
    contexts, batch_contexts = tuple(grid.contexts), tuple(grid.batch_contexts)
    prefill = np.stack([line["prefill_s"] for line in found["tree"]], axis=-1)
    batch_axes = {"k": tuple(grid.batch_k), "w": tuple(grid.batch_w), "context": batch_contexts}
    texts_axes = {"texts": tuple(grid.texts), "rows": tuple(grid.text_rows), "context": contexts}
    model.passes = target.describe()  # by now, since shapes that nobody foresaw have run
    return CostSurface(
        model=model.to_json(),
        machine=machine,
        prefill=Grid({"context": contexts}, prefill),
        tree=Grid({"rows": tuple(grid.tree_rows), "context": contexts}, samples["tree"]),
        batch=Grid(batch_axes, samples["batch"]) if "batch" in kinds else None,
        texts=Grid(texts_axes, samples["texts"]) if "texts" in kinds else None,
        drafting=_drafting_times(config, grid.contexts, runs, loaded, target.vocab_size, rng),
    )


# A round of a kind of passes over the contexts with the given places, as a line of `ROUNDS`.
_Round: TypeAlias = Callable[[list[int]], dict[str, Any]]


def _tree_round(target: Target, grid: CostConfig, rng: np.random.Generator) -> _Round:
    contexts, rows = grid.contexts, grid.tree_rows
    trees = [random_tree(n - 1, target.vocab_size, rng) for n in rows]

    def once(which: list[int]) -> dict[str, Any]:
        prompts = np.zeros(len(contexts))
        times = np.zeros((len(rows), len(contexts)))
        for j in rng.permutation(which):
            prompt = rng.integers(0, target.vocab_size, contexts[j])
            prompts[j] = seconds(partial(target.prefill, prompt), target.device)
            for i in rng.permutation(len(rows)):
                times[i, j] = pass_s(target, trees[i], contexts[j])
        return {"prefill_s": prompts.tolist(), "pass_s": times.tolist()}

    return once


def _batch_round(target: Target, grid: CostConfig, rng: np.random.Generator) -> _Round:
    k, w, contexts = grid.batch_k, grid.batch_w, grid.batch_contexts
    points = [(i, j) for i in range(len(k)) for j in range(len(w))]
    drafts = {(i, j): _random_rows(k[i], w[j], target.vocab_size, rng) for i, j in points}

    def once(which: list[int]) -> dict[str, Any]:
        times = np.zeros((len(k), len(w), len(contexts)))
        for c in rng.permutation(which):
            target.prefill(rng.integers(0, target.vocab_size, contexts[c]))
            target.cache.broadcast()  # once a prompt: steps bring their rows along themselves
            for p in rng.permutation(len(points)):
                i, j = points[p]
                times[i, j, c] = pass_s(target, drafts[i, j], contexts[c])
        return {"pass_s": times.tolist()}

    return once


def _texts_round(target: Target, grid: CostConfig, rng: np.random.Generator) -> _Round:
    """Passes over several texts of one length, each with a tree of as many rows."""
    from specbench.models.batch_target import BatchTarget

    texts, rows, contexts = grid.texts, grid.text_rows, grid.contexts
    trees = [random_tree(n - 1, target.vocab_size, rng) for n in rows]
    batch = BatchTarget(target, max(texts), max(rows) - 1)
    points = [(i, j) for i in range(len(texts)) for j in range(len(rows))]

    def once(which: list[int]) -> dict[str, Any]:
        times = np.zeros((len(texts), len(rows), len(contexts)))
        for c in rng.permutation(which):
            batch.read(rng.integers(0, target.vocab_size, contexts[c]))
            for p in rng.permutation(len(points)):
                i, j = points[p]
                times[i, j, c] = texts_pass_s(batch, texts[i], trees[j], contexts[c])
        return {"pass_s": times.tolist()}

    return once


def _rounds(
    path: Path, kinds: Mapping[str, _Round], grid: CostConfig, *, warm_all: bool
) -> dict[str, list[dict[str, Any]]]:
    """Finished rounds by kind, kept on disk as they are made: an interrupted run goes on.

    Each round visits all kinds, so that a drift of the machine spreads over them, too: of kinds
    that were timed one after the other, one was priced by half.
    """
    done: list[dict[str, Any]] = jsonl.mend_jsonl(path, dict)
    found = {kind: [line for line in done if line["kind"] == kind] for kind in kinds}
    lengths = {kind: len(grid.contexts) for kind in kinds} | {"batch": len(grid.batch_contexts)}
    every = {kind: list(range(n)) for kind, n in lengths.items()}
    for kind, once in kinds.items():
        if len(found[kind]) < grid.passes:
            log.info("%s passes: warming up", kind)
            once(every[kind] if warm_all else [0])
    for number in range(1, grid.passes + 1):
        for kind, once in kinds.items():
            if len(found[kind]) < number:
                log.info("%s passes: round %d of %d", kind, number, grid.passes)
                found[kind].append({"kind": kind, **once(every[kind])})
                jsonl.append_jsonl(path, found[kind][-1:])
    return found


def _random_rows(k: int, w: int, vocab: int, rng: np.random.Generator) -> DraftTree:
    places = np.arange(k * w)
    parents = np.where(places % w == 0, -1, places - 1) if w else places
    return DraftTree(rng.integers(0, vocab, k * w), parents, rows=(k, w))


def _drafting_times(
    config: RunConfig,
    contexts: Sequence[int],
    runs: Sequence[MethodRun],
    loaded: LoadedModel,
    vocab: int,
    rng: np.random.Generator,
) -> list[Drafting]:
    tokenizer = loaded.tokenizer
    sha = "" if tokenizer is None else loading.tokenizer_hash(tokenizer)
    rows: list[Drafting] = []
    for context in contexts:
        model = RecordedModel(
            eos_ids=[],
            vocab_size=vocab,
            tokenizer_hash=sha,
            context_length=max(loaded.context_length, context + _TEXT_TOKENS),
        )
        replayer = Replayer(
            _made_up_traces(model, context, rng),
            None,
            model=config.model,
            cache_dir=Path(config.cache_dir),
            seed=config.seed,
        )
        for run in runs:
            row = Drafting(label=run.label, method=run.entry.name, context=context)
            try:
                row["step_us"] = 1e6 * replayer.step_s(replayer.prepare(run.drafter))
            except SpecBenchError as error:
                row["skipped"] = f"not measured: {error}"
            rows.append(row)
    return rows


def _made_up_traces(model: RecordedModel, context: int, rng: np.random.Generator) -> Traces:
    """Texts of phrases that recur, so that drafters have something to find."""
    turns = {}
    for i in range(_TEXTS):
        phrases = rng.integers(0, model["vocab_size"], (_PHRASES, _PHRASE_TOKENS))
        length = context + _TEXT_TOKENS
        order = rng.integers(0, _PHRASES, -(-length // _PHRASE_TOKENS))
        text = phrases[order].reshape(-1)[:length]
        turns[BASELINE, str(i), 0] = RecordedTurn(
            label=BASELINE,
            task="made_up",
            category="made_up",
            case_id=str(i),
            turn=0,
            stream_index=i,
            seed=0,
            prompt_ids=text[:context],
            output_ids=text[context:],
        )
    config = {"generation": {"max_new_tokens": _TEXT_TOKENS}}
    return Traces(Path(), model, config, "", "", turns, ())
