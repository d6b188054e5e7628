"""Measurements that no run of ``run.py`` shows; this file: what the sections share."""

from collections.abc import Iterable, Sequence

import pandas as pd
from rich.console import Console

from specbench.results.fitted_table import FittedTable

# Whole rows also where the output is not a terminal.
console = Console(width=130)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console.print(FittedTable(pd.DataFrame([*rows], columns=[*columns]), title))
