"""Runs grouped into comparisons: those that one table may hold, with their rows and claims."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.runs.claims import Claim, check_claim, claims_not_run, find_claim, load_claims
from analysis.runs.load import Run
from analysis.runs.settings import run_texts, setting_texts
from specbench.results.cells import FEWEST, NumberCell
from specbench.results.conditions import steps_without_drafts
from specbench.results.headline_table import metric_cell, no_drafts_text
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.records import TIMINGS, CaseRecord
from specbench.results.statistics.counted import rankable
from specbench.results.statistics.disturbed import disturbance
from specbench.results.statistics.roofline import baseline_context
from specbench.results.statistics.summary import counted_turns, summarize, task_order, timed_turns
from specbench.results.summary_schema import Disturbance, SummaryRow, n_of
from specbench.results.tasks import OVERALL
from specbench.storage.hashes import ids_sha256
from specbench.storage.jsonl import JsonObject


@dataclass(frozen=True)
class ComparedLabel:
    """One label of one run: its rows by task, its claim, and the run's disturbances."""

    run: Run
    label: str
    rows: Mapping[str, SummaryRow]
    claim: Claim | None
    disturbed: Disturbance | None

    @property
    def overall(self) -> SummaryRow:
        return self.rows[OVERALL]

    @property
    def method(self) -> str:
        return str(self.overall["method"])

    @property
    def ranked(self) -> bool:
        """True if it may have a standing, `specbench.results.statistics.counted`."""
        return bool(rankable([self.label], self.run.wrong_outputs, self.run.baseline))

    @cached_property
    def without_drafts(self) -> str:
        """The suffix to the name of a label that drafted nothing; "" for others."""
        manifest = self.run.manifest
        if self.label not in steps_without_drafts(self.records, manifest):
            return ""
        return f" ({no_drafts_text(manifest.labels[self.label].budget)})"

    @property
    def knobs(self) -> JsonObject:
        return self.run.knobs(self.label)

    @cached_property
    def records(self) -> list[CaseRecord]:
        """The label's own turns of the cases that count."""
        counted = counted_turns(self.run.records, self.run.labels)
        return [record for record in counted if record.label == self.label]

    @cached_property
    def timed_records(self) -> list[CaseRecord]:
        """The label's own turns that count in times."""
        timed = timed_turns(self.run.records, self.run.labels)
        return [record for record in timed if record.label == self.label]

    @property
    def without_rule(self) -> float | None:
        """The measured speedup over the run without the rule about disturbed turns."""
        return self.disturbed and self.disturbed["without_rule"][self.label]["speedup"]

    def measured(self, key: str, task: str = OVERALL) -> NumberCell:
        """Return a number of a task's row with its interval; empty if the run lacks the task."""
        return metric_cell(self.rows[task], key) if task in self.rows else NumberCell(None)

    def speed(self) -> NumberCell:
        """Return tokens/s over the run with its own interval."""
        row = self.overall
        return NumberCell(
            row["tokens_per_s"], row["tokens_per_s_ci"], 1, n_of(row, "speed") < FEWEST
        )

    def verdict(self, task: str = OVERALL, claim: Claim | None = None) -> str:
        """Return the verdict on the label's claim, or on ``claim``; "" without one."""
        claim = claim or self.claim
        return check_claim(self.run, claim, self.rows[task]).status if claim else ""

    def note(self, name: str, claim: Claim | None = None) -> str:
        """Format the source and checked numbers of its claim or ``claim``; "" without one."""
        claim = claim or self.claim
        if claim is None:
            return ""
        claim_result = check_claim(self.run, claim, self.overall)
        numbers = {"MAT": claim_result.mat, "speedup": claim_result.speedup}
        text = ", ".join(f"{key} {number}" for key, number in numbers.items() if number.value)
        return claim.note(name) + (f" Counted the same way here: {text}." if text else "")


@dataclass(frozen=True, eq=False)
class ComparedRuns:
    """Runs that share model, questions and conditions: one table.

    ``overrides``: settings in which its runs differ from another comparison's on the same model and
    data, ``dataset.path=b.jsonl``; "" if there is none.
    """

    runs: Sequence[Run]
    entries: Sequence[ComparedLabel]
    not_run: Sequence[Claim]
    estimator: str
    overrides: str = ""

    @property
    def model(self) -> str:
        return self.runs[0].model

    @property
    def dataset(self) -> str:
        return self.runs[0].dataset

    @property
    def timing(self) -> str:
        return self.runs[0].timing

    @property
    def title(self) -> str:
        return self._title(self.model, self.dataset)

    @property
    def printed_title(self) -> str:
        """``Vicuna-7B on Spec-Bench``."""
        return self._title(display_name(self.model), display_name(self.dataset))

    def _title(self, model: str, data: str) -> str:
        run, loaded = self.runs[0], self.runs[0].manifest.model
        weights = f"{loaded.weights} weights" if loaded and loaded.weights else ""
        batch = f"batch of {run.batch}" if run.batch > 1 else ""
        return ", ".join(filter(None, [f"{model} on {data}", weights, batch, self.overrides]))

    @property
    def drafting(self) -> list[ComparedLabel]:
        """The labels that draft: all but plain decoding, by whichever engine."""
        return [e for e in self.entries if e.label != e.run.baseline and e.method != BASELINE]

    @property
    def ranked(self) -> list[ComparedLabel]:
        """The drafting labels that may have a standing."""
        return [entry for entry in self.drafting if entry.ranked]

    def name_of(self, entry: ComparedLabel) -> str:
        """Return the label, with its differing settings if the comparison has it several times."""
        text = self.settings_of(entry)
        return f"{entry.label} ({text})" if text else entry.label

    def settings_of(self, entry: ComparedLabel) -> str:
        """Return the settings in which a label differs from others of its name; "" if none."""
        return self._settings_texts[entry.run.path, entry.label]

    @cached_property
    def _settings_texts(self) -> dict[tuple[Path, str], str]:
        labels = [(entry.run, entry.label) for entry in self.entries]
        names, texts = run_names(self.runs), setting_texts(labels)
        counts = Counter((label, text) for (_, label), text in zip(labels, texts, strict=True))
        # The same settings measured twice differ in their folders only.
        return {
            (run.path, label): text if counts[label, text] == 1 else names[run.path]
            for (run, label), text in zip(labels, texts, strict=True)
        }

    @property
    def load(self) -> int:
        """Batch size, or concurrent requests of a server."""
        return self.runs[0].batch * self.runs[0].concurrency

    @property
    def unit(self) -> str:
        """Unit of the bootstrap: cases, or groups of them that share a batch."""
        return "groups" if self.runs[0].batch > 1 else "cases"

    @property
    def tasks(self) -> list[str]:
        tasks = {task for entry in self.entries for task in entry.rows} - {OVERALL}
        return sorted(tasks, key=task_order)


