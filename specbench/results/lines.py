"""What the fields of a run's files must be before a number is made of them. Free of torch.

Whoever edits a line by hand, or joins files, can make one that says something else than what was
measured. The types below are checked where a line is read (`specbench.storage.jsonl.read_jsonl`),
not where the program makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

_MOST = 2**31 - 1  # ids and counts are kept as 32-bit numbers
_HUGE = 1e18

Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, le=_MOST)]
Seed = Annotated[int, Strict(), Field(ge=0)]  # of 56 bits
Number = Annotated[float, Strict(), Field(gt=-_HUGE, lt=_HUGE, allow_inf_nan=False)]
Seconds = Annotated[float, Strict(), Field(ge=0, lt=_HUGE, allow_inf_nan=False)]
Ids = list[Count]
OutputIds = list[Annotated[int, Strict(), Field(ge=-1, le=_MOST)]]  # -1: an imported id
Committed = list[Annotated[int, Strict(), Field(ge=1, le=_MOST)]]  # tokens by step
Sources = list[Annotated[int, Strict(), Field(ge=-_MOST, le=_MOST)]]


def one_of(names: Collection[str]) -> AfterValidator:
    """The check of a text that is one of a few."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return name

    return AfterValidator(check)


def _equally_long(rows: list[list[int]]) -> list[list[int]]:
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows of one length")
    return rows


Rows = Annotated[list[Ids], Field(min_length=1), AfterValidator(_equally_long)]


class TurnLine(TypedDict):
    """The turn that a line of a side file is about; such a line may say more."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    label: Text
    case_id: Text
    turn: Count
    repeat: Count


class ErrorLine(TurnLine):
    """A line of ``errors.jsonl``."""

    during: Text
    type: Text
    message: Text


class CandidatesLine(TurnLine):
    """A line of ``candidates.jsonl``; ``top``: ids by row."""

    top: Rows


class AnswerLine(TypedDict):
    """A line of ``dialogue.jsonl``: the plain greedy output of a prompt."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    case_id: Text
    turn: Count
    prompt_sha: Text
    output_ids: Ids


class PackedLine(TypedDict):
    """A turn of a trace pack."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    label: Text
    case_id: Text
    turn: Count
    method: Text
    task: Text
    category: Text
    stream_index: Count
    seed: Seed
    prompt_ids: Ids
    output_ids: Ids
    candidates: Rows | None


turn_line: Callable[[object], TurnLine] = TypeAdapter(TurnLine).validate_python
error_line: Callable[[object], ErrorLine] = TypeAdapter(ErrorLine).validate_python
candidates_line: Callable[[object], CandidatesLine] = TypeAdapter(CandidatesLine).validate_python
answer_line: Callable[[object], AnswerLine] = TypeAdapter(AnswerLine).validate_python
packed_line: Callable[[object], PackedLine] = TypeAdapter(PackedLine).validate_python
ids: Callable[[object], list[int]] = TypeAdapter(Ids).validate_python
