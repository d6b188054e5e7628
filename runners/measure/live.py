"""A run on a loaded model: all labels over all cases, interleaved, resumable."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from runners.job import EAGER_BASELINE, CaseBlock, Job, label_order
from runners.measure import device_lock
from runners.measure.blocks import WARM_UP_TEXT, OutputSource, Turn, ask_each, require_ok
from runners.measure.measurement import Measurement, attempts
from runners.measure.method_runs import MethodRun
from runners.run_folder.manifest import check_passes, check_prompts, check_subject
from specbench.arrays import IntArray
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError
from specbench.results import records
from specbench.results.jsonl_schema import Batched, answer_line
from specbench.results.manifest import BASELINE, ModelInfo, RunManifest
from specbench.results.records import CaseRecord, Lossless
from specbench.storage import jsonl
from specbench.storage.jsonl import DiskError, failure
from specbench.system import cuda_settings, interference
from specbench.system.clock import Timings, gc_paused
from specbench.system.interference import Interference, SystemMonitor

if TYPE_CHECKING:  # they load torch, which a finished run does not need
    from runners.measure.session import Session
    from specbench.decoding.batch import TurnRequest
    from specbench.decoding.turn import DecodeResult

    Load = Callable[[Job, Sequence[MethodRun]], Session]

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16


def run_live(job: Job, load: Load, drafters: Mapping[str, Drafter] | None = None) -> int:
    """Measure what is missing in the job's folder and close it, as `runners.runner.Runner.run`.

    ``load`` loads what the labels share, only if records are missing. ``drafters``: see
    `build_method_runs`.
    """
    if job.config.measure.pin and "OMP_PLACES" not in os.environ:
        raise ConfigurationError(
            "measure.pin=true: threads are pinned when their process starts, and this one runs "
            "already. Leave it out, or type the same on the command line of run.py."
        )
    cuda_settings.fix()  # before the manifest notes the settings in force
    for run in attempts(with_eager_baseline(job), drafters):
        with run:
            if run.incomplete:
                _measure(load, run)
    return run.exit_code


def with_eager_baseline(job: Job) -> Job:
    """Add an eager ``ar`` to a job whose ``ar`` runs CUDA graphs.

    A speedup over graphs alone cannot be compared with papers' speedups, and one over eager passes
    alone is partly due to launches. A started folder keeps its labels.
    """
    config = job.config
    baselines = [entry for entry in job.entries if entry.name == BASELINE]
    if not job.baseline or any(entry.method.get("eager") for entry in baselines):
        return job
    if (job.folder / records.MANIFEST).exists():
        required = EAGER_BASELINE in RunManifest.read(job.folder).labels
    else:
        required = (
            config.engine.eager_baseline
            and config.engine.name in ("auto", "graph")
            and not config.measure.phases  # it gives no headline numbers
            and config.model.device_map is None  # a spread model has no graphs
            and device_lock.names(job) != ["cpu"]
            and config.batch.size == 1  # batches have no graphs
        )
    if not required:
        return job
    plain = next(entry for entry in baselines if entry.label == BASELINE)
    eager = replace(plain, label=EAGER_BASELINE, method={**plain.method, "eager": True})
    return replace(job, entries=(*job.entries, eager))


def _measure(load: Load, run: Measurement) -> None:
    from runners.measure.session import Recorder  # torch, only if records are missing

    job, runs, files, manifest = run.job, run.runs, run.files, run.manifest
    measure, earlier = job.config.measure, manifest.model
    drafts = [r.entry.draft for r in runs if r.drafter.needs.draft_model]
    drafts += [job.config.pair.draft for r in runs if r.entry.name == "hf:assisted"]
    with device_lock.hold_device(job, drafts) as gpus:
        if measure.energy:
            interference.check_energy(gpus, device_lock.names(job, drafts))
        watch = SystemMonitor(gpus, energy=measure.energy)
        if earlier is not None:
            _keep_measured(earlier, runs)
        session = load(job, runs)
        model = session.describe()
        _name_busy_machine(watch.end(), measure.disturbed.others)
        check_subject(manifest, model)
        manifest.forced_resume |= check_passes(manifest, model, job.config.resume == "force")
        # On a shared GPU each process gets only a part of the memory's speed: no floor.
        measures_memory = measure.exclusive or model.device == "cpu"
        reading = session.fastest_read(earlier.read_bytes_per_s if earlier else None)
        if measures_memory:
            reading.measure()
            model.read_bytes_per_s = reading.bytes_per_s
        manifest.model = model
        manifest.notes = session.remarks() or None
        for remark in manifest.notes or ():
            log.warning("note: %s", remark)
        run.save_manifest()
        log.info("warming up %s", ", ".join(job.labels))
        prompts = [session.render([(case.turns[0], None)]) for case in job.cases]
        check_prompts(job, files.done, prompts)
        size = job.config.batch.size
        source = (EngineSource if size == 1 else BatchSource)(job, session, watch)
        source.prepare_warm_up(prompts)
        runner = run.runner(source)
        session.check_heads(runs, prompts[0])  # it makes caches, so graphs are captured after it
        runner.warm_up(measure.warmup)
        model.row_times = session.time_rows(prompts, job.config.seed)
        if job.greedy and job.baseline:
            tolerance = session.calibrate_audit(prompts, earlier.audit if earlier else None)
            model.audit = tolerance.to_json()
        run.save_manifest()
        recorder = Recorder(job, session, runs) if job.config.record else None
        try:
            with gc_paused():
                for number, batch, missing in run.pending(size):
                    block_result = runner.run(batch, number).select(missing)
                    if recorder is not None:
                        recorder.record(block_result.records)
                    files.append(block_result)
                    reading.measure_between()
                for block, attempt in run.reruns():
                    files.replace(runner.run([block], block.stream_index, attempt))
            if measures_memory:
                reading.measure()
        finally:
            model.read_bytes_per_s = reading.bytes_per_s or None
            session.note_passes(model)


def _keep_measured(earlier: ModelInfo, runs: Sequence[MethodRun]) -> None:
    """Reuse the first start's measurements of labels and of how passes read panels."""
    for method_run in runs:
        method_run.measured.update(earlier.measured.get(method_run.label, {}))
    if earlier.threads is None:
        return
    from specbench.kernels.prefetch import keep_distances

    # The target comes last: its choice for a form holds for its drafts, too.
    for packed in (*(draft.packed for draft in earlier.drafts.values()), earlier.packed):
        keep_distances((packed or {}).get("ahead", {}), earlier.threads)


