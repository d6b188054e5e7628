"""Claims: what papers state, and how a measured row compares with it.

Verdicts, for a claim about the same model, data set, task and settings:

- MAT agrees where the claimed value lies within the measured 95 % interval widened by 5 % at both
  ends; definitions differ that much (some count the prompt's pass as a step).
- Speedup agrees likewise with 10 %, and is compared only where the hardware is the same.
- An interval whose upper end is more than 1.5 times its lower one agrees with nearly anything, and
  fewer than three cases have none: neither agrees nor disagrees.
- ``reproduced``: all that is claimed and can be compared agrees, speedup among it;
  ``MAT only``: MAT agrees, but speedup does not or cannot be compared; ``not``: MAT does not agree,
  or speedup alone is claimed and does not; ``too few to tell``: what could be compared has such a
  wide interval or none; ``not compared``: there is nothing to compare; ``other model``: the claim
  is about another model and stands there for orientation. Of those that are stated it is the
  nearest in size (by ratio; the sizes are in ``claims.yaml``).

A claim stands beside a row only where the row's settings are those it was made with: the knobs that
the claim names, and what ``settings`` in the file (or the exhibit's own) say of the method, as far
as the run knows them. Beside a row of the same model, which it judges, the terms must agree too:
precision, answer length, form of the prompts, questions, draft model, and what a store was built
from. Where the file has claims about the run's own model, other models' stand for nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.runs.load import Run
from specbench.results.estimate import FEWEST
from specbench.results.statistics.summary import OVERALL
from specbench.results.summary_schema import SummaryRow, interval, number
from specbench.storage.jsonl import JsonObject

MAT_TOLERANCE = 0.05
SPEEDUP_TOLERANCE = 0.10
WIDEST = 1.5  # upper end of an interval over its lower one, for a verdict

REPRODUCED, MAT_ONLY, NOT, TOO_FEW = "reproduced", "MAT only", "not", "too few to tell"
NOT_COMPARED, OTHER_MODEL, NOT_RUN = "not compared", "other model", "not run"

# The rule at the head of this module, for the foot of a table.
VERDICT_RULE = (
    "Verdict: MAT agrees where the claim lies in the 95 % interval widened by "
    f"{100 * MAT_TOLERANCE:.0f} %; speed (widened by {100 * SPEEDUP_TOLERANCE:.0f} %) is compared "
    'on the same hardware only; without it, agreement is "MAT only". Where the upper end of an '
    f"interval is more than {WIDEST:g} times its lower one, or there are fewer than {FEWEST} "
    f'cases, it is "{TOO_FEW}". A claim stands beside its own settings only; one for another '
    "model, the nearest in size that is stated, for orientation."
)

# What a verdict is about; speed in tokens/s alone stands there for orientation.
_COMPARED = ("speedup", "mat")
# A claim that no table of ours can stand beside.
NO_MODEL = re.compile(r"all|unspecified.*")


@dataclass(frozen=True)
class Counting:
    """How a source counts: its formula of speed, the engine below its speedups, steps of MAT."""

    speed: str
    baseline: str
    mat_counts_prompt: Sequence[str]


@dataclass(frozen=True)
class Claim:
    """A number or several that a source states for one method.

    Attributes:
        paper: key of the source; ``exhibit``: which of its tables, figures, logs or passages;
            ``title`` and ``source`` say where the numbers stand.
        hardware: in words; ``gpu`` is a pattern of its GPUs' name or None, ``gpu_count`` how many.
        values: by metric, then by task; ``overall`` is the whole data set.
        knobs, setting, qualifier, over, quoted, own: see the head of ``claims.yaml``.
        counting: how the source counts, ``counting`` in the file.
        usual: the method's settings where the claim names no others; a list has several values,
            each of which the source may have used.
        terms: what else the numbers were made with (`analysis.runs.load.Run.terms`).
        size: of the model, nominal, in billions of parameters; None where it is not stated.
        speedup_sd: standard deviation of the overall speedup, where stated.
    """

    paper: str
    title: str
    exhibit: str
    source: str
    hardware: str
    gpu: str | None
    gpu_count: int
    dataset: str
    method: str
    model: str
    values: Mapping[str, Mapping[str, float]]
    counting: Counting
    knobs: JsonObject = field(default_factory=dict)
    usual: JsonObject = field(default_factory=dict)
    terms: JsonObject = field(default_factory=dict)
    size: float | None = None
    draft: str | None = None
    temperature: float = 0.0
    setting: str | None = None
    qualifier: str | None = None
    over: str | None = None
    quoted: bool = False
    own: bool = False
    speedup_sd: float | None = None

    def value(self, metric: str, task: str = OVERALL) -> float | None:
        return self.values.get(metric, {}).get(task)

    def fits(self, knobs: JsonObject) -> bool:
        """Whether a label with these settings may stand beside the claim.

        A knob of the claim's own must be there; the usual ones count where the run has recorded
        them, which files of others have not.
        """
        own = all(key in knobs and knobs[key] == value for key, value in self.knobs.items())
        usual = {key: value for key, value in self.usual.items() if key not in self.knobs}
        return own and not _differing(usual, knobs)

    def unmet_terms(self, terms: JsonObject) -> list[str]:
        """The terms that a run recorded with another value."""
        return _differing(self.terms, terms)

    def same_hardware(self, gpus: Sequence[str]) -> bool:
        """Whether a run with these GPUs may compare its times with this claim's."""
        if self.gpu is None or len(gpus) < self.gpu_count:
            return False
        return all(re.search(self.gpu, name) for name in gpus)

    @property
    def place(self) -> str:
        return f"{self.model}, {self.hardware}"

    def note(self, who: str, how: str = "claimed") -> str:
        """Where the numbers come from that stand beside a row of this name."""
        title = self.title.partition(":")[0]
        words = [title, self.source, self.model, self.dataset, self.hardware]
        return f"{who}: {how} by {'; '.join(filter(None, words))}."


