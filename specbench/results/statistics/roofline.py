"""The share of the memory's read bandwidth that AR decoding reaches: a check of the baseline.

A one-token pass cannot end before all weights are read. A speedup over a baseline far above that
floor is partly the baseline's slowness: compiled engines reach 65-70 % of an A100's bandwidth
(gpt-fast's README), launched kernel by kernel a 7B model reaches a quarter to a third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.results.manifest import BASELINE, ModelInfo, Passes, RunManifest

PLAIN_PASS = "1 x 1 rows"  # how ``GraphTarget`` names the shape of plain decoding's passes


@dataclass(frozen=True)
class BaselineContext:
    """The baselines of a run's speedups.

    Attributes:
        plain: the label of plain decoding by the engine (``eager``, ``graph``) that ran it.
        floor_s: seconds to read the weights once at the memory's speed; None where not known.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    floor_s: float | None = None

    def with_passes(self, tokens_per_s: float | None) -> BaselineContext:
        """Lower the floor to plain decoding's time: its passes are reads of the weights, too."""
        if not self.floor_s or not tokens_per_s or self.floor_s * tokens_per_s <= 1:
            return self
        return replace(self, floor_s=1 / tokens_per_s)

    def share(self, tokens_per_s: float | None) -> float | None:
        """Compute the bandwidth share; at most 1 after `with_passes` of the fastest AR run."""
        return min(1.0, self.floor_s * tokens_per_s) if self.floor_s and tokens_per_s else None


def plain_engine(model: ModelInfo) -> str | None:
    """Tell how plain decoding ran, ``eager`` or ``graph``; None where that is not known."""
    passes = model.passes or Passes()
    engine: str | None = passes.get("engine")
    if engine is None and (model.device or "").startswith("cpu"):
        return "eager"  # there has never been another one
    graphs = passes.get("graphs", [PLAIN_PASS])
    if engine == "graph" and not any(shape.startswith(PLAIN_PASS) for shape in graphs):
        return "eager"  # the engine was there, and no graph of such a pass
    return engine


def baseline_context(manifest: RunManifest) -> BaselineContext:
    """Find a run's AR decoders and the memory's speed, as far as its manifest has them."""
    model = manifest.timed_model
    engine = plain_engine(model)
    plain: dict[str, str] = {}
    for label in sorted(manifest.labels, key=lambda label: label != manifest.baseline):
        entry = manifest.labels[label]
        if entry.method == BASELINE or label == manifest.baseline:
            by = "eager" if entry.knobs.get("eager") else engine
            if by:
                plain.setdefault(by, label)
    cache, size = manifest.timed_hardware.get("cache_bytes"), model.weight_bytes
    from_cache = (model.device or "cpu").startswith("cpu") and cache and size and size <= cache
    # A batch's pass reads the weights once for all sequences, whose tokens count together.
    if from_cache or manifest.batch_size > 1 or not size or not model.read_bytes_per_s:
        return BaselineContext(plain)
    return BaselineContext(plain, size / model.read_bytes_per_s)


def number_format(model: Mapping[str, Any]) -> str:
    """Name a model's format: ``float32``, or ``float32 of bfloat16 weights``."""
    dtype, weights = str(model.get("dtype")).removeprefix("torch."), model.get("weights")
    return f"{dtype} of {weights} weights" if weights else dtype
