"""llama.cpp's server in a child process, from the wheel ``xllamacpp``.

The child holds the model and the port; it ends with this process, whichever way that goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

from specbench import paths
from specbench.config.schema import PLAIN, LlamacppConfig, parts_of
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.system.environment import cpus_usable

WHEEL = "xllamacpp"
_GGUF = b"GGUF"  # the first bytes of a model's file
_NO_SPECULATION = "failed to initialize speculative"  # in its log
_START_S = 300.0  # a large model takes long to read
_END_S = 10.0
_LOG_LINES = 5


class ServerFailed(ConfigurationError):
    """The server did not start; the message has the end of its log."""


def wheel_version() -> str:
    """Return the wheel's version, which is llama.cpp's build.

    Raises:
        NeedsNotMet: it is not installed.
    """
    if util.find_spec(WHEEL) is None:
        raise NeedsNotMet(
            "server=llamacpp needs the package xllamacpp, which is not installed. Type: pip "
            "install -e '.[llamacpp]'. Where this platform has no wheel, start llama.cpp's own "
            "server and type server=openai server.base_url=http://127.0.0.1:8080/v1."
        )
    return metadata.version(WHEEL)


def check_gguf(key: str, given: str) -> Path:
    """Check that a path the user typed is a GGUF file.

    Raises:
        NeedsNotMet: it is not; ``key`` is what to type.
    """
    path = Path(given).expanduser()
    try:
        with path.open("rb") as file:
            begins = file.read(len(_GGUF))
        wrong = "" if begins == _GGUF else f"a file that begins with {begins!r}"
    except OSError as error:
        wrong = str(error.strerror)
    if wrong:
        raise NeedsNotMet(f"{key} must be a model's file, FILE.gguf, got {given}: {wrong}.")
    return path


def flags(config: LlamacppConfig, gguf: Path) -> dict[str, object]:
    """Make the server's flags, as `specbench.servers.llamacpp_process` reads them."""
    kind = config.speculation
    result: dict[str, object] = {
        "model": str(gguf),
        "speculation": kind,
        "slots": config.concurrency,
        "context": config.context,
        "threads": config.threads or max(1, cpus_usable() // 2),
    }
    parts = parts_of(kind)
    if any(part.startswith("ngram_") for part in parts):
        result |= {"size_n": config.size_n, "size_m": config.size_m, "min_hits": config.min_hits}
    if any(part != PLAIN and not part.startswith("ngram_") for part in parts):
        result |= {"draft": config.draft_gguf, "draft_max": config.draft_max}
        result |= {"draft_min": config.draft_min, "draft_p_min": config.draft_p_min}
    for key in ("flash_attention", "kv_type", "batch", "ubatch", "reuse"):
        if (value := getattr(config, key)) is not None:
            result[key] = value
    return result


class LlamacppProcess:
    """The child process.

    Args:
        flags: of `flags`.
        log: file that the server's own messages go to.
    """

    def __init__(self, flags: Mapping[str, object], log: Path) -> None:
        self._flags, self._log = dict(flags), log
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: int | None = None
        self.url = self.simd = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def killed(self) -> bool:
        """Tell whether it was killed, by a user or by the kernel for lack of memory."""
        ended = self._ended if self._process is None else self._process.poll()
        return ended == -9  # SIGKILL, which Windows has no name for

    def start(self) -> None:
        """Start the server and wait until it answers; `url` is then its address.

        To be called in the main thread: the kernel ends the child with the thread that made it.

        Raises:
            ServerFailed: it ended, or took too long.
        """
        self.stop()
        log_start = self._log.stat().st_size if self._log.exists() else 0
        command = [sys.executable, "-m", "specbench.servers.llamacpp_process", str(os.getpid())]
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [*command, json.dumps(self._flags)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(paths.PROJECT)},
            )
        assert process.stdout is not None
        late = threading.Timer(_START_S, process.terminate)
        late.start()
        line = process.stdout.readline()
        late.cancel()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        log_text = self._log.read_bytes()[log_start:].decode(errors="replace")
        refused = _NO_SPECULATION in log_text  # it would go on without, silently
        if not line or refused:
            self.stop()
            end = "\n".join(log_text.splitlines()[-_LOG_LINES:]) or "nothing"
            hint = f"draft_gguf={self._flags.get('draft')} may have another vocabulary.\n"
            raise ServerFailed(
                f"llama.cpp's server did not start with {json.dumps(self._flags)}. "
                f"{hint if refused else ''}Its log, {self._log}, ends with:\n{end}"
            )
        reply = json.loads(line)
        self.url, self.simd = reply["url"], simd(reply["system"])

    def stop(self) -> None:
        """End the server; without one, nothing happens."""
        process, self._process = self._process, None
        if process is None:
            return
        self._ended = process.poll()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(_END_S)  # it ends when its standard input does
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def simd(system: str) -> str:
    """Read the instructions llama.cpp was built for: ``AVX2, FMA`` from ``AVX2 = 1 | FMA = 1``.

    Its wheels are built for many machines, and lack instructions that this one may have.
    """
    return ", ".join(re.findall(r"(\w+) = 1\b", system))
