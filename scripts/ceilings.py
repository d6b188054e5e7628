"""Print what the acceptance of runs could give where rows cost as on another machine: a ceiling.

    python -m scripts.ceilings RUNS --surface surfaces/vicuna7b-h200.json --claims vicuna7b

A ceiling is AR decoding's time over the time of a method's own steps: each pass at the price of its
rows after its text on that surface, drafting free. It needs no replay, as `steps.parquet` has the
rows. It is no speedup: drafting takes time, and another model accepts other tokens.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.claims import Claim, load_claims
from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.estimates import mat, pooled_ratio
from analysis.runs.load import Run, usable_runs
from specbench.errors import ResultsError
from specbench.replay.cost_surface import CostSurface
from specbench.results.cells import NumberCell
from specbench.results.jsonl_schema import read_steps
from specbench.results.records import STEPS, CaseRecord
from specbench.storage import jsonl


def ceilings(run: Run, label: str, surfaces: Sequence[CostSurface]) -> list[NumberCell]:
    """Estimate MAT, tokens verified per step, and the ceiling on each surface, of one label."""
    turns = {trace.key: trace for trace in read_steps(run.path / STEPS)}
    records = [r for r in run.records if r.label == label and r.key in turns]

    def rows(record: CaseRecord) -> np.ndarray:
        """Root, draft and auxiliary tokens of each step's pass; auxiliary ones as their mean."""
        drafted = np.array(turns[record.key].drafted, np.float64)
        return 1 + drafted + (record.n_aux or 0) / len(drafted)

    def method_s(record: CaseRecord, surface: CostSurface) -> float:
        committed = np.array(turns[record.key].committed)
        context = record.n_prompt + np.cumsum(committed) - committed
        return float(surface.tree.predict(rows(record), context.astype(np.float64)).sum())

    def plain_s(record: CaseRecord, surface: CostSurface) -> float:
        context = record.n_prompt + np.arange(record.n_new - 1, dtype=np.float64)
        return float(surface.tree.predict(np.ones(len(context)), context).sum())

    return [
        mat(records),
        pooled_ratio(records, lambda r: float(rows(r).sum()), lambda r: float(len(rows(r)))),
        *(
            pooled_ratio(records, partial(plain_s, surface=s), partial(method_s, surface=s))
            for s in surfaces
        ),
    ]


def claim_for(method: str, model: str, claims: Sequence[Claim]) -> Claim | None:
    """Give the claim for Spec-Bench: its authors' own, else that of Spec-Bench's board."""
    stated = [
        c
        for c in claims
        if (c.method, c.model, c.dataset, c.temperature) == (method, model, "specbench", 0)
        and c.states("mat")
        and c.states("speedup")
    ]
    return min(stated, key=lambda c: (not c.own, c.exhibit != "leaderboard_a100"), default=None)


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="folders of finished runs, live or replayed")
    add("--surface", type=Path, action="append", required=True, help="once for each surface")
    add("--claims", default="vicuna7b", metavar="MODEL", help="show claims for this model")
    add("--out", type=Path, help="also write the numbers as FILE.json")
    options = parser.parse_args()
    surfaces = [CostSurface.read(path) for path in options.surface]
    runs, _ = usable_runs(options.runs, include_incomplete=False)
    claims, lines = load_claims(), []
    names = ["mat", "tokens_per_pass", *(path.stem for path in options.surface)]
    for run in runs:
        if not (run.path / STEPS).is_file():
            raise ResultsError(f"{run.path} has no {STEPS}: name a run's own folder, no kept one.")
        for label, info in run.manifest.labels.items():
            if info.method in (None, "ar"):
                continue
            estimates = dict(zip(names, ceilings(run, label, surfaces), strict=True))
            claim = claim_for(str(info.method), options.claims, claims)
            lines.append((label, estimates, claim))
    lines.sort(key=lambda line: -(line[1][names[-1]].value or 0))
    table = Table("method", "MAT", "rows", box=None, padding=(0, 2, 0, 0))
    for heading in (*(f"ceiling: {path.stem}" for path in options.surface), "claimed"):
        table.add_column(heading)
    for label, estimates, claim in lines:
        accepted, rows, *ceiling = estimates.values()
        stated = f"{claim.value('mat')}, {claim.value('speedup')}" if claim else "-"
        plain = (f"{estimate.value or 0:.2f}" for estimate in (accepted, rows))
        table.add_row(label, *plain, *map(str, ceiling), stated)
    Console().print(table)
    print(f"rows: tokens verified per step. claimed: MAT, speedup of {options.claims}.")
    if options.out:
        rows = [
            {"method": label}
            | {key: e.value for key, e in estimates.items()}
            | {f"{key}_ci": e.interval for key, e in estimates.items() if e.interval}
            | {f"claimed {m}": claim.value(m) if claim else "–" for m in ("mat", "speedup")}
            for label, estimates, claim in lines
        ]
        origin = {key: getattr(runs[0].manifest, key) for key in ("ended_at", "git", "hardware")}
        jsonl.write_json(options.out, {**origin, "ceilings": rows})
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
