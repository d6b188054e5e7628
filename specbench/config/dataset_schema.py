"""Types of the ``dataset`` group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING

from specbench.config.limits import ASIDE, Group, OneOf, Positive, Text

SPECIAL_TOKENS = ("parse", "text")
PARTS = ("all", "selection")
ORDERS = ("interleaved", "file")


@dataclass
class HubConfig(Group):
    """Where a data set lies on the hub."""

    id: str = MISSING
    revision: str = "main"
    split: str = "test"
    configs: list[str | None] = field(default_factory=lambda: [None])  # read one after the other
    configs_are_folders: bool = False  # folders of data files, not named configurations
    rows_per_config: int | None = None  # to keep of each; null: all
    columns: dict[str, str | None] = field(default_factory=dict)  # other than `dataset.columns`


@dataclass
class ColumnsConfig(Group):
    """Which column holds what; null: there is none."""

    id: str | None = None  # becomes `case_id`; null: the line number, from 1
    turns: str | None = None  # the user's turns, a list of texts; null: one turn by a prompt form
    category: str | None = None
    reference: str | None = None


@dataclass
class RowsConfig(Group):
    """Keeps the rows whose integer ``column`` (null: line number) lies in ``first .. last``."""

    column: str | None = None
    first: int = MISSING
    last: int = MISSING


@dataclass
class DatasetConfig(Group):
    """The questions."""

    name: str = MISSING
    path: Text | None = None  # a file of one JSON object a line; wins over `file` and the hub
    file: str | None = None  # its name below `data_dir`
    shipped: bool = False  # `file` comes with the project, below `assets`
    hub: HubConfig | None = None
    fetch: Annotated[str | None, ASIDE] = None  # how a missing file is brought here
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    rows: RowsConfig | None = None  # null: all
    prompt_form: str = "default"  # which of `prompts` builds the turn
    prompts: dict[str, str] = field(default_factory=dict)  # `str.format` over a row's columns
    # Worked examples, which stand where a prompt form has {shots}: a file below `data_dir`, one
    # JSON object a line, and a template over its columns.
    shots: str | None = None
    shot: str = ""
    raw: bool = False  # the model is given turns as they are, without a chat template
    task: str | None = None  # of every case; null: derived from the category
    category: str | None = None  # of every case where there is no such column
    tasks: list[str] | None = None  # those to keep; null: all
    limit: Positive | None = None  # cases at most
    # How `limit` chooses: the first, or evenly over the tasks and evenly spaced within each.
    sample: Annotated[str, OneOf("head", "stratified")] = "head"
    selection: list[int] = field(default_factory=list)  # questions that settings are chosen by
    # `all`: of it a limit below the number of questions takes none of `selection`.
    part: Annotated[str, OneOf(*PARTS)] = "all"
    # Seed of a shuffle. It comes before a `head` sample, which is then a random one, and after a
    # `stratified` one, which keeps its questions.
    shuffle: int | None = None
    # interleaved: tasks mixed evenly, so that a machine that slows down meanwhile slows all tasks
    # alike; file: as in the file or as shuffled, for methods that learn from case to case.
    order: Annotated[str, OneOf(*ORDERS)] = (
        "${specbench.case_order:${state_scope},${dataset.shuffle}}"
    )
    # What a special token's text in a question is: that token, as in transformers, or characters.
    special_tokens: Annotated[str, OneOf(*SPECIAL_TOKENS)] = "parse"
    # ar: later turns see the plain greedy answers; own: the method's own.
    dialogue: Annotated[str, OneOf("ar", "own")] = "ar"
    source: Annotated[str, ASIDE] = ""
