"""The replay runner: any drafter on recorded outputs, without a model, in this process.

Steps equal the live run's exactly for drafters that read only tokens, and up to rounding for heads
if hidden states were recorded (``record=states``); methods that need the model in other ways are
refused. Without a cost surface there are steps but no times. With one, the target's part of every
time is predicted and the drafter's part is measured here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from runners.job import Job
from runners.measure.blocks import OutputSource, Turn
from runners.measure.measurement import Measurement, attempts
from runners.measure.method_runs import (
    MethodRun,
    as_method_cannot_run,
    as_needs_not_met,
    build_method_runs,
    describe_files,
    find_heads,
)
from runners.run_folder.resumable_files import BlockResult
from runners.runner import Runner
from specbench.config import compose
from specbench.config.schema import ReplayConfig, RunConfig
from specbench.config.validate import check_values
from specbench.data.cases import Case
from specbench.errors import CaseFailed, ConfigurationError
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import EXACT, ROUNDED, Replayer, replay_kind
from specbench.replay.traces import RecordedTurn, Traces, load_traces
from specbench.results.manifest import BASELINE, ModelInfo
from specbench.results.records import CaseRecord
from specbench.results.statistics.roofline import number_format
from specbench.storage.hashes import file_sha256

_GROUPS = ("model", "dataset", "generation")  # taken from the traces
# Their keys that may differ: where files are, and which cases are replayed.
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
        """Fill in the traces' model, prompts, limits and seed."""
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
        recorded = traces.config
        if cfg.model.name != recorded["model"]["name"]:
            raise ConfigurationError(
                f"runner.traces={cfg.runner.traces} was recorded with model "
                f"{recorded['model']['name']}, but this run has {cfg.model.name}. Type "
                f"{compose.model_override(recorded['model'])}."
            )
        if cfg.baseline and BASELINE not in traces.labels:
            raise ConfigurationError(
                f"runner.traces={cfg.runner.traces} has no rows of {BASELINE}, only of "
                f"{', '.join(traces.labels)}. Type baseline=false and replay these labels."
            )
        typed_keys = {text.lstrip("+").partition("=")[0] for text in overrides}
        resolved = cfg.copy()
        for group in _GROUPS:
            if group in typed_keys and cfg[group].name != recorded[group]["name"]:
                raise _contradiction(group, cfg[group].name, recorded[group]["name"])
            node = {}
            for key in recorded[group].keys() & cfg[group].keys():
                name, value = f"{group}.{key}", recorded[group][key]
                if name not in typed_keys:
                    node[key] = _as_text(value)
                elif name not in _FREE_KEYS and cfg[group][key] != value:
                    raise _contradiction(name, cfg[group][key], value)
            open_node = cfg[group].copy()
            OmegaConf.set_struct(open_node, False)  # open mappings have the recording's keys
            resolved[group] = OmegaConf.merge(open_node, node)
            OmegaConf.set_struct(resolved[group], None)
        resolved.dataset.path = None  # the prompts are in the traces, whatever their source
        if "seed" not in typed_keys:
            resolved.seed = recorded["seed"]
        resolved.runner.traces_sha = traces.sha
        if cfg.runner.surface is not None:
            CostSurface.read(Path(cfg.runner.surface))
            resolved.runner.surface_sha = file_sha256(Path(cfg.runner.surface))[:16]
        try:
            check_values(resolved)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the configuration recorded in runner.traces={cfg.runner.traces} is unusable: "
                f"{error}"
            ) from error
        return resolved

    def load_cases(self, config: RunConfig) -> tuple[Case, ...]:
        """Return the recorded cases; the ids of a turn's prompt stand for its text."""
        cases = [
            Case(
                case_id=case_id,
                category=turns[0].category,
                task=turns[0].task,
                turns=tuple(" ".join(map(str, turn.prompt_ids.tolist())) for turn in turns),
            )
            for case_id, turns in _traces(config).cases().items()
        ]
        if config.dataset.tasks is not None:
            tasks = set(config.dataset.tasks)
            cases = [case for case in cases if {case.task, case.category} & tasks]
        if not cases:
            raise ConfigurationError(
                f"dataset.tasks={config.dataset.tasks or []} leaves none of the recorded cases."
            )
        return tuple(cases[: config.dataset.limit])

    def local_cases(self, config: RunConfig) -> tuple[Case, ...]:
        return self.load_cases(config)

    def run(self, job: Job) -> int:
        traces = _traces(job.config)
        for method_run in build_method_runs(job.without(job.optional)):
            replay_kind(method_run.drafter, traces)  # refuses before the folder belongs to the run
        for run in attempts(job):
            with run:
                if run.incomplete:
                    _replay(run)
        return run.exit_code


