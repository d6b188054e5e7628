"""The prompts: data sets as lists of cases, from local files or from the hub.

Reading is strict. A line that is not what its yaml promises stops the run with file, line number
and reason: a benchmark that quietly skips lines measures something else. The yaml says which
column holds what; nothing here knows a data set by name.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from specbench.config.schema import DatasetConfig, RowsConfig
from specbench.errors import DatasetError, first_line, nearest, unknown_name
from specbench.paths import ASSETS, typed_path
from specbench.results.tasks import OVERALL, task_of
from specbench.storage.jsonl import BYTE_ORDER_MARK, parse_json

_COLUMNS = ("id", "turns", "category", "reference")
_HUB_ERROR_CHARACTERS = 300
_ONE_LINE_EACH = (
    "Type dataset.path=FILE with one JSON object a line (prompt; or question_id, category, turns), "
    "or FILE.txt with a prompt a line."
)


@dataclass(frozen=True, slots=True)
class Case:
    """One question with all its turns.

    Attributes:
        case_id: the data set's own id, else the line number (from 1).
        category: as in the data.
        task: one of Spec-Bench's six where the category belongs to one, else the data set's.
        turns: what the user says, turn by turn.
        reference: the data set's own answer, or None; never shown to a model.
    """

    case_id: str
    category: str
    task: str
    turns: tuple[str, ...]
    reference: Any = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A record of a data set, with the file or hub's part that messages name."""

    source: str
    number: int
    values: Mapping[str, Any]
    columns: Mapping[str, str | None]

    def error(self, reason: str) -> DatasetError:
        return DatasetError(f"{self.source}, line {self.number}: {reason}")

    def column(self, name: str) -> Any:
        if name not in self.values:
            close = nearest(name, self.values)
            others = f"the nearest is {close!r}" if close else f"it has {', '.join(self.values)}"
            raise self.error(f"the column {name!r} is missing ({others})")
        return self.values[name]


def load_cases(dataset: DatasetConfig, data_dir: str | Path | None = None) -> list[Case]:
    """Load the cases after task filter, limit and shuffle, in the order of the run.

    ``data_dir`` is the folder that is searched for ``dataset.file`` before the hub.

    Raises:
        DatasetError: the data cannot be had, a line is malformed, or nothing is left.
        ConfigurationError: an unknown task.
    """
    cases: dict[str, Case] = {}
    numbers: dict[str, int] = {}
    source = str(dataset.path or dataset.name)
    shots = _shots(dataset, data_dir)
    path = local_file(dataset, data_dir)
    columns = {name: getattr(dataset.columns, name) for name in _COLUMNS}
    for row in hub_rows(dataset, columns) if path is None else _file_rows(path, columns):
        source = row.source
        if _selected(row, dataset.rows):
            case = _case(row, dataset, shots)
            if case.case_id in cases:
                earlier = numbers[case.case_id]
                raise row.error(f"line {earlier} has the id {case.case_id!r} already")
            cases[case.case_id], numbers[case.case_id] = case, row.number
    if not cases:
        raise DatasetError(
            f"{source} has no questions for dataset={dataset.name}. A question is a line: JSON "
            "with a prompt, or in FILE.txt the prompt itself."
        )
    return _select(list(cases.values()), dataset)


