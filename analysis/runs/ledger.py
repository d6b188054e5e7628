"""The ledger of claims: ``claims.yaml``, read and held to its own rules."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TypedDict

import yaml

from analysis.runs.claims import FORMULAS, NO_MODEL, Claim, Counting
from specbench.errors import ResultsError
from specbench.results.statistics.roofline import ENGINES
from specbench.results.tasks import OVERALL
from specbench.storage.jsonl import JsonObject

CLAIMS_FILE = Path(__file__).with_name("claims.yaml")
QUALIFIERS = ("up to", "about", "more than", "less than")


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
    terms: JsonObject


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
        counted = file["counting"].get(exhibit["paper"], file["counting"]["default"])
        counting = _counting(exhibit.get("counting", counted), place)
        for i, given in enumerate(exhibit["claims"], start=1):
            entry = dict(given)
            values = _take_values(entry, file["metrics"].keys(), f"{place}, claim {i}")
            method, model = entry.pop("method"), entry.pop("model")
            usual = dict(settings.get(method) or {})
            terms = _terms(file, exhibit, entry.get("draft"), usual.pop("corpus", None))
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
                    usual=usual,
                    terms=terms,
                    size=_size(file["sizes"], model, f"{place}, claim {i}"),
                    own=exhibit.get("own", False) or method in exhibit.get("own_of", ()),
                    **entry,
                )
            )
    return tuple(claims)


def _counting(given: JsonObject, place: str) -> Counting:
    if given.keys() != Counting.__annotations__.keys() or (
        given["speed"] not in FORMULAS or given["baseline"] not in ENGINES
    ):
        raise ResultsError(
            f"{place}: counting is {given}; it has speed ({' or '.join(FORMULAS)}), baseline "
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


def _terms(
    file: JsonObject, exhibit: _Exhibit, draft: str | None, corpus: str | None
) -> JsonObject:
    """A claim's terms: the paper's, the method's corpus, the exhibit's; questions as a list."""
    terms = {**file["papers"][exhibit["paper"]].get("terms", {}), "corpus": corpus}
    terms |= {"draft": file["drafts"][draft] if draft else None, **exhibit.get("terms", {})}
    if isinstance(terms.get("questions"), str):
        first, last = map(int, terms["questions"].split(".."))
        terms["questions"] = [str(number) for number in range(first, last + 1)]
    return {key: value for key, value in terms.items() if value is not None}


def _size(sizes: Mapping[str, float], model: str, place: str) -> float | None:
    if NO_MODEL.fullmatch(model):
        return None
    if model not in sizes:
        raise ResultsError(f"{place}: the size of model {model!r} is not stated under `sizes`.")
    return float(sizes[model])
