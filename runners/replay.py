"""The runner of recorded outputs: any drafter against them, without a model, in this process.

Steps are exactly the live run's for drafters that look at tokens alone, and up to rounding for
heads, where hidden states were recorded (``record=states``); for drafters that learn from logits
they are an approximation (``specbench.replay.recorded_target``), and methods that need the model in
other ways are refused. Without a cost surface there are steps and no times. With one, the
target's part of every time is predicted and the drafter's is measured here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from runners.job import Job
from runners.runner import Runner
from runners.session.batching import check_batch, check_budget
from runners.session.blocks import BlockResult
from runners.session.method_runs import (
    MethodRun,
    build_method_runs,
    describe_files,
    find_heads,
    fitting,
    needs_of,
)
from runners.session.open_run import OpenRun, complete
from runners.session.replayed import GroupedAnswers, RecordedAnswers
from specbench.config import compose
from specbench.config.dataset_schema import ORDERS
from specbench.config.schema import ReplayConfig, RunConfig
from specbench.config.validate import check_values
from specbench.data.cases import Case
from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface
from specbench.replay.prediction_error import known_error
from specbench.replay.replay_kind import APPROXIMATE, ROUNDED, replay_kind
from specbench.replay.replayer import Replayer
from specbench.replay.traces import Traces, load_traces
from specbench.results.manifest import BASELINE, ModelInfo
from specbench.results.statistics.roofline import number_format
from specbench.storage.hashes import file_sha256

_GROUPS = ("model", "dataset", "generation")  # taken from the traces
# Keys of them that may be typed differently: where things lie, and which cases are replayed.
_FREE_KEYS = frozenset(
    (
        *("model.cache_dir", "model.device", "model.source", "model.path"),
        *("dataset.path", "dataset.source", "dataset.fetch", "dataset.limit", "dataset.tasks"),
    )
)
_BLOCKS_PER_WRITE = 64  # each write is synced to disk, which takes longer than replaying a block
_NOT_COVERED = 0.01  # share of passes outside the surface's grid from which a note says so


class Replay(Runner):
    """``runner=replay``; loads no model, so the jobs of a sweep share one process."""

    in_child = False

    def resolve_config(self, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """The configuration with the traces' model, questions, limits and seed."""
        if cfg.runner.traces is None:
            raise ConfigurationError(
                "runner=replay needs recorded outputs: type runner.traces=RUN, with the folder of "
                "a finished greedy run, or runner=replay_recorded, which records them first."
            )
        if cfg.measure.energy:
            raise ConfigurationError(
                "measure=energy reads a GPU's counter while a model runs, and runner=replay runs "
                "none. Type measure=timed."
            )
        traces = load_traces(cfg.runner.traces)
        recorded = dict(traces.config)
        # Recordings from before this key are in the file's order.
        recorded["dataset"] = {"order": ORDERS[1], **recorded["dataset"]}
        if cfg.model.name != recorded["model"]["name"]:
            raise ConfigurationError(
                f"runner.traces={cfg.runner.traces} was recorded with model "
                f"{recorded['model']['name']}, but this run has {cfg.model.name}. Type "
                f"{compose.model_words(recorded['model'])}."
            )
        if cfg.baseline and BASELINE not in traces.labels:
            raise ConfigurationError(
                f"runner.traces={cfg.runner.traces} has no rows of {BASELINE}, only of "
                f"{', '.join(traces.labels)}. Type baseline=false and replay these labels."
            )
        typed = {text.lstrip("+").partition("=")[0] for text in overrides}
        resolved = cfg.copy()
        for group in _GROUPS:
            node = {key: value for key, value in recorded[group].items() if key in cfg[group]}
            for key in [key for key in node if f"{group}.{key}" in typed]:
                if f"{group}.{key}" not in _FREE_KEYS and cfg[group][key] != node[key]:
                    raise ConfigurationError(
                        f"{group}.{key}={cfg[group][key]} contradicts the traces, which were "
                        f"recorded with {group}.{key}={node[key]}. Leave it out."
                    )
            node = {key: value for key, value in node.items() if f"{group}.{key}" not in typed}
            if group in typed and cfg[group].name != recorded[group]["name"]:
                raise ConfigurationError(
                    f"{group}={cfg[group].name} contradicts the traces, which were recorded with "
                    f"{group}={recorded[group]['name']}. Leave it out."
                )
            own = cfg[group].copy()
            OmegaConf.set_struct(own, False)  # open mappings have the recording's keys
            resolved[group] = OmegaConf.merge(own, _as_text(node))
            OmegaConf.set_struct(resolved[group], None)
        resolved.dataset.path = None  # the questions are in the traces, wherever they came from
        if "seed" not in typed:
            resolved.seed = recorded["seed"]
        resolved.runner.traces_sha = traces.sha
        if cfg.runner.surface is not None:
            path = Path(cfg.runner.surface)
            CostSurface.read(path)
            resolved.runner.surface_sha = file_sha256(path)[:16]
        try:
            check_values(resolved)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the configuration recorded in runner.traces={cfg.runner.traces} is unusable: "
                f"{error}"
            ) from error
        return resolved

    def load_cases(self, config: RunConfig) -> tuple[Case, ...]:
        """The recorded cases; the ids of a turn's prompt stand for its text."""
        found = [
            Case(
                case_id=case_id,
                category=turns[0].category,
                task=turns[0].task,
                turns=tuple(" ".join(map(str, turn.prompt_ids.tolist())) for turn in turns),
            )
            for case_id, turns in _traces(config).cases().items()
        ]
        if config.dataset.tasks is not None:
            wanted = set(config.dataset.tasks)
            found = [case for case in found if case.task in wanted or case.category in wanted]
        found = found[: config.dataset.limit]
        if not found:
            raise ConfigurationError(
                f"dataset.tasks={config.dataset.tasks or []} leaves none of the recorded cases."
            )
        return tuple(found)

    def questions_at_hand(self, config: RunConfig) -> tuple[Case, ...]:
        return self.load_cases(config)

    def run(self, job: Job) -> int:
        traces = _traces(job.config)
        for method_run in build_method_runs(job.without(job.optional)):
            replay_kind(method_run.drafter, traces)  # refuses before the folder is anybody's
        return complete(job, _replay)


