"""Find each method's budget with the same effort, on questions that are never measured.

    python scripts/tune.py data_dir=DIR --out tuned                      # all methods
    python scripts/tune.py data_dir=DIR --methods pld,eagle2 --settings 8
    python scripts/tune.py dataset=jsonl dataset.path=MY.jsonl           # by your questions

Words with = are keys of a run (model, data_dir, generation, ...). The questions are the selection
set, which samples of Spec-Bench leave out: dataset=specbench dataset.part=selection.

Each method gets as many settings of the space in its yaml (search), its own among them, and they
are halved twice: all on a quarter of the cases, half on half of them, a quarter on all. A method
that drafts from text is replayed from one recording of plain decoding, its passes priced by this
machine's cost surface (PREDICTED); others are run, interleaved with plain decoding (measured).
Heads, too: a replay misjudges them, for their weights stay in the processor's cache there.
Scores on these questions are no results, since settings were chosen by them.

Everything lies in --out, and the same command goes on there. It writes a file for conf/pair for
each method: the settings chosen, beside what the present file says of the draft model.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import parser_of, reporting_errors
from runners.search import (
    Bench,
    Candidate,
    Entries,
    LiveRuns,
    Measure,
    Replays,
    format_knobs,
    load_spaces,
    mix_tasks,
    successive_halving,
)
from specbench import paths
from specbench.config import compose
from specbench.config.entries import is_part
from specbench.data.cases import Case, load_cases
from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import EXACT
from specbench.replay.traces import load_traces
from specbench.results.fitted_table import FittedTable
from specbench.storage import jsonl

REPLAYED, LIVE, NOT_RUN = "replayed: PREDICTED", "live: measured", "not run"

console = Console(width=160)


class Tuning:
    """The search of one model's settings on one set of questions, in a folder."""

    def __init__(self, overrides: Sequence[str], folder: Path, count: int, seed: int) -> None:
        named = any(word.startswith("dataset=") for word in overrides)
        questions = [] if named else ["dataset=specbench", "dataset.part=selection"]
        self.cfg = compose.compose(["method=ar", *questions, *overrides])
        self.folder, self.count, self.seed = folder, count, seed
        config = compose.to_config(self.cfg)
        self.cases: list[Case] = mix_tasks(load_cases(config.dataset, config.data_dir), seed)

    def run(self, methods: Sequence[str] | None) -> list[dict[str, Any]]:
        """Search each method's settings; returns a row of the report each."""
        bench = Bench(self.cfg)
        surface = CostSurface.read(bench.surface())
        bench.record(self.cases, self.folder / "recording")
        traces = load_traces(self.folder / "recording")
        entries = Entries(self.cfg)
        replays = Replays(entries, traces, surface, self.folder / "replayed.jsonl")
        live = LiveRuns(bench, self.cases, self.folder / "live")
        candidates = entries.candidates(load_spaces(methods), self.count, self.seed)
        reasons = {method: entries.why_not(method) for method in candidates}
        ways: dict[str, dict[str, list[Candidate]]] = {REPLAYED: {}, LIVE: {}}
        for method, tried in candidates.items():
            if not reasons[method]:
                exact = replays.kind(method, {}) == EXACT
                ways[REPLAYED if exact else LIVE][method] = tried
        for tried in ways[LIVE].values():
            replays.refuse_unfit(tried)
        measures: dict[str, Measure] = {REPLAYED: replays, LIVE: live}
        ids = [case.case_id for case in self.cases]
        rows: dict[str, dict[str, Any]] = {}
        for way, chosen in ways.items():
            for method, finalists in successive_halving(chosen, ids, measures[way]).items():
                rows[method] = _row(way, chosen[method], finalists[:1], ids)
        not_run = {"way": NOT_RUN, "settings": 0, "replays": 0, "knobs": {}, "speedup": None}
        not_run["own"] = None
        return [{"method": m, **rows.get(m, {**not_run, "reason": reasons[m]})} for m in candidates]


