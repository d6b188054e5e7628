"""The runner that measures what a target pass costs here, as a cost surface.

A sample is timed by ``runners.measure.pass_times``: a whole step without the drafter. Every repeat
visits all points in a new order, so that a drift of the machine spreads over them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from rich.console import Console

from runners.job import Job
from runners.measure.pass_times import pass_s, random_tree, sequences_pass_s
from runners.run_folder import folder
from runners.run_folder.manifest import add_start, begin, check_resume, close
from runners.run_folder.reproduce_note import write_reproduce_note
from runners.runner import Runner
from specbench.arrays import IntArray
from specbench.config.schema import CostConfig, RunConfig
from specbench.data.cases import Case
from specbench.decoding.device import seconds
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError
from specbench.kernels.architectures import one_text_layers
from specbench.models import loading
from specbench.models.loading import LoadedModel
from specbench.models.target import Target
from specbench.replay.cost_surface import FREE, GRIDS, CostSurface, Grid
from specbench.results import records
from specbench.results.fitted_table import FittedTable
from specbench.results.manifest import ModelInfo, RunManifest
from specbench.results.records import SURFACE
from specbench.results.statistics.roofline import number_format
from specbench.storage import jsonl
from specbench.system import cuda_settings, environment
from specbench.system.clock import gc_paused
from specbench.system.hardware import Machine

ROUNDS = "rounds.jsonl"

log = logging.getLogger(__name__)

# Smallest allowed values of the grid's lists.
_LEAST = {"contexts": 1, "tree_rows": 1, "batch_k": 1, "batch_w": 0, "texts": 1, "text_rows": 1}
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Cost(Runner):
    """``runner=cost``.

    Args:
        load: loads the model; by default the one that the configuration names.
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
                    f"runner.{key} must be ascending whole numbers from {least}, got {values}."
                )
        if not grid.contexts or not grid.tree_rows or grid.tree_rows[0] != 1:
            raise ConfigurationError(
                "runner=cost needs runner.contexts and runner.tree_rows. The latter must "
                "begin with 1: plain decoding, which all else is compared with."
            )
        if len({bool(values) for values in (grid.batch_k, grid.batch_w, grid.batch_contexts)}) > 1:
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
        """Load none, but check that the model is there."""
        loading.model_files_present(config)
        return ()

    def local_cases(self, config: RunConfig) -> None:
        """Return None: no prompts are measured."""

    def run(self, job: Job) -> int:
        cuda_settings.fix()
        with folder.hold_folder(job.folder):
            machine = environment.describe()
            if (job.folder / ROUNDS).exists():
                manifest = RunManifest.read(job.folder)
                check_resume(manifest, machine, force=job.config.resume == "force")
            else:
                manifest = begin(job, {}, machine)
                write_reproduce_note(job.folder, manifest, {})
            add_start(manifest, 0, 0)
            manifest.write(job.folder)
            surface = _measure(job, machine, manifest, self._load(job.config))
            surface.write(job.folder / SURFACE)
            close(manifest, "complete", 0)
            manifest.finish(job.folder, [SURFACE])
        return 0

    def show(self, path: Path, *, brief: bool = False) -> None:
        """Print a surface's table and how many draft nodes are free."""
        surface = CostSurface.read(path / SURFACE)
        console = Console(width=118, soft_wrap=False, highlight=False, markup=False)
        hardware = surface.machine["hardware"]
        on_gpu = str(surface.model["device"]).startswith("cuda")
        where = hardware["gpus"][0]["name"] if on_gpu else hardware["cpu"]
        subject = f"{surface.model['name']}, {number_format(surface.model)}, {where}"
        contexts = np.array(surface.tree.axes["context"])
        frame = pd.DataFrame({"cached tokens": contexts.astype(str)})
        for rows in (r for r in _SHOWN_ROWS if r <= surface.tree.axes["rows"][-1]):
            predicted = surface.tree.predict(np.full(len(contexts), rows), contexts)
            frame[f"{rows} row{'s' * (rows > 1)}"] = [f"{1e3 * s:.1f}" for s in predicted]
        free = [surface.nodes_within_budget(context) for context in contexts]
        frame["free nodes"] = [str(n) for n in free]
        console.print(FittedTable(frame, f"{subject}: milliseconds of a pass"))
        grids = {name: getattr(surface, name) for name in GRIDS}
        errors = (f"{name} {grid.error:.1%}" for name, grid in grids.items() if grid)
        console.print(f"relative error of the medians: {', '.join(errors)}")
        console.print(
            f"free here: {min(free)} to {max(free)} draft nodes (a pass with them takes at most "
            f"{FREE:.0%} longer than a pass without)"
        )
        console.print(f"files: {path}/ ({SURFACE}, {records.MANIFEST})")


@dataclass(frozen=True)
class PassGrid:
    """One kind of pass, timed over a grid.

    Attributes:
        axes: the grid's values by name, the context (cached tokens) last.
        read: reads a prompt ``[context]``.
        time_pass: times a pass after ``context`` tokens at a point of the other axes.
    """

    axes: Mapping[str, tuple[int, ...]]
    read: Callable[[IntArray], object]
    time_pass: Callable[..., float]

    def round(
        self, target: Target, rng: np.random.Generator, n_contexts: int | None = None
    ) -> dict[str, Any]:
        """Time every point once, in a new order: a line of `ROUNDS`.

        Args:
            n_contexts: times passes only after the first ones; the other times are 0.
        """
        *axes, contexts = self.axes.values()
        prompts = np.zeros(len(contexts))
        times = np.zeros([len(values) for values in self.axes.values()])
        points = list(np.ndindex(*times.shape[:-1]))
        for c in rng.permutation(n_contexts or len(contexts)):
            prompt = rng.integers(0, target.vocab_size, contexts[c])
            prompts[c] = seconds(partial(self.read, prompt), target.device)
            for point in map(points.__getitem__, rng.permutation(len(points))):
                sizes = [values[i] for values, i in zip(axes, point, strict=True)]
                times[(*point, c)] = self.time_pass(contexts[c], *sizes)
        return {"prefill_s": prompts.tolist(), "pass_s": times.tolist()}


