"""Runs that may stand in one table: rows, claims, and the caption that belongs below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.runs.claims import Claim, claims_not_run, find_claim
from analysis.runs.ledger import load_claims
from analysis.runs.load import Run
from analysis.runs.settings import setting_words
from analysis.runs.verdicts import Judge
from specbench.results.decision import measured
from specbench.results.estimate import FEWEST, Estimate
from specbench.results.manifest import BASELINE
from specbench.results.records import TIMINGS, CaseRecord
from specbench.results.statistics.aggregate import (
    LEFT_OUT_SHARE,
    counted_turns,
    timed_turns,
)
from specbench.results.statistics.disturbed import disturbance, disturbance_words
from specbench.results.statistics.roofline import IMPOSSIBLE, SLOW_BASELINE, baseline_context
from specbench.results.statistics.summary import summarize, task_order
from specbench.results.summary_schema import Disturbance, SummaryRow, n_of, number
from specbench.results.tasks import OVERALL
from specbench.results.wording import SPEEDUPS, TIMES, cases_words, interval_words, verdict_words
from specbench.storage.jsonl import JsonObject

# A limit that runs had whose rule also looked at a label's own times and threads.
_EARLIER = "waiting"


@dataclass(frozen=True)
class ComparedLabel:
    """One label of one run: its rows by task, what is claimed, and what disturbed the run."""

    run: Run
    label: str
    rows: Mapping[str, SummaryRow]
    claim: Claim | None
    judge: Judge
    disturbed: Disturbance | None

    @property
    def overall(self) -> SummaryRow:
        return self.rows[OVERALL]

    @property
    def method(self) -> str:
        return self.overall["method"]

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
        """Those of them that count in times."""
        timed = timed_turns(self.run.records, self.run.labels)
        return [record for record in timed if record.label == self.label]

    @property
    def without_rule(self) -> float | None:
        """The measured speedup over the run without the rule about disturbed turns."""
        return self.disturbed and self.disturbed["without_rule"][self.label]["speedup"]

    def measured(self, key: str, task: str = OVERALL) -> Estimate:
        """A number of a task's row with its interval; none where the run lacks the task."""
        return measured(self.rows[task], key) if task in self.rows else Estimate(None)

    def speed(self) -> Estimate:
        """Tokens/s over the run with its own interval."""
        row = self.overall
        return Estimate(row["tokens_per_s"], row["tokens_per_s_ci"], 1, n_of(row, "speed") < FEWEST)

    def verdict(self, task: str = OVERALL, claim: Claim | None = None) -> str:
        """The verdict on the label's claim, or on another one about it."""
        return self.judge.judge(claim or self.claim, self.rows[task]).verdict

    def judged(self, claim: Claim | None = None) -> str:
        """What the verdict was found on, counted as the claim's source counts; "" if nothing."""
        return str(self.judge.judge(claim or self.claim, self.overall))

    def note(self, name: str, claim: Claim | None = None) -> str:
        """Where the claim beside the label comes from, and what was judged; "" without a claim."""
        claim = claim or self.claim
        if claim is None:
            return ""
        judged = self.judged(claim)
        return claim.note(name) + (f" Counted so here: {judged}." if judged else "")


@dataclass(frozen=True)
class Comparison:
    """Runs that share model, questions and conditions: one table."""

    runs: Sequence[Run]
    entries: Sequence[ComparedLabel]
    not_run: Sequence[Claim]
    estimator: str

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
        return f"{self.model} on {self.dataset}"

    @property
    def drafting(self) -> list[ComparedLabel]:
        """The labels that draft: all but plain decoding, by whichever engine."""
        return [
            entry
            for entry in self.entries
            if entry.label != entry.run.baseline and entry.method != BASELINE
        ]

    def name_of(self, entry: ComparedLabel) -> str:
        """The label, with the settings that differ where the comparison has it more than once."""
        words = self.words_of(entry)
        return f"{entry.label} ({words})" if words else entry.label

    def words_of(self, entry: ComparedLabel) -> str:
        """The settings in which a label differs from others of its name; "" where it has none."""
        return self._words[entry.run.path, entry.label]

    @cached_property
    def _words(self) -> dict[tuple[Path, str], str]:
        labels = [(entry.run, entry.label) for entry in self.entries]
        names, words = run_names(self.runs), setting_words(labels)
        counts = Counter((label, said) for (_, label), said in zip(labels, words, strict=True))
        # The same settings twice, as measured again: only their folders tell them apart.
        return {
            (run.path, label): said if counts[label, said] == 1 else names[run.path]
            for (run, label), said in zip(labels, words, strict=True)
        }

    @property
    def tasks(self) -> list[str]:
        tasks = {task for entry in self.entries for task in entry.rows} - {OVERALL}
        return sorted(tasks, key=task_order)