def _contradiction(key: str, value: object, recorded: object) -> ConfigurationError:
    return ConfigurationError(
        f"{key}={value} contradicts the traces, which were recorded with {key}={recorded}. "
        "Leave it out."
    )


def _as_text(value: Any) -> Any:
    """Escape ``${`` in a recorded value, which OmegaConf would resolve here."""
    if isinstance(value, dict):
        return {key: _as_text(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_text(part) for part in value]
    if isinstance(value, str) and "${" in value:
        # Backslashes are literal, except before an interpolation.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _traces(config: RunConfig) -> Traces:
    assert isinstance(config.runner, ReplayConfig)
    assert config.runner.traces is not None
    return load_traces(config.runner.traces)


class RecordedSource(OutputSource):
    """Recorded turns replayed by the engine's own loop.

    Attributes:
        covered: share of each turn's passes that lay inside the surface's grid.

    Args:
        kinds: by label, how closely its steps match the live run's (`replay_kind`).
        surface: predicts the times; None: no times.
    """

    during = "replay"

    def __init__(
        self,
        job: Job,
        replayer: Replayer,
        traces: Traces,
        kinds: Mapping[str, str],
        surface: CostSurface | None,
    ) -> None:
        super().__init__(job)
        self._replayer, self._traces, self._kinds = replayer, traces, kinds
        self._timing = "none" if surface is None else "predicted"
        self._error = None if surface is None else surface.stated_error[0]
        self.covered: list[float] = []

    def begin(self, record: CaseRecord) -> CaseRecord:
        return record.replace(timing=self._timing, prediction_error=self._error)

    def decode_turn(self, turn: Turn) -> None:
        record, drafter = turn.record, turn.run.drafter
        recorded = self._recorded(record.label, record.case_id, record.turn)
        replayed = self._replayer.replay_turn(
            drafter,
            recorded,
            empty=drafter.starts_empty(record.turn),
            seed=record.seed,
            seen=turn.run.seen(record),
        )
        self.covered.append(replayed.covered)
        kind = self._kinds[record.label]
        turn.finish_decoded(
            replayed.decoded,
            None,
            n_prompt=len(recorded.prompt_ids),
            prompt_ids=recorded.prompt_ids.tolist(),
            prefill_s=replayed.prefill_s,
            decode_s=replayed.decode_s,
            drafter_setup_s=replayed.setup_s,
            wall_s=replayed.prefill_s + replayed.decode_s,
            phase_s=replayed.phase_s if self.job.config.measure.phases else None,
            drafter={**replayed.decoded.drafter, **({} if kind == EXACT else {"replay": kind})},
        )

    def _recorded(self, label: str, case_id: str, number: int) -> RecordedTurn:
        """Find the turn to replay: plain decoding's if the label reads hidden states."""
        source = BASELINE if self._kinds[label] == ROUNDED else label
        recorded = self._traces.find(source, case_id, number)
        if recorded is None:
            raise CaseFailed("no_trace", f"neither {label} nor {BASELINE} was recorded for it")
        return recorded

    def decode_again(self, run: MethodRun, record: CaseRecord) -> None:
        recorded = self._recorded(record.label, record.case_id, record.turn)
        seen = run.seen(record)
        self._replayer.replay_turn(run.drafter, recorded, empty=False, seed=record.seed, seen=seen)

    def warm_up(self, run: MethodRun) -> None:
        first = self._recorded(run.label, self.job.cases[0].case_id, 0)
        self._replayer.replay_turn(run.drafter, first, empty=True)


def _replay(run: Measurement) -> None:
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
    )
    kinds: dict[str, str] = {}
    for method_run in run.runs:
        with as_method_cannot_run(method_run.entry), as_needs_not_met(method_run.entry):
            kinds[method_run.label] = replay_kind(method_run.drafter, traces)
            if surface is not None and method_run.drafter.needs.layout == "batch":
                surface.batch_passes()  # or no case of the run would have a time
            method_run.heads = find_heads(job.config, method_run)
            method_run.drafter = replayer.prepare(method_run.drafter, method_run.heads)
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
    source = RecordedSource(job, replayer, traces, kinds, surface)
    # Not the written records: state kept for a run needs all blocks, also those written earlier.
    runner = replace(run.runner(source), done=[])
    runner.warm_up(job.config.measure.warmup)
    missing = {block.key for block in run.files.pending}
    start = time.perf_counter()
    unwritten = BlockResult()
    blocks = job.blocks()
    for i, block in enumerate(blocks, start=1):
        block_result = runner.run([block], i - 1)
        runner.done.extend(block_result.records)
        unwritten.extend(block_result.select(missing))
        if i % _BLOCKS_PER_WRITE == 0 or i == len(blocks):
            run.files.append(unwritten)
            unwritten = BlockResult()
    manifest.replay_s = time.perf_counter() - start
    manifest.notes = _notes(job, traces, kinds)
    if surface is not None:
        outside = 1.0 - float(np.mean(source.covered))
        manifest.notes[1:1] = _notes_of_times(job, traces, surface, outside)
    run.save_manifest()