def make_comparisons(
    runs: Sequence[Run], estimator: str | None = None, claims: Sequence[Claim] | None = None
) -> list[ComparedRuns]:
    """Summarize the runs and group those that one table may hold.

    Defaults: the estimator that each run was made with, and all claims.
    """
    claims = load_claims() if claims is None else claims
    by_key: dict[tuple[Any, ...], list[Run]] = {}
    for run, questions in zip(runs, _questions(runs), strict=True):
        kind = estimator or run.estimator
        key = (run.model, run.dataset, *conditions(run), len(questions), questions, kind)
        by_key.setdefault(key, []).append(run)
    # Comparisons that share model, data and machine list their differing settings.
    alike: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for key in sorted(by_key):
        run = by_key[key][0]
        same = (run.model, run.dataset, run.dtype, run.hardware, run.temperature, run.timing)
        alike.setdefault((*same, key[-1]), []).append(key)
    overrides = {
        key: text
        for keys in alike.values()
        for key, text in zip(keys, run_texts([by_key[key] for key in keys]), strict=True)
    }
    comparisons = []
    for key in sorted(by_key):
        members, kind = by_key[key], key[-1]
        entries = [entry for run in members for entry in _entries(run, kind, claims)]
        methods = {entry.method for entry in entries} | {BASELINE}
        not_run = claims_not_run(members[0], methods, claims)
        comparisons.append(ComparedRuns(members, entries, not_run, kind, overrides[key]))
    return comparisons


def conditions(run: Run) -> tuple[Any, ...]:
    """Return what runs in one table share besides model and data; sortable."""
    drafting = [record for record in run.records if record.label != run.baseline]
    verifiers = sorted({record.verifier for record in drafting or run.records[:1]})
    source = (run.manifest.imported or {}).get("from") or ""
    arithmetic = (run.batch, run.dtype, run.hardware, run.temperature, run.synthetic)
    measured_by = (" and ".join(verifiers), run.timing, source, run.max_new_tokens or 0)
    return (*arithmetic, *measured_by, run.engine, run.concurrency)


def by_timing(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs by where their times come from, measured ones first.

    No table or panel mixes predicted times with measured ones.
    """
    groups = ([run for run in runs if run.timing == timing] for timing in TIMINGS)
    return [group for group in groups if group]


def _questions(runs: Sequence[Run]) -> list[tuple[tuple[str, int], ...]]:
    """Return the questions of each run's prompt set by id, with a checksum of the first prompt."""
    sets = [(run.model, run.manifest.prompt_set_hash or run.path) for run in runs]
    questions: dict[Any, dict[str, int]] = {}
    for run, prompts in zip(runs, sets, strict=True):
        # A turn that failed early has no prompt; another label's turn has it.
        first = sorted((r for r in run.records if not r.turn), key=lambda r: bool(r.n_prompt))
        for case, r in {r.case_id: r for r in first}.items():
            digest = r.prompt_sha or ids_sha256(r.prompt_ids)
            questions.setdefault(prompts, {})[case] = zlib.crc32(digest.encode())
    return [tuple(sorted(questions[prompts].items())) for prompts in sets]


def run_names(runs: Iterable[Run]) -> dict[Path, str]:
    """Name the runs by folder, with parent folders if names are equal.

    Absolute paths are avoided, since tables are sent to readers on other machines.
    """
    whole = {run.path: run.path.resolve().parts for run in runs}
    ends = Counter(parts[-n:] for parts in whole.values() for n in range(1, len(parts) + 1))
    return {
        path: "/".join(next(parts[-n:] for n in range(1, len(parts) + 1) if ends[parts[-n:]] == 1))
        for path, parts in whole.items()
    }


def _entries(run: Run, estimator: str, claims: Sequence[Claim]) -> list[ComparedLabel]:
    context = baseline_context(run.manifest)
    rows = summarize(
        run.records, run.labels, run.baseline, run.seed, estimator=estimator, context=context
    )
    disturbed = disturbance(run.records, run.superseded, rows, run.baseline, run.seed)
    entries = []
    for label in run.labels:
        by_task = {row["task"]: row for row in rows if row["label"] == label}
        claim = None  # plain decoding is what claims are relative to
        if label != run.baseline:
            claim = find_claim(run, label, by_task[OVERALL]["method"], claims)
        entries.append(ComparedLabel(run, label, by_task, claim, disturbed))
    return entries
