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
MEAN = "mean"  # a column: what the source prints as the mean of the columns before it
_ROUNDING = 0.0051  # half of a printed mean's last digit
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

    columns: list[str | JsonObject]
    metrics: list[str]
    own: bool
    own_of: list[str]
    counting: JsonObject
    settings: dict[str, dict[str, object]]
    terms: dict[str, object]


# Of a claim, besides its metrics.
_CLAIM_KEYS = {
    "method", "model", "draft", "temperature", "knobs", "setting", "qualifier", "over", "quoted",
    "speedup_sd",
}  # fmt: skip

# The compiled parser where there is one: the other takes a second.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Metrics that compare with the method in `over`.
_OVER = {"gain", "speed_ratio", "load_ratio", "mat_gain"}


@functools.cache
def load_claims(path: Path = CLAIMS_FILE) -> tuple[Claim, ...]:
    """All claims, in the order of the file.

    Raises:
        ResultsError: the file does not follow its own rules; names the place.
    """
    file = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
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
        entries = [
            (*of_a_cell, f"{place}, claim {i}")
            for i, given in enumerate(exhibit["claims"], start=1)
            for of_a_cell in _by_cell(exhibit, given, f"{place}, claim {i}")
        ]
        for entry, dataset, source, where in entries:
            values = _take_values(entry, file["metrics"].keys(), where)
            method, model = entry.pop("method"), entry.pop("model")
            usual = dict(settings.get(method) or {})
            terms = _terms(file, exhibit, entry.get("draft"), usual.pop("corpus", None))
            claims.append(
                Claim(
                    paper=exhibit["paper"],
                    title=file["papers"][exhibit["paper"]]["title"],
                    exhibit=exhibit["exhibit"],
                    source=source,
                    hardware=hardware["text"],
                    gpu=hardware["gpu"],
                    gpu_count=hardware["count"],
                    dataset=dataset,
                    method=method,
                    model=model,
                    values=values,
                    counting=counting,
                    usual=usual,
                    terms=terms,
                    size=_size(file["sizes"], model, where),
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


def _by_cell(exhibit: _Exhibit, row: JsonObject, place: str) -> list[tuple[JsonObject, str, str]]:
    """An entry with its data set and source, or of a table with ``columns`` one for each cell."""
    dataset, source = exhibit["dataset"], exhibit["source"]
    if "columns" not in exhibit:
        return [(dict(row), dataset, source)]
    columns, metrics = exhibit["columns"], exhibit["metrics"]
    rest = dict(row)
    differing = rest.pop("mean_differs", [])
    cells = [
        dict(zip(metrics, map(float, cell.split("/")), strict=True)) if cell != "-" else {}
        for cell in str(rest.pop("cells")).split()
    ]
    if len(cells) != len(columns):
        raise ResultsError(f"{place}: cells must be {len(columns)}, with - for none.")
    off: dict[str, float] = {}
    if MEAN in columns and all(cells):
        for metric, printed in cells[-1].items():
            mean = sum(cell[metric] for cell in cells[:-1]) / (len(cells) - 1)
            if abs(mean - printed) > _ROUNDING:
                off[metric] = mean
    if list(off) != differing:
        raise ResultsError(
            f"{place}: its cells' mean is not the printed one for {list(off)}; mean_differs says "
            f"{differing}."
        )
    words = "".join(f"; its cells' mean {metric} is {mean:.2f}" for metric, mean in off.items())
    return [
        ({**rest, **cell}, column, f"{source}{words if column == MEAN else ''}")
        if isinstance(column, str)
        else ({**rest, **column, **cell}, dataset, source)
        for column, cell in zip(columns, cells, strict=True)
        if cell
    ]


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
    if bool(metrics & _OVER) != ("over" in entry):
        raise ResultsError(f"{place}: `over` goes with {', '.join(sorted(_OVER))} alone.")
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
) -> dict[str, object]:
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
