"""The GPU check's report: what was measured and what not, as JSON, Markdown and a picture."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu import steps as gpu_steps
from scripts.gpu.measurements import DRAFT_NODES, DRAFT_TEXT, ROWS
from scripts.gpu.progress import Progress
from specbench.system import environment


def command_line() -> str:
    """What was typed, without this machine's folders."""
    return " ".join(["python -m scripts.gpu_check", *sys.argv[1:]])


def write(check: Progress) -> None:
    """The report so far, as JSON, Markdown and a picture."""
    out: Path = check.args.out
    out.mkdir(parents=True, exist_ok=True)
    data = {
        "command": command_line(), "date": time.strftime("%Y-%m-%d"),
        "environment": environment.describe(), "results": check.results, "missing": check.missing,
        "left_out": check.left_out, "surfaces": check.surfaces,
    }  # fmt: skip
    (out / "gpu_check.json").write_text(json.dumps(data, indent=1, default=str))
    (out / "gpu_check.md").write_text(report(check))
    if any(name.startswith("rows") for name in check.results):
        picture(check, out / "gpu_check.png")


def report(check: Progress) -> str:
    """The figures as Markdown, each beside what is wanted of it."""
    device = (
        torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else "CPU (a trial)"
    )
    lines = [f"# GPU check: {device}", "", f"**Command:** `{command_line()}`", "",
             f"**Date:** {time.strftime('%Y-%m-%d')}", ""]  # fmt: skip
    if "numerics" in check.results:
        found = check.results["numerics"]
        lines += [f"Numerics: {found['pytest']}", *(f"- {why}" for why in found["skipped"]), ""]
    if "bandwidth" in check.results:
        found = check.results["bandwidth"]
        lines += [f"Memory: {found['read_gb_per_s']:.0f} GB/s read, "
                  f"{found['copy_gb_per_s']:.0f} GB/s copied", ""]  # fmt: skip
    rows = [(n, r) for n, r in check.results.items() if n.startswith("decoding")]
    if rows:
        lines += ["Tokens/s of whole calls, the prompt's pass among them; the share of the "
                  "bandwidth is that of the passes after it.", "",
                  "| model | graph tokens/s | eager | generate | graph / generate (wanted ≥ 3) "
                  "| graph's share of bandwidth (wanted ≥ 70 %) |", "|---" * 6 + "|"]  # fmt: skip
        for name, r in rows:
            rate, share = r["tokens_per_s"], r["bandwidth_share"]["graph"]
            lines.append(
                f"| {name.split()[1]} | {rate['graph']:.1f} | {rate['eager']:.1f} "
                f"| {rate['generate']:.1f} | {r['graph_over_generate']:.2f} "
                f"| {'–' if share is None else f'{share:.0%}'} |"
            )
        lines.append("")
    for name, points in check.results.items():
        if name.startswith("rows"):
            lines += _rows_table(name.split()[1], points)
    if check.surfaces:
        kept = ", also in `surfaces/`" if check.device.type == "cuda" else ""
        files = ", ".join(f"`{name}`" for name in check.surfaces)
        lines += [f"Cost surfaces for replay, beside this report{kept}: {files}", ""]
    for name, passes in check.results.items():
        if name.startswith("drafts"):
            lines += _drafts_table(name.split()[1], passes)
    lines += _steps_table(check.results.get("steps", {}))
    lacking = check.missing | check.left_out
    lines += ["", *(f"- not measured: {name}: {why}" for name, why in lacking.items())]
    return "\n".join(lines).rstrip() + "\n"


def _drafts_table(model: str, passes: list[dict[str, Any]]) -> list[str]:
    by = {(p["engine"], p["nodes"]): p["ms"] for p in passes}
    return [
        f"A draft model's pass, {model}, behind {DRAFT_TEXT} tokens, ms:", "",
        "| nodes | eager | graph |", "|---" * 3 + "|",
        *(
            f"| {n} | {_number(by.get(('eager', n)), '.2f')} "
            f"| {_number(by.get(('graph', n)), '.2f')} |"
            for n in DRAFT_NODES
        ), "",
    ]  # fmt: skip


def _steps_table(methods: dict[str, Any]) -> list[str]:
    if not methods:
        return []
    phases = sorted({phase for r in methods.values() for phase in r["us_per_step"]})
    lines = [
        "A step by phase, host and device, µs. Outside the target's pass: by phases, where the "
        "host's work before the launch counts as the pass, and by bare replays of the same "
        "shapes. A toy file is a small one of made-up text.", "",
        "| method | engine | nodes | " + " | ".join(phases)
        + " | bare replay | outside by phases | outside by replays |",
        "|---" * (len(phases) + 6) + "|",
        *(
            f"| {method} ({r['setting']}) | {r['engine']} | {_nodes(r)} | "
            + " | ".join(f"{r['us_per_step'].get(phase, 0.0):.0f}" for phase in phases)
            + f" | {_number(r['replay_us_per_step'], '.0f')} | {r['outside_by_phases']:.1%} "
            f"| {_number(r['outside_by_replays'], '.1%')} |"
            for method, r in methods.items()
        ), "",
    ]  # fmt: skip
    bounded = [method for method in gpu_steps.STEP_METHODS if method in methods]
    if bounded:
        lines += [
            "| host and device time outside the target's pass | the larger count | wanted |",
            "|---" * 3 + "|",
            *(
                f"| {m} ({methods[m]['setting']}), nodes: {_nodes(methods[m])} "
                f"| {methods[m]['outside_the_pass']:.1%} | ≤ 8 % |"
                for m in bounded
            ), "",
        ]  # fmt: skip
    return lines


def _nodes(method: dict[str, Any]) -> str:
    """Nodes of a step; what stays below half the budget is no measurement of a step at it."""
    count, most = method["nodes_per_step"], method["most_nodes"]
    return f"{count:.1f}" + (f", below half of {most}" if 2 * count < most else "")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _rows_table(model: str, points: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"A step without drafting, {model}, ms (ratio to 1 row; wanted at 64 rows ≤ 1.25):",
        "",
    ]
    kinds = sorted({(p["engine"], p["context"]) for p in points})
    by = {(p["engine"], p["context"], p["rows"]): p["ms"] for p in points}
    lines += ["| rows | " + " | ".join(f"{e} {c}" for e, c in kinds) + " |"]
    lines += ["|---" * (len(kinds) + 1) + "|"]
    for rows in ROWS:
        cells = [f"{by[e, c, rows]:.2f} ({by[e, c, rows] / by[e, c, 1]:.2f})" for e, c in kinds]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def picture(check: Progress, path: Path) -> None:
    """Time of a pass over rows, a line an engine and context, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = [name for name in check.results if name.startswith("rows")]
    figure, axes = plt.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for axis, name in zip(axes[0], models, strict=True):
        points = check.results[name]
        for engine, style in (("eager", "--"), ("graph", "-")):
            for i, context in enumerate(sorted({p["context"] for p in points})):
                chosen = [p for p in points if (p["engine"], p["context"]) == (engine, context)]
                axis.plot(
                    [p["rows"] for p in chosen], [p["ms"] for p in chosen],
                    style, color=f"C{i}", marker=".", label=f"{engine}, context {context}",
                )  # fmt: skip
        axis.set(title=name.split()[1], xlabel="rows of the pass", ylabel="ms", xscale="log")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
