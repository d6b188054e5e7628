"""Measurements that no run of ``run.py`` shows; this file: what the sections share."""

import time
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
from rich.console import Console

from specbench.results.fitted_table import FittedTable

# Whole rows also where the output is not a terminal.
console = Console(width=130)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console.print(FittedTable(pd.DataFrame([*rows], columns=[*columns]), title))
