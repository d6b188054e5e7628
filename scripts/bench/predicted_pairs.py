"""Predicted speedups beside live ones of the same settings on the same questions.

    python -m scripts.bench predicted_pairs data_dir=DIR --out FILE --keep

All settings are run live, a dozen a run, interleaved with plain decoding, and replayed from a
recording of plain decoding with this machine's cost surface. The logarithm of predicted over live
is each one's error; the file has every pair and what all of them say of predictions
(specbench/replay/prediction_error.py). --keep notes that in surfaces/prediction_errors.json, where
the intervals of predicted speedups find it.

Words with = are keys of a run (model, data_dir, dataset, generation, ...). The same command goes on
where it was stopped. Nothing else may run on the machine.
"""

import argparse
import json
import math
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runners.advice.bench import folder_of
from runners.search import jobs
from runners.search.entries import Entries, mapping_of
from runners.search.halving import Candidate
from runners.search.intervals import error_noise, predicted
from runners.search.live import fill_in
from runners.search.replayed import Replays
from runners.search.space import shown
from runners.search.trials import remembered
from scripts.bench import console, print_table
from specbench.config import compose
from specbench.config.validate import check_values
from specbench.data.cases import Case, load_cases
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.replay.cost_surface import CostSurface
from specbench.replay.prediction_error import PredictionError, fitted, keep_error
from specbench.replay.traces import load_traces
from specbench.results.estimate import FEWEST, Estimate
from specbench.results.records import read_records
from specbench.storage.hashes import file_sha256
from specbench.system import environment

