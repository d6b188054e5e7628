"""A server on a loopback port that answers as vLLM, SGLang and llama.cpp document it.

Its answers are fixed beforehand: words are tokens. Faults are taken from a list, one for each
request, before answers continue.
"""

import contextlib
import json
import socket
import threading
import time
import types
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "a-key-that-nobody-may-see"


@dataclass
class Fake:
    """The fake server's state and behaviour.

    Attributes:
        engine: vllm, sglang, llamacpp or other.
        accepted: of each step with a draft, the draft tokens accepted; None: plain decoding.
        drafted: draft tokens of each of these steps.
        idle: steps without a draft.
        faults: what goes wrong with the next requests: a status, ``cut``, ``json``, ``unended``,
            ``error``.
        per_request, metrics: whether counters are in answers, and under /metrics.
        key: asked for where it is not empty.
        wait_s: between events; ``firsts``: of the next answers, how many events are sent together,
            when the last of them is made; ``retry_after``: a header of status 429.
        thoughts: words of reasoning before the answer's.
        mutate: changes each line of a stream.
        broken: one of the ways of `tests.servers.broken`; ``heals_after`` so many answers.
    """

    engine: str = "vllm"
    accepted: tuple[int, ...] | None = None
    drafted: int = 4
    idle: int = 0
    model: str = "org/small-model"
    version: str = "0.30.1"
    faults: list = field(default_factory=list)
    per_request: bool = True
    metrics: bool = True
    key: str = ""
    wait_s: float = 0.0
    firsts: list = field(default_factory=list)
    thoughts: tuple = ()
    retry_after: str = "0"
    mutate: object = None
    broken: object = None
    heals_after: int | None = None
    text: str = ""
    requests: list = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: object = field(default_factory=threading.Lock)
    answered: int = 0

    @property
    def n_new(self):
        if self.accepted is None:
            return 12
        return 1 + self.idle + sum(n + 1 for n in self.accepted)

    @property
    def steps(self):
        return self.idle + len(self.accepted)

    def tokens(self, question):
        """Make one word per token, the same for the same question."""
        seed = sum(map(ord, question))
        if self.text:
            return self.text.split()[: self.n_new]
        return [f"w{(seed + 7 * i) % 97}" for i in range(self.n_new)]

    def counters(self):
        if self.accepted is None or not self.per_request:
            return {}
        n_accepted, n_drafted = sum(self.accepted), self.drafted * len(self.accepted)
        if self.engine == "vllm":
            counts = {
                "mean_acceptance_length": 1 + n_accepted / len(self.accepted),
                "num_spec_steps": len(self.accepted),
                "num_accepted_draft_tokens": n_accepted,
                "num_draft_tokens": n_drafted,
                "per_step_accepted": list(self.accepted),
            }
            return {"metrics": {"speculative_decoding": counts}}
        if self.engine == "sglang":
            counts = {
                "spec_accept_length": self.n_new / self.steps,
                "spec_num_correct_drafts": n_accepted,
                "spec_num_proposed_drafts": n_drafted,
                "spec_verify_ct": self.steps,
            }
            return {"sglext": {"spec_tokens_details": counts}}
        return {}

    def prometheus(self):
        accepted = self.accepted or ()
        counts = {
            "vllm:generation_tokens_total": self.n_new,
            "vllm:spec_decode_num_drafts_total": len(accepted),
            "vllm:spec_decode_num_draft_tokens_total": self.drafted * len(accepted),
            "vllm:spec_decode_num_accepted_tokens_total": sum(accepted),
            "sglang:generation_tokens_total": self.n_new,
            "sglang:spec_verify_calls_total": self.idle + len(accepted),
        }
        lines = [
            f'{name}{{model_name="{self.model}"}} {float(self.answered * count)}'
            for name, count in counts.items()
            if name.startswith(self.engine)
        ]
        return "\n".join(["# TYPE made up counter", *lines]) if lines else ""

    def events(self, body):
        """Yield the JSON of the stream's events."""
        tokens = self.tokens(body["messages"][-1]["content"])[: body.get("max_tokens")]
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": self.model}
        delta = {"role": "assistant", "content": ""}
        first = {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        with_ids = self.engine == "vllm" and body.get("return_token_ids")
        if with_ids:
            first["prompt_token_ids"] = [1, 2, 3, 4, 5]
        yield first
        sizes, at = [1] * len(tokens), 0
        if with_ids and self.accepted is not None:  # the steps without a draft come first
            sizes = [1, *[1] * self.idle, *(n + 1 for n in self.accepted)]
        for size in sizes:
            step, at = tokens[at : at + size], at + size
            if not step:
                break
            choice = {"index": 0, "delta": {"content": " ".join([*step, ""])}}
            choice["finish_reason"] = "length" if at >= len(tokens) else None
            if (body.get("stream_options") or {}).get("continuous_usage_stats"):
                base["usage"] = {"prompt_tokens": 5, "completion_tokens": at}
            if at <= len(self.thoughts):
                choice["delta"] = {"reasoning_content": self.thoughts[at - 1] + " "}
            if with_ids:
                ids = [int(w[1:]) if w[0] == "w" else at - size + i for i, w in enumerate(step)]
                choice["token_ids"] = ids
            yield {**base, "choices": [choice]}
        usage = {"prompt_tokens": 5, "completion_tokens": len(tokens)}
        counters = self.counters()
        if "sglext" in counters:
            yield {**base, "choices": [], **counters}
            counters = {}
        yield {**base, "choices": [], "usage": usage, **counters}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> Fake:
        return self.server.fake

    def log_message(self, *_):
        pass

    def _refused(self):
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self._json({"error": {"message": "invalid key", "code": 401}}, 401)
            return True
        return False

    def _is_broken(self):
        """Write what a broken server writes in place of an answer."""
        broken = self.fake.broken
        if broken is None or broken.raw is None or broken.path != self.path:
            return False
        self.close_connection = True
        with contextlib.suppress(OSError):
            for data in broken.raw():
                self.wfile.write(data)
                if broken.pause_s:
                    self.wfile.flush()
                    time.sleep(broken.pause_s)
                    # A write of nothing does not tell that the other side has gone.
                    if not data and not self._listens():
                        break
        return True

    def _listens(self):
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        finally:
            self.connection.setblocking(True)

    def do_GET(self):
        fake = self.fake
        if self._refused() or self._is_broken():
            return
        if self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": fake.model}]})
        elif self.path == "/version" and fake.engine == "vllm":
            self._json({"version": fake.version})
        elif self.path == "/get_server_info" and fake.engine == "sglang":
            description = {"version": "0.6.2", "dtype": "bfloat16", "quantization": "fp8"}
            self._json({**description, "api_key": KEY, "speculative_algorithm": "EAGLE3"})
        elif self.path == "/metrics" and fake.metrics and fake.prometheus():
            self._send(fake.prometheus().encode(), 200, "text/plain")
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self):
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        with fake.lock:
            fake.requests.append((self.path, body))
            fault = fake.faults.pop(0) if fake.faults else None
            fake.now += 1
            fake.most_at_once = max(fake.most_at_once, fake.now)
        try:
            self._answer(body, fault)
        finally:
            with fake.lock:
                fake.now -= 1

    def _answer(self, body, fault):
        fake = self.fake
        if fake.heals_after is not None:
            fake.heals_after -= 1
            if fake.heals_after < 0:
                fake.broken = None
        if self._is_broken():
            return
        if body.get("model") != fake.model:
            self._json(
                {"error": {"message": f"The model {body.get('model')} does not exist."}}, 404
            )
        elif isinstance(fault, int):
            self.extra = {"Retry-After": fake.retry_after} if fault == 429 else {}
            self._json({"error": {"message": f"made up {fault}"}}, fault)
        else:
            self._stream(body, fault)

    def _stream(self, body, fault):
        fake = self.fake
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = list(fake.events(body))
        if fake.broken is not None and fake.broken.change is not None:
            events = fake.broken.change(events)
        first, held = fake.firsts.pop(0) if fake.firsts else 0, b""
        for i, event in enumerate(events):
            line = event
            if not isinstance(event, bytes):
                line = f"data: {json.dumps(event)}\n\n".encode()
            if fault == "json" and i == 3:
                line = b'data: {"choices": [{\n\n'
            if fault == "error" and i == 3:
                line = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
            if fake.mutate is not None:
                line = fake.mutate(line)
            if 0 < i <= first:
                held += line
                if i < first:
                    time.sleep(fake.wait_s)
                    continue
                line = held
            self._chunk(line)
            time.sleep(fake.wait_s)
            if i == 4 and fault == "cut":
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True
                return
            if i == 4 and fault == "unended":
                break
        else:
            fake.answered += 1
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data):
        with contextlib.suppress(OSError):
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    extra = types.MappingProxyType({})

    def _json(self, value, status=200):
        self._send(json.dumps(value).encode(), status, "application/json")

    def _send(self, data, status, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving(fake=None, **how):
    """Yield the address of a server that runs inside the block."""
    fake = fake or Fake(**how)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.fake = fake
    server.handle_error = lambda *_: None  # clients that have gone
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", fake
    finally:
        server.shutdown()
        server.server_close()
