"""Settings of methods: their spaces, their entries, and the best of them by successive halving.

A method's yaml has its space (``search``): for each knob a list of choices, or whole numbers
``{from, to}``, with ``log: true`` for a logarithmic scale. Other knobs keep the values that a run
would give them.

Halving tries all settings on a few cases, the better half on twice as many, and so on (Jamieson and
Talwalkar 2016, arXiv 1502.07943). Every method gets the same number of settings, cases and rounds,
so that no method gains from a longer search.

Settings are measured by replays of recorded outputs, with pass times from a cost surface, or by
live runs, interleaved with plain decoding.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from omegaconf import DictConfig, OmegaConf
from scipy.stats import qmc
from tqdm import tqdm

from runners.job import Entry, Job
from runners.launch import prerequisites
from runners.launch.dispatch import Invocation, entry_of, execute
from runners.measure.method_runs import (
    MethodRun,
    as_needs_not_met,
    build_method_runs,
    find_heads,
    make_drafter,
)
from runners.run_folder.folder import is_complete
from specbench import paths
from specbench.artifacts import resolve
from specbench.config import compose
from specbench.config.compose import build_model
from specbench.config.entries import compose_entry
from specbench.config.run_key import key_of, run_key
from specbench.config.schema import RECORD_STATES
from specbench.data.cases import Case
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError, NeedsNotMet, SpecBenchError, unknown_name
from specbench.paths import file_name
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import Replayer, replay_kind
from specbench.replay.traces import RecordedTurn, Traces
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import SURFACE, read_records
from specbench.results.statistics.counted import left_out, wrong_outputs
from specbench.storage import jsonl
from specbench.system import environment

Space: TypeAlias = Mapping[str, Any]
Knobs: TypeAlias = dict[str, Any]

ROUNDS = 3
_DRAWS = 40  # for each setting: spaces may be small, or have settings that are refused
# A surface in a minute: predictions between its points are within a few percent.
GRID: Mapping[str, list[int]] = {
    "contexts": [64, 512],
    "tree_rows": [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64],
    "batch_contexts": [256],
    "batch_k": [1, 4, 16],
    "batch_w": [1, 4, 12],
}
_PASSES = 3
OUT_OF_TIME = "the minutes ended before it was tried"


@dataclass(frozen=True, slots=True)
class CaseCost:
    """A case's cost with a setting, and with plain decoding: tokens after the first, seconds."""

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float


@dataclass(eq=False)
class Candidate:
    """A setting of a method and its measurements.

    Attributes:
        knobs: the knobs that differ from the method's own setting.
        costs: by case.
        refused: why the setting cannot be used; "" where it can.
    """

    method: str
    knobs: Knobs
    costs: dict[str, CaseCost] = field(default_factory=dict)
    refused: str = ""

    @property
    def key(self) -> str:
        return json.dumps([self.method, self.knobs], sort_keys=True)

    def speedup(self, cases: Sequence[str]) -> float:
        """Compute tokens/s over plain decoding's, pooled over the cases; 0 of a refused setting."""
        costs = [self.costs[case] for case in cases if case in self.costs]
        seconds, plain = sum(c.seconds for c in costs), sum(c.plain_seconds for c in costs)
        tokens, plain_tokens = sum(c.tokens for c in costs), sum(c.plain_tokens for c in costs)
        if self.refused or not (seconds and plain_tokens):
            return 0.0
        return tokens * plain / (seconds * plain_tokens)


# Fills in the missing cases in each candidate's `costs`, or `refused`.
Measure: TypeAlias = Callable[[Sequence[Candidate], Sequence[str]], None]


