"""The runner of recorded outputs: any drafter against them, without a model, in this process.

Steps are exactly the live run's for drafters that look at tokens alone; for those that learn from
logits they are an approximation (``specbench.recorded``), and methods that need the model in other
ways are refused. Without a cost surface there are steps and no times. With one, the target's part
of every time is predicted and the drafter's is measured here.
"""

from __future__ import annotations

import hashlib
import logging
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from runners import offline, table
from runners.contenders import build_contenders, restore
from runners.job import derive_seed
from runners.player import APPROXIMATE, EXACT, Player, replay_kind
from specbench import durable, records
from specbench.cases import Case
from specbench.cost_surface import CostSurface
from specbench.errors import CaseFailed, ConfigurationError
from specbench.records import CaseRecord, StepTrace
from specbench.traces import PLAIN, Traces, load_traces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runners.contenders import Contender
    from runners.folder import ResultFiles
    from runners.job import Block, Job
    from runners.player import Played
    from specbench.traces import Turn

IN_PROCESS = True

show = table.print_folder

log = logging.getLogger(__name__)

_GROUPS = ("model", "dataset", "generation")  # taken from the traces
# Keys of them that may be typed differently: where things lie, and which cases are replayed.
_FREE_KEYS = frozenset(
    (
        *("model.cache_dir", "model.device", "model.source"),
        *("dataset.path", "dataset.source", "dataset.fetch", "dataset.limit", "dataset.tasks"),
    )
)
_BLOCKS_PER_WRITE = 64  # each write is synced to disk, which takes longer than replaying a block
_NOT_COVERED = 0.01  # share of passes outside the surface's grid from which a note says so


