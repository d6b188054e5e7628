"""What a line of a run's files must be before a number is made of it. Free of torch.

Whoever edits a line by hand, or joins files, can make one that says something else than what was
measured. Times are finite; a finished turn took some. Zero stays possible where a clock may say it:
decoding that ended with the prompt's pass, and a drafter without setup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.storage.jsonl import JsonObject

_TEXTS = (
    *("run_key", "label", "method", "model", "dataset", "task", "category", "case_id"),
    *("state_scope", "verifier", "disturbed_by", "started_at", "host", "engine", "numerics"),
    *("prompt_sha", "output_sha"),
)
_COUNTS = (
    *("turn", "repeat", "stream_index", "position", "attempt", "seed"),
    *("n_prompt", "n_new", "n_target_passes", "n_drafted", "n_aux"),
)
_TIMES = ("prefill_s", "decode_s", "drafter_setup_s", "wall_s")
_SHARES = ("cpu_steal", "cpu_waiting", "cpu_others", "cpu_load", "energy_j")  # None where unknown
_LISTS = {"accepted_per_step": 1, "prompt_ids": 0, "output_ids": -1}  # -1: an imported id
_MOST = 2**31  # ids and counts are kept as 32-bit numbers
_HUGE = 1e18
_ROUNDING = 1e-6


def check_record(record: Any) -> None:
    """Types, ranges and times of a ``records.CaseRecord``.

    Raises:
        ValueError: names the field.
    """
    _check_texts(record, _TEXTS)
    for name in _COUNTS:
        _check_count(name, getattr(record, name))
    for name, least in _LISTS.items():
        _check_whole(name, getattr(record, name), least)
    for name in (*_TIMES, *_SHARES):
        value = getattr(record, name)
        if value is None and name in _SHARES:
            continue
        if not _is_number(value) or value < 0:
            raise ValueError(f"{name} is {value!r}, not a number from 0")
    if record.prompt_ids and len(record.prompt_ids) != record.n_prompt:
        raise ValueError(f"n_prompt is {record.n_prompt}, prompt_ids has {len(record.prompt_ids)}")
    if record.n_retokenized is not None:
        _check_count("n_retokenized", record.n_retokenized)
    _check_counted(record)
    _check_served(record.served)
    _check_phases(record.phase_s)
    if record.status != "failed":
        _check_times(record)


def _check_times(record: Any) -> None:
    """Of a finished turn."""
    parts = record.prefill_s + record.decode_s
    if record.timing == "none":
        if record.wall_s or parts:
            raise ValueError("it has times, although timing is none")
        return
    if not record.wall_s:
        raise ValueError("wall_s is 0, and a finished turn takes time")
    if parts and abs(parts - record.wall_s) > _ROUNDING * record.wall_s:
        raise ValueError(f"wall_s is {record.wall_s}, prefill_s + decode_s is {parts}")
    if parts and record.n_target_passes and not record.decode_s:
        raise ValueError(f"decode_s is 0, and {record.n_target_passes} steps take time")


def _check_counted(record: Any) -> None:
    """What drafters and GPUs said, as far as tables and the rule of noise read it."""
    if not isinstance(record.drafter, dict):
        raise ValueError(f"drafter is {record.drafter!r}, not an object")
    for name, value in record.drafter.items():
        if name.startswith(("accepted_from_", "found_by_")):
            _check_count(name, value)
    if record.gpu is not None and not (
        isinstance(record.gpu, list) and all(isinstance(gpu, dict) for gpu in record.gpu)
    ):
        raise ValueError(f"gpu is {record.gpu!r}, not a list of objects")
    for name in ("first_diff", "gap"):
        value = getattr(record.lossless, name)
        if value is not None and not _is_number(value):
            raise ValueError(f"lossless.{name} is {value!r}, not a number")


def _check_served(served: object) -> None:
    """What tables read of a server's turn."""
    if served is None:
        return
    if not isinstance(served, dict):
        raise ValueError(f"served is {served!r}, not an object")
    for name in ("concurrency", "batch", "requests"):
        _check_count(f"served.{name}", served.get(name))
    if not isinstance(served.get("text"), str):
        raise ValueError(f"served.text is {served.get('text')!r}, not a text")
    batch_s = served.get("batch_s")
    if batch_s is not None and not (_is_number(batch_s) and batch_s > 0):
        raise ValueError(f"served.batch_s is {batch_s!r}, not a number above 0")


