"""Measuring what servers answer: batches of blocks, all labels of a batch interleaved."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from runners.job import CaseBlock, Job
from runners.run_folder.manifest import check_subject
from runners.session import device_lock
from runners.session.case_records import BlockResult, begin_record
from runners.session.interference_rule import by_counters
from runners.session.method_runs import MethodRun
from runners.session.open_run import OpenRun, complete
from runners.session.progress import RunProgress
from runners.session.served_session import NOT_PLAIN, Asked, ServedSession
from runners.session.warmup import TEXT
from specbench.arrays import first_difference
from specbench.config.server_schema import LlamacppConfig
from specbench.errors import CaseFailed, ConfigurationError
from specbench.models.checkpoints.bundled import find_gguf
from specbench.results.records import DIFFERS, CaseRecord, Lossless
from specbench.results.statistics.served import Served
from specbench.system.interference import Interference, SystemMonitor

log = logging.getLogger(__name__)


def run_served(job: Job) -> int:
    """Ask what is missing in the job's folder and close it, as `runners.runner.Runner.run`."""
    return complete(job, _measure)


def _measure(run: OpenRun) -> None:
    job, files, manifest = run.job, run.files, run.manifest
    session = ServedSession(job, run.runs, _gguf(job))
    try:
        with contextlib.ExitStack() as stack:
            session.open()
            if session.local:
                stack.enter_context(device_lock.hold_device(job))
            servers = session.describe()
            model = session.model(str(job.config.model.id), Path(job.config.cache_dir))
            check_subject(manifest, model)
            manifest.model, manifest.servers = model, servers
            run.save_manifest()
            blocks = ServedBlocks(
                job, session, {r.label: r for r in run.runs}, manifest.forced_resume
            )
            blocks.warm_up(job.config.measure.warmup)
            pending, total = {b.place for b in files.pending}, len(job.blocks())
            with RunProgress(total, done=total - len(pending)) as progress:
                for number, batch in enumerate(batches(job)):
                    missing = [b for b in batch if b.place in pending]
                    if not missing:
                        continue
                    # All of it, so that what is missing is answered under the load of the rest.
                    made = blocks.run(number, batch)
                    _keep(made, {b.place for b in missing})
                    files.append(made.records, made.errors, made.steps)
                    for block in missing:
                        progress.advance(f"{block.case.task} {block.case.case_id}")
            # A batch is answered anew as a whole or not at all: only single questions are.
            while session.concurrency == 1 and (again := run.noisy()):
                log.info("measuring again what was disturbed (cases: %d)", len(again))
                for block in again:
                    keys = block.keys(job.labels)
                    attempt = 1 + max(r.attempt for r in files.done if r.key in keys)
                    made = blocks.run(block.stream_index, [block], attempt)
                    files.replace(made.records, made.errors, made.steps)
    finally:
        session.close()


def _gguf(job: Job) -> Path | None:
    """The file that servers of ours serve."""
    server = job.config.server
    if not isinstance(server, LlamacppConfig):
        return None
    if server.gguf is not None:
        return Path(server.gguf).expanduser()
    return find_gguf(str(job.config.model.gguf_package), str(job.config.model.gguf_file))


def batches(job: Job) -> Iterator[list[CaseBlock]]:
    """The blocks of the run, as many at a time as are asked at once; of one repeat."""
    assert job.config.server is not None
    size = job.config.server.concurrency
    for repeat in range(job.repeats):
        blocks = [block for block in job.blocks() if block.repeat == repeat]
        for start in range(0, len(blocks), size):
            yield blocks[start : start + size]


def _keep(made: BlockResult, places: set[tuple[int, str]]) -> None:
    """Leave out what earlier starts of the run have measured."""
    made.records = [r for r in made.records if (r.repeat, r.case_id) in places]
    made.errors = [e for e in made.errors if (e["repeat"], e["case_id"]) in places]
    made.steps = [s for s in made.steps if (s.repeat, s.case_id) in places]


@dataclass(slots=True)
class _Dialogue:
    """A label's next prompt in one block: messages, or why there is none."""

    messages: list[dict[str, str]] = field(default_factory=list)
    broken: str = ""