def _name_busy_machine(loading: Interference, limit: float | None) -> None:
    """Warn before the first timing that other programs took the CPU while weights loaded."""
    if loading.cpu_others and limit is not None and loading.cpu_others > limit:
        log.warning(
            "this machine is busy: other programs take %.0f %% of its CPU time (load %s). Cases "
            "may be measured again (measure.rerun_share). End the other work first.",
            100 * loading.cpu_others,
            loading.cpu_load,
        )


class EngineSource(OutputSource):
    """Decodes turns by our own engine, one at a time, while ``watch`` monitors the machine."""

    def __init__(self, job: Job, session: Session, watch: SystemMonitor | None = None) -> None:
        super().__init__(job)
        self._session, self._watch = session, watch or SystemMonitor()
        # Plain greedy outputs that no measured turn gives: computed once, untimed, kept in a file.
        # A dialogue without a greedy baseline quotes them, and a method may need one early.
        self._plain_file = job.folder / records.DIALOGUE
        self._plain_outputs = {
            (line["case_id"], line["turn"], line["prompt_sha"]): line["output_ids"]
            for line in jsonl.mend_jsonl(self._plain_file, answer_line)
        }
        self._lengths: list[int] = []
        # The keys are a case and the outputs that the prompt quotes.
        self._prompts: dict[tuple[Any, ...], IntArray] = {}

    def begin_batch(self) -> None:
        """Keep the prompts of first turns, which other repeats decode again."""
        self._prompts = {key: ids for key, ids in self._prompts.items() if len(key) == 1}

    def begin(self, record: CaseRecord) -> CaseRecord:
        return record.replace(verifier=self.job.verifier(record.label), host=socket.gethostname())

    def decode_turn(self, turn: Turn) -> None:
        request = self._request(turn)
        self._watch.begin()
        prompt, drafter = request.prompt, request.drafter
        decoded = self._session.decode(prompt, drafter, request.seed, seen=request.seen)
        around = self._watch.end()
        self._finish(turn, decoded, decoded.timings.with_setup(request.reset_s), around)

    def _request(self, turn: Turn) -> TurnRequest:
        """Make the request of a turn, with a drafter that is ready for it."""
        from specbench.decoding.batch import TurnRequest  # torch

        session, drafter = self._session, turn.run.drafter
        reset_s = session.reset(drafter) if drafter.starts_empty(turn.record.turn) else 0.0
        prompt = self._prompt(turn)
        # A prompt that is too long is recorded by its length alone: it may be a whole book.
        fits = len(prompt) < session.context_length
        ids = prompt.tolist() if fits else []
        turn.record = turn.record.replace(n_prompt=len(prompt), prompt_ids=ids)
        if drafter.needs.reference:
            drafter.set_reference(self._reference(turn, prompt))
        return TurnRequest(prompt, drafter, turn.record.seed, turn.run.seen(turn.record), reset_s)

    def _finish(
        self,
        turn: Turn,
        decoded: DecodeResult,
        times: Timings,
        around: Interference,
        batch: Batched | None = None,
    ) -> None:
        plain = turn.run.entry.name == BASELINE
        turn.finish_decoded(
            decoded,
            times.step_s,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            drafter_setup_s=times.drafter_setup_s,
            wall_s=times.wall_s,
            phase_s=times.phase_s,
            batch=batch,
            n_retokenized=self._session.retokenized(decoded.output_ids) if plain else None,
            **asdict(around),
        )

    def _prompt(self, turn: Turn) -> IntArray:
        """Render a prompt once for all labels that quote alike: a template may read the clock."""
        pairs = turn.dialogue.pairs
        key = (turn.record.case_id, *pairs)
        if key not in self._prompts:
            self._prompts[key] = self._session.render([*pairs, (turn.question, None)])
        return self._prompts[key]

    def _plain(self, record: CaseRecord, prompt: IntArray) -> IntArray:
        """Return the plain greedy output for a prompt of a record's turn."""
        sha = hashlib.sha256(np.ascontiguousarray(prompt, dtype="<i8").tobytes()).hexdigest()
        key = (record.case_id, record.turn, sha)
        if key not in self._plain_outputs:
            output = self._session.plain(prompt).tolist()
            line = dict(zip(("case_id", "turn", "prompt_sha"), key, strict=True))
            jsonl.append_jsonl(self._plain_file, [{**line, "output_ids": output}])
            self._plain_outputs[key] = output
        return np.asarray(self._plain_outputs[key], dtype=np.int64)

    def _reference(self, turn: Turn, prompt: IntArray) -> IntArray:
        """Return the turn's plain greedy output: the baseline's if it ran already, or computed."""
        ran = turn.siblings.get(self.job.baseline or "") if self.job.greedy else None
        if ran and ran.record.status != "failed" and ran.record.prompt_ids == prompt.tolist():
            return np.asarray(ran.record.output_ids, dtype=np.int64)
        return self._plain(turn.record, prompt)

    def previous_answer(self, turn: Turn) -> str:
        """Quote the label's own output, the greedy baseline's, or a plain one computed for it."""
        if self.job.config.dataset.dialogue == "own":
            output = require_ok(turn.record).output_ids
        elif self.job.greedy and self.job.baseline:
            output = require_ok(turn.siblings[self.job.baseline].record).output_ids
        else:
            output = self._plain(turn.record, self._prompt(turn)).tolist()
        return self._session.answer(self._prompt(turn), output)

    def compare(self, record: CaseRecord, plain: CaseRecord) -> Lossless:
        if record is plain:
            return Lossless(verdict="equal")
        reference = plain.output_ids
        if record.prompt_ids != plain.prompt_ids:
            # The label's own dialogue diverged after a near tie.
            prompt = np.asarray(record.prompt_ids, dtype=np.int64)
            reference = self._plain(record, prompt).tolist()
        return self._session.audit(record, reference)

    def decode_again(self, run: MethodRun, record: CaseRecord) -> None:
        prompt = np.asarray(record.prompt_ids, dtype=np.int64)
        if run.drafter.needs.reference:
            run.drafter.set_reference(self._plain(record, prompt))
        self._session.decode(prompt, run.drafter, record.seed, seen=run.seen(record))

    def recover(self, error: Exception, running: str, before: str) -> None:
        self._session.recover(error, running, before)

    def prepare_warm_up(self, prompts: Sequence[IntArray]) -> None:
        """Choose at most three representative prompt lengths for the warm-up.

        Also makes room for the audit, so that no buffer grows after the warm-up.
        """
        case_ids = [case.case_id for case in self.job.cases]
        self._prompts = {(id,): ids for id, ids in zip(case_ids, prompts, strict=True)}
        if self.job.greedy and self.job.baseline:
            self._session.reserve_audit(prompts)
        longest = self._session.context_length - _WARM_UP_TOKENS
        lengths = sorted(length for length in map(len, prompts) if length <= longest)
        if lengths:
            self._lengths = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})

    def warm_up(self, run: MethodRun) -> None:
        for length in self._lengths:
            request = self._warm_up_request(run, length)
            self._session.decode(request.prompt, run.drafter, 0, _WARM_UP_TOKENS)

    def _warm_up_request(self, run: MethodRun, length: int) -> TurnRequest:
        from specbench.decoding.batch import TurnRequest  # torch

        prompt: IntArray = np.resize(self._session.encode(WARM_UP_TEXT), length)
        run.drafter.reset()
        if run.drafter.needs.reference:
            run.drafter.set_reference(self._session.plain(prompt, _WARM_UP_TOKENS))
        return TurnRequest(prompt, run.drafter)


