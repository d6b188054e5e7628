"""The servers of a run: started or found, sent requests, with retries where they may help."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specbench.config.schema import (
    LEARN_FROM_REQUESTS,
    PLAIN,
    GenerationConfig,
    LlamacppConfig,
    OpenaiConfig,
    ServerConfig,
    parts_of,
)
from specbench.errors import SpecBenchError
from specbench.results.manifest import ModelInfo
from specbench.servers import counters, llamacpp
from specbench.servers.adapters import EngineInfo, HttpRequest, Messages, identify, vocabulary
from specbench.servers.client import Client, NoAnswer
from specbench.servers.counters import Counts
from specbench.servers.stream import Answer, read_answer
from specbench.storage.hashes import file_sha256

NOT_PLAIN = "not_plain"  # kind of error: the baseline's server drafts
_METRICS_S, _METRICS_EVERY_S = 2.0, 0.05  # an engine may count an answer after it has sent it
_LONGEST_WAIT_S = 60.0
_STARTS = 3  # of a server that is killed while it starts
_WARM_UP = [{"role": "user", "content": "Hello"}]


@dataclass(slots=True)
class Request:
    """One request to one server, and its result.

    Attributes:
        messages: the dialogue that the server continues.
        answer, counts: of the attempt that succeeded; ``counts`` None without counters.
        error: of the last attempt, where none succeeded.
        n_sent: how often it was sent.
    """

    messages: Messages
    seed: int
    http: HttpRequest | None = None
    answer: Answer | None = None
    counts: Counts | None = None
    error: Exception | None = None
    n_sent: int = 0

    @property
    def open(self) -> bool:
        """Tell whether sending it (again) may help."""
        return self.answer is None and (self.error is None or getattr(self.error, "again", False))


class Server:
    """One label's server; ``config``: the ``server`` group for the label."""

    client: Client  # set by `ready`
    info: EngineInfo
    pid: int | None = None  # of its process, where it was started here

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.plain = config.speculation == PLAIN

    @property
    def where(self) -> str:
        """The server's address, in a form that later readers understand."""
        return self.client.url

    @property
    def flags(self) -> Mapping[str, object]:
        return self.info.flags

    def ready(self) -> bool:
        """Start and identify the server; return True if it had to be started.

        Raises:
            SpecBenchError: it does not start, or does not answer.
        """
        config = self.config
        assert isinstance(config, OpenaiConfig)
        if not hasattr(self, "info"):
            key = os.environ.get(config.api_key_env, "")
            self.client = Client(str(config.base_url), config.timeout_s, config.answer_mb, key)
            self.info = identify(self.client, config.engine, config.model, config.numerics)
        return False

    def stop(self) -> None:
        """Stop it, if it was started here."""


