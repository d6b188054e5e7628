"""Verdicts: whether a run bears out a claim, counted as the claim's source counts.

For a claim about the same model, data set, task and settings:

- MAT agrees where the claimed value lies within the measured 95 % interval widened by 5 % at both
  ends. Where the source counts the prompt's pass and its token as a step, so does the verdict.
- Speed agrees likewise with 10 %. It is compared only where it was measured, on the same hardware,
  by the source's formula (end to end, or Spec-Bench's ``speed.py``) and over plain decoding as
  the source ran it, which is eager: ``ar_eager`` beside CUDA graphs, ``ar`` itself on a CPU, where
  there are none. Where the run lacks one of these, the verdict says what to run.
- An interval whose upper end is more than 1.5 times its lower one agrees with nearly anything, and
  without one, as of fewer than three cases, nothing is known: neither agrees nor disagrees.
- ``reproduced``: all that is claimed and can be compared agrees, speedup among it;
  ``MAT only``: MAT agrees, but speedup does not or cannot be compared; ``not``: MAT does not agree,
  or speedup alone is claimed and does not; ``too few to tell``: what could be compared has such a
  wide interval or none; ``not compared``: there is nothing to compare; ``other model``: the claim
  is about another model and stands there for orientation. Of those that are stated it is the
  nearest in size (by ratio; the sizes are in ``claims.yaml``).
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

MAT_TOLERANCE = 0.05
SPEEDUP_TOLERANCE = 0.10
WIDEST = 1.5  # upper end of an interval over its lower one, for a verdict

REPRODUCED, MAT_ONLY, NOT, TOO_FEW = "reproduced", "MAT only", "not", "too few to tell"
NOT_COMPARED, OTHER_MODEL, NOT_RUN = "not compared", "other model", "not run"

# The rule at the head of this module, for the foot of a table; the words of its verdicts.
VERDICT_RULE = (
    "Verdict: a claim is reproduced where it lies in the 95 % interval measured for the same "
    f"model, data, settings and, for speed, hardware, widened by {100 * MAT_TOLERANCE:.0f} % for "
    f"MAT and {100 * SPEEDUP_TOLERANCE:.0f} % for speed, both counted as its source counts them "
    "(speed end to end or by Spec-Bench's speed.py, over eager plain decoding)."
)
VERDICT_WORDS = (
    f'"{MAT_ONLY}": speed does not agree, or cannot be compared, as on other hardware or '
    "predicted; where a run is lacking, the verdict says which. "
    f'"{TOO_FEW}": the upper end of an interval is more than {WIDEST:g} times its lower one, or '
    f"there is none, as of fewer than {FEWEST} cases. A claim is shown with its own settings only; "
    "one for another model, the nearest in size that is stated, is there for orientation."
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
    accepted = _agrees(claim.value("mat", task), mat, MAT_TOLERANCE)
    # Speed is asked where MAT agrees or is not claimed.
    if accepted not in (None, REPRODUCED):
        return accepted
    speed = _agrees(claim.value("speedup", task), speedup, SPEEDUP_TOLERANCE)
    if accepted is None:
        found = speed or NOT_COMPARED
    else:
        found = REPRODUCED if speed == REPRODUCED else MAT_ONLY
    return f"{found}; {lacking}" if lacking else found


def _agrees(claimed: float | None, measured: Estimate, tolerance: float) -> str | None:
    """One number's part of the verdict: reproduced, not, or too few to tell.

    None where it is not claimed or not measured.
    """
    if claimed is None or measured.value is None:
        return None
    low, high = measured.interval or (0.0, 1.0)
    if high > WIDEST * low:
        return TOO_FEW
    return REPRODUCED if low / (1 + tolerance) <= claimed <= high * (1 + tolerance) else NOT