def successive_halving(
    candidates: Mapping[str, Sequence[Candidate]], cases: Sequence[str], measure: Measure
) -> dict[str, list[Candidate]]:
    """Search the settings of each method; all methods' survivors of a round are measured together.

    Args:
        candidates: by method; the first of each, its own setting, is measured on all cases.
        cases: in the order in which they are taken; the first round takes a quarter of them.

    Returns:
        By method the settings that were measured on all cases, the best first.
    """
    remaining = {method: list(tried) for method, tried in candidates.items()}
    for rounds_left in reversed(range(ROUNDS)):
        chosen = cases[: math.ceil(len(cases) / (1 << rounds_left))]
        measure([candidate for tried in remaining.values() for candidate in tried], chosen)
        for method, tried in remaining.items():
            usable = [candidate for candidate in tried if not candidate.refused]
            usable.sort(key=lambda c: c.speedup(chosen), reverse=True)  # stable: earlier first
            if rounds_left:
                better = usable[: math.ceil(len(usable) / 2)]
                default_candidates = [c for c in candidates[method][:1] if c in usable]
                usable = better + [c for c in default_candidates if c not in better]
            remaining[method] = usable
    return remaining


def mix_tasks(cases: Sequence[Case], seed: int) -> list[Case]:
    """Order the cases by seed so that every beginning holds each task as often as it can."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, Case]] = []
    for index in np.random.default_rng(seed).permutation(len(cases)):
        ranked.append((seen[cases[index].task], cases[index]))
        seen[cases[index].task] += 1
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def split_halves(cases: Sequence[Case], seed: int) -> tuple[list[Case], list[Case]]:
    """Split cases to choose by from cases to confirm on, each task as evenly as it goes."""
    ordered = sorted(mix_tasks(cases, seed), key=lambda case: case.task)
    return mix_tasks(ordered[::2], seed), mix_tasks(ordered[1::2], seed)


def load_spaces(methods: Iterable[str] | None = None) -> dict[str, Space]:
    """Read the space of each method by name; None takes all methods that have one.

    Raises:
        ConfigurationError: there is no such method, or its yaml has no ``search``.
    """
    names = compose.option_names("method")
    spaces: dict[str, Space] = {}
    for method in names if methods is None else methods:
        if method not in names:
            raise unknown_name("method", method, names)
        node: Any = OmegaConf.load(paths.CONF_DIR / "method" / f"{method}.yaml")
        space: Any = OmegaConf.to_container(node.get("search") or OmegaConf.create())
        if space:
            spaces[method] = space
        elif methods is not None:
            raise ConfigurationError(
                f"method={method} has no search space: add `search` to conf/method/{method}.yaml, "
                "e.g. search: {num_tokens: {from: 1, to: 32, log: true}}."
            )
    return spaces


def settings(
    space: Space, count: int, seed: int, usable: Callable[[Knobs], bool] = lambda _: True
) -> list[Knobs]:
    """Choose up to ``count`` settings: the method's own (no knobs), the least, then others.

    The least has the first of all choices and the lowest of all numbers, since the shortest draft
    is often fastest if verification is costly. The others are a scrambled Halton sequence: any
    number of them fills the space evenly, and a longer sequence begins with the shorter one.
    """
    chosen: list[Knobs] = [{}]
    refused: list[Knobs] = []
    points = qmc.Halton(len(space), rng=seed).random(count * _DRAWS)
    for point in [[0.0] * len(space), *points]:
        if len(chosen) >= count:
            break
        pairs = zip(space.items(), point, strict=True)
        knobs = {key: _value(values, float(at)) for (key, values), at in pairs}
        if knobs not in chosen and knobs not in refused:
            (chosen if usable(knobs) else refused).append(knobs)
    return chosen


def _value(values: Any, at: float) -> Any:
    """Map a point in [0, 1) to a value; choices, or whole numbers, share the interval."""
    if isinstance(values, list):
        return values[int(at * len(values))]
    low, high = int(values["from"]), int(values["to"])
    if values.get("log", False):
        # The ends of the numbers' shares: from `low` up to `high + 1`, each number its own.
        return min(high, int(low * math.exp(at * math.log((high + 1) / low))))
    return low + int(at * (high + 1 - low))


class Entries:
    """Settings of methods as entries of runs with one configuration; each is composed once.

    ``cfg``: a run's configuration; its method does not matter.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg, self.config = cfg, compose.to_config(cfg)
        self._entries: dict[str, Entry] = {}

    def entry(self, method: str, knobs: Mapping[str, Any]) -> Entry:
        """Compose a setting (ConfigurationError: an unknown knob, or a value of another type)."""
        key = json.dumps([method, knobs], sort_keys=True)
        if key not in self._entries:
            self._entries[key] = entry_of(compose_entry(self.cfg, {"method": method, **knobs}))
        return self._entries[key]

    def candidates(
        self, spaces: Mapping[str, Space], count: int, seed: int
    ) -> dict[str, list[Candidate]]:
        """Give ``count`` settings of each method that its class takes; fewer of a small space."""
        return {
            method: [
                Candidate(method, knobs)
                for knobs in settings(space, count, seed, partial(self._is_taken, method))
            ]
            for method, space in spaces.items()
        }

    def _is_taken(self, method: str, knobs: Knobs) -> bool:
        try:
            make_drafter(self.entry(method, knobs))
        except ConfigurationError:
            return False
        return True

    def why_not(self, method: str) -> str:
        """Say why a method cannot run with this configuration, and what to type; "": it can."""
        try:
            entries = (self.entry(method, {}),)
            build_method_runs(Job(self.config, (), {}, "", Path(), entries, ()))
        except ConfigurationError as error:
            return str(error)
        return ""