def _measure(job: Job, machine: Machine, manifest: RunManifest, loaded: LoadedModel) -> CostSurface:
    # Heavy imports only if something remains to be measured.
    from runners.measure.session import make_target
    from specbench.models.checks import self_check
    from specbench.models.graph_target import GraphTarget

    config = job.config
    assert isinstance(config.runner, CostConfig)
    grid = config.runner
    longest = max([*grid.contexts, *grid.batch_contexts])
    max_rows = max([*grid.tree_rows, *grid.text_rows])
    target, check = self_check.checked(
        loaded.model,
        partial(make_target, config=config, max_len=longest, max_nodes=max_rows),
        subject=f"model={config.model.name}",
        longest=longest,
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
    graphs = isinstance(target, GraphTarget)
    kinds = _pass_grids(target, grid, rng)
    if graphs:
        kinds.pop("texts", None)  # no graph holds several sequences
    with gc_paused():
        rounds = _rounds(job.folder / ROUNDS, kinds, target, rng, grid.passes, warm_all=graphs)
    surface = {
        kind: Grid(passes.axes, np.stack([line["pass_s"] for line in rounds[kind]], axis=-1))
        for kind, passes in kinds.items()
    }
    prefill = np.stack([line["prefill_s"] for line in rounds["tree"]], axis=-1)
    model.passes = target.describe()  # now, since unforeseen shapes may have run
    return CostSurface(
        model=model.to_json(),
        machine=machine,
        prefill=Grid({"context": tuple(grid.contexts)}, prefill),
        tree=surface["tree"],
        batch=surface.get("batch"),
        texts=surface.get("texts"),
    )


def _pass_grids(target: Target, grid: CostConfig, rng: np.random.Generator) -> dict[str, PassGrid]:
    from specbench.models.batch_target import BatchTarget

    vocab, contexts = target.vocab_size, tuple(grid.contexts)
    trees = {n: random_tree(n - 1, vocab, rng) for n in sorted({*grid.tree_rows, *grid.text_rows})}
    kinds = {
        "tree": PassGrid(
            {"rows": tuple(grid.tree_rows), "context": contexts},
            target.prefill,
            lambda context, rows: pass_s(target, trees[rows], context),
        )
    }
    if grid.batch_k:
        target.reserve(
            max([*contexts, *grid.batch_contexts]),
            max(grid.batch_k) * max(grid.batch_w),
            max(grid.batch_k),
        )
        drafts = {
            (k, w): _random_rows(k, w, vocab, rng) for k in grid.batch_k for w in grid.batch_w
        }

        def read_into_rows(prompt: IntArray) -> None:
            target.prefill(prompt)
            target.cache.broadcast()  # once a prompt: steps bring their rows along themselves

        kinds["batch"] = PassGrid(
            {
                "k": tuple(grid.batch_k),
                "w": tuple(grid.batch_w),
                "context": tuple(grid.batch_contexts),
            },
            read_into_rows,
            lambda context, k, w: pass_s(target, drafts[k, w], context),
        )
    if grid.texts and one_text_layers(target.model) is None:
        batch = BatchTarget(target, max(grid.texts), max(grid.text_rows) - 1)
        kinds["texts"] = PassGrid(
            {"texts": tuple(grid.texts), "rows": tuple(grid.text_rows), "context": contexts},
            batch.read,
            lambda context, n, rows: sequences_pass_s(batch, n, trees[rows], context),
        )
    return kinds


def _rounds(
    path: Path,
    kinds: Mapping[str, PassGrid],
    target: Target,
    rng: np.random.Generator,
    count: int,
    *,
    warm_all: bool,
) -> dict[str, list[dict[str, Any]]]:
    """Measure rounds by kind, saved on disk as they finish: an interrupted run goes on.

    Each round visits all kinds, so that a drift of the machine spreads over them, too: when kinds
    were timed one after the other, one came out at half its cost.
    """
    lines: list[dict[str, Any]] = jsonl.mend_jsonl(path, dict)
    rounds = {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}
    for kind, passes in kinds.items():
        if len(rounds[kind]) < count:
            log.info("%s passes: warming up", kind)
            # A batch layout is captured at its first pass, once per bucket of keys.
            passes.round(target, rng, None if warm_all else 1)
    for number in range(1, count + 1):
        for kind, passes in kinds.items():
            if len(rounds[kind]) < number:
                log.info("%s passes: round %d of %d", kind, number, count)
                rounds[kind].append({"kind": kind, **passes.round(target, rng)})
                jsonl.append_jsonl(path, rounds[kind][-1:])
    return rounds


def _random_rows(k: int, w: int, vocab: int, rng: np.random.Generator) -> DraftTree:
    nodes = np.arange(k * w)
    parents = np.where(nodes % w == 0, -1, nodes - 1) if w else nodes
    return DraftTree(rng.integers(0, vocab, k * w), parents, rows=(k, w))
