"""Types of the ``dataset`` group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# OmegaConf's mark of a value that must be given. Weights load without OmegaConf, which the GPU
# check relies on.
MISSING: Any = "???"

SPECIAL_TOKENS = ("parse", "text")
PARTS = ("all", "selection")
ORDERS = ("interleaved", "file")


@dataclass
class HubConfig:
    """Where a data set lies on the hub.

    Attributes:
        configs: configurations to read one after the other.
        configs_are_folders: they are folders of data files, not named configurations.
        rows_per_config: rows to keep of each; null keeps all.
        columns: what differs from ``dataset.columns`` there.
    """

    id: str = MISSING
    revision: str = "main"
    split: str = "test"
    configs: list[str | None] = field(default_factory=lambda: [None])
    configs_are_folders: bool = False
    rows_per_config: int | None = None
    columns: dict[str, str | None] = field(default_factory=dict)


@dataclass
class ColumnsConfig:
    """Which column holds what; null: there is none.

    Attributes:
        id: becomes ``case_id``; null takes the line number, from 1.
        turns: the user's turns, a list of strings; null builds one turn by ``dataset.prompt``.
    """

    id: str | None = None
    turns: str | None = None
    category: str | None = None
    reference: str | None = None


@dataclass
class RowsConfig:
    """Keeps the rows whose integer ``column`` (null: line number) lies in ``first .. last``."""

    column: str | None = None
    first: int = MISSING
    last: int = MISSING


@dataclass
class DatasetConfig:
    """The questions.

    Attributes:
        path: a file of one JSON object a line; wins over ``file`` and the hub.
        file: the file's name below ``data_dir``.
        shipped: ``file`` comes with the project, below ``assets``.
        hub: where it lies on the hub; null: it does not.
        fetch: how a missing file is brought here.
        columns: which column holds what.
        rows: which rows belong to it; null: all.
        prompt_form: which of ``prompts`` builds the turn.
        prompts: templates in the words of ``str.format`` over a row's columns.
        shots: a file below ``data_dir``, one JSON object a line: worked examples, which stand where
            a prompt form has ``{shots}``.
        shot: template of one of them, over the file's columns.
        raw: turns are given to the model as they are, without a chat template.
        task: the task of every case; null derives it from the category.
        category: the category of every case where there is no such column.
        tasks: keep these tasks; null keeps all.
        limit: cases at most.
        sample: how ``limit`` chooses: ``head``, or ``stratified``: evenly over the tasks and
            evenly spaced within each.
        selection: ids of the questions that settings are chosen by.
        part: which questions: ``all`` (of which a ``limit`` below their number takes none of
            ``selection``), or ``selection``.
        shuffle: seed of a shuffle; null keeps the order. It comes before a ``head`` sample, which
            is then a random one, and after a ``stratified`` one, which keeps its questions.
        order: how the chosen cases follow each other. ``interleaved``: tasks mixed evenly, so that
            a machine that slows down meanwhile slows all tasks alike; ``file``: as in the file, or
            as ``shuffle`` mixed them, for methods that learn from case to case.
        special_tokens: what a special token's text in a question is: ``parse``: that token, as in
            transformers; ``text``: the characters that it is written with.
        dialogue: ``ar``: later turns see the plain greedy answers; ``own``: the method's own.
    """

    name: str = MISSING
    path: str | None = None
    file: str | None = None
    shipped: bool = False
    hub: HubConfig | None = None
    fetch: str | None = None
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    rows: RowsConfig | None = None
    prompt_form: str = "default"
    prompts: dict[str, str] = field(default_factory=dict)
    shots: str | None = None
    shot: str = ""
    raw: bool = False
    task: str | None = None
    category: str | None = None
    tasks: list[str] | None = None
    limit: int | None = None
    sample: str = "head"
    selection: list[int] = field(default_factory=list)
    part: str = "all"
    shuffle: int | None = None
    order: str = "${specbench.case_order:${state_scope},${dataset.shuffle}}"
    special_tokens: str = "parse"
    dialogue: str = "ar"
    source: str = ""
