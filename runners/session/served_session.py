"""The servers of a run: started or found, asked, and asked again where that may help."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from runners.job import Job
from runners.session.method_runs import MethodRun
from specbench.config.schema import GenerationConfig
from specbench.config.server_schema import (
    LEARN_FROM_REQUESTS,
    PLAIN,
    LlamacppConfig,
    OpenaiConfig,
    ServerConfig,
)
from specbench.errors import SpecBenchError
from specbench.results.manifest import ModelInfo
from specbench.servers import counters, llamacpp
from specbench.servers.client import Client, NoAnswer
from specbench.servers.counters import Counts
from specbench.servers.engines import EngineInfo, Question, identify, question, vocabulary
from specbench.servers.stream import Answer, read_answer
from specbench.storage.hashes import file_sha256

SERVER_LOG = "server-{}.log"
_METRICS_S = 2.0  # an engine may count an answer a moment after it has sent it
_METRICS_EVERY_S = 0.05
_LONGEST_WAIT_S = 60.0
NOT_PLAIN = "not_plain"  # kind of error: the baseline's server drafts
_SETTLING = [{"role": "user", "content": "Hello"}]
_STARTS = 3  # of a server that is killed while it starts


@dataclass(slots=True)
class Server:
    """One label's server.

    Attributes:
        config: the ``server`` group's keys as they hold for the label.
        process: where it is started here.
    """

    config: ServerConfig
    process: llamacpp.LlamacppProcess | None = None
    client: Client = field(default_factory=lambda: Client("", 1.0))
    info: EngineInfo | None = None

    @property
    def plain(self) -> bool:
        return self.config.speculation == PLAIN

    @property
    def described(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    def ready(self) -> None:
        """Have it run and know what it is.

        Raises:
            SpecBenchError: it does not start, or does not answer.
        """
        if self.process is None:
            config = self.config
            assert isinstance(config, OpenaiConfig) and config.base_url is not None
            if self.info is None:
                key = os.environ.get(config.api_key_env, "")
                self.client = Client(config.base_url, config.timeout_s, key)
                self.info = identify(self.client, config.engine, config.model, config.numerics)
        elif not self.process.alive:
            self._start(self.process)

    def _start(self, process: llamacpp.LlamacppProcess) -> None:
        for left in reversed(range(_STARTS)):
            try:
                process.start()
                self.client = Client(process.url, self.config.timeout_s)
                if self.info is None:
                    found = identify(self.client, "llamacpp", None, None)
                    version = llamacpp.wheel_version()
                    self.info = EngineInfo(found.engine, version, found.numerics, found.model)
                return
            except SpecBenchError:
                if not (process.killed and left):  # it would only fail again
                    raise

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()


@dataclass(slots=True)
class Asked:
    """One question to one server, and what became of it.

    Attributes:
        messages: the dialogue; its last answer is to be written.
        answer, counts: of the request that succeeded; ``counts`` None where nobody counted.
        error: of the last request, where none did.
        requests: how often it was asked.
    """

    messages: Sequence[Mapping[str, str]]
    seed: int
    question: Question | None = None
    answer: Answer | None = None
    counts: Counts | None = None
    error: Exception | None = None
    requests: int = 0


class ServedSession:
    """The servers of a run by label."""

    def __init__(self, job: Job, runs: Sequence[MethodRun], gguf: Path | None) -> None:
        assert job.config.server is not None
        self._generation: GenerationConfig = job.config.generation
        self._shared = job.config.server
        self._gguf = gguf
        self._pool: ThreadPoolExecutor | None = None
        if self._shared.concurrency > 1:
            self._pool = ThreadPoolExecutor(self._shared.concurrency, "ask")
        self.servers: dict[str, Server] = {}
        for number, run in enumerate(runs):
            keys = dict(run.entry.method["server"])
            if keys["name"] == "openai":
                self.servers[run.label] = Server(OpenaiConfig(**keys))
                continue
            assert gguf is not None
            config = LlamacppConfig(**keys)
            log = job.folder / SERVER_LOG.format(number)
            process = llamacpp.LlamacppProcess(llamacpp.flags(config, gguf), log)
            self.servers[run.label] = Server(config, process)

    def open(self) -> None:
        """Have all servers run, unless they are to take turns."""
        for label in self.servers:
            self.use(label)

    def use(self, label: str) -> Server:
        """The label's server, running; the others are stopped first with ``server.restart``."""
        server = self.servers[label]
        if self._shared.restart:
            for other in self.servers.values():
                if other is not server:
                    other.stop()
        started = server.process is not None and not server.process.alive
        server.ready()
        if started:
            self._settle(server)
        return server

    def forget(self) -> None:
        """End the servers that would answer with what they learnt from questions before.

        `use` starts them again.
        """
        for server in self.servers.values():
            if server.process is not None and server.config.speculation in LEARN_FROM_REQUESTS:
                server.stop()

    def _settle(self, server: Server) -> None:
        """Have a server that was just started touch its memory, so that no question pays for it."""
        one = Asked(_SETTLING, 0)
        self._prepare(server, [one], longest=2)
        self._request(server, one)  # what goes wrong here does so again where it is counted

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pids(self) -> list[int]:
        """Processes of the servers that were started here."""
        processes = (server.process for server in self.servers.values())
        return [p.pid for p in processes if p is not None and p.pid is not None]

    @property
    def local(self) -> bool:
        """Whether all servers run on this machine."""
        return all(s.process is not None or s.client.local for s in self.servers.values())

    def describe(self) -> dict[str, dict[str, Any]]:
        """The manifest's part about the servers."""
        found = {}
        for label, server in self.servers.items():
            info = server.described
            flags = dict(info.flags)
            if isinstance(server.config, LlamacppConfig):
                assert self._gguf is not None
                flags = {**llamacpp.flags(server.config, self._gguf), "model": self._gguf.name}
            found[label] = {
                "engine": info.name,
                "numerics": info.numerics,
                "model": Path(info.model).name if info.model.startswith("/") else info.model,
                "speculation": server.config.speculation,
                "where": self.where(label),
                "this_machine": server.process is not None or server.client.local,
                "flags": flags,
            }
        return found

    def model(self, model_id: str, cache: Path) -> ModelInfo:
        """The manifest's part about the model, as far as the servers tell."""
        numerics = ", ".join(dict.fromkeys(s.described.numerics for s in self.servers.values()))
        digest = None if self._gguf is None else file_sha256(self._gguf, cache / "hashes")
        found = ModelInfo(id=model_id, weights_hash=digest, dtype=numerics, device="server")
        first = next(iter(self.servers.values()))
        if first.process is not None and isinstance(first.config, LlamacppConfig):
            # What a replay of its answers asks for; the file stands for its tokenizer.
            found.vocab_size, found.eos_ids = vocabulary(first.client)
            found.context_length = first.config.context
            found.tokenizer_hash = f"gguf:{digest}"
        return found

    @property
    def concurrency(self) -> int:
        return self._shared.concurrency

    def where(self, label: str) -> str:
        """Which server answers a label, in words that hold for later readers."""
        server = self.servers[label]
        return "started here" if server.process is not None else server.client.url

    def comparable(self, label: str, other: str) -> bool:
        """Whether two labels are answered by the same engine with the same arithmetic."""
        a, b = self.servers[label].described, self.servers[other].described
        return (a.engine, a.version, a.numerics) == (b.engine, b.version, b.numerics)

    def ask(self, label: str, asked: Sequence[Asked], longest: int | None = None) -> float | None:
        """Ask a label's questions at once, and again those whose answers did not come whole.

        A request is repeated ``server.retries`` times where that may help: the connection was
        refused or broke off, it took too long, the status was 408, 429 or 5xx, or what came is no
        JSON. Nothing of an answer that did not come whole is kept. A server of ours that died is
        started again.

        Args:
            longest: tokens at most; None: the run's.

        Returns:
            Seconds from the first request to the last token; None where one failed or was repeated.
        """
        seconds: float | None = None
        for round_number in range(1 + self._shared.retries):
            left = [one for one in asked if one.answer is None and _may_help(one)]
            if not left:
                break
            if round_number:
                asked_to_wait = max(getattr(one.error, "wait_s", 0.0) for one in left)
                own = self._shared.retry_wait_s * 2 ** (round_number - 1)
                time.sleep(min(max(asked_to_wait, own), _LONGEST_WAIT_S))
            server = self.use(label)
            self._prepare(server, left, longest)
            start = time.perf_counter()
            if self._pool is None or len(left) == 1:
                for one in left:
                    self._request(server, one)
            else:
                list(self._pool.map(partial(self._request, server), left))
            ended = time.perf_counter() - start
            seconds = None if round_number else ended
        return seconds if all(one.answer is not None for one in asked) else None

    def _prepare(self, server: Server, asked: Sequence[Asked], longest: int | None) -> None:
        """Put prompts into ids where the server is given those; never timed."""
        generation = self._generation
        if longest is not None:
            generation = replace(generation, max_new_tokens=longest)
        for one in asked:
            if one.question is None:
                try:
                    one.question = question(
                        server.described, server.client, one.messages, generation, one.seed
                    )
                except NoAnswer as error:
                    one.error = error

    def _request(self, server: Server, one: Asked) -> None:
        """One request; whatever goes wrong is kept, and the run goes on."""
        one.requests += 1
        if one.question is None:
            return
        engine = server.described.engine
        try:
            before = self._metrics(server)
            stream = server.client.stream(one.question.path, one.question.body)
            answer = read_answer(stream)
            if one.question.prompt_ids:
                answer.prompt_ids = list(one.question.prompt_ids)
                answer.n_prompt = len(answer.prompt_ids)
            if server.plain:
                if counters.drafts(engine, answer.counters):
                    raise NoAnswer(
                        NOT_PLAIN,
                        f"the server at {server.client.url} drafts, but answers as plain decoding. "
                        "Start it without speculation (server.plain_url), or say what it drafts "
                        "with (server.speculation).",
                        again=False,
                    )
                one.counts = counters.plain_counts(answer.n_new)
            else:
                one.counts = counters.find_counts(engine, answer.counters, answer.n_new)
                if one.counts is None and before is not None:
                    one.counts = self._counted(server, before, answer)
            one.answer, one.error = answer, None
        except Exception as error:
            one.error = error

    def _metrics(self, server: Server) -> Mapping[str, float] | None:
        """Prometheus counters, where one question at a time makes their rise that question's."""
        known = counters.metrics_words(server.described.engine) is not None
        if server.plain or server.process is not None or self._pool is not None or not known:
            return None
        try:
            return counters.read_metrics(server.client.get("/metrics").decode(errors="replace"))
        except NoAnswer:
            return None

    def _counted(
        self, server: Server, before: Mapping[str, float], answer: Answer
    ) -> Counts | None:
        """What the server's counters rose by, if by this answer's tokens and nothing else's."""
        words = counters.metrics_words(server.described.engine)
        assert words is not None
        end = time.monotonic() + _METRICS_S
        while True:
            after = self._metrics(server) or {}
            said = counters.difference(words, before, after)
            if said is not None and said[words.new_tokens] == answer.n_new:
                answer.counters[counters.METRICS] = said
                return counters.convert(words, said, answer.n_new)
            if said is None or time.monotonic() > end:
                return None
            time.sleep(_METRICS_EVERY_S)


def _may_help(one: Asked) -> bool:
    return one.error is None or getattr(one.error, "again", False)