def _as_text(value: Any) -> Any:
    """A recorded value in which ``${`` is two characters: OmegaConf would resolve it here."""
    if isinstance(value, dict):
        return {key: _as_text(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_text(part) for part in value]
    if isinstance(value, str) and "${" in value:
        # Backslashes mean themselves, but for those in front of an interpolation.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _traces(config: RunConfig) -> Traces:
    assert isinstance(config.runner, ReplayConfig)
    assert config.runner.traces is not None
    return load_traces(config.runner.traces)


def _replay(run: OpenRun) -> None:
    job, manifest = run.job, run.manifest
    traces = _traces(job.config)
    assert isinstance(job.config.runner, ReplayConfig)
    path = job.config.runner.surface
    surface = CostSurface.read(Path(path)) if path else None
    replayer = Replayer(
        traces,
        surface,
        model=job.config.model,
        cache_dir=Path(job.config.cache_dir),
        seed=job.config.seed,
        seats=job.config.batch.size,
        budget_shared=job.config.batch.shared,
    )
    size = job.config.batch.size
    check_budget(run.runs, job.config.batch.budget)
    kinds: dict[str, str] = {}
    seats: dict[str, list[MethodRun]] = {}
    for method_run in run.runs:
        with needs_of(method_run.entry), fitting(method_run.entry):
            kinds[method_run.label] = replay_kind(method_run.drafter, traces)
            if surface is not None and method_run.drafter.needs.layout == "batch":
                surface.batch_passes()  # or no case of the run would have a time
            if size > 1:
                check_batch(method_run, size)
            method_run.heads = find_heads(job.config, method_run)
            others = [method_run.twin(None) for _ in range(size - 1)]
            seats[method_run.label] = [method_run, *others]
            for number, seat in enumerate(seats[method_run.label]):
                seat.drafter = replayer.prepare(seat.drafter, method_run.heads, number)
    manifest.model = ModelInfo.from_json(traces.model)
    manifest.model.artefacts = describe_files(run.runs)
    manifest.traces = {
        "run_key": traces.run_key,
        "sha": traces.sha,
        "prompt_set_hash": traces.prompt_set_hash,
        "failed": list(traces.failed),
    }
    manifest.replay = kinds
    if surface is not None:
        manifest.surface = {
            "model": {**surface.model, "row_times": surface.row_times()},
            "machine": dict(surface.machine),
        }
    error = None if surface is None else known_error(surface).within(_grid_error(surface, size))
    if size == 1:
        source = RecordedAnswers(job, replayer, traces, kinds, error)
    elif surface is None:
        raise ConfigurationError(
            f"batch.size={size} changes no step, and without runner.surface=FILE there are no "
            "times. Name a surface, or type batch.size=1."
        )
    else:
        source = GroupedAnswers(job, replayer, traces, kinds, error, surface, seats)
    # Not the written records: state kept for a run goes through all blocks, whoever wrote them.
    runner = replace(run.runner(source), done=[])
    runner.warm_up(job.config.measure.warmup)
    missing = {block.place for block in run.files.pending}
    start = time.perf_counter()
    batch = BlockResult()
    groups = [[block] for block in job.blocks()] if size == 1 else job.groups(size)
    for i, blocks in enumerate(groups, start=1):
        made = runner.run(blocks, i - 1)
        runner.done.extend(made.records)
        batch.extend(made.of(missing))
        if i % _BLOCKS_PER_WRITE == 0 or i == len(groups):
            run.files.append(batch.records, batch.errors, batch.steps)
            batch = BlockResult()
    manifest.replay_s = time.perf_counter() - start
    manifest.notes = _notes(job, surface, kinds, traces, source.covered)
    manifest.notes += [
        f"{label}: its steps are predicted {share:.1%} shorter than {BASELINE}'s, so its speedup "
        "exceeds its MAT: it takes fewer of them where texts are long."
        for label, share in source.quicker_steps().items()
    ]
    run.save_manifest()


def _grid_error(surface: CostSurface, size: int) -> float:
    """Of the grid that prices the target's passes."""
    return (surface.tree if size == 1 or surface.texts is None else surface.texts).error


def _notes(
    job: Job,
    surface: CostSurface | None,
    kinds: dict[str, str],
    traces: Traces,
    covered: Sequence[float],
) -> list[str]:
    notes = [f"replayed from recorded outputs ({traces.path.name}); outputs are not audited."]
    if surface is None:
        notes.append("steps only: without runner.surface=FILE there are no times and no speedup.")
    else:
        hardware = surface.machine["hardware"]
        where = hardware["gpus"][0]["name"] if hardware["gpus"] else hardware["cpu"]
        notes.append(
            f"PREDICTED times: passes by the cost surface of {surface.model['name']} on {where} "
            f"(relative error {_grid_error(surface, job.config.batch.size):.1%}), drafting "
            f"measured on this machine; {known_error(surface).words}."
        )
        if surface.model["name"] != job.config.model.name:
            notes.append(
                f"outputs are {job.config.model.name}'s, costs {surface.model['name']}'s: "
                "acceptance may differ between the two."
            )
        elif surface.model.get("dtype"):
            recorded, timed = number_format(traces.model), number_format(surface.model)
            if recorded != timed:
                notes.append(
                    f"outputs were recorded in {recorded}, and costs measured in {timed}: another "
                    "engine. Name a surface of the recording's."
                )
        outside = 1.0 - float(np.mean(covered))
        if outside > _NOT_COVERED:
            notes.append(
                f"{outside:.0%} of the passes lie outside the surface's grid and are extrapolated."
            )
    rounded = [label for label, kind in kinds.items() if kind == ROUNDED]
    if rounded:
        notes.append(
            f"{', '.join(rounded)}: steps EXACT UP TO ROUNDING: heads read hidden states that were "
            "recorded along plain decoding, and passes of several rows round otherwise."
        )
    rough = [label for label, kind in kinds.items() if kind == APPROXIMATE]
    if rough:
        notes.append(
            f"{', '.join(rough)}: APPROXIMATE steps, since the logits of rejected draft nodes are "
            "not in a trace."
        )
    if traces.failed:
        notes.append(
            f"{len(traces.failed)} cases failed when the traces were recorded and are left out."
        )
    return notes