def make_comparisons(
    runs: Sequence[Run], estimator: str | None = None, claims: Sequence[Claim] | None = None
) -> list[Comparison]:
    """Summarize the runs and put those that may stand in one table together.

    By default with the estimator that each run was made with, and all claims.
    """
    claims = load_claims() if claims is None else claims
    by_key: dict[tuple[Any, ...], list[Run]] = {}
    for run, questions in zip(runs, _questions(runs), strict=True):
        kind = estimator or run.estimator
        key = (run.model, run.dataset, *conditions(run), len(questions), questions, kind)
        by_key.setdefault(key, []).append(run)
    comparisons = []
    for key, members in sorted(by_key.items(), key=lambda item: item[0]):
        kind = key[-1]
        entries = [entry for run in members for entry in _entries(run, kind, claims)]
        methods = {str(entry.method) for entry in entries} | {BASELINE}
        comparisons.append(
            Comparison(members, entries, claims_not_run(members[0], methods, claims), kind)
        )
    return comparisons


def conditions(run: Run) -> tuple[Any, ...]:
    """What runs in one table share besides model and data; may be sorted."""
    made = (run.verifier, run.timing, run.imported or "", run.max_new_tokens or 0)
    return (run.dtype, run.hardware, run.temperature, run.synthetic, *made)


def by_timing(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs apart by where their times come from, measured ones first.

    Predicted times stand in no table and no panel with measured ones.
    """
    groups = ([run for run in runs if run.timing == timing] for timing in TIMINGS)
    return [group for group in groups if group]


def _questions(runs: Sequence[Run]) -> list[tuple[tuple[str, int], ...]]:
    """For each run the questions that it was to ask, whatever their order.

    A shard has asked a part of them; other runs of the same prompt set know the rest.
    """
    sets = [(run.model, run.manifest.prompt_set_hash or run.path) for run in runs]
    asked: dict[Any, dict[str, int]] = {}
    for run, prompts in zip(runs, sets, strict=True):
        asked.setdefault(prompts, {}).update(run.questions)
    known = {prompts: tuple(sorted(found.items())) for prompts, found in asked.items()}
    return [known[prompts] for prompts in sets]


def run_names(runs: Iterable[Run]) -> dict[Path, str]:
    """What to call the runs, by folder: its name, or all of its path where names are alike."""
    folders = {run.path for run in runs}
    counts = Counter(path.name for path in folders)
    return {path: path.name if counts[path.name] == 1 else str(path) for path in folders}


def _entries(run: Run, estimator: str, claims: Sequence[Claim]) -> list[ComparedLabel]:
    rows = summarize(
        run.records,
        run.labels,
        run.baseline,
        seed=run.seed,
        estimator=estimator,
        context=baseline_context(run.manifest),
    )
    disturbed = disturbance(run.records, run.superseded, rows, run.baseline, run.seed)
    entries = []
    judge = Judge(run)
    for label in run.labels:
        own = {row["task"]: row for row in rows if row["label"] == label}
        # Plain decoding is what claims are relative to.
        is_baseline = label == run.baseline
        claim = None if is_baseline else find_claim(run, label, own[OVERALL]["method"], claims)
        entries.append(ComparedLabel(run, label, own, claim, judge, disturbed))
    return entries


def caption(comparison: Comparison, speedup: bool = True) -> str:
    """Model, data, state, hardware, number of cases, verdict on losslessness, code.

    Speedups are explained where what stands above shows some.
    """
    return " ".join(_sentences(comparison, speedup))


def captions_once(comparisons: Iterable[Comparison], speedup: bool = True) -> list[str]:
    """A caption for each comparison, and a last line of what holds for all."""
    each = [_sentences(comparison, speedup) for comparison in comparisons]
    if len(each) < 2:
        return [" ".join(sentences) for sentences in each]
    shared = [said for said in each[0] if all(said in other for other in each)]
    own = [" ".join(said for said in one if said not in shared) for one in each]
    return [*own, " ".join(["All:", *shared])] if shared else own


def decoding_words(run: Run) -> str:
    """``greedy``, or at which temperature."""
    return "greedy" if run.temperature == 0 else f"temperature {run.temperature:g}"


def _sentences(comparison: Comparison, speedup: bool = True) -> list[str]:
    first = comparison.runs[0]
    made_up = "SYNTHETIC RECORDS, not a measurement. " if first.synthetic else ""
    made_up += TIMES[first.timing]
    if first.imported:
        made_up += f"IMPORTED from {first.imported}'s files: not run here, no tokens to audit. "
    cases = cases_words(entry.overall for entry in comparison.entries)
    repeats = sorted({1 + max(record.repeat for record in run.records) for run in comparison.runs})
    limit = first.max_new_tokens
    dropped = _lost(comparison, "n_dropped")
    noisy = _lost(comparison, "n_disturbed")
    speed = SPEEDUPS[comparison.estimator]
    return [
        f"{made_up}{first.model} ({first.dtype}, {decoding_words(first)}) on {first.dataset}: "
        + cases
        + (f" of at most {limit} new tokens a turn" if limit else "")
        + (f", {' or '.join(map(str, repeats))} repeats" if repeats != [1] else "")
        + (f", {dropped} dropped because one label failed" if dropped else "")
        + (f", {noisy}{_of_runs(comparison)} with a disturbed turn " if noisy else "")
        + (_how_counted(comparison) if noisy else "")
        + ".",
        *disturbed_words(comparison, speedup),
        f"Hardware: {first.hardware}.",
        f"State kept per {_scopes(comparison)}.",
        f"Lossless: {_lossless(comparison)}.",
        *([f"{speed}."] if speedup and first.timing != "none" else []),
        interval_words(repeats[-1], _counts(comparison)),
        *_slow_baseline(comparison),
        f"Code: {', '.join(sorted({run.code for run in comparison.runs}))}.",
    ]


def _counts(comparison: Comparison) -> list[int]:
    key = "mat" if comparison.runs[0].timing == "none" else "speedup"
    return [n_of(row, key) for entry in comparison.entries for row in entry.rows.values()]


def _slow_baseline(comparison: Comparison) -> list[str]:
    """Warnings: a baseline under half the memory's speed, or faster than any read measured."""
    shares: dict[str, list[tuple[str, float]]] = {}
    for entry in comparison.entries:
        if entry.label == entry.run.baseline:
            found = [(task, row["bandwidth_share"]) for task, row in entry.rows.items()]
            by = baseline_context(entry.run.manifest).by
            shares.setdefault(by, []).extend((task, s) for task, s in found if s is not None)
    warnings = []
    for by, reached in shares.items():
        if slow := [share for task, share in reached if task == OVERALL and share < SLOW_BASELINE]:
            warnings.append(
                f"SLOW BASELINE: ar takes {_span(slow)} of the {by} bandwidth, under "
                f"{SLOW_BASELINE:.0%}, so a part of each speedup is its slowness."
            )
        if any(share >= IMPOSSIBLE for _, share in reached):
            warnings.append(
                f"BANDWIDTH DISTURBED: no {by} was measured that is as fast as ar's own passes: "
                "the share is one of ar's fastest task."
            )
    return warnings


def _span(shares: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares))))