def _row(
    way: str, tried: Sequence[Candidate], best: Sequence[Candidate], cases: Sequence[str]
) -> dict[str, Any]:
    refused = dict.fromkeys(c.refused for c in tried if c.refused)
    return {
        "way": way if best else NOT_RUN,
        "settings": sum(1 for c in tried if c.costs),
        "replays": sum(len(c.costs) for c in tried),
        "knobs": dict(best[0].knobs) if best else {},
        "speedup": best[0].speedup(cases) if best else None,
        "own": tried[0].speedup(cases) if tried[0].costs else None,
        "reason": "" if best else "; ".join(refused),
    }


def _on_reading(part: Mapping[str, Any]) -> str:
    """Format a part so that yaml creates it on reading, and a typed one replaces it whole."""
    return "${oc.create:{" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in part.items()) + "}}"


def pair_file(cfg: DictConfig, method: str, knobs: Mapping[str, Any], head: str) -> str:
    """Format ``conf/pair/<method>_<model>.yaml`` with these knobs and its other keys."""
    model = str(cfg.model.name)
    name = compose.pair_name(method, model)
    old = paths.CONF_DIR / "pair" / f"{name}.yaml"
    node: Any = OmegaConf.to_container(OmegaConf.load(old)) if old.is_file() else {}
    if name == f"draft_{model}":  # a file of its own would hide the model's common one
        node = {"defaults": [f"{name}@pair", "_self_"]}
    written = {k: _on_reading(v) if is_part(v) else v for k, v in knobs.items()}
    node["method"] = OmegaConf.to_container(OmegaConf.merge(node.get("method", {}), written))
    return f"# @package _global_\n# {head}\n{OmegaConf.to_yaml(OmegaConf.create(node))}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("keys", nargs="*", metavar="KEY=VALUE", help="of a run, as for run.py")
    add("--methods", help="comma-separated (default: every method with a search space)")
    add("--settings", type=int, default=16, help="of each method (default: 16)")
    add("--seed", type=int, default=0, help="of the settings and of the order of cases")
    add("--out", type=Path, default=Path("results/tuned"), help="folder (default: results/tuned)")
    options = parser.parse_args(arguments)
    if options.settings < 1:
        raise ConfigurationError("--settings must be at least 1.")
    if wrong := [word for word in options.keys if "=" not in word]:
        raise ConfigurationError(f"{wrong[0]!r} is not KEY=VALUE. Methods go after --methods.")
    methods = options.methods.split(",") if options.methods else None
    load_spaces(methods)  # refuses a name before anything is measured
    tuning = Tuning(options.keys, options.out, options.settings, options.seed)
    rows = tuning.run(methods)
    head = (
        f"Chosen by scripts/tune.py among {options.settings} settings on {len(tuning.cases)} "
        "questions."
    )
    for row in rows:
        if row["speedup"]:
            name = f"{row['method']}_{tuning.cfg.model.name}.yaml"
            text = pair_file(tuning.cfg, row["method"], row["knobs"], head)
            jsonl.write_text(options.out / name, text)
    jsonl.write_json(options.out / "tuned.json", {"cases": len(tuning.cases), "rows": rows})
    console.print(
        FittedTable(_table(rows), f"{len(tuning.cases)} questions, all for choosing", _CAPTION)
    )
    console.print(f"files for conf/pair: {options.out}/", markup=False, highlight=False)
    return 0


_CAPTION = (
    "Scores are the choice's reasons, not results: settings were chosen by these questions. "
    "Replays PREDICT them, live runs measure them; compare them within one way only."
)


def _table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "method": row["method"],
                "way": row["way"],
                "settings tried": str(row["settings"]),
                "cases × settings": str(row["replays"]),
                "own": _number(row["own"]),
                "chosen": _number(row["speedup"]),
                "setting": format_knobs(row["knobs"]) if row["speedup"] else row["reason"],
            }
            for row in rows
        ]
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
