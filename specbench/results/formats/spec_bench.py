"""Spec-Bench's answer files, to and from case records. Free of torch.

Format (hemingkx/Spec-Bench, ``evaluation/eval.py`` and ``evaluation/speed.py``; no code taken): a
line per question with ``question_id, category, answer_id, model_id, choices[{index, turns,
decoding_steps, new_tokens, wall_time, accept_lengths}], tstamp``; ``turns``, ``decoding_steps``,
``new_tokens`` and ``wall_time`` have an entry per turn, ``accept_lengths`` one per step, all turns
after each other.

Words that differ: their wall time holds the prompt's pass, their accepted length is ours (accepted
draft tokens and one more), and some of their methods count the prompt's pass and its token as a
step, so that the lengths add up to ``new_tokens`` and not to one less. Token ids, the split of the
time, what was drafted and the prompt's length are not in their files.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from specbench.errors import ConfigurationError
from specbench.results.records import CaseRecord
from specbench.results.statistics.aggregate import BlockKey, by_block, is_complete, untimed_blocks
from specbench.results.tasks import task_of
from specbench.storage.jsonl import JsonObject

UNKNOWN_TOKEN = -1  # stands for each new token of a file that has none
UNKNOWN_SCOPE = "unknown"
# Fields of a record that their files say nothing about; 0, empty or the marks above stand there.
UNKNOWN_FIELDS = (
    "prompt_ids", "n_prompt", "output_ids", "finish_reason", "n_drafted", "n_aux", "prefill_s",
    "decode_s", "drafter_setup_s", "state_scope", "seed", "lossless",
)  # fmt: skip
_PER_TURN = ("turns", "decoding_steps", "new_tokens", "wall_time")
# What their eval.py writes as the answer where decoding failed; its numbers are the turn before's.
_ERROR = "ERROR"


class AnswerError(ConfigurationError):
    """An answer line contradicts itself or lacks a field (file, question, reason)."""


@dataclass(frozen=True, slots=True)
class Usable:
    """The blocks of a run that an answer file can hold.

    Attributes:
        blocks: ``(repeat, case_id)`` in the order of the run.
        failed, noisy: how many were left out for all labels, and why.
    """

    blocks: tuple[BlockKey, ...]
    failed: int
    noisy: int


def usable_blocks(records: Sequence[CaseRecord], labels: Sequence[str]) -> Usable:
    """Blocks with every turn of every label, none of them failed, or too disturbed to be timed.

    Their format has no word for a turn that went wrong, and a file that lacks a question which the
    baseline's has would not be compared on the same questions. Where so many are disturbed that
    some count in our tables, these stay.
    """
    if any(record.batch is not None for record in records):
        raise ConfigurationError(
            "these cases were decoded several at once, which Spec-Bench's files have no word for. "
            "Export a run with batch.size=1."
        )
    blocks, untimed = by_block(records), untimed_blocks(records)
    whole = [key for key, turns in blocks.items() if is_complete(turns, labels)]
    timed = tuple(key for key in whole if key not in untimed)
    return Usable(timed, failed=len(blocks) - len(whole), noisy=len(whole) - len(timed))


def to_answers(
    records: Iterable[CaseRecord],
    blocks: Iterable[BlockKey],
    model_id: str,
    decode: Callable[[Sequence[int]], str],
) -> list[JsonObject]:
    """The lines of one label's file, of one repeat and in the order of ``blocks``.

    Args:
        records: of one label.
        blocks: which of its blocks.
        model_id: what the file calls the label.
        decode: from new tokens to the answer's text.
    """
    turns_of, lines = by_block(records), []
    for key in blocks:
        turns = sorted(turns_of[key], key=lambda record: record.turn)
        first = turns[0]
        name = f"{first.run_key}/{first.label}/{first.repeat}/{first.case_id}"
        lines.append(
            {
                "question_id": int(first.case_id) if first.case_id.isdigit() else first.case_id,
                "category": first.category,
                "answer_id": hashlib.sha256(name.encode()).hexdigest()[:22],
                "model_id": model_id,
                "choices": [
                    {
                        "index": 0,
                        "turns": [decode(turn.output_ids) for turn in turns],
                        "decoding_steps": [turn.n_target_passes for turn in turns],
                        "new_tokens": [turn.n_new for turn in turns],
                        "wall_time": [turn.wall_s for turn in turns],
                        "accept_lengths": [n for turn in turns for n in turn.committed_per_step],
                    }
                ],
                "tstamp": _seconds(first.started_at),
            }
        )
    return lines


def _seconds(started_at: str) -> float:
    return datetime.datetime.fromisoformat(started_at).timestamp() if started_at else 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """What a run folder needs to know of an answer file, and its lines do not say."""

    label: str
    method: str
    model: str
    dataset: str
    run_key: str
    repeat: int = 0
    position: int = 0


def from_answer(line: JsonObject, source: Source, stream_index: int) -> list[CaseRecord]:
    """The records of one question, a turn each; ``failed`` where their run noted an error.

    Raises:
        AnswerError: a field is missing or counts contradict each other.
    """
    try:
        choice = line["choices"][0]
        case_id, category = str(line["question_id"]), str(line["category"])
        texts, steps, new_tokens, walls = ([*choice[name]] for name in _PER_TURN)
        lengths = [int(n) for n in choice["accept_lengths"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise AnswerError(f"not a Spec-Bench answer: {type(error).__name__} {error}.") from error
    if not len(texts) == len(steps) == len(new_tokens) == len(walls) > 0:
        raise AnswerError(
            f"question {case_id}: {len(texts)} turns, {len(steps)} decoding_steps, "
            f"{len(new_tokens)} new_tokens, {len(walls)} wall_time; each turn needs one of each."
        )
    failed = [text == _ERROR for text in texts]
    # After an error the lengths belong to no turn for sure.
    split: list[list[int]] = [[] for _ in texts] if any(failed) else _split(lengths, steps, case_id)
    records = []
    for turn, own in enumerate(split):
        record = CaseRecord(
            **asdict(source),
            task=task_of(category),
            category=category,
            case_id=case_id,
            turn=turn,
            stream_index=stream_index,
            state_scope=UNKNOWN_SCOPE,
            seed=0,
            started_at=_when(line.get("tstamp")),
        )
        if any(failed):
            records.append(record)
            continue
        where = f"question {case_id}, turn {turn}"
        accepted = _after_the_first(own, int(new_tokens[turn]), where)
        if not float(walls[turn]) > 0:
            raise AnswerError(f"{where}: wall_time is {walls[turn]}.")
        counted = {"decoding_steps": int(steps[turn]), "accept_lengths": own}
        records.append(
            record.finished(
                [UNKNOWN_TOKEN] * int(new_tokens[turn]),
                accepted,
                wall_s=float(walls[turn]),
                drafter={"specbench": counted},
            )
        )
    return records


def _split(lengths: list[int], steps: Sequence[int], case_id: str) -> list[list[int]]:
    """Their flat list by turn.

    ``decoding_steps`` is the number of steps, or the index of the last one: then every turn has
    one more.
    """
    extra, rest = divmod(len(lengths) - sum(steps), len(steps))
    if rest or extra not in (0, 1):
        raise AnswerError(
            f"question {case_id}: decoding_steps {list(steps)} do not belong to "
            f"{len(lengths)} accept_lengths."
        )
    parts, start = [], 0
    for count in steps:
        parts.append(lengths[start : start + count + extra])
        start += count + extra
    return parts


def _after_the_first(lengths: list[int], n_new: int, where: str) -> list[int]:
    """Tokens committed by each step without the first new token, which the prompt's pass yields."""
    total = sum(lengths)
    if min(lengths, default=0) < 0 or n_new < 0 or total not in (n_new - 1, n_new):
        raise AnswerError(
            f"{where}: accept_lengths add up to {total} and new_tokens is {n_new}; they must be "
            "equal, or differ by the prompt's one token."
        )
    if total < n_new or not lengths:
        return lengths
    first, *others = lengths
    return [first - 1, *others] if first > 1 else others


def _when(tstamp: object) -> str:
    if not isinstance(tstamp, int | float) or not tstamp:
        return ""
    return datetime.datetime.fromtimestamp(tstamp, datetime.UTC).isoformat(timespec="milliseconds")


def mean_accept_length(lines: Iterable[JsonObject]) -> float | None:
    """The mean accepted tokens as their ``speed.py`` prints it: over all steps of all questions."""
    lengths = [int(n) for line in lines for n in line["choices"][0]["accept_lengths"]]
    return sum(lengths) / len(lengths) if lengths else None
