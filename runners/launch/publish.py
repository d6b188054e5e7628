"""Copies of finished runs elsewhere, as the ``logger`` group says; none disturbs a measurement.

They are made in a process of its own when a command's last job has ended.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.launch.sweep import run_analysis
from specbench.errors import ConfigurationError
from specbench.results.records import DONE
from specbench.storage.jsonl import JsonObject

# What W&B takes: the rules of its settings, and of its accounts' names.
_TAKEN = {
    "project": (r"[^/\\#?%:]{1,128}", "1 to 128 letters without / \\ # ? % :"),
    "entity": (r"[A-Za-z0-9_-]{1,64}", "1 to 64 of A-Z, a-z, 0-9, - and _"),
    "tags": (r"(?s).{1,64}", "a list of texts of 1 to 64 letters each"),
}


def check(logger: Any) -> None:
    """Refuse what could not be published, before anything is measured.

    Raises:
        ConfigurationError: wandb is missing, or W&B would refuse a value.
    """
    if not isinstance(logger, Mapping) or logger.get("name") in (None, "none"):
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigurationError("logger=wandb needs wandb. Type pip install -e '.[wandb]'.")
    for key, (pattern, rule) in _TAKEN.items():
        value = logger.get(key)
        texts = value if key == "tags" and isinstance(value, list) else [value]
        alike = value is None or (key == "tags") == isinstance(value, list)
        if not alike or not all(t is None or re.fullmatch(pattern, str(t)) for t in texts):
            raise ConfigurationError(f"`logger.{key}` must be {rule}, got {value!r}.")


def publish(jobs: Sequence[JsonObject]) -> int:
    """Publish the finished runs among a command's jobs, all together; 0, or 1 where that failed."""
    loggers = [job["logger"] for job in jobs if (job.get("logger") or {}).get("name") == "wandb"]
    folders = dict.fromkeys(job["folder"] for job in jobs if job["folder"])
    done = [folder for folder in folders if Path(folder, DONE).exists()]
    if not loggers or not done:
        return 0
    return min(1, run_analysis("publish", *done, "--settings", json.dumps(loggers[0])))
