"""A second listener with a clock of its own: a proxy that stands before a server."""

import contextlib
import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np

_HOPS = {"connection", "transfer-encoding", "content-length", "keep-alive", "host"}


@contextlib.contextmanager
def listening(url):
    """The proxy's URL, and what it heard: of each streamed answer when its words passed by.

    Times are seconds since the whole request had come, in order of the words.
    """
    where, heard = urlsplit(url), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.passed_on(None)

        def do_POST(self):
            self.passed_on(self.rfile.read(int(self.headers["Content-Length"])))

        def passed_on(self, body):
            start, times = time.monotonic(), []
            server = http.client.HTTPConnection(where.hostname, where.port)
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
            server.request(self.command, self.path, body, kept)
            answer = server.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOPS:
                    self.send_header(name, value)
            self.end_headers()
            for line in answer:
                if said(line):
                    times.append(time.monotonic() - start)
                self.wfile.write(line)
                self.wfile.flush()
            if times:
                heard.append((json.loads(body), times))
            server.close()

        def log_message(self, *words):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    proxy = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}{where.path}", heard
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def said(line):
    """Whether a line of the stream brings words."""
    if not line.startswith(b"data: {"):
        return False
    event = json.loads(line[6:])
    if choices := event.get("choices"):
        return bool(choices[0].get("delta", {}).get("content"))
    return bool(event.get("content") or event.get("tokens"))  # llama.cpp's own form


def percentiles(answers):
    """P50, P95 and P99 in seconds of the answers' waits, from the times that `listening` gives."""
    gaps = []
    for times in answers:
        bursts = [b for a, b in zip([-1.0, *times], times, strict=False) if b - a > 1e-3]
        gaps += np.diff(bursts).tolist()
    waits = {
        "ttft": [times[0] for times in answers],
        "tpot": [(times[-1] - times[0]) / (len(times) - 1) for times in answers if times[1:]],
        "itl": gaps,
        "e2e": [times[-1] for times in answers],
    }
    shares = (50, 95, 99)
    return {
        name: {f"p{share}": float(np.percentile(seconds, share)) for share in shares}
        for name, seconds in waits.items()
    }
