"""Self-checks that need not be made again: of the same weights, code, packages and machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from transformers import PreTrainedModel

from specbench.errors import SpecBenchError
from specbench.paths import PROJECT
from specbench.storage import jsonl
from specbench.system import environment


@dataclass(frozen=True)
class Earlier:
    """What self-checks of a model's weights found, kept in files.

    Attributes:
        cache_dir: of the run.
        weights: stands for the weights' content.
        engine: settings by which passes run.
    """

    cache_dir: Path
    weights: str
    engine: Mapping[str, Any]

    def read(self, model: PreTrainedModel, text: object) -> dict[str, Any] | None:
        """What an earlier check found on ``text``; None where something has changed since."""
        path = self._path(model, text)
        try:
            return jsonl.read_json(path) if path.is_file() else None
        except jsonl.RecordError:  # cut off; the check is made again
            return None

    def keep(self, model: PreTrainedModel, text: object, found: Mapping[str, Any]) -> None:
        path = self._path(model, text)
        with contextlib.suppress(OSError, SpecBenchError):  # without it the check is made again
            path.parent.mkdir(parents=True, exist_ok=True)
            jsonl.write_json(path, dict(found))

    def _path(self, model: PreTrainedModel, text: object) -> Path:
        """Named by all that can change what a pass computes."""
        hardware = environment.hardware()
        what = {
            "weights": self.weights,
            "config": model.config.to_json_string(),
            "dtype": str(model.dtype),
            "device": str(model.device),
            "engine": dict(self.engine),
            "text": text,
            "threads": torch.get_num_threads(),
            "simd": [torch.backends.cpu.get_cpu_capability(), llvmlite.binding.get_host_cpu_name()],
            "machine": [hardware.get("cpu"), hardware.get("gpus"), environment.versions()],
            "code": _code(),
        }
        digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
        return self.cache_dir / "self_checks" / f"{digest[:16]}.json"


@cache
def _code() -> str:
    """A digest of the library, changes that were not committed included."""
    digest = hashlib.sha256()
    for path in sorted((PROJECT / "specbench").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
