"""Publish finished runs as the ``logger`` group says, without disturbing a measurement.

A separate process publishes them when a command's last job has ended.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.launch.sweep import run_analysis
from specbench.errors import ConfigurationError
from specbench.results.records import DONE
from specbench.storage.jsonl import JsonObject


def check(logger: Mapping[str, Any] | None) -> None:
    """Check that runs can be published, before anything is measured.

    Raises:
        ConfigurationError: wandb is missing.
    """
    if (logger or {}).get("name") == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ConfigurationError("logger=wandb needs wandb. Type pip install -e '.[wandb]'.")


def publish(jobs: Sequence[JsonObject]) -> int:
    """Publish the finished runs among a command's jobs, all together; 0, or 1 where that failed."""
    loggers = [job["logger"] for job in jobs if (job.get("logger") or {}).get("name") == "wandb"]
    folders = dict.fromkeys(job["folder"] for job in jobs if job["folder"])
    done = [folder for folder in folders if Path(folder, DONE).exists()]
    if not loggers or not done:
        return 0
    return min(1, run_analysis("publish", *done, "--settings", json.dumps(loggers[0])))
