"""A cost surface of passes that others timed: a table of steps, whatever engine and machine.

A step is a line: rows of the pass (or sequences and tokens of each), cached tokens before it,
seconds. Steps of several sequences are left out, since a replay decodes one. Contexts of real
requests are all different, so many of them are gathered around powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from specbench.arrays import FloatArray
from specbench.errors import ConfigurationError, unknown_name
from specbench.replay.cost_surface import CostSurface, Grid
from specbench.storage.hashes import file_sha256
from specbench.system.noted import Gpu, Machine

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_FEWEST_ROWS = 2  # of different width; one of them tells nothing about a draft's price
_CONTEXTS = 16  # so many different ones are kept as they are
_REPEATS = 15  # kept of a cell; odd, so that its median stays
_READERS = ".csv, .json, .jsonl or .parquet"


@dataclass(frozen=True)
class Origin:
    """Whose timings they are: what a table of steps does not say of itself.

    Attributes:
        source: who timed them and where they are published, in words.
        model: its name, as in conf/model where it is there; ``dtype``: of its weights.
        gpu: name of the GPU, or None; then ``cpu`` is the processor's and ``threads`` its threads
            that computed, None where nobody says.
    """

    source: str
    model: str
    dtype: str
    gpu: str | None = None
    cpu: str | None = None
    threads: int | None = None


def read_steps_of_others(
    path: Path,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    unit: str = "s",
) -> pd.DataFrame:
    """The steps of one sequence in a file: ``rows``, ``context`` and ``seconds`` of each.

    Args:
        path: a table.
        columns: its names of ``rows``, ``batch``, ``tokens``, ``context`` and ``seconds``, where
            they differ.
        where: values of other columns that a line must have, as text.
        unit: of the times.

    Raises:
        ConfigurationError: the file cannot be read, lacks a column, holds what is not a time or a
            count, or no step of one sequence.
    """
    table = _read(path)
    names = {name: name for name in ("rows", "batch", "tokens", "context", "seconds")}
    for name, theirs in (columns or {}).items():
        if name not in names:
            raise unknown_name("column of ours", name, names)
        names[name] = theirs
    for column, value in (where or {}).items():
        _need(table, path, column)
        table = table[table[column].astype(str) == value]
        if table.empty:
            raise ConfigurationError(f"{path} has no line with {column}={value}. Leave it out.")
    batch = ("batch",) if names["batch"] in table else ()
    width = "tokens" if batch and names["rows"] not in table else "rows"
    kept = (width, *batch, "context", "seconds")
    found = {name: _numbers(table, path, names[name], name) for name in kept}
    found["seconds"] *= UNITS[unit]
    for name in kept[:-1]:
        least = 0 if name == "context" else 1
        bad = found[name][(found[name] < least) | (found[name] % 1 != 0)]
        if len(bad):
            raise ConfigurationError(
                f"{path}: {names[name]} is {bad.iloc[0]:g}, it must be a whole number from {least}."
            )
    if len(bad := found["seconds"][~(found["seconds"] > 0) | ~np.isfinite(found["seconds"])]):
        raise ConfigurationError(
            f"{path}, line {bad.index[0] + 1} of the table: {names['seconds']} is no positive time."
        )
    found["rows"] = found.pop(width)
    if batch:
        alone = found.pop("batch") == 1
        found = {name: values[alone] for name, values in found.items()}
        if not alone.any():
            raise ConfigurationError(
                f"{path} has no step with {names['batch']} 1, and a replay decodes one sequence. "
                "Name a file of steps that were timed with one request at a time."
            )
    return pd.DataFrame(found)


def imported_surface(steps: pd.DataFrame, origin: Origin, path: Path) -> CostSurface:
    """A surface of such steps; a prompt's pass costs as rows behind the shortest context.

    Args:
        steps: see `read_steps_of_others`.
        origin: whose they are.
        path: the file they came from; its name and hash are kept.

    Raises:
        ConfigurationError: there are too few steps for a grid.
    """
    rows, contexts = steps["rows"], steps["context"].astype(float)
    if contexts.nunique() > _CONTEXTS:
        contexts = (2.0 ** np.log2(contexts.clip(lower=1)).round()).where(contexts > 0, 0.0)
    counts = steps.groupby([rows, contexts]).size().unstack(fill_value=0)
    counts.columns = counts.columns.astype(int)
    counts = _without_gaps(counts)
    if len(counts) < _FEWEST_ROWS or not counts.size:
        raise ConfigurationError(
            f"{path} has too few points: of its {len(steps)} steps "
            f"{int(counts.to_numpy().sum())} remain, of {len(counts)} numbers of rows behind the "
            f"same contexts, and at least {_FEWEST_ROWS} are needed. Add steps of other widths."
        )
    repeats = min(_REPEATS, int(counts.to_numpy().min()))
    repeats -= 1 - repeats % 2
    by_cell = {
        cell: own.to_numpy(dtype=np.float64)
        for cell, own in steps["seconds"].groupby([rows.astype(int), contexts.astype(int)])
    }
    samples = np.array(
        [
            [_evenly(by_cell[r, c], repeats) for c in counts.columns]
            for r in counts.index.astype(int)
        ]
    )
    wide = tuple(int(r) for r in counts.index)
    used = int(counts.to_numpy().sum())
    gpus = [Gpu(name=origin.gpu)] if origin.gpu else []
    machine: Machine = {
        "hardware": {"cpu": origin.cpu, "gpus": gpus},
        "versions": {},
        "git": None,
        "code": None,
        "cuda_settings": {},
    }
    return CostSurface(
        model={
            "name": origin.model,
            "dtype": origin.dtype,
            "device": "cuda" if origin.gpu else "cpu",
            "threads": origin.threads,
            "imported": {
                "source": origin.source,
                "file": path.name,
                "sha256": file_sha256(path),
                "steps": used,
                "steps_left_out": len(steps) - used,
                "prompts": f"as rows behind {counts.columns[0]} cached tokens",
            },
        },
        machine=machine,
        prefill=Grid({"context": wide}, samples[:, 0]),
        tree=Grid({"rows": wide, "context": tuple(int(c) for c in counts.columns)}, samples),
    )


def _read(path: Path) -> pd.DataFrame:
    readers = {
        ".csv": pd.read_csv,
        ".json": pd.read_json,
        ".jsonl": lambda file: pd.read_json(file, lines=True),
        ".parquet": pd.read_parquet,
    }
    if path.suffix not in readers or not path.is_file():
        what = "is not a file" if path.suffix in readers else "is no table that can be read"
        raise ConfigurationError(f"{path} {what}. Name a file that ends in {_READERS}.")
    try:
        table: pd.DataFrame = readers[path.suffix](path)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as a table: {error}.") from error
    if table.empty:
        raise ConfigurationError(f"{path} holds no step.")
    return table


def _need(table: pd.DataFrame, path: Path, column: str, name: str | None = None) -> None:
    if column not in table:
        rename = f" If it has another name, type --columns {name}=THEIRS." if name else ""
        raise ConfigurationError(
            f"{path} has no column {column!r}; it has {', '.join(map(str, table))}.{rename}"
        )


def _numbers(table: pd.DataFrame, path: Path, column: str, name: str) -> pd.Series[float]:
    _need(table, path, column, name)
    numbers = pd.to_numeric(table[column], errors="coerce").astype(float)
    if numbers.isna().any():
        line = int(numbers.isna().to_numpy().argmax())
        raise ConfigurationError(
            f"{path}: {column} is {table[column].iloc[line]!r}, it must be a number."
        )
    return numbers


def _without_gaps(counts: pd.DataFrame) -> pd.DataFrame:
    """A table without empty cells: the line or column with most of them goes, again and again.

    Of several the one with fewest steps.
    """
    while counts.size and (counts == 0).to_numpy().any():
        share = {
            (axis, key): ((line == 0).mean(), -line.sum())
            for axis, lines in ((0, counts.iterrows()), (1, counts.items()))
            for key, line in lines
        }
        axis, key = max(share, key=lambda place: share[place])
        counts = counts.drop(key, axis=axis)
    return counts


def _evenly(values: FloatArray, n: int) -> FloatArray:
    """So many of the values, evenly over their order."""
    found: FloatArray = np.quantile(values, (np.arange(n) + 0.5) / n, method="inverted_cdf")
    return found
