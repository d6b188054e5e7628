"""Claims: what papers state, and beside which of a run's labels it may stand.

A claim stands beside a row only where the row's settings are those it was made with: the knobs that
the claim names, and what ``settings`` in the file (or the exhibit's own) say of the method, as far
as the run knows them. How a row compares with its claim: :mod:`analysis.runs.verdicts`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import yaml

from analysis.runs.load import Run
from specbench.errors import ResultsError
from specbench.results.statistics.roofline import ENGINES
from specbench.results.statistics.summary import OVERALL
from specbench.storage.jsonl import JsonObject

CLAIMS_FILE = Path(__file__).with_name("claims.yaml")

QUALIFIERS = ("up to", "about", "more than", "less than")
# What a verdict is about; speed in tokens/s alone stands there for orientation.
_COMPARED = ("speedup", "mat")
# A claim that no table of ours can stand beside.
_NO_MODEL = re.compile(r"all|unspecified.*")


# Estimators by which sources count speed, in words.
_FORMULAS = {"end_to_end": "end to end", "specbench_exact": "by Spec-Bench's speed.py"}


@dataclass(frozen=True)
class Counting:
    """How a source counts: its formula of speed, the engine below its speedups, steps of MAT."""

    speed: str
    baseline: str
    mat_counts_prompt: Sequence[str]

    def words(self, method: str) -> str:
        prompt = (
            ", MAT with the prompt's pass as a step" if method in self.mat_counts_prompt else ""
        )
        return f"speed {_FORMULAS[self.speed]} over {self.baseline} plain decoding{prompt}"


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
        return own and all(
            knobs[key] == value or (isinstance(value, list) and knobs[key] in value)
            for key, value in usual.items()
            if key in knobs
        )

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
        if any(self.value(metric) is not None for metric in _COMPARED):
            words.append(self.counting.words(self.method))
        return f"{who}: {how} by {'; '.join(words)}."


class _ExhibitMust(TypedDict):
    paper: str
    exhibit: str
    source: str
    hardware: str
    dataset: str
    claims: list[JsonObject]


class _Exhibit(_ExhibitMust, total=False):
    """A table, figure, log or passage of a source, as the file has it."""

    own: bool
    own_of: list[str]
    counting: JsonObject
    settings: dict[str, JsonObject]


# Of a claim, besides its metrics.
_CLAIM_KEYS = {
    "method", "model", "draft", "temperature", "knobs", "setting", "qualifier", "over", "quoted",
    "speedup_sd",
}  # fmt: skip


@functools.cache
def load_claims(path: Path = CLAIMS_FILE) -> tuple[Claim, ...]:
    """All claims, in the order of the file.

    Raises:
        ResultsError: the file does not follow its own rules; names the place.
    """
    file = yaml.safe_load(path.read_text(encoding="utf-8"))
    exhibits: list[_Exhibit] = file["exhibits"]
    claims: list[Claim] = []
    for place_in_file, exhibit in enumerate(exhibits, start=1):
        place = f"{path.name}, exhibit {place_in_file} ({exhibit.get('paper')})"
        unknown = exhibit.keys() - _Exhibit.__annotations__.keys()
        missing = _ExhibitMust.__annotations__.keys() - exhibit.keys()
        if unknown or missing:
            raise ResultsError(f"{place}: unknown {sorted(unknown)}, missing {sorted(missing)}.")
        for key, name, known in (
            ("paper", exhibit["paper"], file["papers"]),
            ("hardware", exhibit["hardware"], file["hardware"]),
        ):
            if name not in known:
                raise ResultsError(f"{place}: {key} {name!r} is not described.")
        hardware = file["hardware"][exhibit["hardware"]]
        settings = {**file["settings"], **exhibit.get("settings", {})}
        usual = file["counting"].get(exhibit["paper"], file["counting"]["default"])
        counting = _counting(exhibit.get("counting", usual), place)
        for i, given in enumerate(exhibit["claims"], start=1):
            entry = dict(given)
            values = _take_values(entry, file["metrics"].keys(), f"{place}, claim {i}")
            method, model = entry.pop("method"), entry.pop("model")
            claims.append(
                Claim(
                    paper=exhibit["paper"],
                    title=file["papers"][exhibit["paper"]]["title"],
                    exhibit=exhibit["exhibit"],
                    source=exhibit["source"],
                    hardware=hardware["text"],
                    gpu=hardware["gpu"],
                    gpu_count=hardware["count"],
                    dataset=exhibit["dataset"],
                    method=method,
                    model=model,
                    values=values,
                    counting=counting,
                    usual=settings.get(method, {}),
                    size=_size(file["sizes"], model, f"{place}, claim {i}"),
                    own=exhibit.get("own", False) or method in exhibit.get("own_of", ()),
                    **entry,
                )
            )
    return tuple(claims)


def _counting(given: JsonObject, place: str) -> Counting:
    if given.keys() != Counting.__annotations__.keys() or (
        given["speed"] not in _FORMULAS or given["baseline"] not in ENGINES
    ):
        raise ResultsError(
            f"{place}: counting is {given}; it has speed ({' or '.join(_FORMULAS)}), baseline "
            f"({' or '.join(ENGINES)}) and mat_counts_prompt (a list of methods)."
        )
    return Counting(**given)


def _take_values(entry: JsonObject, known: Set[str], place: str) -> dict[str, dict[str, float]]:
    """Take the metrics out of an entry that follows the rules: by metric and task."""
    metrics = entry.keys() & known
    unknown = entry.keys() - known - _CLAIM_KEYS
    if unknown or not metrics or not {"method", "model"} <= entry.keys():
        raise ResultsError(
            f"{place}: unknown {sorted(unknown)}, metrics {sorted(metrics)}; it must have a "
            "method, a model and a metric."
        )
    if entry.get("qualifier") not in (None, *QUALIFIERS):
        raise ResultsError(f"{place}: qualifier {entry['qualifier']!r}; use one of {QUALIFIERS}.")
    if bool(metrics & {"gain", "speed_ratio", "load_ratio"}) != ("over" in entry):
        raise ResultsError(f"{place}: `over` goes with gain, speed_ratio and load_ratio alone.")
    values: dict[str, dict[str, float]] = {}
    for metric in sorted(metrics):
        value = entry.pop(metric)
        by_task = value if isinstance(value, dict) else {OVERALL: value}
        if not all(isinstance(v, int | float) and v == v for v in by_task.values()):
            raise ResultsError(f"{place}: {metric} must be numbers.")
        values[metric] = {task: float(value) for task, value in by_task.items()}
    return values


def _size(sizes: Mapping[str, float], model: str, place: str) -> float | None:
    if _NO_MODEL.fullmatch(model):
        return None
    if model not in sizes:
        raise ResultsError(f"{place}: the size of model {model!r} is not stated under `sizes`.")
    return float(sizes[model])


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
        and not _NO_MODEL.fullmatch(claim.model)
        and any(claim.value(metric) is not None for metric in (*_COMPARED, "tokens_per_s"))
    )


def find_claim(run: Run, label: str, method: str, claims: Sequence[Claim]) -> Claim | None:
    """The claim that comes closest to a label of a run.

    Of the claims about the method, the data set and the settings, those about the same model come
    first, then the model nearest in size, then those on the same hardware, those that name
    settings, those by the method's authors, and last the order of the file.
    """
    knobs = run.knobs(label)
    gpus = run.gpus
    fitting = [
        claim
        for claim in claims
        if claim.method == method
        and _applies(claim, run.dataset, run.temperature)
        and (claim.setting in (None, label))
        and claim.fits(knobs)
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