class StartedServer(Server):
    """llama.cpp's server in a child process; ``log``: the file that it writes to."""

    where = "started here"

    def __init__(self, config: LlamacppConfig, gguf: Path, log: Path) -> None:
        super().__init__(config)
        self._flags = llamacpp.flags(config, gguf)
        self._process = llamacpp.LlamacppProcess(self._flags, log)

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        return self._process.pid

    @property
    def flags(self) -> Mapping[str, object]:
        wheel = f"{llamacpp.WHEEL} {llamacpp.wheel_version()}"
        model = Path(str(self._flags["model"])).name
        return {**self._flags, "model": model, "wheel": wheel, "simd": self._process.simd}

    def ready(self) -> bool:
        if self._process.alive:
            return False
        for remaining in reversed(range(_STARTS)):
            try:
                self._process.start()
                config = self.config
                self.client = Client(self._process.url, config.timeout_s, config.answer_mb)
                if not hasattr(self, "info"):
                    info = identify(self.client, "llamacpp", None, None)
                    self.info = replace(info, version=llamacpp.wheel_version())
                break
            except SpecBenchError:
                if not (self._process.killed and remaining):  # it would only fail again
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
                log = folder / f"server-{number}.log"
                self.by_label[label] = StartedServer(config, gguf, log)
            else:
                self.by_label[label] = Server(config)

    def open(self) -> None:
        """Start all servers, unless they are to take turns."""
        for label in self.by_label:
            self.use(label)

    def use(self, label: str) -> Server:
        """Return the label's server, running; with ``server.restart`` the others are stopped."""
        server = self.by_label[label]
        if self._shared.restart:
            for other in self.by_label.values():
                if other is not server:
                    other.stop()
        if server.ready():
            # A first request touches the server's memory, so that no measured one pays for it. An
            # error here occurs again where it is counted.
            warm_up = Request(_WARM_UP, 0)
            self._prepare(server, warm_up, longest=2)
            _send(server, warm_up)
        return server

    def forget(self) -> None:
        """Stop the servers that would draft from earlier requests; `use` starts them again."""
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
        return [server.pid for server in self.by_label.values() if server.pid is not None]

    @property
    def local(self) -> bool:
        return all(server.client.local for server in self.by_label.values())

    def describe(self) -> dict[str, dict[str, object]]:
        descriptions: dict[str, dict[str, object]] = {}
        for label, server in self.by_label.items():
            model = server.info.model
            descriptions[label] = {
                "engine": server.info.name,
                "numerics": server.info.numerics,
                "model": Path(model).name if model.startswith("/") else model,
                "speculation": server.config.speculation,
                "where": server.where,
                "this_machine": server.client.local,
                "flags": dict(server.flags),
            }
        return descriptions

    def model(self, model_id: str, cache: Path) -> ModelInfo:
        """Make the manifest's part about the model, as far as the servers describe it."""
        kinds = dict.fromkeys(server.info.numerics for server in self.by_label.values())
        digest = None if self._gguf is None else file_sha256(self._gguf, cache / "hashes")
        info = ModelInfo(id=model_id, weights_hash=digest, dtype=", ".join(kinds), device="server")
        first = next(iter(self.by_label.values()))
        if isinstance(first.config, LlamacppConfig):
            # A replay of its answers needs these; the file's hash identifies its tokenizer.
            info.vocab_size, info.eos_ids = vocabulary(first.client)
            info.context_length = first.config.context
            info.tokenizer_hash = f"gguf:{digest}"
        return info

    def comparable(self, label: str, other: str) -> bool:
        """Tell whether two labels' servers have the same engine and the same arithmetic."""
        a, b = self.by_label[label].info, self.by_label[other].info
        return (a.engine, a.version, a.numerics) == (b.engine, b.version, b.numerics)

    def send(self, label: str, requests: list[Request], longest: int | None = None) -> float | None:
        """Send a label's requests at once, and again those without a complete answer.

        A request is repeated ``server.retries`` times where that may help: the connection was
        refused or broke off, it took too long, the status was 408, 429 or 5xx, or what came is not
        JSON. Incomplete answers are dropped. Our own servers are started again if they died.
        ``longest``: tokens at most; None: the run's.

        Returns:
            Seconds from the first request to the last token; None where one failed or was repeated.
        """
        seconds = None
        for attempt in range(1 + self._shared.retries):
            pending = [request for request in requests if request.open]
            if not pending:
                break
            if attempt:
                requested_s = max(getattr(request.error, "wait_s", 0.0) for request in pending)
                doubled_s = self._shared.retry_wait_s * 2 ** (attempt - 1)
                time.sleep(min(max(requested_s, doubled_s), _LONGEST_WAIT_S))
            server = self.use(label)
            for request in pending:
                self._prepare(server, request, longest)
            before = self._metrics(server)
            start = time.perf_counter()
            list((self._pool.map if self._pool else map)(partial(_send, server), pending))
            seconds = None if attempt else time.perf_counter() - start
            for request in pending:
                _count(server, request)
            first = pending[0]
            if before is not None and first.counts is None and first.answer is not None:
                first.counts = self._count_by_metrics(server, before, first.answer)
        return seconds if all(request.answer is not None for request in requests) else None

    def _prepare(self, server: Server, request: Request, longest: int | None) -> None:
        """Make the HTTP request, tokenizing the prompt where the server takes ids; never timed."""
        if request.http is not None:
            return
        dialogue = {"messages": list(request.messages), **self._template}
        info, generation = server.info, self._generation
        try:
            http = info.kind.http_request(
                server.client, info.model, dialogue, generation, request.seed, longest
            )
        except NoAnswer as error:
            request.error = error
            return
        if isinstance(server.config, LlamacppConfig) and server.config.reuse is not None:
            http = replace(http, body={**http.body, "cache_prompt": True})
        request.http = http

    def _metrics(self, server: Server) -> Mapping[str, float] | None:
        """Read Prometheus counters, where a rise can be attributed to one answer."""
        if server.plain or self._pool is not None or server.info.kind.metrics is None:
            return None
        try:
            return counters.read_metrics(server.client.get("/metrics"))
        except NoAnswer:
            return None

    def _count_by_metrics(
        self, server: Server, before: Mapping[str, float], answer: Answer
    ) -> Counts | None:
        """Count by the rise of the server's counters, if it is by this answer's tokens alone."""
        names = server.info.kind.metrics
        assert names is not None
        end = time.monotonic() + _METRICS_S
        while True:
            risen = counters.difference(names, before, self._metrics(server) or {})
            if risen is not None and risen[names.new_tokens] == answer.n_new:
                answer.counters["/metrics"] = risen
                return counters.convert(names, risen, answer.n_new, answer.per_event)
            if risen is None or time.monotonic() > end:
                return None
            time.sleep(_METRICS_EVERY_S)


def _send(server: Server, request: Request) -> None:
    """Send one request; an error is stored with it, and the run goes on."""
    request.n_sent += 1
    if request.http is None:
        return
    try:
        events = server.client.stream(request.http.path, request.http.body)
        request.answer, request.error = read_answer(events, request.http.longest), None
    except Exception as error:
        request.error = error


def _count(server: Server, request: Request) -> None:
    """Read an answer's counters; refuse the answer of a baseline server that drafted."""
    answer, counter_names = request.answer, server.info.kind.counters
    if answer is None or request.http is None:
        return
    # No single event had the key; together they may spell it.
    answer.thoughts = server.client.hide(answer.thoughts)
    answer.reply = server.client.hide(answer.reply)
    answer.prompt_ids = list(request.http.prompt_ids) or answer.prompt_ids
    answer.n_prompt = len(answer.prompt_ids) or answer.n_prompt
    if not server.plain:
        request.counts = counters.find_counts(
            counter_names, answer.counters, answer.n_new, answer.per_event
        )
    elif counters.drafts(counter_names, answer.counters):
        request.answer = None
        request.error = NoAnswer(
            NOT_PLAIN,
            f"the server at {server.client.url} drafts, but answers as plain decoding. Start it "
            "without speculation (server.plain_url), or say what it drafts with "
            "(server.speculation).",
            again=False,
        )
    else:
        request.counts = counters.plain_counts(answer.n_new)
