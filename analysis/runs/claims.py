"""Claims: what papers state, and beside which of a run's labels it may stand.

A claim is shown in a row only where the row's settings are those it was made with: the knobs that
the claim names, and what ``settings`` in the file (or the exhibit's own) say of the method, as far
as the run knows them. Beside a row of the same model, which it judges, the terms must agree too:
precision, answer length, form of the prompts, questions, draft model, and what a store was built
from. Where the file has claims about the run's own model, other models' stand for nothing.
How a row compares with its claim: :mod:`analysis.runs.claim_verdicts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from analysis.runs.load import Run
from specbench.results.tasks import OVERALL

# What a verdict is about; speed in tokens/s alone stands there for orientation.
_COMPARED = ("speedup", "mat")
# Metrics that compare with the method in `over`.
_OVER = {"gain", "speed_ratio", "load_ratio", "mat_gain"}
# A claim that no table of ours can show.
NO_MODEL = re.compile(r"all|unspecified.*")
# Estimators by which sources count speed, in words.
_FORMULAS = {"end_to_end": "end to end", "specbench_exact": "by Spec-Bench's speed.py"}
_CHECKED = ConfigDict(frozen=True, extra="forbid")


@pydantic_dataclass(config=_CHECKED)
class Counting:
    """How a source counts: its formula of speed, the engine below its speedups, steps of MAT."""

    speed: Literal["end_to_end", "specbench_exact"]
    baseline: Literal["eager", "graph"]
    mat_counts_prompt: Sequence[str]

    def words(self, method: str) -> str:
        words = f"speed {_FORMULAS[self.speed]} over {self.baseline} plain decoding"
        counts = method in self.mat_counts_prompt
        return f"{words}, MAT with the prompt's pass as a step" if counts else words


class Claim(BaseModel):
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

    model_config = _CHECKED

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
    values: dict[str, dict[str, FiniteFloat]] = Field(min_length=1)
    counting: Counting
    knobs: dict[str, object] = {}
    usual: dict[str, object] = {}
    terms: dict[str, object] = {}
    size: float | None = None
    draft: str | None = None
    temperature: float = 0.0
    setting: str | None = None
    qualifier: Literal["up to", "about", "more than", "less than"] | None = None
    over: str | None = None
    quoted: bool = False
    own: bool = False
    speedup_sd: float | None = None

    @model_validator(mode="after")
    def _compares_with_another(self) -> Self:
        if bool(self.values.keys() & _OVER) != (self.over is not None):
            raise ValueError(f"`over` goes with {', '.join(sorted(_OVER))} alone")
        return self

    def value(self, metric: str, task: str = OVERALL) -> float | None:
        return self.values.get(metric, {}).get(task)

    def fits(self, knobs: Mapping[str, object]) -> bool:
        """Whether the claim may be shown in the row of a label with these settings.

        A knob of the claim's own must be there; the usual ones count where the run has recorded
        them, which files of others have not.
        """
        wanted = {**self.usual, **self.knobs}
        return self.knobs.keys() <= knobs.keys() and not _differing(wanted, knobs)

    def unmet_terms(self, terms: Mapping[str, object]) -> list[str]:
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
        """Where the numbers come from that a row of this name shows."""
        title = self.title.partition(":")[0]
        words = [title, self.source, self.model, self.dataset, self.hardware]
        if any(self.value(metric) is not None for metric in _COMPARED):
            words.append(self.counting.words(self.method))
        return f"{who}: {how} by {'; '.join(words)}."


def _differing(wanted: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Keys of both whose value is not the wanted one.

    Of a wanted list, one; of a set that was found, all must be in it; a method within a method may
    be wanted by its name alone or with some of its knobs.
    """

    def agrees(value: object, given: object) -> bool:
        if isinstance(given, dict) and value is not None:
            named = value if isinstance(value, dict) else {"name": value}
            return named["name"] == given.get("name") and not _differing(named, given)
        allowed = value if isinstance(value, list) else [value]
        return given == value or all(
            one in allowed for one in (given if isinstance(given, set) else [given])
        )

    return [key for key in wanted if key in found and not agrees(wanted[key], found[key])]


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
    """The claim for a variant that is not a knob (``setting`` in the file), whatever the knobs.

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