# What a run takes where nothing else is typed. Settings below are whole: published knobs but these.
DEFAULTS = (
    "method=ar", "budgets=published", "dataset=specbench", "dataset.limit=6",
    "generation.max_new_tokens=48", "measure.rerun_minutes=2",
)  # fmt: skip
_TOGETHER = 13  # settings of one run
_IDS = {"vocabulary": "assets/draft_smollm2_135m"}  # the bundled model's heads draft from these
_CHAIN, _TREE = {"total": 2, "depth": 0, "top_k": 1}, {"total": 8, "depth": 3, "top_k": 3}
_FIXED = {"merge": True, "budget_counts": "fixed"}
# Items of ``compare``: small and large drafts of every method that can be replayed.
ENTRIES: list[dict[str, Any]] = [
    *({"method": "pld", "num_tokens": n} for n in (2, 5, 10, 20)),
    *(
        {"method": "cacheback", "total_draft_len": n, "chaining_reserved": n // 6, **_FIXED}
        for n in (4, 6, 16, 48, 96)
    ),
    *(
        {"method": "ngrammys", "k": k, "w": w, "layout": "tree"}
        for k, w in ((2, 3), (4, 4), (8, 6))
    ),
    *({"method": "ngrammys", "k": k, "w": w, "layout": "batch"} for k, w in ((2, 4), (4, 4))),
    *({"method": "suffix_decoding", "max_spec_tokens": n} for n in (4, 8, 16)),
    {"method": "suffix_decoding", "max_spec_tokens": 16, "draft": "tree"},
    *({"method": "sam", "automata": "dynamic", "max_predicts": n} for n in (4, 8, 16, 40)),
    *({"method": "rest", "choices": n} for n in (4, 16, 64)),
    *({"method": "ssd", "draft_len": n, "rebuild": "sync"} for n in (4, 10)),
    *({"method": "token_recycling", "levels": levels} for levels in ([2], [2, 1], [4, 4, 2], None)),
    *({"method": "racer", "capacity": n, "learn_prompt": False} for n in (8, 24)),
    *({"method": "logitspec", "capacity": n} for n in (8, 24)),
    *(
        {"method": method, "levels": levels, **_IDS}
        for method in ("medusa", "hydra", "eagle")
        for levels in ([1], [2, 2, 1])
    ),
    *({"method": "eagle2", **tree, **_IDS} for tree in (_CHAIN, _TREE)),
    *({"method": "eagle3", **tree} for tree in (_CHAIN, _TREE)),
    *(
        {"method": "sam_eagle2", "max_predicts": n, "auxiliary": {**tree, **_IDS}}
        for n, tree in ((5, _CHAIN), (12, _TREE))
    ),
    *(
        {"method": "union", "drafters": drafters, "max_nodes": n}
        for drafters, n in (
            (["pld", "suffix_decoding"], 8),
            (["suffix_decoding", "sam"], 24),
            (["cacheback", "suffix_decoding"], 48),
            (
                [
                    "suffix_decoding",
                    {"method": "eagle2", "total": 4, "depth": 2, "top_k": 1, **_IDS},
                ],
                6,
            ),
        )
    ),
]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("keys", nargs="*", metavar="KEY=VALUE", help="of a run, as for run.py")
    add("--entries", type=Path, metavar="FILE", help="JSON: items of compare, instead of the list")
    add("--folder", type=Path, default=Path("results/predicted_pairs"), help="runs lie there")
    add("--keep", action="store_true", help="note the error beside the surfaces")


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    items = ENTRIES if options.entries is None else _items(options.entries)
    pairs = Pairs(options.keys, items, options.folder)
    results = pairs.measure()
    error = error_of(results["pairs"], str(options.out or ""))
    if options.keep:
        keep_error(pairs.surface, error)
    yield {"command": _command(options), **results, "error": asdict(error)}


def _command(options: argparse.Namespace) -> str:
    """The line to type again, without where this machine has its data."""
    words = [re.sub(r"^(\+*data_dir=).*", r"\1DIR", word) for word in options.keys]
    more = ["--keep"] if options.keep else []
    more += ["--entries", options.entries.name] if options.entries else []
    return shlex.join(["python", "-m", "scripts.bench", "predicted_pairs", *words, *more])


def _items(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--entries {path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, list) or not all(isinstance(i, dict) and "method" in i for i in found):
        raise ConfigurationError(
            f'--entries {path} must be a list of items of compare: [{{"method": "pld", '
            '"num_tokens": 4}, ...].'
        )
    return found


class Pairs:
    """Settings run and replayed on one set of questions, in a folder.

    Raises:
        ConfigurationError: a key or a knob is wrong, or there are too few questions.
    """

    def __init__(
        self, words: Sequence[str], items: Sequence[Mapping[str, Any]], folder: Path
    ) -> None:
        keys = {word.lstrip("+").partition("=")[0] for word in words}
        defaults = [word for word in DEFAULTS if word.partition("=")[0] not in keys]
        self.cfg = compose.compose([*defaults, *words])
        check_values(self.cfg)
        config = compose.typed(self.cfg)
        self.folder, self.seed = folder, config.seed
        self.cases: list[Case] = list(load_cases(config.dataset, config.data_dir))
        if len(self.cases) < FEWEST:
            raise ConfigurationError(
                f"{len(self.cases)} questions give no interval: take {FEWEST} or more, e.g. "
                "dataset.limit=6."
            )
        self.asked = jobs.asked_from(self.cfg, self.cases, folder / "questions.jsonl")
        self.entries = Entries(self.asked)
        self.items = {
            f"{item['method']}_{number}": Candidate(
                str(item["method"]), {key: item[key] for key in item if key != "method"}
            )
            for number, item in enumerate(items)
        }
        for one in self.items.values():
            self.entries.entry(one.method, one.knobs)  # a wrong knob ends it here

    def measure(self) -> dict[str, Any]:
        """All pairs; what could not be run or replayed is in ``left_out``, with its reason."""
        _say("timing passes of the model, recording plain decoding")
        file = jobs.measure_surface(self.cfg)
        self.surface = CostSurface.read(file)
        traces = load_traces(jobs.record(self.asked, self.folder / "recording"))
        replays = Replays(self.entries, traces, self.surface)
        kinds, left_out = self._kinds(replays)
        live = {label: one for label, one in self.items.items() if label in kinds}
        ids = [case.case_id for case in self.cases]
        _say(f"running {len(live)} settings and plain decoding live on {len(ids)} questions")
        rows: dict[str, float] = {}
        noisy = 0
        for part in _parts(live):
            items = [mapping_of(one.method, one.knobs, label) for label, one in part.items()]
            path = folder_of(self.folder, "live", items, self.cases)
            jobs.try_live(self.asked, items, path)
            fill_in(part, path, ids)
            rows_of_it, noisy_in_it = _rows_and_noise(path)
            rows |= rows_of_it
            noisy += noisy_in_it
        guesses = {label: replace(one, costs={}, refused="") for label, one in live.items()}
        sha = file_sha256(file)[:16]
        kept = self.folder / f"replayed-{traces.sha[:8]}-{sha[:8]}.jsonl"
        progress = _Progress(len(guesses))
        remembered(replays, kept, progress)([*guesses.values()], ids)
        pairs = []
        for label, one in live.items():
            guess = guesses[label]
            missing = [case for case in ids if case not in one.costs or case not in guess.costs]
            if (
                reason := one.refused
                or guess.refused
                or (f"{missing[0]} failed" if missing else "")
            ):
                left_out[label] = reason
            else:
                numbers = self._numbers(one, guess, ids)
                pairs.append(
                    {
                        "method": one.method,
                        "knobs": dict(one.knobs),
                        "replay": kinds[label],
                        "rows": round(rows[label], 3),
                        **numbers,
                    }
                )
        for label, reason in left_out.items():
            console.print(f"left out: {label}: {reason}", markup=False, highlight=False)
        return {
            "model": str(self.cfg.model.name),
            "dataset": str(self.cfg.dataset.name),
            "questions": ids,
            "max_new_tokens": int(self.cfg.generation.max_new_tokens),
            "surface_sha": sha,
            "disturbed_turns": noisy,
            "left_out": left_out,
            "pairs": pairs,
        }

    def _kinds(self, replays: Replays) -> tuple[dict[str, str], dict[str, str]]:
        """By label how close a setting's replay is; of others why there is none."""
        kinds: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for label, one in self.items.items():
            reason = self.entries.why_not(one.method) or replays.slow_build(one.method)
            try:
                if not reason:
                    kinds[label] = replays.kind(one.method, one.knobs)
            except NeedsNotMet as error:
                reason = str(error)
            if reason:
                left_out[label] = reason
        return kinds, left_out

    def _numbers(self, live: Candidate, guess: Candidate, ids: Sequence[str]) -> dict[str, Any]:
        tasks = {case.case_id: case.task for case in self.cases}
        measured, measured_ci = predicted(live, ids, tasks, 0.0, self.seed)
        value, value_ci = predicted(guess, ids, tasks, 0.0, self.seed)
        return {
            "live": measured,
            "live_ci": measured_ci,
            "predicted": value,
            "predicted_ci": value_ci,  # over questions alone
            "log_error": math.log(value / measured),
            "noise": error_noise(guess, live, ids, tasks, self.seed) or 0.0,
        }


class _Progress:
    """A line now and then, with the time left."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()

    def __call__(self, one: Candidate) -> None:
        self._done += 1
        left = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        _say(f"replayed {self._done} of {self._total}, {left:.0f} s left: {one.method}")


def _say(text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False)


def _parts(live: Mapping[str, Candidate]) -> list[dict[str, Candidate]]:
    """Runs of few settings: among fifty a setting's turn is minutes away from plain decoding's."""
    count = -(-len(live) // _TOGETHER)
    return [dict([*live.items()][i::count]) for i in range(count)]


def _rows_and_noise(path: Path) -> tuple[dict[str, float], int]:
    """Rows of a target pass of each label, the mean; and how many turns stayed disturbed."""
    records = read_records(path)[0]
    totals: dict[str, list[int]] = {}
    for record in records:
        found = totals.setdefault(record.label, [0, 0])
        found[0] += record.n_target_passes + record.n_drafted
        found[1] += record.n_target_passes
    rows = {label: drafted / max(1, passes) for label, (drafted, passes) in totals.items()}
    return rows, sum(record.status == "disturbed" for record in records)


def error_of(pairs: Sequence[Mapping[str, Any]], record: str) -> PredictionError:
    """What pairs say of predictions, by their ``log_error``, ``noise`` and ``method``.

    Raises:
        ResultsError: there are too few.
    """
    columns = ([pair[key] for pair in pairs] for key in ("log_error", "noise", "method"))
    git = environment.describe()["git"] or {}
    return replace(
        fitted(*columns),
        date=time.strftime("%Y-%m-%d"),
        commit=str(git.get("commit") or ""),
        record=record,
    )


def show(results: Mapping[str, Any]) -> None:
    rows = [
        (
            pair["method"],
            shown(pair["knobs"]),
            f"{pair['rows']:.1f}",
            *(str(Estimate(pair[key], pair[f"{key}_ci"])) for key in ("live", "predicted")),
            f"{math.expm1(pair['log_error']):+.1%}",
        )
        for pair in results["pairs"]
    ]
    columns = ("method", "setting", "rows", "live [95 %]", "PREDICTED [95 %]", "error")
    print_table("Predicted and live speedups over plain decoding", columns, rows)
    error = PredictionError(**results["error"])
    console.print(
        f"{error.words}. Of {error.pairs} live speedups {error.coverage:.0%} lie in the 95 % "
        f"interval that the other methods' pairs give ({error.coverage_by_pair:.0%}: all other "
        "pairs).",
        highlight=False,
    )
