"""Claims: what papers state, which of a run's labels may show it, and whether the run agrees.

``claims.yaml`` has the numbers, and at its head what each key means. A claim is shown in a row only
if the row has the settings that it was made with: the knobs that the claim names, and what
``settings`` in the file (or in the exhibit) say about the method, as far as the run recorded them.
For a row of the same model, which it judges, the terms must agree too: precision, output length,
form of the prompts, questions, draft model, and what a store was built from. If the file has
claims about the run's model, those about other models are ignored.

A verdict is an equivalence test for a claim about the same model, data set, task and settings:
:data:`VERDICT_RULES`. MAT counts the prompt's pass as a step if the source does. Speed is
compared only if it was measured, on the same hardware, by the source's formula and over plain
decoding as the source ran it (eager or graphs); if the run lacks one of these, the verdict says
what to run. If two numbers are claimed and the verdicts differ, both verdicts are listed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from analysis.runs.estimates import pooled_ratio, steps
from analysis.runs.load import Run
from specbench.errors import ResultsError
from specbench.results.cells import FEWEST, NumberCell
from specbench.results.statistics.roofline import baseline_context
from specbench.results.statistics.summary import counted_turns, summarize
from specbench.results.summary_schema import SummaryRow, interval, n_of, number
from specbench.results.tasks import OVERALL

CLAIMS_FILE = Path(__file__).with_name("claims.yaml")
MARGINS = {"mat": 0.05, "speedup": 0.10}

AGREES, DISAGREES, CANNOT_TELL = "agrees", "disagrees", "cannot tell"
NOT_COMPARED, OTHER_MODEL, NOT_RUN = "not compared", "other model", "not run"

# For the foot of a table: the rule of the verdicts and their names.
VERDICT_RULES = (
    f'Verdict: "{AGREES}" if the whole 95 % interval, measured for the same model, data, '
    f"settings and (for speed) hardware, lies within {100 * MARGINS['mat']:.0f} % of the claimed "
    f'MAT and {100 * MARGINS["speedup"]:.0f} % of the claimed speed; "{DISAGREES}" if it lies '
    f'outside; otherwise "{CANNOT_TELL}". Both are computed as the claim\'s source does.',
    f'"MAT {AGREES}" alone: speed is not compared, e.g. on other hardware. "{OTHER_MODEL}": no '
    "claim is about this model; the nearest in size is shown for orientation.",
)
# What to run if a run has no speed on a claim's terms.
_TO_RUN = {
    "eager": "for speed run with engine.eager_baseline=true",
    "graph": "for speed run with engine=graph",
}
_UNCOUNTED = "for speed run again: these records lack Spec-Bench's count of ar's tokens"

# Metrics of a verdict; speed in tokens/s is shown for orientation only.
_COMPARED = {"mat": "MAT", "speedup": "speed"}
# Metrics that compare with the method in `over`.
_OVER = {"gain", "speed_ratio", "load_ratio", "mat_gain"}
# A model that no table of ours can show.
_NO_MODEL = re.compile(r"all|unspecified.*")
_FORMULAS = {"end_to_end": "end to end", "specbench_exact": "by Spec-Bench's speed.py"}
_ABSENT = NumberCell(None)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CountingRule(_Part):
    """A source's formula of speed, its baseline and its count of MAT."""

    speed: Literal["end_to_end", "specbench_exact"]
    """Its formula of speed."""
    baseline: Literal["eager", "graph"]
    """Engine of the plain decoding that its speedups refer to."""
    mat_counts_prompt: Sequence[str]
    """Methods for which the prompt's pass and its token count as a step of MAT."""

    def text(self, method: str) -> str:
        text = f"speed {_FORMULAS[self.speed]} over {self.baseline} plain decoding"
        counts = method in self.mat_counts_prompt
        return f"{text}, MAT with the prompt's pass as a step" if counts else text


