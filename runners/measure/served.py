"""Measure turns on servers: batches of blocks, all labels of a batch interleaved."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from runners.job import CaseBlock, Job, label_order
from runners.measure import device_lock
from runners.measure.blocks import WARM_UP_TEXT, OutputSource, Turn, require_ok, without_reasoning
from runners.measure.measurement import Measurement, attempts
from runners.measure.method_runs import MethodRun
from runners.run_folder.manifest import check_subject
from specbench.arrays import first_difference
from specbench.config.schema import SERVERS, LlamacppConfig
from specbench.errors import CaseFailed, ConfigurationError, field_error
from specbench.models.checkpoints.bundled import find_gguf
from specbench.results.records import DIFFERS, CaseRecord, Lossless, Served
from specbench.servers.counters import Counts
from specbench.servers.load_generator import NOT_PLAIN, Request, Servers
from specbench.system.interference import Interference, SystemMonitor

_WARM_UP_TOKENS = 8


def run_served(job: Job) -> int:
    """Measure what is missing in the job's folder and close it, as `runners.runner.Runner.run`."""
    for run in attempts(job):
        with run:
            if run.incomplete:
                _measure(run)
    return run.exit_code


def _measure(run: Measurement) -> None:
    job, manifest = run.job, run.manifest
    assert job.config.server is not None
    configs = {}
    for method_run in run.runs:
        keys = dict(method_run.entry.method["server"])
        configs[method_run.label] = SERVERS[keys["name"]](**keys)
    server, generation = job.config.server, job.config.generation
    kwargs = {str(key): value for key, value in job.config.model.template_kwargs.items()}
    servers = Servers(server, configs, generation, kwargs, _gguf(job), job.folder)
    try:
        with contextlib.ExitStack() as stack:
            servers.open()
            if servers.local:
                stack.enter_context(device_lock.hold_device(job))
            described = servers.describe()
            model = servers.model(str(job.config.model.id), Path(job.config.cache_dir))
            check_subject(manifest, model)
            manifest.model, manifest.servers = model, described
            run.save_manifest()
            runner = run.runner(ServedSource(job, servers, run.files.done))
            runner.warm_up(job.config.measure.warmup)
            for number, batch, missing in run.pending(servers.concurrency):
                run.files.append(runner.run(batch, number).select(missing))
            if servers.concurrency == 1:  # a batch is measured again whole or not at all
                for block, attempt in run.reruns():
                    run.files.replace(runner.run([block], block.stream_index, attempt))
    finally:
        servers.close()


def _gguf(job: Job) -> Path | None:
    server = job.config.server
    if not isinstance(server, LlamacppConfig):
        return None
    if server.gguf is not None:
        return Path(server.gguf).expanduser()
    return find_gguf(str(job.config.model.gguf_package), str(job.config.model.gguf_file))


