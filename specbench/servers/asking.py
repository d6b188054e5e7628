"""The servers of a run: started or found, asked, and asked again where that may help."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specbench.config.schema import GenerationConfig
from specbench.config.server_schema import (
    LEARN_FROM_REQUESTS,
    PLAIN,
    LlamacppConfig,
    OpenaiConfig,
    ServerConfig,
    parts_of,
)
from specbench.errors import SpecBenchError
from specbench.results.manifest import ModelInfo
from specbench.servers import counters, llamacpp
from specbench.servers.client import Client, NoAnswer
from specbench.servers.counters import Counts
from specbench.servers.engines import (
    STOP_RULES,
    EngineInfo,
    Messages,
    Question,
    Sampling,
    identify,
    vocabulary,
)
from specbench.servers.stream import Answer, read_answer
from specbench.storage.hashes import file_sha256

SERVER_LOG = "server-{}.log"
NOT_PLAIN = "not_plain"  # kind of error: the baseline's server drafts
_METRICS_S = 2.0  # an engine may count an answer a moment after it has sent it
_METRICS_EVERY_S = 0.05
_LONGEST_WAIT_S = 60.0
_STARTS = 3  # of a server that is killed while it starts
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


class Server:
    """One label's server, which runs already; ``config``: the ``server`` group for the label."""

    client: Client  # of a server that was made `ready`
    info: EngineInfo
    pid: int | None = None  # of its process, where it was started here

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.plain = config.speculation == PLAIN

    @property
    def where(self) -> str:
        """Which server answers, in words that hold for later readers."""
        return self.client.url

    @property
    def flags(self) -> Mapping[str, object]:
        """What it was started with, as far as is known."""
        return self.info.flags

    def ready(self) -> bool:
        """Have it run and know what it is; whether it had to be started.

        Raises:
            SpecBenchError: it does not start, or does not answer.
        """
        config = self.config
        assert isinstance(config, OpenaiConfig) and config.base_url is not None
        if not hasattr(self, "info"):
            key = os.environ.get(config.api_key_env, "")
            self.client = Client(config.base_url, config.timeout_s, config.answer_mb, key)
            self.info = identify(self.client, config.engine, config.model, config.numerics)
        return False

    def stop(self) -> None:
        """End it, where it was started here."""


class StartedServer(Server):
    """llama.cpp's server in a child process; ``log``: the file that it writes to."""

    def __init__(self, config: LlamacppConfig, gguf: Path, log: Path) -> None:
        super().__init__(config)
        self._flags = llamacpp.flags(config, gguf)
        self._process = llamacpp.LlamacppProcess(self._flags, log)

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        return self._process.pid

    @property
    def where(self) -> str:
        return "started here"

    @property
    def flags(self) -> Mapping[str, object]:
        wheel = f"{llamacpp.WHEEL} {llamacpp.wheel_version()}"
        built = {"wheel": wheel, "simd": self._process.simd}
        return {
            **self._flags,
            "model": Path(str(self._flags["model"])).name,
            **built,
            **self.info.flags,
        }

    def ready(self) -> bool:
        if self._process.alive:
            return False
        for left in reversed(range(_STARTS)):
            try:
                self._process.start()
                config = self.config
                self.client = Client(self._process.url, config.timeout_s, config.answer_mb)
                if not hasattr(self, "info"):
                    info = identify(self.client, "llamacpp", None, None)
                    rules = {key: value for key, value in info.flags.items() if key == STOP_RULES}
                    self.info = replace(info, version=llamacpp.wheel_version(), flags=rules)
                break
            except SpecBenchError:
                if not (self._process.killed and left):  # it would only fail again
                    raise
        return True

    def stop(self) -> None:
        self._process.stop()


