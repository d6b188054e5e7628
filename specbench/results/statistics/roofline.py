"""How near plain decoding comes to the memory's speed: the honesty of a speedup's baseline.

A one-token pass cannot end before all weights are read. A speedup over a baseline far above that
floor is partly the baseline's slowness: compiled engines reach 65-70 % of an A100's bandwidth
(gpt-fast's README), launched kernel by kernel a 7B model reaches a quarter to a third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbench.config.schema import STORED_WEIGHTS as STORED_WEIGHTS
from specbench.results.manifest import BASELINE, ModelInfo, Passes, RunManifest
from specbench.results.summary_schema import SummaryRow

SLOW_BASELINE = 0.5  # share of the bandwidth below which a table warns
IMPOSSIBLE = 1 - 1e-9  # a share from which on plain decoding itself was the fastest read
ENGINES = ("eager", "graph")
PLAIN_PASS = "1 x 1 rows"  # how ``GraphTarget`` names the shape of plain decoding's passes


@dataclass(frozen=True)
class BaselineContext:
    """What the speedups of a run stand on.

    Attributes:
        plain: the label of plain decoding by engine, of those (``ENGINES``) that were run.
        floor_s: seconds to read the weights once at the memory's speed; None where not known.
        by: what showed that speed: the run's fastest ``read``, in older runs one ``copy``.
        weights: that passes read, where not float32 ones.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    floor_s: float | None = None
    by: str = "read"
    weights: str | None = None

    def with_passes(self, tokens_per_s: float | None) -> BaselineContext:
        """The same where plain decoding was that fast: its passes are reads of the weights, too."""
        if not self.floor_s or not tokens_per_s or self.floor_s * tokens_per_s <= 1:
            return self
        return replace(self, floor_s=1 / tokens_per_s)

    def share(self, tokens_per_s: float | None) -> float | None:
        """At most 1 in a context `with_passes` of the run's fastest plain decoding."""
        return min(1.0, self.floor_s * tokens_per_s) if self.floor_s and tokens_per_s else None


def _subject(manifest: RunManifest) -> ModelInfo:
    """The manifest's part about the model; predicted times are of the surface's machine."""
    if manifest.surface:
        return ModelInfo.from_json(manifest.surface.get("model") or {})
    return manifest.model or ModelInfo()


def _engine(model: ModelInfo) -> str | None:
    """How plain decoding ran, whatever was asked for; None where that is not known."""
    passes = model.passes or Passes()
    engine: str | None = passes.get("engine")
    if engine is None and (model.device or "").startswith("cpu"):
        return "eager"  # there has never been another one
    if engine == "graph" and not any(
        shape.startswith(PLAIN_PASS) for shape in passes.get("graphs", [PLAIN_PASS])
    ):
        return "eager"  # the engine was there, and no graph of such a pass
    return engine


def baseline_context(manifest: RunManifest) -> BaselineContext:
    """Which plain decodings a run has, and the memory's speed, as far as its manifest says."""
    model = _subject(manifest)
    engine = _engine(model)
    plain: dict[str, str] = {}
    baseline = manifest.baseline
    for label in sorted(manifest.labels, key=lambda label: label != baseline):
        entry = manifest.labels[label]
        if label != baseline and entry.method != BASELINE:
            continue
        by = "eager" if entry.knobs.get("eager") else engine
        if by in ENGINES:
            plain.setdefault(by, label)
    size, (speed, by) = model.weight_bytes, _memory_speed(model)
    # A batch's pass reads the weights once for all texts, whose tokens are counted together.
    if _batched(manifest) or _cached(manifest):
        size = None
    return BaselineContext(plain, size / speed if size and speed else None, by, model.weights)


def _cached(manifest: RunManifest) -> bool:
    """Whether the last cache before the memory holds all weights: then they are read from there."""
    machine = (manifest.surface or {}).get("machine") or {"hardware": manifest.hardware}
    model, cache = _subject(manifest), machine.get("hardware", {}).get("cache_bytes")
    on_cpu = (model.device or "cpu").startswith("cpu")
    return bool(on_cpu and cache and model.weight_bytes and model.weight_bytes <= cache)