class Claim(_Part):
    """A number or several that a source states for one method; keys as in ``claims.yaml``."""

    paper: str
    title: str
    exhibit: str
    source: str
    hardware: str
    gpu: str | None
    """Pattern of its GPUs' name."""
    gpu_count: int
    dataset: str
    method: str
    model: str
    values: dict[str, dict[str, FiniteFloat]] = Field(min_length=1)
    """Numbers by metric, then by task; ``overall`` is the whole data set."""
    counting: CountingRule
    knobs: dict[str, object] = {}
    usual: dict[str, object] = {}
    """The method's settings where ``knobs`` names no others; of a list, any value."""
    terms: dict[str, object] = {}
    """Further conditions of the numbers (`analysis.runs.load.Run.terms`)."""
    size: float | None = None
    """The model's nominal billions of parameters; None if not stated."""
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

    def states(self, *metrics: str) -> bool:
        """Return whether the claim has one of these numbers for the whole data set."""
        return any(self.value(metric) is not None for metric in metrics)

    def fits(self, knobs: Mapping[str, object]) -> bool:
        """Return whether the claim may be shown in the row of a label with these settings.

        Knobs that the claim names must be recorded; the usual ones count if the run recorded
        them, which imported files have not.
        """
        return self.knobs.keys() <= knobs.keys() and _agree({**self.usual, **self.knobs}, knobs)

    def same_hardware(self, gpus: Sequence[str]) -> bool:
        """Return whether a run with these GPUs may compare its times with this claim's."""
        if self.gpu is None or len(gpus) < self.gpu_count:
            return False
        return all(re.search(self.gpu, name) for name in gpus)

    @property
    def claimed_on(self) -> str:
        return f"{self.model}, {self.hardware}"

    def note(self, name: str, verb: str = "claimed") -> str:
        """Format the source of the claimed numbers in a row of this name."""
        title = self.title.partition(":")[0]
        parts = [title, self.source, self.model, self.dataset, self.hardware]
        parts += [self.counting.text(self.method)] if self.states(*_COMPARED) else []
        return f"{name}: {verb} by {'; '.join(parts)}."


# --- the file -------------------------------------------------------------------------------------


@functools.cache
def load_claims(path: Path = CLAIMS_FILE) -> tuple[Claim, ...]:
    """Read all claims, in the order of the file.

    Raises:
        ResultsError: the file does not follow its own rules; names the claim.
    """
    # The compiled parser if there is one, since the other takes a second.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    file = yaml.load(path.read_text(encoding="utf-8"), loader)
    claims = []
    for exhibit in file["exhibits"]:
        location = f"{path.name}, {exhibit['paper']}, {exhibit['exhibit']}"
        try:
            for i, row in enumerate([*_rows(exhibit)], start=1):
                location = f"{path.name}, {exhibit['paper']}, {exhibit['exhibit']}, claim {i}"
                claims.append(_claim(file, exhibit, row))
        except ValidationError as error:
            reasons = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ResultsError(f"{location}: {'; '.join(reasons)}.") from error
        except KeyError as error:
            raise ResultsError(f"{location}: {error} is not described in the file.") from error
        except ValueError as error:
            raise ResultsError(f"{location}: {error}.") from error
    return tuple(claims)


