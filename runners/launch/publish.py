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
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf

_MODULE = "analysis.publish"  # run as a module: runners import no analysis
_PUBLISH_S = 300.0
_UNREACHABLE = 3  # their exit code where the service cannot be used online

_lost: set[str] = set()  # loggers whose service could not be used online, for the rest of a sweep


def publish(logger: DictConfig, path: Path) -> None:
    """Copy a finished run elsewhere as the ``logger`` node says; a failure is only reported.

    After the first copy that could not be sent (``logger.mode=online``), it and the copies of later
    jobs of a sweep are laid down offline.
    """
    if logger is None or logger.name == "none":
        return
    name = str(logger.name)
    if name in _lost and logger.mode == "online":
        logger = logger.copy()
        logger.mode = "offline"
    code, message = _copy(logger, path)
    sys.stdout.write(f"{name}: {message}\n")
    if code == _UNREACHABLE and logger.mode == "online":
        _lost.add(name)
        sys.stdout.write(
            f"{name}: the copies of this job and of the later ones are laid down offline, since "
            "each would wait as long.\n"
        )
        publish(logger, path)


def _copy(logger: DictConfig, path: Path) -> tuple[int, str]:
    """The exit code of the process that makes the copy, and what it says."""
    settings = json.dumps(OmegaConf.to_container(logger, resolve=True))
    command = [sys.executable, "-m", _MODULE, str(path), "--settings", settings]
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
            # What it left: its children, also in sessions of their own, and its group.
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    # The first line says it; a service's own complaints may follow.
    lines = (out if process.returncode == 0 else complaints).strip().splitlines()
    return process.returncode, lines[0] if lines else "nothing was said"
