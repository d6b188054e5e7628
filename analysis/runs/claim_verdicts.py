"""Verdicts: whether a run bears out a claim, counted as the claim's source counts.

An equivalence test for a claim about the same model, data set, task and settings. A number
``agrees`` where its whole 95 % interval lies within the margin of the claimed value, it
``disagrees`` where the whole interval lies outside; else, and without an interval, as of fewer than
three cases, the run ``cannot tell``. So a wide interval never agrees. Few sources state the error
of a claim: it counts for nothing here.

- MAT's margin is 5 % (a factor of 1.05 either way). Where the source counts the prompt's pass and
  its token as a step, so does the verdict.
- Speed's is 10 %. It is compared only where it was measured, on the same hardware, by the source's
  formula (end to end, or Spec-Bench's ``speed.py``) and over plain decoding as the source ran it,
  which is eager: ``ar_eager`` beside CUDA graphs, ``ar`` itself on a CPU, where there are none.
  Where the run lacks one of these, the verdict says what to run.
- Where a claim states both, and the two verdicts differ or one number is not compared, the verdict
  names what it is about: ``MAT agrees``, ``MAT agrees, speed disagrees``.
- ``not compared``: there is nothing to compare; ``other model``: the claim is about another model
  and stands there for orientation. Of those that are stated it is the nearest in size (by ratio;
  the sizes are in ``claims.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from analysis.runs.claims import Claim
from analysis.runs.estimates import pooled_ratio, steps
from analysis.runs.load import Run
from specbench.results.estimate import FEWEST, Estimate
from specbench.results.statistics.aggregate import counted_turns
from specbench.results.statistics.roofline import baseline_context
from specbench.results.statistics.summary import summarize
from specbench.results.summary_schema import SummaryRow, interval, n_of, number
from specbench.results.tasks import OVERALL

MAT_MARGIN = 0.05
SPEED_MARGIN = 0.10

AGREES, DISAGREES, CANNOT_TELL = "agrees", "disagrees", "cannot tell"
NOT_COMPARED, OTHER_MODEL, NOT_RUN = "not compared", "other model", "not run"

# The rule at the head of this module, for the foot of a table; the words of its verdicts.
VERDICT_RULE = (
    f'Verdict: a run "{AGREES}" with a claim where the whole 95 % interval measured for the same '
    "model, data, settings and, for speed, hardware lies within "
    f"{100 * MAT_MARGIN:.0f} % of the claimed MAT and {100 * SPEED_MARGIN:.0f} % of the claimed "
    f'speed; it "{DISAGREES}" where the whole interval lies outside, and "{CANNOT_TELL}" else. '
    "Both are counted as the claim's source counts them (speed end to end or by Spec-Bench's "
    "speed.py, over eager plain decoding)."
)
VERDICT_WORDS = (
    f'"MAT {AGREES}": speed is not compared, as on other hardware or predicted; where a run is '
    f"lacking, the verdict says which. Fewer than {FEWEST} cases have no interval and cannot tell. "
    "A claim is shown with its own settings only; one for another model, the nearest in size that "
    "is stated, is there for orientation."
)

# What a run lacks that has no speed on a claim's terms.
_TO_RUN = {
    "eager": "for speed run with engine.eager_baseline=true",
    "graph": "for speed run with engine=graph",
}
_UNCOUNTED = "for speed run again: these records lack Spec-Bench's count of ar's tokens"


_ABSENT = Estimate(None)


@dataclass(frozen=True)
class Judgement:
    """A verdict ("" without a claim), and the numbers on the claim's terms that it is about."""

    verdict: str = ""
    mat: Estimate = _ABSENT
    speedup: Estimate = _ABSENT

    def __str__(self) -> str:
        """The numbers that were judged, for a note below a table; "" where none was."""
        numbers = {"MAT": self.mat, "speedup": self.speedup}
        return ", ".join(f"{name} {found}" for name, found in numbers.items() if found.value)


