"""Copies of finished runs elsewhere, as the ``logger`` group says; none stops or disturbs a run.

A process of its own makes each copy after the measurement, and ends before the next job's clock
starts. A service that could not be reached is not waited for again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from specbench.errors import unknown_name

_LOGGERS = {"wandb": "analysis.publish"}  # run as modules: runners import no analysis
_PUBLISH_S = 300.0
_UNREACHABLE = 3  # their exit code where the service cannot be used online

_lost: set[str] = set()  # loggers whose service could not be used online, for the rest of a sweep


def publish(logger: DictConfig, path: Path) -> None:
    """Copy a finished run elsewhere as the ``logger`` node says; a failure is only reported.

    After the first copy that could not be sent (``logger.mode=online``), it and those of the later
    jobs of a sweep are laid down offline.

    Raises:
        ConfigurationError: there is no such logger.
    """
    if logger is None or logger.name == "none":
        return
    name = str(logger.name)
    if name not in _LOGGERS:
        raise unknown_name("logger", name, ["none", *_LOGGERS])
    plain = OmegaConf.to_container(logger, resolve=True)
    assert isinstance(plain, dict)
    node = {str(key): value for key, value in plain.items()}
    if name in _lost and node.get("mode") == "online":
        node["mode"] = "offline"
    code, said = _copy(name, path, node)
    if code == _UNREACHABLE and node.get("mode") == "online":
        _lost.add(name)
        node["mode"] = "offline"
        sys.stdout.write(
            f"{name}: {said}\n{name}: the copies of this job and of the later ones are laid down "
            "offline, since each would wait as long.\n"
        )
        _, said = _copy(name, path, node)
    sys.stdout.write(f"{name}: {said}\n")


def _copy(name: str, path: Path, node: Mapping[str, Any]) -> tuple[int, str]:
    """The exit code of the process that makes the copy, and what it says."""
    command = [sys.executable, "-m", _LOGGERS[name], str(path), "--settings", json.dumps(node)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # nobody is there to be asked for a key
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return 1, f"not published: {error}"
    with process:
        try:
            out, complaints = process.communicate(timeout=_PUBLISH_S)
        except subprocess.TimeoutExpired:
            return _UNREACHABLE, f"not published: {path}: it took more than {_PUBLISH_S:g} s"
        finally:
            _end(process)
    # The first line says it; a service's own complaints may follow.
    said = (out if process.returncode == 0 else complaints).strip().splitlines()
    return process.returncode, said[0] if said else "nothing was said"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process, its group, and what it started in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