class ServedSource(OutputSource):
    """Sends turns over HTTP, a batch at a time; ``done``: the run's records so far."""

    refusals = (ConfigurationError,)

    def __init__(self, job: Job, servers: Servers, done: Sequence[CaseRecord]) -> None:
        super().__init__(job)
        self._servers = servers
        self._counted: dict[tuple[object, ...], CaseRecord] = {}
        for record in done:
            if record.status != "failed":
                with contextlib.suppress(CaseFailed):  # it is in the files already
                    self._check_counts(record)
        self._watch = SystemMonitor(helpers=lambda: servers.pids)

    def begin(self, record: CaseRecord) -> CaseRecord:
        engine = self._servers.by_label[record.label].info
        return record.replace(
            verifier="server",
            host=socket.gethostname(),
            engine=engine.name,
            numerics=engine.numerics,
        )

    def order(self, block: CaseBlock, batch: int) -> tuple[str, ...]:
        return label_order(self.job.labels, self.job.config.seed, batch)

    def begin_batch(self) -> None:
        self._servers.forget()

    def warm_up(self, run: MethodRun) -> None:
        """Send a prompt that is never measured, and refuse a baseline's server that drafts."""
        request = Request([{"role": "user", "content": WARM_UP_TEXT}], 0)
        self._servers.send(run.label, [request], longest=_WARM_UP_TOKENS)
        if getattr(request.error, "kind", "") == NOT_PLAIN:
            raise ConfigurationError(str(request.error))
        if request.error is not None:
            raise request.error

    def decode_turns(self, turns: Sequence[Turn]) -> None:
        requests = [(t, Request(_messages(t), t.record.seed)) for t in turns if t.error is None]
        label = turns[0].run.label
        self._servers.use(label)
        self._watch.begin()
        seconds = self._servers.send(label, [request for _, request in requests])
        around = self._watch.end()
        if not self._servers.local or not self._servers.pids:
            # The CPU time of a server that was not started here cannot be attributed.
            around = replace(around, cpu_others=None)
        finished = []
        for turn, request in requests:
            try:
                turn.record = self._finished(turn, request, around)
                finished.append(turn)
            except CaseFailed as error:
                turn.error = error
        # Without all tokens a batch's time is meaningless.
        if len(finished) < len(turns):
            seconds = None
        for turn in finished:
            served = turn.record.served
            turn.record = turn.record.replace(served=served and served.replace(batch_s=seconds))

    def _finished(self, turn: Turn, request: Request, around: Interference) -> CaseRecord:
        """Complete a turn's record; CaseFailed: an incomplete output or impossible counts."""
        answer, counts = request.answer, request.counts or Counts(0)
        if answer is None:
            raise request.error or CaseFailed("no_answer", "the question was not asked")
        served = Served(
            text=answer.text,
            n_thought=len(answer.thoughts),
            n_first=answer.n_first,
            concurrency=self._servers.concurrency,
            batch=turn.batch,
            bursts=[round(at, 6) for at in answer.bursts],
            requests=request.n_sent,
            counted=request.counts is not None,
            where=self._servers.by_label[turn.run.label].where,
            counters=answer.counters,
        )
        whole = len(answer.output_ids) == answer.n_new
        try:
            record = turn.record.finished(
                answer.output_ids if whole else [],
                counts.committed,
                n_prompt=answer.n_prompt,
                prompt_ids=answer.prompt_ids,
                n_new=answer.n_new,
                finish_reason=answer.finish_reason,
                n_target_passes=counts.steps,
                n_drafted=counts.drafted or 0,
                prefill_s=answer.ttft_s,
                decode_s=answer.last_s - answer.ttft_s,
                wall_s=answer.last_s,
                served=served,
                **asdict(around),
            )
            record = CaseRecord.from_json(record.to_json())
        except ValueError as error:
            text = f"the answer contradicts itself: {field_error(error)}"
            raise CaseFailed("malformed", text) from None
        self._check_counts(record)
        return record

    def _check_counts(self, record: CaseRecord) -> None:
        """Refuse a count that differs from an equal text's earlier one, also across starts."""
        assert record.served is not None
        where = (record.engine, record.numerics, record.case_id, record.turn)
        counts = [("a text", record.served.text, "n_new")]
        if record.turn == 0:  # later turns quote outputs
            counts.append(("a prompt", "", "n_prompt"))
        for subject, text, name in counts:
            first = self._counted.setdefault((*where, subject, text), record)
            count, before = getattr(record, name), getattr(first, name)
            if count != before:
                raise CaseFailed(
                    "bad_count",
                    f"the server counts {count} tokens in {subject} that had {before} for "
                    f"{first.label} (case {first.case_id}, repeat {first.repeat})",
                )

    def previous_answer(self, turn: Turn) -> str:
        shared = self.job.baseline if self.job.config.dataset.dialogue == "ar" else None
        served = require_ok(turn.siblings[shared or turn.run.label].record).served
        assert served is not None  # the turn did not fail
        return without_reasoning(served.text[served.n_thought :])

    def compare(self, record: CaseRecord, plain: CaseRecord) -> Lossless:
        if self._servers.comparable(record.label, plain.label):
            return compare(record, plain)
        return record.lossless


def _messages(turn: Turn) -> list[dict[str, str]]:
    texts = [*(text for pair in turn.dialogue.pairs for text in pair), turn.question]
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def compare(record: CaseRecord, plain: CaseRecord) -> Lossless:
    """Compare an output with the same server's plain one, by ids if both have them or by text."""
    if record.output_ids and plain.output_ids:
        at = first_difference(record.output_ids, plain.output_ids)
    else:
        assert record.served is not None and plain.served is not None
        at = first_difference(record.served.text, plain.served.text)
    return Lossless(verdict="equal") if at is None else Lossless(verdict=DIFFERS, first_diff=at)