def _memory_speed(model: ModelInfo) -> tuple[float | None, str]:
    """Bytes per second, and what showed them."""
    if model.read_bytes_per_s:
        return model.read_bytes_per_s, "read"
    return model.copy_bytes_per_s, "copy"


def not_captured(manifest: RunManifest) -> str:
    """Say why plain decoding's passes are no CUDA graphs on a GPU; empty where they are."""
    model = _subject(manifest)
    passes = model.passes or Passes()
    failed = [
        f"{shape}: {reason}"
        for shape, reason in (passes.get("eager") or {}).items()
        if shape.startswith(PLAIN_PASS)
    ]
    if passes.get("engine") == "graph" and _engine(model) == "eager" and not failed:
        return "none of a pass with one row was captured"
    if failed:
        return "; ".join(failed)
    on_gpu = (model.device or "").startswith("cuda")
    return str(passes["reason"]) if on_gpu and passes.get("reason") else ""


def baseline_engine(manifest: RunManifest) -> str | None:
    """Tell how plain decoding ran: ``eager`` or ``graph``; None where that is not known."""
    return _engine(_subject(manifest))


def share_text(manifest: RunManifest, rows: Sequence[SummaryRow]) -> str:
    """Tell which part of the memory's speed plain decoding takes; empty where not known."""
    shares = [row["bandwidth_share"] for row in rows if row["label"] == manifest.baseline]
    speed, by = _memory_speed(_subject(manifest))
    if not shares or shares[0] is None or speed is None:
        return ""
    return f"by ar at {shares[0]:.0%} of this machine's {by} bandwidth ({speed / 1e9:.0f} GB/s)"


def _batched(manifest: RunManifest) -> bool:
    return int(manifest.setting("batch", "size") or 1) > 1


def row_prices(manifest: RunManifest) -> dict[int, Sequence[float]]:
    """Give by rows a pass's time over that of one row, with its interval where that is known.

    Returns:
        By rows above 1 ``(price,)`` or ``(price, low, high)``; nothing of a batch, or where the
        times of passes were not measured.
    """
    times = _subject(manifest).row_times
    if not times or "1" not in times["seconds"] or _batched(manifest):
        return {}
    prices: dict[int, Sequence[float]] = {
        int(rows): (seconds / times["seconds"]["1"],) for rows, seconds in times["seconds"].items()
    }
    prices |= {int(rows): price for rows, price in times.get("prices", {}).items()}
    return {rows: prices[rows] for rows in sorted(prices) if rows > 1}


def price_text(manifest: RunManifest) -> str:
    """Tell what rows cost in this run; empty where that was not measured, or of a batch."""
    times, prices = _subject(manifest).row_times, row_prices(manifest)
    if not prices or times is None:
        return ""
    return (
        f"{_prices_text(prices)}, in passes of one row behind {times['context']} tokens; speedup "
        "is MAT / this, less what drafting takes"
    )


def prices_below_one(manifest: RunManifest) -> str:
    """Name the rows whose pass takes less time than one row's, beyond the spread; empty if none."""
    prices = row_prices(manifest)
    # As they are shown.
    below = {rows: p for rows, p in prices.items() if len(p) == 3 and round(p[2], 2) < 1}
    return _prices_text(below)


def _prices_text(prices: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(
        f"{rows} rows {price:.2f}" + (" ({:.2f} to {:.2f})".format(*bounds) if bounds else "")
        for rows, (price, *bounds) in prices.items()
    )


def number_format(model: Mapping[str, Any]) -> str:
    """Of a manifest's or a surface's model: ``float32``, or ``float32 of bfloat16 weights``."""
    dtype, weights = str(model.get("dtype")).removeprefix("torch."), model.get("weights")
    return f"{dtype} of {weights} weights" if weights else dtype