@dataclass(frozen=True)
class Judge:
    """Verdicts on the rows of a run; what sources count in other ways is worked out once."""

    run: Run
    _rows: dict[tuple[str, str], list[SummaryRow]] = field(default_factory=dict)

    def judge(self, claim: Claim | None, row: SummaryRow) -> Judgement:
        """The verdict on a task's row, by the rule at the head of this module."""
        if claim is None:
            return Judgement()
        if claim.model != self.run.model:
            return Judgement(OTHER_MODEL)
        if claim.qualifier is not None:
            return Judgement(NOT_COMPARED)
        task = row["task"]
        mat = self._mat(claim, row) if claim.value("mat", task) is not None else _ABSENT
        speedup, lacking = _ABSENT, ""
        if claim.value("speedup", task) is not None and self._comparable(claim):
            speedup, lacking = self._speedup(claim, row)
        return Judgement(compare(claim, task, mat, speedup, lacking), mat, speedup)

    def _comparable(self, claim: Claim) -> bool:
        run = self.run
        return run.timing == "measured" and not run.phases and claim.same_hardware(run.gpus)

    def _mat(self, claim: Claim, row: SummaryRow) -> Estimate:
        if row["method"] not in claim.counting.mat_counts_prompt:
            return _estimate(row, "mat")
        own = [
            record
            for record in counted_turns(self.run.records, self.run.labels)
            if record.label == row["label"] and row["task"] in (OVERALL, record.task)
        ]
        return pooled_ratio(own, lambda r: r.n_new, lambda r: steps(r) + 1, self.run.seed)

    def _speedup(self, claim: Claim, row: SummaryRow) -> tuple[Estimate, str]:
        """Speedup on the claim's terms; without it what to run."""
        run, counting = self.run, claim.counting
        plain = baseline_context(run.manifest).plain.get(counting.baseline)
        if plain not in run.labels:
            return _ABSENT, _TO_RUN[counting.baseline]
        key = (counting.speed, plain)
        if key not in self._rows:
            self._rows[key] = summarize(
                run.records, run.labels, plain, run.seed, estimator=counting.speed
            )
        place = (row["label"], row["task"])
        own = next(r for r in self._rows[key] if (r["label"], r["task"]) == place)
        found = _estimate(own, "speedup")
        return found, _UNCOUNTED if found.value is None else ""


def _estimate(row: SummaryRow, key: str) -> Estimate:
    return Estimate(number(row, key), interval(row, key), few=n_of(row, key) < FEWEST)


def compare(claim: Claim, task: str, mat: Estimate, speedup: Estimate, lacking: str = "") -> str:
    """The verdict on numbers that are counted as the claim's; a speed may be ``lacking``."""
    claimed = {"MAT": claim.value("mat", task), "speed": claim.value("speedup", task)}
    tested = {
        "MAT": equivalent(claimed["MAT"], mat, MAT_MARGIN),
        "speed": equivalent(claimed["speed"], speedup, SPEED_MARGIN),
    }
    known = {name: word for name, word in tested.items() if word is not None}
    words = set(known.values())
    if len(words) == 1 and known.keys() == {name for name, value in claimed.items() if value}:
        found = words.pop()
    else:
        found = ", ".join(f"{name} {word}" for name, word in known.items()) or NOT_COMPARED
    return f"{found}; {lacking}" if lacking else found


def equivalent(claimed: float | None, measured: Estimate, margin: float) -> str | None:
    """Whether a number is the claimed one, up to a factor of ``1 + margin`` either way.

    None where it is not claimed or not measured.
    """
    if claimed is None or measured.value is None:
        return None
    low, high = claimed / (1 + margin), claimed * (1 + margin)
    if measured.interval is None:
        return CANNOT_TELL
    if low <= measured.interval[0] and measured.interval[1] <= high:
        return AGREES
    return DISAGREES if measured.interval[1] < low or high < measured.interval[0] else CANNOT_TELL
