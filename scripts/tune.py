"""Tune methods on recorded outputs and a cost surface, each with the same number of trials.

    python scripts/tune.py RUN surfaces/FILE.json pld cacheback ngrammys --trials 40

RUN is a run folder or a trace pack. Its cases are split once, by task, into a development split
that trials are scored on and a held-out split that nothing is chosen by. A score is the predicted
speedup over plain decoding (target passes by the surface, drafting measured here). Three settings
of each method are reported on the held-out split: the default (its yaml), the tuned one (best on
the development split) and the best in hindsight (of all trials, the one that happens to be best on
the held-out split: what perfect choosing would have given, an upper bound and not a result).

The spaces are in scripts/search_spaces.yaml. Optuna only suggests (ask) and learns (tell); --seed
is its seed and the split's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils
import numpy as np
import optuna
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from specbench.config.compare import with_parts
from specbench.config.compose import compose, option_names
from specbench.config.knobs import check_method
from specbench.errors import ConfigurationError, SpecBenchError, unknown_name
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import Replayer
from specbench.replay.traces import load_traces

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specbench.replay.traces import Traces, Turn

SPACES = Path(__file__).with_name("search_spaces.yaml")
DEFAULT, TUNED, HINDSIGHT = "default", "tuned", "best in hindsight"

console = Console(width=118)


@dataclass
class Trial:
    """One setting of a method.

    Attributes:
        knobs: what differs from the method's yaml.
        speedup: over plain decoding, by split; None where the setting is refused.
    """

    knobs: Mapping[str, Any]
    speedup: dict[str, float | None] = field(default_factory=dict)


class Scorer:
    """Predicted speedups of settings on the two splits of the traces."""

    def __init__(self, traces: Traces, surface: CostSurface, share: float, seed: int) -> None:
        config = compose([f"model={traces.config['model']['name']}"])
        self._replayer = Replayer(
            traces,
            surface,
            model=config.model,
            cache_dir=Path(config.cache_dir),
            seed=int(traces.config["seed"]),
        )
        self.splits = split(traces, share, seed)
        self._model = str(config.model.name)
        self._defaults: dict[str, dict[str, Any]] = {}
        self._plain = {name: self._speed("ar", {}, turns) for name, turns in self.splits.items()}

    def score(self, method: str, knobs: Mapping[str, Any]) -> Trial:
        """The speedup of a setting on both splits.

        Raises:
            ConfigurationError: the method cannot be replayed.
        """
        trial = Trial(dict(knobs))
        for name, turns in self.splits.items():
            speed = self._speed(method, knobs, turns)
            trial.speedup[name] = None if speed is None else speed / (self._plain[name] or 1.0)
        return trial

    def default_knobs(self, method: str) -> dict[str, Any]:
        """The method's own values, as a run of this model has them."""
        if method not in self._defaults:
            composed = compose([f"method={method}", f"model={self._model}"]).method
            node = OmegaConf.to_container(composed, resolve=True)
            assert isinstance(node, dict)
            self._defaults[method] = {str(k): v for k, v in node.items() if k != "label"}
        return dict(self._defaults[method])

    def _speed(self, method: str, knobs: Mapping[str, Any], turns: Sequence[Turn]) -> float | None:
        """Predicted tokens/s; None where the knobs contradict each other."""
        node = {**self.default_knobs(method), **knobs}
        check_method(node)
        try:
            drafter = hydra.utils.instantiate(with_parts(node), _convert_="all")
        except hydra.errors.InstantiationException as error:
            if isinstance(error.__cause__, ConfigurationError):
                return None
            raise
        drafter = self._replayer.prepare(drafter)
        played = self._replayer.replay_turns(drafter, turns)
        tokens = sum(len(p.decoded.output_ids) - 1 for p in played)
        return tokens / sum(p.decode_s for p in played)


def split(traces: Traces, share: float, seed: int) -> dict[str, list[Turn]]:
    """The turns of the development and of the held-out cases; every task is cut alike."""
    by_task: dict[str, list[str]] = {}
    cases = traces.cases()
    for case_id, turns in cases.items():
        by_task.setdefault(turns[0].task, []).append(case_id)
    rng = np.random.default_rng(seed)
    development: set[str] = set()
    for members in by_task.values():
        count = round(share * len(members))
        development.update(rng.permutation(members)[:count].tolist())
    if not development or len(development) == len(cases):
        raise ConfigurationError(
            f"{len(cases)} cases cannot be split with --share {share}: record more, at least two a "
            "task."
        )
    return {
        "development": [t for case, turns in cases.items() if case in development for t in turns],
        "held-out": [t for case, turns in cases.items() if case not in development for t in turns],
    }


def load_spaces(path: Path, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The search space of each method.

    Raises:
        ConfigurationError: a method has none.
    """
    spaces = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(spaces, dict)
    for method in methods:
        if method not in option_names("method"):
            raise unknown_name("method", method, option_names("method"))
        if method not in spaces:
            raise unknown_name(f"search space in {path.name}:", method, map(str, spaces))
    return {method: spaces[method] for method in methods}


def suggest(trial: optuna.Trial, space: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs by Optuna's suggestion; a knob is a list of choices, or ``{from, to, log}``."""
    knobs: dict[str, Any] = {}
    for key, values in space.items():
        if isinstance(values, list):
            knobs[key] = trial.suggest_categorical(key, values)
        else:
            knobs[key] = trial.suggest_int(
                key, values["from"], values["to"], log=bool(values.get("log", False))
            )
    return knobs


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


def render(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=title, caption="speedups are PREDICTED, not measured")
    for heading in ("method", "setting", "development", "held-out", "knobs"):
        table.add_column(heading)
    for row in rows:
        for name in (DEFAULT, TUNED, HINDSIGHT):
            part = row[name]
            knobs = " ".join(f"{key}={value}" for key, value in part["knobs"].items())
            table.add_row(
                row["method"] if name == DEFAULT else "",
                name,
                f"{part['development']:.3f}",
                f"{part['held-out']:.3f}",
                knobs or "its yaml",
                end_section=name == HINDSIGHT,
            )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("surface", type=Path)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--trials", type=int, default=40, help="of each method (default: 40)")
    parser.add_argument("--share", type=float, default=0.5, help="of the development split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spaces", type=Path, default=SPACES)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    options = parser.parse_args(arguments)
    if options.trials < 1 or not 0 < options.share < 1:
        raise ConfigurationError("--trials must be at least 1, and --share between 0 and 1.")
    spaces = load_spaces(options.spaces, options.methods)
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
    console.print(render(rows, title))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"seed": options.seed, "share": options.share, "cases": counts, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
