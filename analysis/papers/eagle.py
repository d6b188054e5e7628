"""EAGLE-3 (arXiv 2503.01840): Table 1, trained heads beside methods without."""

from __future__ import annotations

from analysis.papers.reproduction import (
    Reproduction,
    data_set_figures,
    label_column,
    settings_tables,
)

PAPER = "eagle"
_TEXT = (
    "Of the paper's five data sets the three that are here; its Alpaca, CNN/DM and means stand in "
    "the ledger of claims alone."
)

_table1 = settings_tables(
    "EAGLE-3, Table 1",
    {"method": label_column, "temperature": lambda entry: f"{entry.run.temperature:g}"},
    PAPER,
    "eagle3_table1",
    text=_TEXT,
)


REPRODUCTIONS = (
    Reproduction(
        "eagle3_table1", "EAGLE-3, Table 1", _table1,
        data_set_figures("EAGLE-3, Table 1", PAPER, "eagle3_table1"),
    ),
)  # fmt: skip
