"""``gpu_check.md`` of what the parts found: numbers with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.results.wording import verdict_words
from specbench.storage import jsonl

NEXT = (
    "python run.py model=vicuna7b dataset=specbench method=cacheback "
    "'compare=[pld,token_recycling,sam]'   (docs/gpu.md)"
)


def write(path: Path, found: Mapping[str, Any], versions: str, git: Mapping[str, Any]) -> None:
    lines = [
        "# GPU check",
        "",
        versions,
        "",
        f"Code: {git['commit']}{' and changes' * git['dirty']}",
    ]
    if any(part["device"] == "cpu" for part in found.values()):
        lines += ["", "**A trial on a CPU: the numbers say nothing.**"]
    rows = [
        [name, p["state"], f"{p['seconds']:.0f}", p["watched"], p["result"]["last_line"][:90]]
        for name, p in found.items()
    ]
    lines += ["", *_table(["part", "state", "s", "GPU meanwhile", "last line"], rows)]
    results = {name: part["result"] for name, part in found.items()}
    copies = results.get("bandwidth", {}).get("copy_bytes_per_s")
    copy = statistics.median(copies) if copies else None
    if copies:
        reads = results["bandwidth"]["read_bytes_per_s"]
        lines += [
            "",
            f"Copy {_spread(copies, 1e-9)} GB/s, fastest read {max(reads) * 1e-9:.0f} GB/s.",
        ]
    for name, result in results.items():
        kind, _, model = name.partition(" ")
        if kind.startswith("loops") and "tokens_per_s" in result:
            lines += ["", f"## Loops, {model}", "", *_loops(result, copy)]
        elif kind == "kernels" and (rows_ := [k for k in result if k.isdigit()]):
            shown = _kernels({k: result[k] for k in rows_}) + _fallbacks(result.get("passes", {}))
            lines += ["", f"## Kernels, {model}", "", *shown]
        elif "surface.json" in result:
            lines += ["", f"## Rows, {model}", "", *_rows(result["surface.json"])]
        elif "summary.json" in result:
            lines += [
                "",
                f"## {name.title()}",
                "",
                *_summary(result["summary.json"], result.get("nodes_per_step", {})),
            ]
    jsonl.write_text(path, "\n".join([*lines, ""]))


def _loops(result: Mapping[str, Any], copy: float | None) -> list[str]:
    size = result["weight_bytes"]
    rows = []
    for name, rates in result["tokens_per_s"].items():
        passes = result["passes_per_s"].get(name) or []
        share = f"{size * statistics.median(passes) / copy:.0%}" if passes and copy else "–"
        failed = result["failed"].get(name, "")
        rows.append([name, _spread(rates) if rates else f"– {failed}", share])
    clock = result["clock_over_wall"]
    off = max((abs(c - 1) for c in clock), default=None)
    lines = _table(["loop", "tokens/s", "share of copy bandwidth"], rows)
    lines += _fallbacks(result.get("passes", {}))
    if off is not None:
        steps = result["tokens"] - 1
        text = f"CUDA-event times against the wall over {steps} steps: off by at most {off:.2%}"
        verdict = "within 1 %" if off <= 0.01 else "NOT within 1 %"
        lines += ["", f"{text}, {verdict if steps >= 100 else 'too few steps to tell'}."]
    return lines


def _kernels(result: Mapping[str, Any]) -> list[str]:
    families = sorted({f for r in result.values() for f in r["us"]})
    heads = ["µs (launches) of"] + [f"{rows} rows" for rows in result]
    rows = [
        [f, *(f"{r['us'].get(f, 0):.0f} ({r['launches'].get(f, 0):.0f})" for r in result.values())]
        for f in families
    ]
    rows.append(["sum", *(f"{sum(r['us'].values()):.0f}" for r in result.values())])
    rows.append(["the pass, by the wall", *(f"{r['wall_us']:.0f}" for r in result.values())])
    return _table(heads, rows)


def _rows(surface: Mapping[str, Any]) -> list[str]:
    axes = surface["tree"]["axes"]
    times = 1e3 * np.asarray(surface["tree"]["samples_s"])  # [rows, contexts, repeats]
    middle = np.median(times, -1)
    rows = [
        [str(n), *(f"{_spread(times[i, j])} ({middle[i, j] / middle[0, j]:.2f})"
                   for j in range(len(axes["context"])))]
        for i, n in enumerate(axes["rows"])
    ]  # fmt: skip
    lines = _table(["rows"] + [f"ms at {c} (of 1 row)" for c in axes["context"]], rows)
    lines += _fallbacks({"graph": surface["model"].get("passes") or {}})
    return lines


def _fallbacks(passes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What of each engine's passes is not what its name says."""
    lines = []
    for name, described in passes.items():
        if eager := described.get("eager"):
            lines += ["", f"{name} ran eagerly: {eager}."]
        if reason := described.get("reason"):
            lines += ["", f"{name} ran eagerly: {reason}."]
        if stock := (described.get("layers") or {}).get("stock"):
            lines += ["", f"{name} has layers that are not fused: {stock}."]
    return lines


def _summary(summary: Mapping[str, Any], nodes: Mapping[str, float]) -> list[str]:
    rows = []
    for row in summary["rows"]:
        if row["task"] == "overall":
            shares = row["phase_share"] or {}
            inside = sum(s for phase, s in shares.items() if phase not in ("prefill", "setup"))
            outside = 1 - shares.get("verify", 0.0) / inside if inside else None
            cells = (row["mat"], row["speedup"], outside)
            words = ["–" if c is None else f"{c:.2f}" for c in cells[:2]]
            words.append("–" if outside is None else f"{outside:.1%}")
            drafted = f"{nodes.get(row['label'], 0):.1f}"
            rows.append([row["label"], drafted, *words, verdict_words(row["lossless"])])
    heads = ["method", "nodes a step", "MAT", "speedup", "outside the pass", "outputs"]
    return [*_table(heads, rows), "", summary["caption"], *(f"- {n}" for n in summary["notes"])]


def _spread(values: Sequence[float] | Any, scale: float = 1.0) -> str:
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] of {len(values)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = "|".join(["---"] * len(heads))
    return [f"| {' | '.join(cells)} |" for cells in (heads,)] + [f"|{marks}|"] + [
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows
    ]  # fmt: skip
