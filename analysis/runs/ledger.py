"""The ledger of claims: ``claims.yaml``, read and held to its own rules."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from analysis.runs.claims import NO_MODEL, Claim, Counting
from specbench.errors import ResultsError
from specbench.results.tasks import OVERALL

CLAIMS_FILE = Path(__file__).with_name("claims.yaml")
MEAN = "mean"  # a column: what the source prints as the mean of the columns before it
_ROUNDING = 0.0051  # half of a printed mean's last digit
# The compiled parser where there is one: the other takes a second.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Settings or terms by key; a claim by key, as the file has it.
_Given = dict[str, object]
_T = TypeVar("_T", bound=BaseModel)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Hardware(_Part):
    text: str
    gpu: str | None
    count: int


class _Paper(_Part):
    title: str
    where: str
    terms: _Given = {}


class _Exhibit(_Part):
    """A table, figure, log or passage of a source; the keys are told at the file's head."""

    paper: str
    exhibit: str
    source: str
    hardware: str
    dataset: str
    claims: list[_Given]
    columns: list[str | _Given] | None = None
    metrics: list[str] = []
    own: bool = False
    own_of: list[str] = []
    counting: Counting | None = None
    settings: dict[str, _Given | None] = {}
    terms: _Given = {}


class _File(_Part):
    schema_version: int
    settings: dict[str, _Given | None]
    drafts: dict[str, str]
    counting: dict[str, Counting]
    sizes: dict[str, float]
    metrics: dict[str, str]
    hardware: dict[str, _Hardware]
    papers: dict[str, _Paper]
    exhibits: list[_Given]


def _checked(kind: type[_T], given: object, place: str) -> _T:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ResultsError(f"{place}: {'; '.join(reasons)}.") from error


@functools.cache
def load_claims(path: Path = CLAIMS_FILE) -> tuple[Claim, ...]:
    """All claims, in the order of the file.

    Raises:
        ResultsError: the file does not follow its own rules; names the place.
    """
    file = _checked(_File, yaml.load(path.read_text(encoding="utf-8"), _LOADER), path.name)
    claims: list[Claim] = []
    for number, given in enumerate(file.exhibits, start=1):
        place = f"{path.name}, exhibit {number} ({given.get('paper')})"
        exhibit = _checked(_Exhibit, given, place)
        for key, name, known in (
            ("paper", exhibit.paper, file.papers),
            ("hardware", exhibit.hardware, file.hardware),
        ):
            if name not in known:
                raise ResultsError(f"{place}: {key} {name!r} is not described.")
        for i, row in enumerate(exhibit.claims, start=1):
            where = f"{place}, claim {i}"
            claims += [_claim(file, exhibit, cell, where) for cell in _by_cell(exhibit, row, where)]
    return tuple(claims)


def _claim(file: _File, exhibit: _Exhibit, row: _Given, place: str) -> Claim:
    """A claim of a row (or of a cell of it), with what the file says of its place and method."""
    metrics = sorted(row.keys() & file.metrics.keys())
    by_task = {key: v if isinstance(v := row[key], dict) else {OVERALL: v} for key in metrics}
    method, model, draft = (str(row.get(key)) for key in ("method", "model", "draft"))
    if model not in file.sizes and not NO_MODEL.fullmatch(model):
        raise ResultsError(f"{place}: the size of model {model!r} is not stated under `sizes`.")
    hardware, paper = file.hardware[exhibit.hardware], file.papers[exhibit.paper]
    usual = dict({**file.settings, **exhibit.settings}.get(method) or {})
    terms = {**paper.terms, "corpus": usual.pop("corpus", None)}
    terms |= {"draft": file.drafts[draft] if "draft" in row else None, **exhibit.terms}
    if isinstance(questions := terms.get("questions"), str):
        first, last = map(int, questions.split(".."))
        terms["questions"] = [str(number) for number in range(first, last + 1)]
    about = {
        "paper": exhibit.paper,
        "title": paper.title,
        "exhibit": exhibit.exhibit,
        "source": exhibit.source,
        "hardware": hardware.text,
        "gpu": hardware.gpu,
        "gpu_count": hardware.count,
        "dataset": exhibit.dataset,
        "values": by_task,
        "counting": exhibit.counting or file.counting.get(exhibit.paper, file.counting["default"]),
        "usual": usual,
        "terms": {key: value for key, value in terms.items() if value is not None},
        "size": None if NO_MODEL.fullmatch(model) else file.sizes[model],
        "own": exhibit.own or method in exhibit.own_of,
    }
    # A table's column may tell its data set apart, and nothing else is the exhibit's and a row's.
    if unknown := row.keys() & about.keys() - {"dataset", "source"}:
        raise ResultsError(f"{place}: unknown {sorted(unknown)}.")
    return _checked(Claim, about | {k: row[k] for k in row if k not in by_task}, place)


def _by_cell(exhibit: _Exhibit, row: _Given, place: str) -> list[_Given]:
    """The row, or of a table with ``columns`` one for each cell, with its data set and source."""
    columns, metrics = exhibit.columns, exhibit.metrics
    if columns is None:
        return [row]
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
    made = []
    for column, cell in zip(columns, cells, strict=True):
        own = {"dataset": column} if isinstance(column, str) else column
        if column == MEAN:
            own["source"] = exhibit.source + words
        made += [{**rest, **own, **cell}] if cell else []
    return made