def _lost(comparison: Comparison, kind: str) -> int:
    """Cases lost over all runs; all labels of a run lose the same ones."""
    by_run = {entry.run.path: number(entry.overall, kind) or 0 for entry in comparison.entries}
    return int(sum(by_run.values()))


def _of_runs(comparison: Comparison) -> str:
    """What cases over all runs are counted out of, where there are several runs."""
    if len(comparison.runs) == 1:
        return ""
    cases = {str(entry.run.path): int(entry.overall["n_cases"]) for entry in comparison.entries}
    return f" of {sum(cases.values())} in {len(cases)} runs"


def _how_counted(comparison: Comparison) -> str:
    """What became of disturbed cases, by :mod:`specbench.results.statistics.summary`."""
    if any(entry.overall["disturbed_counted"] for entry in comparison.entries):
        return (
            f"(at most {LEFT_OUT_SHARE:.0%} of a run's cases not timed, those first whose labels "
            "were disturbed most unequally)"
        )
    return "not timed"


def disturbed_words(comparison: Comparison, speedup: bool = True) -> list[str]:
    """What the rule about disturbed turns did to the runs, and their speedups without it."""
    by_run = {entry.run.path: entry.disturbed for entry in comparison.entries}
    speedups = [
        (comparison.name_of(e), e.overall["speedup"], e.disturbed["without_rule"][e.label])
        for e in comparison.entries
        if speedup and e.disturbed is not None and e.label != e.run.baseline
    ]
    words = disturbance_words(by_run.values(), speedups)
    rules = [run.manifest.setting("measure", "disturbed") or {} for run in comparison.runs]
    if words and any(_EARLIER in rule for rule in rules):
        words.append(
            "Some were called disturbed by an earlier version's rule, for which a label's own slow "
            "steps and waiting threads sufficed, and measured again by it."
        )
    return words


def _scopes(comparison: Comparison) -> str:
    by_scope: dict[str, list[str]] = {}
    for entry in comparison.entries:
        if entry.label == entry.run.baseline:
            continue
        labels = by_scope.setdefault(str(entry.overall["state_scope"]), [])
        if entry.label not in labels:
            labels.append(entry.label)
    parts = [f"{scope} ({', '.join(labels)})" for scope, labels in sorted(by_scope.items())]
    return "; ".join(parts) or "nothing but ar was run"


def _lossless(comparison: Comparison) -> str:
    totals: dict[str, int] = {}
    for entry in comparison.entries:
        if entry.label != entry.run.baseline:
            for kind, count in entry.overall["lossless"].items():
                totals[kind] = totals.get(kind, 0) + count
    return verdict_words(totals)