def _notes(job: Job, traces: Traces, kinds: Mapping[str, str]) -> list[str]:
    assert isinstance(job.config.runner, ReplayConfig)
    notes = [f"replayed from recorded outputs ({traces.path.name}); outputs are not audited."]
    if job.config.runner.surface is None:
        notes.append("steps only: without runner.surface=FILE there are no times and no speedup.")
    if rounded := [label for label, kind in kinds.items() if kind == ROUNDED]:
        notes.append(
            f"{', '.join(rounded)}: steps EXACT UP TO ROUNDING: heads read hidden states that were "
            "recorded along plain decoding, and passes of several rows round otherwise."
        )
    if traces.failed:
        notes.append(
            f"{len(traces.failed)} cases failed when the traces were recorded and are left out."
        )
    return notes


def _notes_of_times(job: Job, traces: Traces, surface: CostSurface, outside: float) -> list[str]:
    hardware = surface.machine["hardware"]
    where = hardware["gpus"][0]["name"] if hardware["gpus"] else hardware["cpu"]
    notes = [
        f"PREDICTED times: passes by the cost surface of {surface.model['name']} on {where}, "
        f"drafting measured on this machine; {surface.stated_error[1]}."
    ]
    recorded, timed = number_format(traces.model), number_format(surface.model)
    if surface.model["name"] != job.config.model.name:
        notes.append(
            f"outputs are {job.config.model.name}'s, costs {surface.model['name']}'s: "
            "acceptance may differ between the two."
        )
    elif surface.model.get("dtype") and recorded != timed:
        notes.append(
            f"outputs were recorded in {recorded}, and costs measured in {timed}: another "
            "engine. Name a surface of the recording's."
        )
    if outside > _NOT_COVERED:
        notes.append(
            f"{outside:.0%} of the passes lie outside the surface's grid and are extrapolated."
        )
    return notes