def _rows(exhibit: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the claims; in a table with ``columns`` one for each cell, with its data set."""
    for claim in exhibit["claims"]:
        if "columns" not in exhibit:
            yield claim
            continue
        rest = {key: value for key, value in claim.items() if key != "cells"}
        for column, cell in zip(exhibit["columns"], str(claim["cells"]).split(), strict=True):
            if cell != "-":
                numbers = zip(exhibit["metrics"], map(float, cell.split("/")), strict=True)
                column_keys = {"dataset": column} if isinstance(column, str) else column
                yield {**rest, **column_keys, **dict(numbers)}


def _claim(file: dict[str, Any], exhibit: dict[str, Any], row: dict[str, Any]) -> Claim:
    """Make a claim from a row (or a cell of it) and the file's entries on its paper and method."""
    about = {k: v for k, v in exhibit.items() if k not in ("claims", "columns", "metrics")} | row
    method, model = about["method"], about["model"]
    hardware, paper = file["hardware"][about["hardware"]], file["papers"][about["paper"]]
    usual = dict({**file["settings"], **about.pop("settings", {})}.get(method) or {})
    terms = {**paper.get("terms", {}), "corpus": usual.pop("corpus", None)}
    terms |= {"draft": file["drafts"][about.pop("draft")]} if "draft" in about else {}
    terms |= about.pop("terms", {})
    if isinstance(questions := terms.get("questions"), str):
        first, last = map(int, questions.split(".."))
        terms["questions"] = [str(number) for number in range(first, last + 1)]
    values = {metric: about.pop(metric) for metric in file["metrics"] if metric in about}
    fields = {
        "title": paper["title"],
        "hardware": hardware["text"],
        "gpu": hardware["gpu"],
        "gpu_count": hardware["count"],
        "values": {k: v if isinstance(v, dict) else {OVERALL: v} for k, v in values.items()},
        "usual": usual,
        "terms": {key: value for key, value in terms.items() if value is not None},
        "size": None if _NO_MODEL.fullmatch(model) else file["sizes"][model],
        "own": method in about.pop("own_of", ()) or about.get("own", False),
    }
    counting = file["counting"].get(about["paper"], file["counting"]["default"])
    return Claim.model_validate({"counting": counting, **about, **fields})


# --- which label may show a claim -----------------------------------------------------------------


def _agree(required: Mapping[str, object], recorded: Mapping[str, object]) -> bool:
    """Return whether the keys of both have the required values.

    A required list allows each of its values; a recorded set must lie in it; a method within a
    method may be required by its name alone or with some of its knobs.
    """

    def agrees(value: object, given: object) -> bool:
        if isinstance(given, dict) and value is not None:
            named = value if isinstance(value, dict) else {"name": value}
            return named["name"] == given.get("name") and _agree(named, given)
        allowed = value if isinstance(value, list) else [value]
        values = given if isinstance(given, set) else [given]
        return given == value or all(item in allowed for item in values)

    return all(agrees(required[key], recorded[key]) for key in required if key in recorded)


def _distance(claim: Claim, run: Run) -> float:
    """Return 0 for the same model, otherwise the logarithm of the ratio of sizes."""
    if claim.model == run.model:
        return 0.0
    parameters = run.parameters()
    if claim.size is None or not parameters:
        return math.inf
    return 1e-9 + abs(math.log(claim.size * 1e9 / parameters))


def _applies(claim: Claim, run: Run) -> bool:
    return (
        (claim.dataset, claim.temperature, claim.over) == (run.dataset, run.temperature, None)
        and not _NO_MODEL.fullmatch(claim.model)
        and claim.states(*_COMPARED, "tokens_per_s")
    )


def find_claim(run: Run, label: str, method: str, claims: Sequence[Claim]) -> Claim | None:
    """Return the claim that comes closest to a label of a run.

    Among claims about the method, the data set and the settings, those about the same model come
    first, then the model nearest in size, then those on the same hardware, those that name
    settings, those by the method's authors, and last the order of the file.
    """
    knobs, terms, gpus = run.knobs(label), run.terms(label), run.gpus
    about = [
        claim
        for claim in claims
        if claim.method == method and claim.setting in (None, label) and _applies(claim, run)
    ]
    own_model = any(claim.model == run.model for claim in about)
    fitting = [
        claim
        for claim in about
        if claim.fits(knobs)
        and (_agree(claim.terms, terms) if claim.model == run.model else not own_model)
    ]
    return min(
        fitting,
        key=lambda claim: (
            claim.setting != label,
            not claim.states(*_COMPARED),
            _distance(claim, run),
            not claim.same_hardware(gpus),
            claim.quoted,
            claim.qualifier is not None,
            not claim.knobs,
            not claim.own,
        ),
        default=None,
    )


def claims_not_run(run: Run, methods: set[str], claims: Sequence[Claim]) -> list[Claim]:
    """Return one claim per method that has numbers for the run's data set but was not run.

    It is about the run's model if the file has it, otherwise about the model with most claims.
    """
    fitting = [
        claim
        for claim in claims
        if _applies(claim, run) and not (claim.quoted or claim.qualifier or claim.setting)
    ]
    models = [claim.model for claim in fitting]
    model = run.model if run.model in models else max(models, key=models.count, default="")
    chosen: dict[str, Claim] = {}
    for claim in sorted(fitting, key=lambda claim: not claim.own):
        if claim.model == model and claim.method not in methods:
            chosen.setdefault(claim.method, claim)
    return [chosen[method] for method in sorted(chosen)]


# --- verdicts -------------------------------------------------------------------------------------


class ClaimResult(NamedTuple):
    """Status of a claim, and the numbers on its terms that it was compared with."""

    status: str
    mat: NumberCell = _ABSENT
    speedup: NumberCell = _ABSENT


def check_claim(run: Run, claim: Claim, row: SummaryRow) -> ClaimResult:
    """Return the verdict on a task's row of a run, by the rule at the head of this module."""
    if claim.model != run.model:
        return ClaimResult(OTHER_MODEL)
    if claim.qualifier is not None:
        return ClaimResult(NOT_COMPARED)
    task = row["task"]
    mat = _mat(run, claim, row) if claim.value("mat", task) is not None else _ABSENT
    speedup, lacking = _ABSENT, ""
    timed = run.timing == "measured" and not run.phases and claim.same_hardware(run.gpus)
    if timed and claim.value("speedup", task) is not None:
        speedup, lacking = _speedup(run, claim, row)
    return ClaimResult(compare(claim, task, mat, speedup, lacking), mat, speedup)


def _mat(run: Run, claim: Claim, row: SummaryRow) -> NumberCell:
    if row["method"] not in claim.counting.mat_counts_prompt:
        return estimate_of(row, "mat")
    records = [
        record
        for record in counted_turns(run.records, run.labels)
        if record.label == row["label"] and row["task"] in (OVERALL, record.task)
    ]
    return pooled_ratio(records, lambda r: r.n_new, lambda r: steps(r) + 1, run.seed)


def _speedup(run: Run, claim: Claim, row: SummaryRow) -> tuple[NumberCell, str]:
    """Compute the speedup on the claim's terms; without it, return what to run."""
    counting = claim.counting
    plain = baseline_context(run.manifest).plain.get(counting.baseline)
    if plain not in run.labels:
        return _ABSENT, _TO_RUN[counting.baseline]
    row_key = (row["label"], row["task"])
    rows = _rows_over(run, plain, counting.speed)
    speedup = estimate_of(next(r for r in rows if (r["label"], r["task"]) == row_key), "speedup")
    return speedup, _UNCOUNTED if speedup.value is None else ""


@functools.lru_cache(maxsize=64)
def _rows_over(run: Run, plain: str, speed: str) -> list[SummaryRow]:
    return summarize(run.records, run.labels, plain, run.seed, estimator=speed)


def estimate_of(row: SummaryRow, key: str) -> NumberCell:
    """Return a number of a row with its interval, of plain decoding too."""
    few, compares = n_of(row, key) < FEWEST, key.endswith("speedup")
    return NumberCell(number(row, key), interval(row, key), few=few, compares=compares)


def compare(
    claim: Claim, task: str, mat: NumberCell, speedup: NumberCell, lacking: str = ""
) -> str:
    """Return the verdict on numbers that are counted as the claim's; a speed may be ``lacking``."""
    verdicts = {}
    for metric, measured in (("mat", mat), ("speedup", speedup)):
        claimed = claim.value(metric, task)
        if claimed is not None and measured.value is not None:
            verdicts[_COMPARED[metric]] = _equivalent(claimed, measured, 1 + MARGINS[metric])
    n_claimed = sum(claim.value(metric, task) is not None for metric in _COMPARED)
    if len(verdicts) == n_claimed and len(set(verdicts.values())) == 1:
        verdict = next(iter(verdicts.values()))
    else:
        verdict = ", ".join(f"{name} {word}" for name, word in verdicts.items()) or NOT_COMPARED
    return f"{verdict}; {lacking}" if lacking else verdict


def _equivalent(claimed: float, measured: NumberCell, factor: float) -> str:
    """Compare a number with the claimed one, up to a factor either way."""
    if measured.interval is None:
        return CANNOT_TELL
    low, high = measured.interval
    if claimed / factor <= low and high <= claimed * factor:
        return AGREES
    return DISAGREES if high < claimed / factor or claimed * factor < low else CANNOT_TELL
