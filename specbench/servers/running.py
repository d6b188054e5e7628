"""A label's server: one that runs already, or llama.cpp's, started here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from specbench.config.server_schema import PLAIN, LlamacppConfig, OpenaiConfig, ServerConfig
from specbench.errors import SpecBenchError
from specbench.servers import llamacpp
from specbench.servers.client import Client
from specbench.servers.engines import STOP_RULES, EngineInfo, identify

_STARTS = 3  # of a server that is killed while it starts


class Server:
    """One label's server, which runs already; ``config``: the ``server`` group for the label."""

    client: Client  # of a server that was made `ready`
    info: EngineInfo

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.plain = config.speculation == PLAIN

    @property
    def pid(self) -> int | None:
        """Its process, where it was started here."""
        return None

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
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def where(self) -> str:
        return "started here"

    @property
    def flags(self) -> Mapping[str, object]:
        built = {
            "wheel": f"{llamacpp.WHEEL} {llamacpp.wheel_version()}",
            "simd": self._process.simd,
        }
        told = self.info.flags if hasattr(self, "info") else {}
        return {**self._flags, "model": Path(str(self._flags["model"])).name, **built, **told}

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
                    stop = {key: info.flags[key] for key in (STOP_RULES,) if key in info.flags}
                    self.info = replace(info, version=llamacpp.wheel_version(), flags=stop)
                break
            except SpecBenchError:
                if not (self._process.killed and left):  # it would only fail again
                    raise
        return True

    def stop(self) -> None:
        self._process.stop()