def adopt(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration with the traces' model, questions, limits and seed.

    Raises:
        ConfigurationError: there are no traces, or what was typed contradicts them.
    """
    if cfg.runner.traces is None:
        raise ConfigurationError(
            "runner=replay needs recorded outputs: type runner.traces=RUN, with the folder of a "
            "finished greedy run, or a pack made by scripts/export_traces.py."
        )
    traces = load_traces(cfg.runner.traces)
    recorded = traces.config
    if cfg.model.name != recorded["model"]["name"]:
        raise ConfigurationError(
            f"runner.traces={cfg.runner.traces} was recorded with model="
            f"{recorded['model']['name']}, but this run has model={cfg.model.name}. Type model="
            f"{recorded['model']['name']}."
        )
    if cfg.baseline and PLAIN not in traces.labels:
        raise ConfigurationError(
            f"runner.traces={cfg.runner.traces} has no rows of {PLAIN}, only of "
            f"{', '.join(traces.labels)}. Type baseline=false and replay these labels."
        )
    typed = {text.lstrip("+").partition("=")[0] for text in overrides}
    adopted = cfg.copy()
    for group in _GROUPS:
        node = {key: value for key, value in recorded[group].items() if key in cfg[group]}
        for key in [key for key in node if f"{group}.{key}" in typed]:
            if f"{group}.{key}" not in _FREE_KEYS and cfg[group][key] != node[key]:
                raise ConfigurationError(
                    f"{group}.{key}={cfg[group][key]} contradicts the traces, which were recorded "
                    f"with {group}.{key}={node[key]}. Leave it out."
                )
        node = {key: value for key, value in node.items() if f"{group}.{key}" not in typed}
        if group in typed and cfg[group].name != recorded[group]["name"]:
            raise ConfigurationError(
                f"{group}={cfg[group].name} contradicts the traces, which were recorded with "
                f"{group}={recorded[group]['name']}. Leave it out."
            )
        adopted[group] = OmegaConf.merge(cfg[group], node)
    adopted.dataset.path = None  # the questions are in the traces, wherever they came from
    if "seed" not in typed:
        adopted.seed = recorded["seed"]
    adopted.runner.traces_sha = traces.sha
    if cfg.runner.surface is not None:
        path = Path(cfg.runner.surface)
        CostSurface.read(path)
        adopted.runner.surface_sha = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return adopted


def questions(cfg: DictConfig) -> tuple[Case, ...]:
    """The recorded cases; the ids of a turn's prompt stand for its text."""
    found = [
        Case(
            case_id=case_id,
            category=turns[0].category,
            task=turns[0].task,
            turns=tuple(" ".join(map(str, turn.prompt_ids.tolist())) for turn in turns),
        )
        for case_id, turns in load_traces(cfg.runner.traces).cases().items()
    ]
    if cfg.dataset.tasks is not None:
        wanted = set(cfg.dataset.tasks)
        found = [case for case in found if case.task in wanted or case.category in wanted]
    found = found[: cfg.dataset.limit]
    if not found:
        raise ConfigurationError(
            f"dataset.tasks={list(cfg.dataset.tasks or [])} leaves none of the recorded cases."
        )
    return tuple(found)


def run(job: Job) -> int:
    """Replay what is missing in the job's folder.

    Raises:
        NeedsNotMet: a method needs the model.
        ConfigurationError: the input cannot be used; see its subclasses.
    """
    traces = load_traces(job.config["runner"]["traces"])
    for contender in build_contenders(job):
        replay_kind(contender.drafter, traces)  # refuses before the folder is anybody's
    return offline.complete(job, _replay)


def _replay(
    job: Job,
    contenders: Sequence[Contender],
    pending: list[Block],
    files: ResultFiles,
    book: dict[str, Any],
    forced: bool,
) -> None:
    options = job.config["runner"]
    traces = load_traces(options["traces"])
    surface = CostSurface.read(Path(options["surface"])) if options["surface"] else None
    player = Player(
        traces,
        surface,
        model=job.config["model"],
        cache_dir=Path(job.config["cache_dir"]),
        seed=int(job.config["seed"]),
    )
    kinds = {c.label: replay_kind(c.drafter, traces) for c in contenders}
    for contender in contenders:
        contender.drafter = player.admit(contender.drafter)
    book["model"] = dict(traces.model)
    book["traces"] = {
        "run_key": traces.run_key,
        "sha": traces.sha,
        "prompt_set_hash": traces.prompt_set_hash,
        "failed": list(traces.failed),
    }
    book["replay"] = kinds
    if surface is not None:
        book["surface"] = {"model": dict(surface.model), "machine": dict(surface.machine)}
    replayer = _Replayer(job, player, contenders, traces, kinds, forced)
    replayer.warm_up(int(job.config["measure"]["warmup"]))
    missing = {(block.repeat, block.case.case_id) for block in pending}
    start = time.perf_counter()
    batch = _Batch()
    # All blocks, also those that are there already: state kept for a run must go through them.
    for i, block in enumerate(job.blocks()):
        made = replayer.run(block)
        if (block.repeat, block.case.case_id) in missing:
            batch.add(made)
        if i % _BLOCKS_PER_WRITE == _BLOCKS_PER_WRITE - 1:
            batch.flush(files)
    batch.flush(files)
    book["replay_s"] = time.perf_counter() - start
    book["notes"] = _notes(job, surface, kinds, traces, replayer.covered)
    durable.write_json(job.folder / records.MANIFEST, book)


class _Batch:
    """Finished blocks that are not written yet."""

    def __init__(self) -> None:
        self.records: list[CaseRecord] = []
        self.errors: list[dict[str, Any]] = []
        self.steps: list[StepTrace] = []

    def add(self, other: _Batch) -> None:
        self.records += other.records
        self.errors += other.errors
        self.steps += other.steps

    def flush(self, files: ResultFiles) -> None:
        if self.records:
            files.append(self.records, self.errors, self.steps)
        self.records, self.errors, self.steps = [], [], []


class _Replayer:
    """Plays blocks one after the other and keeps the drafters' state scopes.

    Attributes:
        covered: share of each turn's passes that lay inside the surface's grid.
    """

    def __init__(
        self,
        job: Job,
        player: Player,
        contenders: Sequence[Contender],
        traces: Traces,
        kinds: dict[str, str],
        forced: bool,
    ) -> None:
        self._job = job
        self._player = player
        self._contenders = {contender.label: contender for contender in contenders}
        self._traces = traces
        self._kinds = kinds
        self._forced = forced
        self._timing = "predicted" if job.config["runner"]["surface"] else "none"
        self._phases = bool(job.config["measure"]["phases"]) and self._timing == "predicted"
        self._repeat: int | None = None
        self._played: dict[str, list[CaseRecord]] = {}
        self.covered: list[float] = []

    def warm_up(self, rounds: int) -> None:
        """Play the first turn with every label, then forget it: compiled code is loaded."""
        first = self._job.cases[0].case_id
        for _ in range(rounds):
            for label, contender in self._contenders.items():
                turn = self._traces.find(label, first, 0)
                if turn is not None:
                    try:
                        self._player.play(contender.drafter, turn, empty=True)
                    except Exception as error:  # fails again where it is counted
                        log.warning("warm-up of %s failed: %s", label, error)

    def run(self, block: Block) -> _Batch:
        """Play all labels and turns of a block."""
        if block.repeat != self._repeat:
            self._repeat = block.repeat
            self._played = {label: [] for label in self._contenders}
            for contender in self._contenders.values():
                contender.drafter.reset()
        made = _Batch()
        for number in range(len(block.case.turns)):
            for position, label in enumerate(block.order(self._job.labels)):
                self._turn(block, number, position, self._contenders[label], made)
        return made

    def _turn(
        self, block: Block, number: int, position: int, contender: Contender, made: _Batch
    ) -> None:
        scope, label = contender.scope, contender.label
        common = self._common(block, number, position, contender)
        turn = self._traces.find(label, block.case.case_id, number)
        try:
            if turn is None:
                raise CaseFailed("no_trace", f"neither {label} nor {PLAIN} was recorded for it")
            empty = scope == "turn" or (scope == "prompt" and number == 0)
            played = self._player.play(contender.drafter, turn, empty=empty, seed=common["seed"])
        except Exception as error:
            failed = CaseRecord(status="failed", n_prompt=0, **common)
            made.records.append(failed)
            made.errors.append(_describe(failed, error))
            log.warning("%s, turn %d, %s: %s", failed.case_id, number, label, error)
            if scope == "run":
                restore(contender, self._played[label], self._play_again(contender))
            else:
                contender.drafter.reset()
            return
        record = self._record(common, turn, played)
        self._played[label].append(record)
        self.covered.append(played.covered)
        made.records.append(record)
        decoded = played.decoded
        made.steps.append(
            StepTrace(
                label=label,
                case_id=record.case_id,
                turn=number,
                repeat=block.repeat,
                drafted=decoded.drafted_per_step,
                depth=decoded.depth_per_step,
                committed=decoded.accepted_per_step,
                sources=decoded.sources_per_step,
            )
        )

    def _common(
        self, block: Block, number: int, position: int, contender: Contender
    ) -> dict[str, Any]:
        config, case = self._job.config, block.case
        return {
            "run_key": self._job.run_key,
            "label": contender.label,
            "method": contender.entry.name,
            "method_version": contender.drafter.version,
            "model": config["model"]["name"],
            "dataset": config["dataset"]["name"],
            "task": case.task,
            "category": case.category,
            "case_id": case.case_id,
            "turn": number,
            "repeat": block.repeat,
            "stream_index": block.stream_index,
            "position": position,
            "timing": self._timing,
            "state_scope": contender.scope,
            "seed": derive_seed(int(config["seed"]), case.case_id, number, block.repeat),
            "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "forced_resume": self._forced,
        }

    def _record(self, common: dict[str, Any], turn: Turn, played: Played) -> CaseRecord:
        decoded = played.decoded
        counted = dict(decoded.drafter)
        if self._kinds[common["label"]] == APPROXIMATE:
            counted["replay"] = APPROXIMATE
        return CaseRecord(
            **common,
            status="ok",
            n_prompt=len(turn.prompt_ids),
            n_new=len(decoded.output_ids),
            finish_reason=decoded.finish_reason,
            n_target_passes=decoded.n_target_passes,
            n_drafted=decoded.n_drafted,
            n_aux=decoded.n_aux,
            accepted_per_step=decoded.accepted_per_step,
            prompt_ids=turn.prompt_ids.tolist(),
            output_ids=decoded.output_ids,
            prefill_s=played.prefill_s,
            decode_s=played.decode_s,
            drafter_setup_s=played.setup_s,
            wall_s=played.prefill_s + played.decode_s,
            phase_s=played.phase_s if self._phases else None,
            drafter=counted,
        )

    def _play_again(self, contender: Contender) -> Any:
        def again(record: CaseRecord) -> None:
            turn = self._traces.find(record.label, record.case_id, record.turn)
            assert turn is not None  # it was played before
            self._player.play(contender.drafter, turn, empty=False, seed=record.seed)

        return again


def _describe(record: CaseRecord, error: Exception) -> dict[str, Any]:
    return {
        "label": record.label,
        "case_id": record.case_id,
        "turn": record.turn,
        "repeat": record.repeat,
        "during": "replay",
        "type": error.kind if isinstance(error, CaseFailed) else type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error))[-4000:],
        "at": record.started_at,
    }


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
            f"(relative error {surface.tree.error:.1%}), drafting measured on this machine."
        )
        if surface.model["name"] != job.config["model"]["name"]:
            notes.append(
                f"outputs are {job.config['model']['name']}'s, costs {surface.model['name']}'s: "
                "acceptance may differ between the two."
            )
        outside = 1.0 - float(np.mean(covered))
        if outside > _NOT_COVERED:
            notes.append(
                f"{outside:.0%} of the passes lie outside the surface's grid and are extrapolated."
            )
    rough = [label for label, kind in kinds.items() if kind != EXACT]
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