def format_overrides(knobs: Mapping[str, Any], prefix: str = "method.") -> list[str]:
    """Write knobs as words of a command line: ``method.num_tokens=4``."""
    overrides: list[str] = []
    for key, value in knobs.items():
        if isinstance(value, Mapping):
            overrides += format_overrides(value, f"{prefix}{key}.")
        else:
            overrides.append(f"{prefix}{key}={_format_value(value)}")
    return overrides


def format_knobs(knobs: Mapping[str, Any]) -> str:
    """Write knobs for a cell of a table."""
    return " ".join(format_overrides(knobs, "")) or "its own"


def _format_value(value: Any) -> str:
    """Write a value as Hydra reads it: no quotes around the words of a list or a mapping."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_format_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_format_value, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


class Bench:
    """Makes runs of one model on chosen cases, in separate processes, each only once.

    ``cfg``: a run's configuration; its method is plain decoding.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def surface(self) -> Path:
        """Return the file of the machine's cost surface; measure it if it is missing."""
        job, path = surface_job(self.cfg)
        return _execute(job, path, "timing passes") / SURFACE

    def record(self, cases: Sequence[Case], path: Path) -> None:
        """Run plain decoding into the folder, with what replays read."""
        job = self._plain(cases, path)
        job.record, job.measure.rerun_minutes = RECORD_STATES, 0.0  # its times do not count
        _execute(job, path, "plain decoding")

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> None:
        """Run plain decoding and the entries of a ``compare`` into the folder, interleaved."""
        job = self._plain(cases, path)
        OmegaConf.update(job, "record", False)
        job.compare = list(items)
        _execute(job, path, "a live run", may_fail=True)

    def _plain(self, cases: Sequence[Case], path: Path) -> DictConfig:
        """Configure plain decoding on these cases, which are written next to the folder."""
        file = path.with_name(f"{path.name}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl.rewrite_jsonl(
            file,
            [
                {"question_id": case.case_id, "category": case.category, "turns": list(case.turns)}
                for case in cases
            ],
        )
        cfg = self.cfg.copy()
        cfg.dataset = compose.compose(["dataset=jsonl"]).dataset
        cfg.dataset.path = str(file)
        for key in ("raw", "task", "special_tokens", "dialogue"):
            cfg.dataset[key] = self.cfg.dataset[key]
        return prerequisites.recording(cfg)


