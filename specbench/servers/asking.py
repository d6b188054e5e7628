"""The servers of a run: started or found, asked, and asked again where that may help."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specbench.config.schema import GenerationConfig
from specbench.config.server_schema import (
    LEARN_FROM_REQUESTS,
    LlamacppConfig,
    ServerConfig,
    parts_of,
)
from specbench.results.manifest import ModelInfo
from specbench.servers import counters
from specbench.servers.client import NoAnswer
from specbench.servers.counters import Counts
from specbench.servers.engines import Messages, Question, vocabulary
from specbench.servers.running import Server, StartedServer
from specbench.servers.stream import Answer, check_prompt, read_answer
from specbench.storage.hashes import file_sha256

SERVER_LOG = "server-{}.log"
_METRICS_S = 2.0  # an engine may count an answer a moment after it has sent it
_METRICS_EVERY_S = 0.05
_LONGEST_WAIT_S = 60.0
NOT_PLAIN = "not_plain"  # kind of error: the baseline's server drafts
_SETTLING = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class AskedAtOnce:
    """Questions that were asked at once.

    Attributes:
        seconds: from the first request to the last token; None where one failed or was repeated.
        passes: of the server for all of them together, their prompts' included; None where it does
            not say, or others may have asked meanwhile.
        accepted: draft tokens of all of them by position of their draft; as ``passes``.
    """

    seconds: float | None = None
    passes: int | None = None
    accepted: tuple[int, ...] = ()


@dataclass(slots=True)
class Asked:
    """One question to one server, and what became of it.

    Attributes:
        messages: the dialogue; its last answer is to be written.
        answer, counts: of the request that succeeded; ``counts`` None where nobody counted.
        error: of the last request, where none did.
        requests: how often it was asked.
    """

    messages: Messages
    seed: int
    question: Question | None = None
    answer: Answer | None = None
    counts: Counts | None = None
    error: Exception | None = None
    requests: int = 0

    @property
    def open(self) -> bool:
        """Whether asking may help."""
        return self.answer is None and (self.error is None or getattr(self.error, "again", False))


class Servers:
    """The servers of a run by label.

    Args:
        shared: the run's ``server`` group; ``configs``: as it holds for each label.
        gguf: the file that servers of ours serve.
        folder: where these write their logs.
    """

    def __init__(
        self,
        shared: ServerConfig,
        configs: Mapping[str, ServerConfig],
        generation: GenerationConfig,
        gguf: Path | None,
        folder: Path,
    ) -> None:
        self._shared, self._generation, self._gguf = shared, generation, gguf
        self.concurrency = shared.concurrency
        self._pool: ThreadPoolExecutor | None = None
        if self.concurrency > 1:
            self._pool = ThreadPoolExecutor(self.concurrency, "ask")
        self.by_label: dict[str, Server] = {}
        for number, (label, config) in enumerate(configs.items()):
            if isinstance(config, LlamacppConfig):
                assert gguf is not None
                log = folder / SERVER_LOG.format(number)
                self.by_label[label] = StartedServer(config, gguf, log)
            else:
                self.by_label[label] = Server(config)

    def open(self) -> None:
        """Have all servers run, unless they are to take turns."""
        for label in self.by_label:
            self.use(label)

    def use(self, label: str) -> Server:
        """The label's server, running; the others are stopped first with ``server.restart``."""
        server = self.by_label[label]
        if self._shared.restart:
            for other in self.by_label.values():
                if other is not server:
                    other.stop()
        if server.ready():
            # It touches its memory, so that no question pays for it. What goes wrong here does so
            # again where it is counted.
            settling = Asked(_SETTLING, 0)
            self._prepare(server, [settling], longest=2)
            self._request(server, settling)
        return server

    def forget(self) -> None:
        """End the servers that would answer with what they learnt from questions before.

        `use` starts them again.
        """
        for server in self.by_label.values():
            if {*parts_of(server.config.speculation)} & {*LEARN_FROM_REQUESTS}:
                server.stop()

    def close(self) -> None:
        for server in self.by_label.values():
            server.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pids(self) -> list[int]:
        """Processes of the servers that were started here."""
        return [server.pid for server in self.by_label.values() if server.pid is not None]

    @property
    def local(self) -> bool:
        """Whether all servers run on this machine."""
        return all(server.client.local for server in self.by_label.values())

    def describe(self) -> dict[str, dict[str, object]]:
        """The manifest's part about the servers."""
        return {
            label: {
                "engine": server.info.name,
                "numerics": server.info.numerics,
                # Of a model that is a file, its name alone.
                "model": server.info.model.rpartition("/")[2]
                if server.info.model.startswith("/")
                else server.info.model,
                "speculation": server.config.speculation,
                "where": server.where,
                "this_machine": server.client.local,
                "flags": dict(server.flags),
            }
            for label, server in self.by_label.items()
        }

    def model(self, model_id: str, cache: Path) -> ModelInfo:
        """The manifest's part about the model, as far as the servers tell."""
        kinds = dict.fromkeys(server.info.numerics for server in self.by_label.values())
        digest = None if self._gguf is None else file_sha256(self._gguf, cache / "hashes")
        info = ModelInfo(id=model_id, weights_hash=digest, dtype=", ".join(kinds), device="server")
        first = next(iter(self.by_label.values()))
        if isinstance(first.config, LlamacppConfig):
            # What a replay of its answers asks for; the file stands for its tokenizer.
            info.vocab_size, info.eos_ids = vocabulary(first.client)
            info.context_length = first.config.context
            info.tokenizer_hash = f"gguf:{digest}"
        return info

    def comparable(self, label: str, other: str) -> bool:
        """Whether two labels are answered by the same engine with the same arithmetic."""
        a, b = self.by_label[label].info, self.by_label[other].info
        return (a.engine, a.version, a.numerics) == (b.engine, b.version, b.numerics)

    def ask(self, label: str, asked: Sequence[Asked], longest: int | None = None) -> AskedAtOnce:
        """Ask a label's questions at once, and again those whose answers did not come whole.

        A request is repeated ``server.retries`` times where that may help: the connection was
        refused or broke off, it took too long, the status was 408, 429 or 5xx, or what came is not
        JSON. Nothing of an answer that did not come whole is kept. A server of ours that died is
        started again.

        Args:
            longest: tokens at most; None: the run's.
        """
        batch = AskedAtOnce()
        for round_number in range(1 + self._shared.retries):
            left = [one for one in asked if one.open]
            if not left:
                break
            if round_number:
                wanted_s = max(getattr(one.error, "wait_s", 0.0) for one in left)
                doubled_s = self._shared.retry_wait_s * 2 ** (round_number - 1)
                time.sleep(min(max(wanted_s, doubled_s), _LONGEST_WAIT_S))
            server = self.use(label)
            self._prepare(server, left, longest)
            before = _own_metrics(server)
            start = time.perf_counter()
            if self._pool is None or len(left) == 1:
                for one in left:
                    self._request(server, one)
            else:
                list(self._pool.map(partial(self._request, server), left))
            ended = time.perf_counter() - start
            for one in left:
                _hide_key(server, one)
            risen = _risen(server, before, _own_metrics(server), left)
            batch = AskedAtOnce() if round_number else AskedAtOnce(ended, *risen)
        return batch if all(one.answer is not None for one in asked) else AskedAtOnce()

    def _prepare(self, server: Server, asked: Sequence[Asked], longest: int | None) -> None:
        """Put prompts into ids where the server is given those; never timed."""
        generation, info = self._generation, server.info
        if longest is not None:
            generation = replace(generation, max_new_tokens=longest)
        for one in asked:
            if one.question is None:
                try:
                    one.question = info.kind.question(
                        server.client, info.model, one.messages, generation, one.seed
                    )
                    if isinstance(server.config, LlamacppConfig):
                        body = {"cache_prompt": server.config.reuse is not None}
                        one.question = replace(one.question, body={**one.question.body, **body})
                except NoAnswer as error:
                    one.error = error

    def _request(self, server: Server, one: Asked) -> None:
        """One request; whatever goes wrong is kept, and the run goes on."""
        one.requests += 1
        if one.question is None:
            return
        table = server.info.kind.counters
        try:
            before = self._metrics(server)
            events = server.client.stream(one.question.path, one.question.body)
            answer = read_answer(events, one.question.longest)
            if one.question.prompt_ids:
                answer.prompt_ids = list(one.question.prompt_ids)
                check_prompt(answer, len(answer.prompt_ids))
            if not server.plain:
                one.counts = counters.find_counts(
                    table, answer.counters, answer.n_new, answer.arrived
                )
                one.counts = self._with_metrics(server, before, answer, one.counts)
            elif counters.drafts(table, answer.counters):
                raise NoAnswer(
                    NOT_PLAIN,
                    f"the server at {server.client.url} drafts, but answers as plain decoding. "
                    "Start it without speculation (server.plain_url), or say what it drafts "
                    "with (server.speculation).",
                    again=False,
                )
            else:
                one.counts = counters.plain_counts(answer.n_new)
            one.answer, one.error = answer, None
        except Exception as error:
            one.error = error

    def _metrics(self, server: Server) -> Mapping[str, float] | None:
        """Prometheus counters, where one question at a time makes their rise that question's."""
        known = counters.metrics_words(server.info.kind.counters) is not None
        if server.plain or server.pid is not None or self._pool is not None or not known:
            return None
        try:
            return counters.read_metrics(server.client.get("/metrics").decode(errors="replace"))
        except NoAnswer:
            return None

    def _with_metrics(
        self,
        server: Server,
        before: Mapping[str, float] | None,
        answer: Answer,
        counts: Counts | None,
    ) -> Counts | None:
        """An answer's counts with what /metrics says besides, or instead."""
        words = counters.metrics_words(server.info.kind.counters)
        if (
            before is None
            or words is None
            or (counts and (counts.committed or not words.positions))
        ):
            return counts
        told = self._counted(server, before, answer)
        if counts is None or told is None:
            return told or counts
        return replace(counts, by_position=told.by_position)

    def _counted(
        self, server: Server, before: Mapping[str, float], answer: Answer
    ) -> Counts | None:
        """What the server's counters rose by, if by this answer's tokens and nothing else's."""
        words = counters.metrics_words(server.info.kind.counters)
        assert words is not None
        end = time.monotonic() + _METRICS_S
        while True:
            risen = counters.difference(words, before, self._metrics(server) or {})
            if risen is not None and risen[words.new_tokens] == answer.n_new:
                answer.counters[counters.METRICS] = risen
                return counters.convert(words, risen, answer.n_new, answer.arrived)
            if risen is None or time.monotonic() > end:
                return None
            time.sleep(_METRICS_EVERY_S)