def _differing(wanted: JsonObject, found: JsonObject) -> list[str]:
    """Keys whose value is not the wanted one, nor one of a wanted list; of a set, all must be."""

    def agrees(key: str) -> bool:
        value = wanted[key]
        allowed = value if isinstance(value, list) else [value]
        given = found[key] if isinstance(found[key], set) else [found[key]]
        return found[key] == value or all(one in allowed for one in given)

    return [key for key in wanted if key in found and not agrees(key)]


def _distance(claim: Claim, run: Run) -> float:
    """0 for the same model, else how many times one is as large as the other (logarithm, above 0).

    Larger than any where a size is not known.
    """
    if claim.model == run.model:
        return 0.0
    parameters = run.parameters()
    if claim.size is None or not parameters:
        return math.inf
    return 1e-9 + abs(math.log(claim.size * 1e9 / parameters))


def _applies(claim: Claim, dataset: str, temperature: float) -> bool:
    return (
        claim.dataset == dataset
        and claim.temperature == temperature
        and claim.over is None
        and not NO_MODEL.fullmatch(claim.model)
        and any(claim.value(metric) is not None for metric in (*_COMPARED, "tokens_per_s"))
    )


def find_claim(run: Run, label: str, method: str, claims: Sequence[Claim]) -> Claim | None:
    """The claim that comes closest to a label of a run.

    Of the claims about the method, the data set and the settings, those about the same model come
    first, then the model nearest in size, then those on the same hardware, those that name
    settings, those by the method's authors, and last the order of the file.
    """
    knobs, terms = run.knobs(label), run.terms(label)
    gpus = run.gpus
    about = [
        claim
        for claim in claims
        if claim.method == method
        and _applies(claim, run.dataset, run.temperature)
        and (claim.setting in (None, label))
    ]
    own_model = any(claim.model == run.model for claim in about)
    fitting = [
        claim
        for claim in about
        if claim.fits(knobs)
        and (not claim.unmet_terms(terms) if claim.model == run.model else not own_model)
    ]
    return min(
        fitting,
        key=lambda claim: (
            claim.setting != label,
            all(claim.value(metric) is None for metric in _COMPARED),
            _distance(claim, run),
            not claim.same_hardware(gpus),
            claim.quoted,
            claim.qualifier is not None,
            not claim.knobs,
            not claim.own,
        ),
        default=None,
    )


def claim_of_setting(
    claims: Sequence[Claim], setting: str, method: str, model: str, dataset: str
) -> Claim | None:
    """The claim for a variant that is no knob (``setting`` in the file), whatever the knobs.

    None where there is none about this model.
    """
    wanted = (setting, method, model, dataset)
    return next((c for c in claims if (c.setting, c.method, c.model, c.dataset) == wanted), None)


def claims_not_run(run: Run, methods: set[str], claims: Sequence[Claim]) -> list[Claim]:
    """One claim per method that has numbers for the run's data set but was not run.

    About the run's model where the file has it, else about the model it says most on.
    """
    fitting = [
        claim
        for claim in claims
        if _applies(claim, run.dataset, run.temperature)
        and not claim.quoted
        and claim.qualifier is None
        and claim.setting is None
    ]
    models = [claim.model for claim in fitting]
    if not models:
        return []
    model = run.model if run.model in models else max(models, key=models.count)
    chosen: dict[str, Claim] = {}
    for claim in sorted(fitting, key=lambda claim: not claim.own):
        if claim.model == model and claim.method not in methods:
            chosen.setdefault(claim.method, claim)
    return [chosen[method] for method in sorted(chosen)]


def compare(
    claim: Claim | None, row: SummaryRow, model: str, gpus: Sequence[str], task: str
) -> str:
    """The verdict on a task's row, by the rule at the head of this module; "" without claim."""
    if claim is None:
        return ""
    if claim.model != model:
        return OTHER_MODEL
    mat = speed = None
    if claim.qualifier is None:
        mat = _agrees(claim, "mat", row, task, MAT_TOLERANCE)
        if claim.same_hardware(gpus):
            speed = _agrees(claim, "speedup", row, task, SPEEDUP_TOLERANCE)
    # Speed is asked where MAT agrees or is not claimed.
    if mat is not None and mat != REPRODUCED:
        return mat
    if mat is None:
        return speed or NOT_COMPARED
    return REPRODUCED if speed == REPRODUCED else MAT_ONLY


def _agrees(claim: Claim, metric: str, row: SummaryRow, task: str, tolerance: float) -> str | None:
    """One number's part of the verdict: reproduced, not, or too few to tell.

    None where it is not claimed or not measured.
    """
    claimed, measured = claim.value(metric, task), number(row, metric)
    if claimed is None or measured is None:
        return None
    low, high = interval(row, metric) or (measured, measured)
    if high > WIDEST * low or row.get("n_cases", FEWEST) < FEWEST:
        return TOO_FEW
    return REPRODUCED if low / (1 + tolerance) <= claimed <= high * (1 + tolerance) else NOT