class BatchSource(EngineSource):
    """Decodes turns by our own engine in lock-step, a static batch of cases at a time.

    Turns of dialogues are in lock-step, too: the first turn of all cases, then the second of those
    that have one, which may be fewer. Outputs are compared with plain decoding of each sequence.
    """

    def __init__(self, job: Job, session: Session, watch: SystemMonitor | None = None) -> None:
        super().__init__(job, session, watch)
        self._size = job.config.batch.size
        self._longest = job.config.generation.max_new_tokens
        self._groups = job.groups_of_a_repeat(self._size)

    def order(self, block: CaseBlock, batch: int) -> tuple[str, ...]:
        repeat, group = divmod(batch, self._groups)
        return label_order(self.job.labels, self.job.config.seed, group, repeat)

    def for_slot(self, run: MethodRun, slot: int) -> MethodRun:
        return self._session.for_slot(run, slot)

    def decode_turns(self, turns: Sequence[Turn]) -> None:
        requests: list[TurnRequest] = []

        def ask(turn: Turn) -> None:
            request = self._request(turn)
            # Here, so that a sequence for which there is no memory is the only one to fail.
            self._session.make_room(len(request.prompt) + self._longest)
            requests.append(request)

        ask_each(turns, ask)
        asked_turns = [turn for turn in turns if turn.error is None]
        for turn in turns:  # a group with a failed sequence is excluded from comparisons
            turn.record = turn.record.replace(
                batch=self.job.slot(turn.batch, turn.slot, len(asked_turns))
            )
        if not asked_turns:
            return
        self._watch.begin()
        try:
            batch_result = self._session.decode_together(requests)
        except DiskError:
            raise
        except Exception as error:  # of a pass, which all sequences share
            for turn in asked_turns:
                turn.error = error
            return
        around = self._watch.end()
        if around.energy_j is not None:
            around = replace(around, energy_j=around.energy_j / len(asked_turns))
        for turn, decoded in zip(asked_turns, batch_result.turns, strict=True):
            if isinstance(decoded, Exception):
                turn.error = decoded
                continue
            assert turn.record.batch is not None
            batch = turn.record.batch.replace(
                full_s=batch_result.full_s,
                model_s=batch_result.model_s,
                model_passes=batch_result.model_passes,
                pass_s=batch_result.pass_s,
            )
            finish = functools.partial(self._finish, turn, decoded, decoded.timings, around, batch)
            turn.error = failure(finish)

    def compare(self, record: CaseRecord, plain: CaseRecord) -> Lossless:
        prompt = np.asarray(record.prompt_ids, dtype=np.int64)
        plain_output = self._plain(record, prompt)
        return self._session.audit(record, plain_output.tolist())

    def warm_up(self, run: MethodRun) -> None:
        requests = [
            self._warm_up_request(self.for_slot(run, i), self._lengths[i % len(self._lengths)])
            for i in range(self._size if self._lengths else 0)
        ]
        decoded = self._session.decode_together(requests, _WARM_UP_TOKENS) if requests else None
        for turn in decoded.turns if decoded else ():
            if isinstance(turn, Exception):
                raise turn