def _check_phases(phases: object) -> None:
    if phases is None:
        return
    if not isinstance(phases, dict) or not all(_is_number(value) for value in phases.values()):
        raise ValueError(f"phase_s is {phases!r}, not seconds by phase")


def check_turn(line: JsonObject) -> None:
    """The turn that a line of a side file is about.

    Raises:
        ValueError: names the field.
    """
    for name in ("label", "case_id"):
        if not isinstance(_field(line, name), str):
            raise ValueError(f"{name} is {line[name]!r}, not a text")
    for name in ("turn", "repeat"):
        _check_count(name, _field(line, name))


def check_error(line: JsonObject) -> None:
    """A line of ``errors.jsonl``; raises a ValueError that names the field."""
    check_turn(line)
    for name in ("during", "type", "message"):
        if not isinstance(_field(line, name), str):
            raise ValueError(f"{name} is {line[name]!r}, not a text")


def check_trace(line: JsonObject) -> None:
    """A line of ``steps.jsonl``; raises a ValueError that names the field."""
    check_turn(line)
    n = len(_list(line, "committed"))
    for name, least in (("drafted", 0), ("depth", 0), ("committed", 1)):
        _check_whole(name, _list(line, name), least)
    for name in ("drafted", "depth", "sources", "step_s"):
        value = line.get(name)
        if value is None and name in ("sources", "step_s"):
            continue
        if len(_list(line, name)) != n:
            raise ValueError(f"{name} has {len(line[name])} entries for {n} steps")
    for value in line.get("step_s") or ():
        if not _is_number(value) or value < 0:
            raise ValueError(f"step_s holds {value!r}, not a number from 0")
    for sources in line.get("sources") or ():
        if sources is not None:
            _check_whole("sources", sources, -_MOST)


def check_answer(line: JsonObject) -> None:
    """A line of ``dialogue.jsonl``; raises a ValueError that names the field."""
    for name in ("case_id", "prompt_sha"):
        if not isinstance(_field(line, name), str):
            raise ValueError(f"{name} is {line[name]!r}, not a text")
    _check_count("turn", _field(line, "turn"))
    _check_whole("output_ids", _list(line, "output_ids"), 0)


def check_candidates(line: JsonObject) -> None:
    """A line of ``candidates.jsonl``; raises a ValueError that names the field."""
    check_turn(line)
    rows = _list(line, "top")
    if not rows:
        raise ValueError("top is empty")
    for row in rows:
        _check_whole("top", row, 0)
    if len({len(row) for row in rows}) > 1:
        raise ValueError("the rows of top are not equally long")


def check_packed(line: JsonObject) -> None:
    """A turn of a trace pack; raises a ValueError that names the field."""
    check_turn({"repeat": 0, **line})
    for name in ("method", "task", "category"):
        if not isinstance(_field(line, name), str):
            raise ValueError(f"{name} is {line[name]!r}, not a text")
    for name in ("stream_index", "seed"):
        _check_count(name, _field(line, name))
    for name in ("prompt_ids", "output_ids"):
        check_ids(name, _list(line, name))
    if _field(line, "candidates") is not None:
        check_candidates({"repeat": 0, **line, "top": line["candidates"]})


def check_ids(name: str, values: object) -> None:
    """A list of token ids; raises a ValueError that names it."""
    _check_whole(name, values, 0)


def _check_texts(record: object, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(value := getattr(record, name), str):
            raise ValueError(f"{name} is {value!r}, not a text")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a whole number from 0")
    if value >= _MOST and name != "seed":
        raise ValueError(f"{name} is {value}, too large a number")


def _check_whole(name: str, values: object, least: int) -> None:
    """A list of whole numbers from ``least`` on that 32 bits can hold."""
    if not isinstance(values, (list, tuple)) or not set(map(type, values)) <= {int}:
        raise ValueError(f"{name} is not a list of whole numbers")
    if values and not least <= min(values) <= max(values) < _MOST:
        raise ValueError(f"{name} goes from {min(values)} to {max(values)}, beyond what it may")


def _field(line: JsonObject, name: str) -> Any:
    if name not in line:
        raise ValueError(f"no field {name}")
    return line[name]


def _list(line: JsonObject, name: str) -> Sequence[Any]:
    value = _field(line, name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}, not a list")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_HUGE < value < _HUGE  # which NaN is not, either