def prompt_set_hash(cases: Iterable[Case]) -> str:
    """Hash ids, categories and turns in order, as SHA-256 hex; equal questions have equal ones."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(json.dumps([case.case_id, case.category, case.turns]).encode() + b"\n")
    return digest.hexdigest()


def local_file(dataset: DatasetConfig, data_dir: str | Path | None) -> Path | None:
    """Find the local file of a data set; None where it must come from the hub.

    Raises:
        DatasetError: there is neither a file nor a hub id, or a named file or folder is missing.
    """
    if dataset.path is not None:
        path = typed_path(dataset.path)
        if not path.is_file():
            raise DatasetError(f"dataset.path={path} is not a file. {_ONE_LINE_EACH}")
        return path
    if dataset.file is None:
        raise DatasetError(f"dataset={dataset.name} needs a file. {_ONE_LINE_EACH}")
    if dataset.shipped:
        return ASSETS / dataset.file
    if data_dir is not None:
        folder = typed_path(data_dir)
        if not folder.is_dir():
            raise DatasetError(f"data_dir={folder} is not a folder. Type data_dir=FOLDER.")
        if (folder / dataset.file).is_file():
            return folder / dataset.file
    if dataset.hub is None:
        raise DatasetError(_missing(dataset, dataset.file, data_dir, "it is not on the hub"))
    return None


def _missing(
    dataset: DatasetConfig, file: str | None, data_dir: str | Path | None, reason: str
) -> str:
    where = f"not in data_dir={data_dir}" if data_dir is not None else "data_dir is not set"
    fetch = f", or, with network, {dataset.fetch}" if dataset.fetch else ""
    return (
        f"dataset={dataset.name}: the file {file} is missing ({where}) and {reason}."
        f" Place {file} into a folder and type data_dir=FOLDER{fetch}."
    )


def _file_rows(path: Path, columns: Mapping[str, str | None]) -> Iterator[_Row]:
    packed = path.suffix == ".gz"
    kind = path.with_suffix("").suffix if packed else path.suffix
    if kind == ".parquet":
        yield from _parquet_rows(path, columns)
        return
    try:
        with cast("IO[bytes]", gzip.open(path) if packed else path.open("rb")) as handle:
            for number, line in enumerate(handle, start=1):
                row = _Row(str(path), number, {}, columns)
                if (values := _values(row, line, kind)) is not None:
                    yield replace(row, values=values)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{path}: not a whole gzip file ({error}).") from error


def _parquet_rows(path: Path, columns: Mapping[str, str | None]) -> Iterator[_Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        records = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DatasetError(f"{path}: not a parquet file ({first_line(error)}).") from error
    for number, values in enumerate(records, start=1):
        yield _Row(str(path), number, values, columns)


def _values(row: _Row, line: bytes, kind: str) -> dict[str, Any] | None:
    try:
        text = line.decode().strip(BYTE_ORDER_MARK).strip()
        if not text or kind == ".txt":
            return {"prompt": text} if text else None
        values = parse_json(line)
    except UnicodeDecodeError as error:
        raise row.error(f"not UTF-8 ({error.reason})") from error
    except ValueError as error:
        raise row.error(
            f'not JSON ({error}). A line must be as {{"prompt": "..."}}; only in FILE.txt it is '
            "the prompt itself."
        ) from error
    if not isinstance(values, dict):
        raise row.error(f"not a JSON object but a {type(values).__name__}")
    return values


def hub_rows(dataset: DatasetConfig, columns: Mapping[str, str | None]) -> Iterator[_Row]:
    """Yield the rows of a data set on the hub; case ids are line numbers where it has none.

    Raises:
        DatasetError: the hub cannot be reached or does not have it.
    """
    import datasets

    hub = dataset.hub
    assert hub is not None, "local_file refuses a data set that is nowhere"
    number = 0
    for config in hub.configs:
        try:
            part = {"data_dir" if hub.configs_are_folders else "name": config}
            if hub.files:
                at = f"hf://datasets/{hub.id}@{hub.revision}"
                files = [f"{at}/{file}" for file in hub.files]
                rows = datasets.load_dataset("json", data_files=files, split="train")
            else:
                rows = datasets.load_dataset(hub.id, split=hub.split, revision=hub.revision, **part)
        except Exception as error:
            # The library passes on whatever its network and file layers raise.
            text = " ".join(str(error).split())[:_HUB_ERROR_CHARACTERS] or type(error).__name__
            reason = f"the hub (id {hub.id}, revision {hub.revision}) did not give it: {text}"
            raise DatasetError(_missing(dataset, dataset.file, None, reason)) from error
        source = f"hub:{hub.id}/{config or 'default'}"
        for values in islice(rows, hub.rows_per_config):
            number += 1
            record = {key: values[key] for key in hub.keep or values}
            yield _Row(source, number, record, {**columns, **hub.columns})


def _selected(row: _Row, rows: RowsConfig | None) -> bool:
    if rows is None:
        return True
    value = row.number if rows.column is None else row.column(rows.column)
    if type(value) is not int:
        raise row.error(f"the column {rows.column!r} must be a whole number, not {value!r}")
    return rows.first <= value <= rows.last


def _case(row: _Row, dataset: DatasetConfig, shots: str) -> Case:
    columns, values = row.columns, row.values
    # A user's file may have bare prompts: other columns are then optional.
    bare = dataset.file is None and columns["turns"] not in values
    if bare and "prompt" not in values:
        bare, close = False, nearest("prompt", values)
        if close is not None:
            raise row.error(f"the column {close!r} is unknown: did you mean 'prompt'?")
    if bare:
        columns = {key: name if name in values else None for key, name in columns.items()}
    case_id = row.number if columns["id"] is None else row.column(columns["id"])
    if type(case_id) not in (int, str) or case_id == "":
        raise row.error(f"the id must be a number or a text, not {case_id!r}")
    category = dataset.category or dataset.name
    if columns["category"] is not None:
        category = row.column(columns["category"])
    if not isinstance(category, str) or not category:
        raise row.error(f"the category must be a text, not {category!r}")
    if bare:
        turns = _texts(row, "prompt", [values["prompt"]])
    elif columns["turns"]:
        turns = _texts(row, columns["turns"], row.column(columns["turns"]))
    else:
        turns = (_filled(dataset.prompts[dataset.prompt_form], row, shots),)
    if dataset.refuse and any(turn.startswith(dataset.refuse) for turn in turns):
        raise row.error(
            f"question {case_id!r} holds {dataset.refuse!r} in place of its text: the data set was "
            f"not resolved. conf/dataset/{dataset.name}.yaml says by which script"
        )
    task = dataset.task or task_of(category)
    if OVERALL in (category, task):
        raise row.error(f"tables call all categories together {OVERALL!r}: rename this category")
    reference = values.get(columns["reference"]) if columns["reference"] else None
    return Case(str(case_id), category, task, turns, reference)


def _texts(row: _Row, column: str, turns: Any) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise row.error(f"{column!r} must be a list of texts that is not empty")
    for i, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise row.error(f"turn {i} in {column!r} must be a text that is not empty")
    return tuple(turns)


def _shots(dataset: DatasetConfig, data_dir: str | Path | None) -> str:
    """Join the worked examples of the chosen prompt form; "" where it has none."""
    if "{shots}" not in dataset.prompts.get(dataset.prompt_form, ""):
        return ""
    path = typed_path(data_dir) / str(dataset.shots) if data_dir is not None else None
    if path is None or not path.is_file():
        reason = f"dataset.prompt_form={dataset.prompt_form} begins with the examples in it"
        raise DatasetError(
            f"{_missing(dataset, dataset.shots, data_dir, reason)} It has one JSON object a line "
            "(question, answer). Or type dataset.prompt_form=default for prompts without examples."
        )
    return "".join(_filled(dataset.shot, row) for row in _file_rows(path, {}))


def _filled(template: str, row: _Row, shots: str = "") -> str:
    """Fill a template with a row's columns.

    ``{column_lines}`` is a list column, one item a line; ``{column_stripped}`` a text without white
    space around it; ``{column_below}`` the text below an empty line, nothing if there is none.
    """
    values = {"shots": shots, **row.values}
    for key, value in row.values.items():
        if isinstance(value, list):
            values[f"{key}_lines"] = "\n".join(map(str, value))
        elif isinstance(value, str):
            values[f"{key}_stripped"] = value.strip()
            values[f"{key}_below"] = f"\n\n{value}" if value.strip() else ""
    try:
        prompt = template.format_map(values)
    except KeyError as error:
        row.column(str(error.args[0]))
        raise
    except (IndexError, TypeError, ValueError, AttributeError) as error:
        raise row.error(f"the prompt cannot be built from it ({error})") from error
    if not prompt.strip():
        raise row.error("the prompt built from it is empty")
    return prompt


def _select(cases: list[Case], dataset: DatasetConfig) -> list[Case]:
    selection = set(map(str, dataset.selection))
    if dataset.part == "selection":
        cases = [case for case in cases if case.case_id in selection]
        if not cases:
            raise DatasetError(f"dataset={dataset.name} has none of the ids in dataset.selection.")
    if dataset.tasks is not None:
        names = {case.task for case in cases} | {case.category for case in cases}
        for name in dataset.tasks:
            if name not in names:
                raise unknown_name("task in dataset.tasks:", str(name), names)
        cases = [case for case in cases if {case.task, case.category}.intersection(dataset.tasks)]
        if not cases:
            raise DatasetError("dataset.tasks=[] leaves no case: name a task, or type null.")
    limit = dataset.limit or len(cases)
    if dataset.part == "all" and limit < len(cases):
        others = [case for case in cases if case.case_id not in selection]
        cases = others if limit <= len(others) else cases
    if limit < len(cases) and dataset.sample == "stratified":
        # Before the shuffle, so that a run in mixed order answers the same questions as the others.
        cases = _stratified(cases, limit)
    if limit < len(cases) and dataset.sample == "hashed":
        chosen = {case.case_id for case in sorted(cases, key=partial(_rank, dataset))[:limit]}
        cases = [case for case in cases if case.case_id in chosen]
    if dataset.shuffle is not None:
        random.Random(dataset.shuffle).shuffle(cases)
    return interleaved(cases[:limit]) if dataset.order == "interleaved" else cases[:limit]


def _rank(dataset: DatasetConfig, case: Case) -> tuple[str, str]:
    text = f"{dataset.sample_seed}:{case.case_id}"
    return hashlib.sha256(text.encode()).hexdigest(), case.case_id


def _by_task(cases: list[Case]) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for i, case in enumerate(cases):
        indices.setdefault(case.task, []).append(i)
    return indices


def interleaved(cases: list[Case]) -> list[Case]:
    """Order the cases so that each task's are evenly spread, in their order."""
    positions = {
        i: (2 * nth + 1) / len(indices)
        for indices in _by_task(cases).values()
        for nth, i in enumerate(indices)
    }
    return [cases[i] for i in sorted(positions, key=positions.__getitem__)]


def _stratified(cases: list[Case], limit: int) -> list[Case]:
    """Choose ``limit`` cases, evenly over the tasks and evenly spaced within each, in order."""
    by_task = _by_task(cases)
    # A round gives one more case to each task that has one left.
    rounds = [(nth, task) for task, indices in by_task.items() for nth in range(len(indices))]
    shares = Counter(task for _, task in sorted(rounds, key=lambda turn: turn[0])[:limit])
    chosen: list[int] = []
    for task, share in shares.items():
        indices = by_task[task]
        # The middles of `share` equal parts: neither the first nor the last case is favoured.
        chosen += [indices[(2 * i + 1) * len(indices) // (2 * share)] for i in range(share)]
    return [cases[index] for index in sorted(chosen)]
