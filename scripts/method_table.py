"""The table of a kept run that holds all methods, as Markdown.

``scripts/mark_pages.py`` writes it between ``<!-- made of RUN -->`` (the best, the median and the
losing methods), or ``<!-- made of RUN, whole -->``, and ``<!-- end -->``. So a run that replaces
the kept one changes the pages by that command alone.
"""

import math
import re
from pathlib import Path

from analysis.runs.load import Run, load_runs
from specbench.paths import PROJECT
from specbench.results.decision import against_cell
from specbench.results.names import display_name
from specbench.results.records import SUMMARY
from specbench.results.summary_schema import SummaryRow
from specbench.storage.jsonl import read_json

_BEST = 5  # rows at the top; then the median, then all whose interval lies below 1
_MADE = re.compile(
    r"(<!-- made of (?P<run>[^\s,]+)(?P<whole>, whole)? -->\n).*?(?P<end><!-- end -->)", re.S
)
_COLUMNS = "- | - | - | overall mat | overall speedup | overall against | overall equal"


def remade(page: str, root: Path = PROJECT) -> str:
    """The page with each such table written anew from its run."""
    return _MADE.sub(
        lambda found: found[1] + table(found["run"], bool(found["whole"]), root) + found["end"],
        page,
    )


def table(kept: str, whole: bool = False, root: Path = PROJECT) -> str:
    """Some methods of a kept run, or all, and what they ran on."""
    (run,) = load_runs([root / kept])
    summary = read_json(root / kept / SUMMARY)
    overall = {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}
    baseline = overall.pop(str(run.baseline))
    ranked = sorted(overall.values(), key=lambda row: -row["speedup"])
    verdicts = [pair["verdict"] for pair in summary["pairs"] if pair["second"] == run.baseline]
    losing = [row for row in ranked if row["speedup_ci"] and row["speedup_ci"][1] < 1]
    shown = ranked[:_BEST] + ranked[len(ranked) // 2 :][:1] + losing
    shown = ranked if whole else [row for i, row in enumerate(shown) if row not in shown[:i]]
    first = f"All {len(ranked)} methods."
    if not whole:
        first = (
            f"The first {_BEST} of {len(ranked)} methods, the median, and all whose interval lies "
            f"below 1 ({len(losing)})."
        )
    first += (
        f" Where all are compared with plain decoding at once, {verdicts.count('faster')} are "
        f"shown to gain and {verdicts.count('slower')} to lose."
    )
    turns = sum(baseline["lossless"].values())
    model = run.manifest.model
    assert model is not None
    form = run.manifest.setting("engine", "draft_weights")
    drafts = f" Draft models and heads are read in {form}." if form not in (None, "float32") else ""
    lines = [
        f"<!-- from: {kept}",
        f"columns: {_COLUMNS}",
        f"rows: {' | '.join(row['label'] for row in shown)} -->",
        "",
        f"| {baseline['n_cases']} questions | budget | rows a pass | remembers earlier "
        "questions | MAT | speedup over plain decoding [95 %] | against the best "
        f"| outputs equal of {turns} |",
        "| --- " * 8 + "|",
        *(
            _line(run, row, str(against_cell(summary["against_best"][row["label"]])))
            for row in shown
        ),
        "",
        f"{first} {display_name(run.model)}, {model.dtype}, on {run.manifest.hardware['cpu']}, "
        f"{model.threads} threads, this project's engine. Plain decoding reads the weights at "
        f"{100 * baseline['bandwidth_share']:.0f} % of the fastest read of memory." + drafts,
    ]
    return "\n".join(lines) + "\n"


def _line(run: Run, row: SummaryRow, against: str) -> str:
    label = row["label"]
    info = run.manifest.labels[label]
    turns = [record for record in run.records if record.label == label]
    passes = sum(record.n_target_passes for record in turns)
    rows = 1 + sum(record.n_drafted + record.n_aux for record in turns) / passes
    low, high = row["speedup_ci"] or (math.nan, math.nan)
    remembers = "yes" if info.state_scope == "run" else "no"
    cells = [
        f"`{label}`", info.budget or "–", f"{rows:.1f}", remembers,
        f"{row['mat']:.2f}", f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}]", against,
        str(row["lossless"]["equal"]),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"