@dataclass(slots=True)
class ServedBlocks:
    """Asks batches of blocks one after the other.

    Attributes:
        runs: by label, in the order of the interleaving.
        forced: whether records are to be marked as made after ``resume=force``.
    """

    job: Job
    session: ServedSession
    runs: Mapping[str, MethodRun]
    forced: bool = False
    _watch: SystemMonitor = field(init=False)

    def __post_init__(self) -> None:
        self._watch = SystemMonitor(helpers=lambda: self.session.pids)

    def warm_up(self, rounds: int) -> None:
        """Ask every server about a text that is never measured.

        Raises:
            ConfigurationError: the baseline's server drafts.
        """
        messages = [{"role": "user", "content": TEXT}]
        for _ in range(rounds):
            for label in self.runs:
                asked = Asked(messages, 0)
                self.session.ask(label, [asked], longest=8)
                if getattr(asked.error, "kind", "") == NOT_PLAIN:
                    raise ConfigurationError(str(asked.error))
                if asked.error is not None:  # fails again where it is counted
                    log.warning("warm-up of %s failed: %s", label, asked.error)

    def run(self, number: int, batch: Sequence[CaseBlock], attempt: int = 0) -> BlockResult:
        """Measure a batch, turn by turn and label by label, and compare the outputs."""
        result = BlockResult()
        self.session.forget()
        dialogues = {(b.place, label): _Dialogue() for b in batch for label in self.runs}
        order = self.job.labels if number % 2 == 0 else self.job.labels[::-1]
        for turn in range(max(len(block.case.turns) for block in batch)):
            asking = [block for block in batch if turn < len(block.case.turns)]
            made: dict[tuple[tuple[int, str], str], CaseRecord] = {}
            for position, label in enumerate(order):
                blanks = {
                    block.place: begin_record(
                        self.job,
                        block,
                        turn,
                        self.runs[label],
                        position,
                        verifier="server",
                        host=socket.gethostname(),
                        forced_resume=self.forced,
                        attempt=attempt,
                        engine=self.session.servers[label].described.name,
                        numerics=self.session.servers[label].described.numerics,
                    )
                    for block in asking
                }
                self._ask(label, number, asking, turn, dialogues, blanks, result)
                made |= {(place, label): record for place, record in blanks.items()}
            self._continue(asking, turn, dialogues, made)
            result.records += self._compared(made)
        return result

    def _ask(
        self,
        label: str,
        number: int,
        asking: Sequence[CaseBlock],
        turn: int,
        dialogues: Mapping[tuple[tuple[int, str], str], _Dialogue],
        blanks: dict[tuple[int, str], CaseRecord],
        result: BlockResult,
    ) -> None:
        """Ask one label all questions of a turn; ``blanks`` become its records."""
        asked: dict[tuple[int, str], Asked] = {}
        for block in asking:
            dialogue, record = dialogues[block.place, label], blanks[block.place]
            if dialogue.broken:
                result.add_error(record, CaseFailed("no_dialogue", dialogue.broken), "decode")
                continue
            said = {"role": "user", "content": block.case.turns[turn]}
            asked[block.place] = Asked([*dialogue.messages, said], record.seed)
        self.session.use(label)
        self._watch.begin()
        batch_s = self.session.ask(label, list(asked.values()))
        around = self._watch.end()
        if not self.session.local or not self.session.pids:
            # Whose CPU time a server takes that was not started here, nobody can tell.
            around = replace(around, cpu_others=None)
        if len(asked) < len(asking):
            batch_s = None
        for place, one in asked.items():
            blanks[place] = self._record(label, number, blanks[place], one, batch_s, around, result)

    def _record(
        self,
        label: str,
        number: int,
        record: CaseRecord,
        one: Asked,
        batch_s: float | None,
        around: Interference,
        result: BlockResult,
    ) -> CaseRecord:
        if one.answer is None:
            error = one.error or CaseFailed("no_answer", "the question was not asked")
            result.add_error(record, error, "decode")
            log.warning("%s, turn %d, %s: %s", record.case_id, record.turn, record.label, error)
            return record
        answer, counts = one.answer, one.counts
        whole = len(answer.output_ids) == answer.n_new
        served = Served(
            text=answer.text,
            concurrency=self.session.concurrency,
            batch=number,
            batch_s=batch_s,
            requests=one.requests,
            counted=counts is not None,
            where=self.session.where(label),
            counters=answer.counters,
        )
        committed = counts.committed if counts else ()
        done = replace(
            record,
            status="ok",
            n_prompt=answer.n_prompt,
            prompt_ids=answer.prompt_ids,
            n_new=answer.n_new,
            output_ids=answer.output_ids if whole else [],
            finish_reason=answer.finish_reason,
            n_target_passes=counts.steps if counts else 0,
            n_drafted=(counts.drafted or 0) if counts else 0,
            accepted_per_step=committed,
            prefill_s=answer.ttft_s,
            decode_s=answer.decode_s,
            wall_s=answer.last_s,
            served=served.to_json(),
            **asdict(around),
        )
        try:
            CaseRecord.from_json(done.to_json())
        except ValueError as error:
            contradicts = CaseFailed("malformed", f"the answer contradicts itself: {error}")
            result.add_error(record, contradicts, "decode")
            return record
        noise = by_counters(done, self.job.config.measure.disturbed)
        return replace(done, status="disturbed", disturbed_by=noise) if noise else done

    def _continue(
        self,
        asking: Sequence[CaseBlock],
        turn: int,
        dialogues: Mapping[tuple[tuple[int, str], str], _Dialogue],
        made: Mapping[tuple[tuple[int, str], str], CaseRecord],
    ) -> None:
        """Put the answers that the next turn quotes into the dialogues."""
        shared = self.job.baseline if self.job.config.dataset.dialogue == "ar" else None
        for block in asking:
            for label in self.runs:
                dialogue, record = dialogues[block.place, label], made[block.place, shared or label]
                if dialogue.broken:
                    continue
                if record.status == "failed" or record.served is None:
                    dialogue.broken = (
                        f"turn {turn} of {record.label} failed, and its answer is part of the next "
                        "turn's prompt"
                    )
                    continue
                dialogue.messages += [
                    {"role": "user", "content": block.case.turns[turn]},
                    {"role": "assistant", "content": record.served["text"]},
                ]

    def _compared(
        self, made: Mapping[tuple[tuple[int, str], str], CaseRecord]
    ) -> Iterator[CaseRecord]:
        """The records with what became of the comparison with the server's plain output."""
        baseline = self.job.baseline
        for (place, label), record in made.items():
            plain = made.get((place, baseline)) if baseline and self.job.greedy else None
            if plain is None or "failed" in (plain.status, record.status):
                yield record
            elif baseline is not None and self.session.comparable(label, baseline):
                yield replace(record, lossless=compare(record, plain))
            else:
                yield record


def compare(record: CaseRecord, plain: CaseRecord) -> Lossless:
    """An output against the same server's plain one: ids where both have them, else text."""
    if record.output_ids and plain.output_ids:
        at = first_difference(record.output_ids, plain.output_ids)
    else:
        assert record.served is not None and plain.served is not None
        at = first_difference(record.served["text"], plain.served["text"])
    return Lossless("equal") if at is None else Lossless(DIFFERS, first_diff=at)