def surface_job(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """Configure the run that times passes, and name its folder on this machine."""
    job, limit = prerequisites.measurement(cfg), cfg.model.context_length
    for key, values in GRID.items():
        usable = [value for value in values if limit is None or value < limit]
        job.runner[key] = usable if "contexts" in key else list(values)
    job.runner.passes = _PASSES
    machine = key_of(environment.fingerprint(environment.describe()))
    name = f"{file_name(cfg.model.name)}-{run_key(job)}-{machine}"
    return job, Path(cfg.cache_dir) / "surfaces" / name


def _execute(job: DictConfig, path: Path, step: str, may_fail: bool = False) -> Path:
    if is_complete(path):
        return path
    job.output_dir = str(path)
    with contextlib.redirect_stdout(io.StringIO()):  # a search has one table, at its end
        code, _ = execute(job, Invocation())
    if code and not may_fail:
        raise SpecBenchError(f"{step} failed: see {path}.")
    return path


class LiveRuns:
    """Measures candidates by runs below a folder; a `Measure`."""

    def __init__(self, bench: Bench, cases: Sequence[Case], folder: Path) -> None:
        self._bench, self._folder = bench, folder
        self._cases = {case.case_id: case for case in cases}

    def __call__(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        usable = [candidate for candidate in candidates if not candidate.refused]
        missing = [case for case in cases if any(case not in c.costs for c in usable)]
        if usable and missing:
            path = self._path(usable, missing)
            self._bench.live(_items(usable), [self._cases[case] for case in missing], path)
            _read_costs(path, usable, missing)

    def is_done(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> bool:
        return is_complete(self._path(candidates, cases))

    def _path(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> Path:
        return self._folder / key_of([_items(candidates), list(cases)])


def _items(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Make the items that ``compare`` takes, with a label for each."""
    return [
        {"method": c.method, "label": f"{c.method}_{number}", **c.knobs}
        for number, c in enumerate(candidates)
    ]


def _read_costs(folder: Path, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
    """Read the costs of the candidates and of plain decoding from a run's folder."""
    records, _ = read_records(folder)
    spent: dict[tuple[str, str], tuple[int, float]] = {}
    for record in records:
        tokens, seconds = spent.get(key := (record.label, record.case_id), (0, 0.0))
        spent[key] = tokens + record.n_decoded, seconds + record.decode_s
    for record in records:
        if record.status == "failed":
            spent.pop((record.label, record.case_id), None)
    labels = [str(item["label"]) for item in _items(candidates)]
    missing = left_out(records, RunManifest.read(folder))
    wrong_labels = wrong_outputs(records, labels)
    for label, candidate in zip(labels, candidates, strict=True):
        for case in cases:
            if {(label, case), (BASELINE, case)} <= spent.keys():
                candidate.costs[case] = CaseCost(*spent[label, case], *spent[BASELINE, case])
        if label in wrong_labels:
            candidate.refused = f"its outputs are not what plain decoding gives (see {folder})"
        elif label in missing or not candidate.costs:
            candidate.refused = missing.get(label, f"it failed on every case (see {folder})")


class Replays:
    """Measures candidates on recorded cases; a `Measure`.

    ``file`` keeps the costs on these traces and this surface: an interrupted search goes on. After
    ``until`` (of ``time.monotonic()``) no setting is measured: missing ones are `OUT_OF_TIME`.
    """

    def __init__(self, entries: Entries, traces: Traces, surface: CostSurface, file: Path) -> None:
        self.until = math.inf
        self._entries, self._config, self._traces = entries, entries.config, traces
        self._replayer = Replayer(
            traces,
            surface,
            model=self._config.model,
            cache_dir=Path(self._config.cache_dir),
            seed=int(traces.config["seed"]),
        )
        self._cases = traces.cases()
        self._warm: set[str] = set()
        self._plain: dict[str, tuple[int, float]] = {}
        self._file = file
        self._earlier: dict[str, Candidate] = {}
        for line in jsonl.mend_jsonl(file, dict):
            costs = {case: CaseCost(**cost) for case, cost in line.pop("costs").items()}
            candidate = Candidate(**line, costs=costs)
            self._earlier[candidate.key] = candidate

    def kind(self, method: str, knobs: dict[str, object]) -> str | None:
        try:
            return replay_kind(make_drafter(self._entries.entry(method, knobs)), self._traces)
        except NeedsNotMet:
            return None

    def slow_build(self, method: str) -> str:
        """Say what to type for a file that takes the model minutes; "": none is missing."""
        needs = make_drafter(self._entries.entry(method, {})).needs
        for artifact in needs.artifacts:
            if artifact.path is None and artifact.per_model:
                path = resolve.default_path(
                    artifact,
                    tokenizer=resolve.NamedTokenizer(self._traces.model["tokenizer_hash"], list),
                    cache_dir=self._config.cache_dir,
                    model_key=self._replayer.model_key(),
                )
                if not path.is_file():
                    command = artifact.command_for(build_model(self._config.model))
                    return f"the model makes its file in minutes. Type: {command}"
        return ""

    def refuse_unfit(self, candidates: Sequence[Candidate]) -> None:
        """Refuse settings that do not fit the method's files: one would end the whole run."""
        for candidate in candidates:
            try:
                self._prepare(candidate)
            except NeedsNotMet:
                pass  # only replays lack this
            except ConfigurationError as error:
                candidate.refused = str(error)

    def __call__(self, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
        for candidate in tqdm(candidates, "replaying", disable=None, leave=False):
            if (earlier := self._earlier.get(candidate.key)) is not None:
                costs = {case: earlier.costs[case] for case in cases if case in earlier.costs}
                candidate.costs = {**costs, **candidate.costs}
                candidate.refused = candidate.refused or earlier.refused
            missing = [case for case in cases if case not in candidate.costs]
            if candidate.refused or not missing:
                continue
            if time.monotonic() > self.until:
                candidate.refused = OUT_OF_TIME
                continue
            try:
                self._measure(candidate, cases, missing)
            except SpecBenchError as error:
                candidate.refused = str(error)
            self._earlier[candidate.key] = replace(candidate, costs=dict(candidate.costs))
            jsonl.append_jsonl(self._file, [asdict(candidate)])

    def _measure(self, candidate: Candidate, cases: Sequence[str], missing: Sequence[str]) -> None:
        drafter = self._prepare(candidate)
        if candidate.method not in self._warm:  # compilation must not count as drafting
            self._replayer.replay_turns(drafter, self._cases[missing[0]])
            self._warm.add(candidate.method)
        # A drafter that keeps state from case to case must see all cases.
        required = list(cases) if drafter.state_scope == "run" else missing
        for case, (tokens, seconds) in self._replay_costs(drafter, required).items():
            candidate.costs[case] = CaseCost(tokens, seconds, *self._plain_cost(case))

    def _prepare(self, candidate: Candidate) -> Drafter:
        entry = self._entries.entry(candidate.method, candidate.knobs)
        run = MethodRun(entry, make_drafter(entry))
        heads = find_heads(self._config, run)
        with as_needs_not_met(entry):
            return self._replayer.prepare(run.drafter, heads)

    def _plain_cost(self, case: str) -> tuple[int, float]:
        if case not in self._plain:
            drafter = self._prepare(Candidate(BASELINE, {}))
            self._plain |= self._replay_costs(drafter, [case])
        return self._plain[case]

    def _replay_costs(self, drafter: Drafter, cases: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Count by case the tokens after the first of each turn, and predicted seconds."""
        turns: list[RecordedTurn] = [turn for case in cases for turn in self._cases[case]]
        costs = dict.fromkeys(cases, (0, 0.0))
        for turn, played in zip(turns, self._replayer.replay_turns(drafter, turns), strict=True):
            tokens, seconds = costs[turn.case_id]
            n_decoded = len(played.decoded.output_ids) - 1
            costs[turn.case_id] = tokens + n_decoded, seconds + played.decode_s
        return costs
