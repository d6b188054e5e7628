"""How far speedups that a cost surface predicts are from measured ones: one number a surface.

A surface prices passes by themselves; in a run they stand between a drafter's work and other
methods' passes. What that is worth is measured once for a model on a machine: a live run is
replayed with the surface and the two are compared (``python -m analysis.residuals``). The number
stands in ``surfaces/prediction_errors.json`` and goes into every interval of a predicted speedup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench import paths
from specbench.errors import ResultsError, first_line
from specbench.storage import jsonl
from specbench.system.noted import Machine

KEPT = paths.PROJECT / "surfaces" / "prediction_errors.json"
UNKNOWN = 0.15  # where nothing was measured


def stated_error(
    model: Mapping[str, Any], machine: Machine, claimed: float, path: Path | None = None
) -> tuple[float, str]:
    """Return the relative standard error of a surface's speedups, and words that state it.

    Args:
        model, machine: of the surface.
        claimed: relative error that the surface itself claims for its passes; never less.

    Raises:
        ResultsError: the file of errors is damaged.
    """
    errors = [line["error"] for line in _read(path or KEPT) if line["of"] == _key(model, machine)]
    error = max(errors[-1] if errors else UNKNOWN, claimed)
    how = (
        "measured with this model on the surface's machine"
        if errors
        else "a cautious guess: no live run was compared with its replay on the surface's machine "
        "(python -m analysis.residuals LIVE REPLAY --keep)"
    )
    return error, f"intervals hold a prediction error of {error:.1%}, {how}"


def keep_error(
    model: Mapping[str, Any], machine: Machine, error: float, path: Path | None = None
) -> None:
    """Note a surface's error where `stated_error` finds it, in place of an earlier one."""
    key, path = _key(model, machine), path or KEPT
    others = [line for line in _read(path) if line["of"] != key]
    jsonl.write_json(path, {"errors": [*others, {"of": key, "error": error}]})


def _key(model: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """What an error holds for: a model on a machine."""
    hardware = machine["hardware"]
    return {
        **{key: model.get(key) for key in ("name", "dtype", "device", "threads")},
        **({"weights": model["weights"]} if model.get("weights") else {}),
        "cpu": hardware.get("cpu"),
        "gpus": [gpu["name"] for gpu in hardware.get("gpus") or []],
    }


def _read(path: Path) -> Sequence[Mapping[str, Any]]:
    if not path.is_file():
        return []
    try:
        return [
            {"of": line["of"], "error": float(line["error"])}
            for line in jsonl.read_json(path)["errors"]
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is damaged ({first_line(error)}).") from error
