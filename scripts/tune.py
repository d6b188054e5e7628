"""Tune methods on recorded outputs and a cost surface, each with the same number of trials.

    python scripts/tune.py RUN surfaces/FILE.json pld cacheback ngrammys --trials 40

RUN is a run folder or a trace pack. Its cases are split once, by task, into a development split
that trials are scored on and a held-out split that nothing is chosen by. A score is the predicted
speedup over plain decoding (target passes by the surface, drafting measured here). Three settings
of each method are reported on the held-out split: the default (its yaml), the tuned one (best on
the development split) and the best in hindsight (of all trials, the one that happens to be best on
the held-out split: what perfect choosing would have given, an upper bound and not a result).

A method's space is ``search`` in its yaml: for each knob a list of choices, or whole numbers
``{from, to}``, with ``log: true`` where doubling matters and adding does not. Knobs that are not
there stay at the method's own values. Optuna only suggests (ask) and learns (tell); --seed
is its seed and the split's.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra.utils
import numpy as np
import optuna
import pandas as pd
from omegaconf import OmegaConf
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.command import parser_of, reporting_errors
from specbench.config.compare import method_node
from specbench.config.compose import compose, model_words, option_names
from specbench.errors import ConfigurationError, unknown_name
from specbench.paths import CONF_DIR
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import Replayer
from specbench.replay.traces import RecordedTurn, Traces, load_traces
from specbench.results.fitted_table import FittedTable
from specbench.results.manifest import BASELINE
from specbench.storage import jsonl

console = Console(width=118)
DEFAULT, TUNED, HINDSIGHT = "default", "tuned", "best in hindsight"


@dataclass
class Trial:
    """One setting of a method: what differs from its yaml, and the speedup on each split.

    The speedup is over plain decoding; None where the setting is refused.
    """

    knobs: Mapping[str, Any]
    speedup: dict[str, float | None]


class Scorer:
    def __init__(self, traces: Traces, surface: CostSurface, share: float, seed: int) -> None:
        self._model = model_words(traces.config["model"])
        config = compose([self._model])
        self._replayer = Replayer(
            traces,
            surface,
            model=config.model,
            cache_dir=Path(config.cache_dir),
            seed=int(traces.config["seed"]),
        )
        self.splits = split(traces, share, seed)
        self._plain = {
            name: self._speed(BASELINE, {}, turns) for name, turns in self.splits.items()
        }

    def score(self, method: str, knobs: Mapping[str, Any]) -> Trial:
        """The speedup of a setting on both splits.

        Raises:
            ConfigurationError: the method cannot be replayed.
        """
        found = Trial(knobs, {})
        for name, turns in self.splits.items():
            speed = self._speed(method, knobs, turns)
            found.speedup[name] = None if speed is None else speed / (self._plain[name] or 1.0)
        return found

    def _speed(
        self, method: str, knobs: Mapping[str, Any], turns: Sequence[RecordedTurn]
    ) -> float | None:
        """Predicted tokens/s; None where the knobs contradict each other."""
        try:
            node = method_node(method, knobs, self._model)
            drafter = hydra.utils.instantiate(node, _convert_="all")
        except hydra.errors.InstantiationException as error:
            if isinstance(error.__cause__, ConfigurationError):
                return None
            raise
        played = self._replayer.replay_turns(self._replayer.prepare(drafter), turns)
        tokens = sum(len(p.decoded.output_ids) - 1 for p in played)
        return tokens / sum(p.decode_s for p in played)


def split(traces: Traces, share: float, seed: int) -> dict[str, list[RecordedTurn]]:
    """The turns of the development and of the held-out cases; every task is cut alike."""
    cases = traces.cases()
    by_task: dict[str, list[str]] = {}
    for case_id, turns in cases.items():
        by_task.setdefault(turns[0].task, []).append(case_id)
    rng = np.random.default_rng(seed)
    development: set[str] = set()
    for members in by_task.values():
        development.update(rng.permutation(members)[: round(share * len(members))].tolist())
    if not development or len(development) == len(cases):
        raise ConfigurationError(
            f"{len(cases)} cases cannot be split with --share {share}: record more, at least two a "
            "task."
        )
    return {
        "development": [t for case, turns in cases.items() if case in development for t in turns],
        "held-out": [t for case, turns in cases.items() if case not in development for t in turns],
    }


def load_spaces(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The search space of each method, from its yaml.

    Raises:
        ConfigurationError: there is no such method, or its yaml names no space.
    """
    spaces: dict[str, dict[str, Any]] = {}
    for method in methods:
        if method not in option_names("method"):
            raise unknown_name("method", method, option_names("method"))
        node: Any = OmegaConf.load(CONF_DIR / "method" / f"{method}.yaml")
        space: Any = OmegaConf.to_container(node.get("search") or OmegaConf.create())
        if not space:
            raise ConfigurationError(
                f"method={method} has no search space: add `search` to conf/method/{method}.yaml, "
                "e.g. search: {num_tokens: {from: 1, to: 32, log: true}}."
            )
        spaces[method] = space
    return spaces


