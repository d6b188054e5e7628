"""Which labels of a run count, and which of them may be ranked: decided here, asked by all others.

- A label that failed in its warm-up, or in more than :data:`FAILED_SHARE` of the cases, is left out
  with its reason: no case drops out because of it. (Below that a case that failed for one label
  drops out for all.) Where that would leave no label, all stay.
- A label with an output that the audit calls a bug has rows, and no standing: no speedup in a
  sentence, and no place among those that may be the best. If it is plain decoding, no label has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specbench.errors import message_line
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import CASES, CaseRecord
from specbench.results.summary_schema import Standing

FAILED_SHARE = 0.5  # of the cases (of groups, where cases are decoded at once)

WRONG = Standing(verdict="wrong outputs", p=None)


@dataclass(frozen=True, slots=True)
class WrongOutputs:
    """A label's outputs that the audit calls a bug: how many, and where the first one differs."""

    turns: int
    audited: int
    case_id: str
    turn: int
    position: int | None  # from 0, in the output's tokens


def failing_labels(records: Iterable[CaseRecord], labels: Collection[str]) -> dict[str, str]:
    """The labels that failed too often to count, each with how often it did, in words."""
    units: set[str] = set()
    grouped = False
    failed: dict[str, set[str]] = {label: set() for label in labels}
    for record in records:
        if record.label in failed:
            units.add(record.unit)
            grouped |= record.batch is not None
            if record.status == "failed":
                failed[record.label].add(record.unit)
    found = {
        label: f"It failed in {len(own)} of {len(units)} {'groups' if grouped else 'cases'}, more "
        f"than {FAILED_SHARE:.0%}"
        for label, own in failed.items()
        if len(own) > FAILED_SHARE * len(units)
    }
    return {} if len(found) == len(failed) else found


def left_out(
    records: Sequence[CaseRecord],
    manifest: RunManifest,
    errors: Iterable[Mapping[str, object]] = (),
) -> dict[str, str]:
    """The labels of a run that do not count, with their reasons.

    Args:
        records: of the run.
        manifest: names those that could not run, or failed in their warm-up.
        errors: the lines of ``errors.jsonl``, for what was said first.
    """
    first: dict[str, str] = {}
    for error in errors:
        words = f"{error['type']}: {message_line(Exception(error['message']))}"
        first.setdefault(str(error["label"]), words)
    failing = {
        label: f"{words}{f' ({first[label]})' if label in first else ''}. Its records are in "
        f"{CASES}."
        for label, words in failing_labels(records, manifest.labels).items()
    }
    return {**(manifest.left_out or {}), **failing}


def wrong_outputs(
    records: Iterable[CaseRecord], labels: Collection[str]
) -> dict[str, WrongOutputs]:
    """The labels that may not be ranked because of their outputs."""
    audited: dict[str, list[CaseRecord]] = {label: [] for label in labels}
    for record in records:
        if record.label in audited and record.lossless.verdict != "not_audited":
            audited[record.label].append(record)
    found = {}
    for label, own in audited.items():
        if bugs := [record for record in own if record.lossless.verdict == "bug"]:
            first = min(bugs, key=lambda r: (r.repeat, r.stream_index, r.turn))
            place = first.case_id, first.turn, first.lossless.first_diff
            found[label] = WrongOutputs(len(bugs), len(own), *place)
    return found


def rankable(
    labels: Iterable[str], wrong: Collection[str], baseline: str | None = BASELINE
) -> list[str]:
    """The labels that may have a standing, given those whose outputs are wrong."""
    return [] if baseline in wrong else [label for label in labels if label not in wrong]


def wrong_words(wrong: Mapping[str, WrongOutputs], baseline: str | None = BASELINE) -> list[str]:
    """A sentence for each label whose outputs are wrong: which, how often, where first."""
    said = []
    for label, found in wrong.items():
        where = "" if found.position is None else f", at token {found.position} of the output"
        so = "so no label has a standing" if label == baseline else "so it has no standing"
        said.append(
            f"WRONG OUTPUTS of {label}, {so}: {found.turns} of {found.audited} are not what plain "
            f"decoding gives; first in case {found.case_id}, turn {found.turn}{where}."
        )
    return said
