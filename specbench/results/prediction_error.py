"""The error of speedups that a cost surface predicts: one number per surface.

A surface has the cost of passes by themselves; in a run they come between a drafter's work and
other methods' passes. The effect is measured once for a model on a machine: a live run is
replayed with the surface and the two are compared (``python -m analysis.residuals``). The number
is in ``surfaces/prediction_errors.json`` and goes into every interval of a predicted speedup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench import paths
from specbench.errors import ResultsError, first_line
from specbench.storage import jsonl
from specbench.system.hardware import Machine

KEPT = paths.PROJECT / "surfaces" / "prediction_errors.json"
UNKNOWN = 0.15  # where nothing was measured


def stated_error(
    model: Mapping[str, Any], machine: Machine, claimed: float, path: Path | None = None
) -> tuple[float, str]:
    """Return the relative standard error of a surface's speedups, and a clause that states it.

    Args:
        model, machine: of the surface.
        claimed: relative error that the surface itself claims for its passes; never less.

    Raises:
        ResultsError: the file of errors is damaged.
    """
    measured = _read(path or KEPT).get(_key(model, machine))
    error = max(UNKNOWN if measured is None else measured, claimed)
    how = (
        "a cautious guess: no live run was compared with its replay on the surface's machine "
        "(python -m analysis.residuals LIVE REPLAY --keep)"
        if measured is None
        else "measured with this model on the surface's machine"
    )
    return error, f"intervals hold a prediction error of {error:.1%}, {how}"


def keep_error(
    model: Mapping[str, Any], machine: Machine, error: float, path: Path | None = None
) -> None:
    """Note a surface's error where `stated_error` finds it, in place of an earlier one."""
    path = path or KEPT
    errors = _read(path) | {_key(model, machine): error}
    lines = [{"of": json.loads(key), "error": error} for key, error in errors.items()]
    jsonl.write_json(path, {"errors": lines})


def _key(model: Mapping[str, Any], machine: Machine) -> str:
    """Format as JSON the model and the machine that an error holds for."""
    hardware = machine["hardware"]
    subject = {
        **{key: model.get(key) for key in ("name", "dtype", "device", "threads")},
        **({"weights": model["weights"]} if model.get("weights") else {}),
        "cpu": hardware.get("cpu"),
        "gpus": [gpu["name"] for gpu in hardware.get("gpus") or []],
    }
    return json.dumps(subject)


def _read(path: Path) -> dict[str, float]:
    try:
        lines = jsonl.read_json(path)["errors"] if path.is_file() else []
        return {json.dumps(line["of"]): float(line["error"]) for line in lines}
    except (LookupError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is damaged ({first_line(error)}).") from error