def suggest(trial: optuna.Trial, space: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs by Optuna's suggestion; a knob is a list of choices, or ``{from, to, log}``."""

    def value(key: str, values: Any) -> Any:
        if isinstance(values, list):
            return trial.suggest_categorical(key, values)
        return trial.suggest_int(key, values["from"], values["to"], log=values.get("log", False))

    return {key: value(key, values) for key, values in space.items()}


def tune(
    scorer: Scorer, method: str, space: Mapping[str, Any], trials: int, seed: int
) -> dict[str, Any]:
    """Spend the budget on a method; returns its row of the report."""
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    done = [scorer.score(method, {})]
    refused = 0
    for _ in range(trials):
        asked = study.ask()
        trial = scorer.score(method, suggest(asked, space))
        score = trial.speedup["development"]
        if score is None:
            # Counts in the budget: who knows the method's rules would not have asked.
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
            refused += 1
        else:
            study.tell(asked, score)
            done.append(trial)
    chosen = {
        DEFAULT: done[0],
        TUNED: max(done, key=lambda t: t.speedup["development"] or 0.0),
        HINDSIGHT: max(done, key=lambda t: t.speedup["held-out"] or 0.0),
    }
    return {
        "method": method,
        "trials": trials,
        "refused": refused,
        **{name: {"knobs": dict(trial.knobs), **trial.speedup} for name, trial in chosen.items()},
    }


def table_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        for name in (DEFAULT, TUNED, HINDSIGHT):
            part = row[name]
            knobs = " ".join(f"{key}={value}" for key, value in part["knobs"].items())
            scores = (f"{part[split]:.3f}" for split in ("development", "held-out"))
            yield [row["method"] if name == DEFAULT else "", name, *scores, knobs or "its yaml"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("run", type=Path)
    add("surface", type=Path)
    add("methods", nargs="+")
    add("--trials", type=int, default=40, help="of each method (default: 40)")
    add("--share", type=float, default=0.5, help="of the development split")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="write the report as JSON")
    options = parser.parse_args(arguments)
    if options.trials < 1 or not 0 < options.share < 1:
        raise ConfigurationError("--trials must be at least 1, and --share between 0 and 1.")
    spaces = load_spaces(options.methods)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    traces = load_traces(options.run)
    scorer = Scorer(traces, CostSurface.read(options.surface), options.share, options.seed)
    rows = []
    for method, space in spaces.items():
        rows.append(tune(scorer, method, space, options.trials, options.seed))
        console.print(f"{method}: {options.trials} trials, {rows[-1]['refused']} refused")
    counts = {name: len({t.case_id for t in turns}) for name, turns in scorer.splits.items()}
    title = (
        f"{options.trials} trials a method, {counts['development']} development and "
        f"{counts['held-out']} held-out cases"
    )
    columns = ["method", "setting", "development", "held-out", "knobs"]
    frame = pd.DataFrame([*table_rows(rows)], columns=columns)
    console.print(FittedTable(frame, title, "speedups are PREDICTED, not measured"))
    if options.out:
        report = {"seed": options.seed, "share": options.share, "cases": counts, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