class Servers:
    """The servers of a run by label.

    Args:
        shared: the run's ``server`` group; ``configs``: as it holds for each label.
        template_kwargs: arguments of the server's chat template.
        gguf: the file that servers of ours serve.
        folder: where these write their logs.
    """

    def __init__(
        self,
        shared: ServerConfig,
        configs: Mapping[str, ServerConfig],
        generation: GenerationConfig,
        template_kwargs: Mapping[str, object],
        gguf: Path | None,
        folder: Path,
    ) -> None:
        self._shared, self._generation, self._gguf = shared, generation, gguf
        self._template = {"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {}
        self.concurrency = shared.concurrency
        self._pool = ThreadPoolExecutor(self.concurrency) if self.concurrency > 1 else None
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
                "model": Path(server.info.model).name
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
        for attempt in range(1 + self._shared.retries):
            left = [one for one in asked if one.open]
            if not left:
                break
            if attempt:
                wanted_s = max(getattr(one.error, "wait_s", 0.0) for one in left)
                doubled_s = self._shared.retry_wait_s * 2 ** (attempt - 1)
                time.sleep(min(max(wanted_s, doubled_s), _LONGEST_WAIT_S))
            server = self.use(label)
            self._prepare(server, left, longest)
            before = self._metrics(server)
            start = time.perf_counter()
            if self._pool is None:
                for one in left:
                    self._request(server, one)
            else:
                list(self._pool.map(partial(self._request, server), left))
            seconds = time.perf_counter() - start
            for one in left:
                _count(server, one)
            passes, accepted = self._count_metrics(server, before, left)
            batch = AskedAtOnce() if attempt else AskedAtOnce(seconds, passes, accepted)
        return batch if all(one.answer is not None for one in asked) else AskedAtOnce()

    def _prepare(self, server: Server, asked: Sequence[Asked], longest: int | None) -> None:
        """Put prompts into ids where the server is given those; never timed."""
        info = server.info
        for one in asked:
            if one.question is None:
                dialogue = {"messages": list(one.messages), **self._template}
                sampling = Sampling.of(self._generation, one.seed, longest)
                try:
                    question = info.kind.question(server.client, info.model, dialogue, sampling)
                except NoAnswer as error:
                    one.error = error
                    continue
                if isinstance(server.config, LlamacppConfig) and server.config.reuse is not None:
                    question = replace(question, body={**question.body, "cache_prompt": True})
                one.question = question

    def _request(self, server: Server, one: Asked) -> None:
        """One request; whatever goes wrong is kept, and the run goes on."""
        one.requests += 1
        if one.question is None:
            return
        try:
            events = server.client.stream(one.question.path, one.question.body)
            one.answer, one.error = read_answer(events, one.question.longest), None
        except Exception as error:
            one.error = error

    def _metrics(self, server: Server) -> Mapping[str, float] | None:
        """Prometheus counters, where their rise is that of these questions alone.

        Nobody else asks a server of ours; of another one, a question at a time is recognised by its
        number of tokens.
        """
        alone = self._pool is None and not server.plain
        if server.info.kind.metrics is None or (server.pid is None and not alone):
            return None
        try:
            return counters.read_metrics(server.client.get("/metrics"))
        except NoAnswer:
            return None

    def _count_metrics(
        self, server: Server, before: Mapping[str, float] | None, asked: Sequence[Asked]
    ) -> tuple[int | None, tuple[int, ...]]:
        """Complete counts by what /metrics says; passes and accepted tokens of all questions."""
        kind = server.info.kind
        if before is None or kind.metrics is None:
            return None, ()
        if server.pid is None:
            self._count_alone(server, before, asked[0])
            return None, ()
        after = self._metrics(server)
        if after is None or kind.passes not in after:
            return None, ()
        passes = counters.whole(after[kind.passes] - before.get(kind.passes, 0.0))
        risen = counters.difference(kind.metrics, before, after)
        accepted = [one.counts.accepted for one in asked if one.counts]
        if not risen or None in accepted:
            return passes, ()
        return passes, counters.by_position(kind.metrics, risen, sum(n or 0 for n in accepted))

    def _count_alone(self, server: Server, before: Mapping[str, float], one: Asked) -> None:
        """Take what the server's counters rose by, if by this answer's tokens alone."""
        words, answer = server.info.kind.metrics, one.answer
        if words is None or answer is None:
            return
        if one.counts and (one.counts.committed or not words.positions):
            return
        end, risen = time.monotonic() + _METRICS_S, None
        while True:
            risen = counters.difference(words, before, self._metrics(server) or {})
            if risen is None or time.monotonic() > end:
                return
            if risen[words.new_tokens] == answer.n_new:
                break
            time.sleep(_METRICS_EVERY_S)
        answer.counters["/metrics"] = risen
        counted = counters.convert(words, risen, answer.n_new, answer.arrived)
        if one.counts is None:
            one.counts = counted
        elif counted is not None:
            one.counts = replace(one.counts, by_position=counted.by_position)


def _count(server: Server, one: Asked) -> None:
    """Read an answer's own counters; that of a plain server which drafted is none."""
    answer, table = one.answer, server.info.kind.counters
    if answer is None or one.question is None:
        return
    # Its events were free of the key each; together they may spell it.
    answer.thoughts = server.client.hide(answer.thoughts)
    answer.said = server.client.hide(answer.said)
    if one.question.prompt_ids:
        answer.prompt_ids = list(one.question.prompt_ids)
    answer.n_prompt = len(answer.prompt_ids) or answer.n_prompt
    if not server.plain:
        one.counts = counters.find_counts(table, answer.counters, answer.n_new, answer.arrived)
    elif counters.drafts(table, answer.counters):
        one.answer = None
        one.error = NoAnswer(
            NOT_PLAIN,
            f"the server at {server.client.url} drafts, but answers as plain decoding. Start it "
            "without speculation (server.plain_url), or say what it drafts with "
            "(server.speculation).",
            again=False,
        )
    else:
        one.counts = counters.plain_counts(answer.n_new)