def _own_metrics(server: Server) -> Mapping[str, float] | None:
    """Prometheus counters of a server of ours, which nobody else asks."""
    if server.pid is None:
        return None
    try:
        return counters.read_metrics(server.client.get("/metrics").decode(errors="replace"))
    except NoAnswer:
        return None


def _risen(
    server: Server,
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    asked: Sequence[Asked],
) -> tuple[int | None, tuple[int, ...]]:
    """Passes of a server meanwhile, and the draft tokens accepted by position."""
    kind = server.info.kind
    if before is None or after is None or kind.passes not in after:
        return None, ()
    passes = counters.whole(after[kind.passes] - before.get(kind.passes, 0.0))
    words = counters.metrics_words(kind.counters)
    risen = words and counters.difference(words, before, after)
    accepted = [one.counts.accepted for one in asked if one.counts]
    if not words or not risen or None in accepted:
        return passes, ()
    return passes, counters.by_position(words, risen, sum(n or 0 for n in accepted))


def _hide_key(server: Server, one: Asked) -> None:
    """Take the key out of what became of a question: the one way into records and lines."""
    secret = server.client.secret
    if one.answer is not None:
        one.answer.text = secret.hide_in_answer(one.answer.text)
        one.answer.counters = secret.hide_in(one.answer.counters)
    if one.error is not None:
        secret.hide_in_error(one.error)
