"""What settings are measured by: recorded answers replayed, or runs of their own.

Both are a `runners.search.space.Measure`. A replay prices passes by a cost surface and needs no
model; live runs interleave all settings with plain decoding.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from runners.launch import prerequisites
from runners.launch.dispatch import Invocation, execute
from runners.run_folder.folder import is_complete
from runners.search.space import Candidate, CaseCost, Entries
from runners.session.method_runs import MethodRun, find_heads, fitting, instantiated
from specbench.artifacts import resolve
from specbench.config import compose
from specbench.config.compose import build_model
from specbench.config.run_key import key_of, run_key
from specbench.config.schema import RECORD_STATES
from specbench.data.cases import Case
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError, NeedsNotMet, SpecBenchError
from specbench.paths import file_name
from specbench.replay.cost_surface import CostSurface
from specbench.replay.replayer import Replayer, replay_kind
from specbench.replay.traces import RecordedTurn, Traces
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import SURFACE, read_records
from specbench.results.statistics.counted import left_out, wrong_outputs
from specbench.storage import jsonl
from specbench.system import environment

# A surface in a minute: predictions between its points are within a few percent, and say so.
GRID: Mapping[str, list[int]] = {
    "contexts": [64, 512],
    "tree_rows": [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64],
    "batch_contexts": [256],
    "batch_k": [1, 4, 16],
    "batch_w": [1, 4, 12],
}
_PASSES = 3


class Bench:
    """Makes runs of one model on chosen cases, in processes of their own; none twice.

    ``cfg``: a run's configuration; its method is plain decoding.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def surface(self) -> Path:
        """Give the file of the machine's cost surface, measured where there is none yet."""
        job, path = surface_job(self.cfg)
        return _execute(job, path, "timing passes") / SURFACE

    def record(self, cases: Sequence[Case], path: Path) -> None:
        """Run plain decoding into the folder, with what replays read."""
        job = self._plain(cases, path)
        job.record, job.measure.rerun_minutes = RECORD_STATES, 0.0  # no time of it counts
        _execute(job, path, "plain decoding")

    def live(self, items: Sequence[Mapping[str, Any]], cases: Sequence[Case], path: Path) -> None:
        """Run plain decoding and the entries of a ``compare`` into the folder, interleaved."""
        job = self._plain(cases, path)
        OmegaConf.update(job, "record", False)
        job.compare = list(items)
        _execute(job, path, "a live run", may_fail=True)

    def _plain(self, cases: Sequence[Case], path: Path) -> DictConfig:
        """Plain decoding on these cases alone, which are written beside the folder."""
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
    """Give the run that times passes, and the folder that is its on this machine."""
    job, limit = prerequisites.measurement(cfg), cfg.model.context_length
    for key, values in GRID.items():
        fitting = [value for value in values if limit is None or value < limit]
        job.runner[key] = fitting if "contexts" in key else list(values)
    job.runner.passes = _PASSES
    machine = key_of(environment.fingerprint(environment.describe()))
    name = f"{file_name(cfg.model.name)}-{run_key(job)}-{machine}"
    return job, Path(cfg.cache_dir) / "surfaces" / name


def _execute(job: DictConfig, path: Path, what: str, may_fail: bool = False) -> Path:
    if is_complete(path):
        return path
    job.output_dir = str(path)
    with contextlib.redirect_stdout(io.StringIO()):  # a search has one table, at its end
        code, _ = execute(job, Invocation())
    if code and not may_fail:
        raise SpecBenchError(f"{what} failed: see {path}.")
    return path


class LiveRuns:
    """Measures candidates by runs below a folder; a `runners.search.space.Measure`."""

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
    """What ``compare`` takes, with a label for each."""
    return [
        {"method": c.method, "label": f"{c.method}_{number}", **c.knobs}
        for number, c in enumerate(candidates)
    ]


def _read_costs(folder: Path, candidates: Sequence[Candidate], cases: Sequence[str]) -> None:
    """Note what a run's folder says of the candidates, and of plain decoding."""
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
    wrong = wrong_outputs(records, labels)
    for label, candidate in zip(labels, candidates, strict=True):
        for case in cases:
            if {(label, case), (BASELINE, case)} <= spent.keys():
                candidate.costs[case] = CaseCost(*spent[label, case], *spent[BASELINE, case])
        if label in wrong:
            candidate.refused = f"its outputs are not what plain decoding gives (see {folder})"
        elif label in missing or not candidate.costs:
            candidate.refused = missing.get(label, f"it failed on every case (see {folder})")


OUT_OF_TIME = "the minutes ended before it was tried"


class Replays:
    """Measures candidates on recorded cases; a `runners.search.space.Measure`.

    ``file`` keeps the costs on these traces of plain decoding and this surface: a search that was
    interrupted goes on. After ``until`` (of ``time.monotonic()``) nothing is measured: what is
    missing is `OUT_OF_TIME`.
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
            return replay_kind(instantiated(self._entries.entry(method, knobs)), self._traces)
        except NeedsNotMet:
            return None

    def slow_build(self, method: str) -> str:
        """Say what to type for a file that takes the model minutes; "": none is missing."""
        needs = instantiated(self._entries.entry(method, {})).needs
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
        """Refuse settings that do not fit the method's files: one of them would end a whole run."""
        for one in candidates:
            try:
                self._prepared(one)
            except NeedsNotMet:
                pass  # of replays alone
            except ConfigurationError as error:
                one.refused = str(error)

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

    def _measure(self, one: Candidate, cases: Sequence[str], missing: Sequence[str]) -> None:
        drafter = self._prepared(one)
        if one.method not in self._warm:  # what is compiled at first use is not drafting
            self._replayer.replay_turns(drafter, self._cases[missing[0]])
            self._warm.add(one.method)
        # What a drafter keeps from case to case it must have seen.
        asked = list(cases) if drafter.state_scope == "run" else missing
        for case, (tokens, seconds) in self._replayed(drafter, asked).items():
            one.costs[case] = CaseCost(tokens, seconds, *self._plain_cost(case))

    def _prepared(self, one: Candidate) -> Drafter:
        entry = self._entries.entry(one.method, one.knobs)
        run = MethodRun(entry, instantiated(entry))
        heads = find_heads(self._config, run)
        with fitting(entry):
            return self._replayer.prepare(run.drafter, heads)

    def _plain_cost(self, case: str) -> tuple[int, float]:
        if case not in self._plain:
            drafter = self._prepared(Candidate(BASELINE, {}))
            self._plain |= self._replayed(drafter, [case])
        return self._plain[case]

    def _replayed(self, drafter: Drafter, cases: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Tokens after the first of each turn, and predicted seconds, by case."""
        turns: list[RecordedTurn] = [turn for case in cases for turn in self._cases[case]]
        costs = dict.fromkeys(cases, (0, 0.0))
        for turn, played in zip(turns, self._replayer.replay_turns(drafter, turns), strict=True):
            tokens, seconds = costs[turn.case_id]
            n_decoded = len(played.decoded.output_ids) - 1
            costs[turn.case_id] = tokens + n_decoded, seconds + played.decode_s
        return costs
