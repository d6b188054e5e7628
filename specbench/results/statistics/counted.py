"""Choice of the labels of a run that count, and of those that may be ranked.

- A label that failed in its warm-up, or in more than :data:`FAILED_SHARE` of the cases, is left out
  with its reason: no case drops out because of it. (Below that a case that failed for one label
  drops out for all.) Where that would leave no label, all stay.
- A label with an output that the audit calls a bug has rows, and no standing: no speedup in a
  sentence, and no place among those that may be the best. If it is plain decoding, no label has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from specbench.errors import message_line
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import CASES, CaseRecord, group_by
from specbench.results.summary_schema import Standing

FAILED_SHARE = 0.5  # of the cases (of groups, where cases are decoded at once)

WRONG = Standing(verdict="wrong outputs", p=None)


def failing_labels(records: Iterable[CaseRecord], labels: Collection[str]) -> dict[str, str]:
    """Find the labels that failed too often to count, each with a sentence on how often."""
    turns = [record for record in records if record.label in labels]
    n_units = len({turn.unit for turn in turns})
    kind = "groups" if any(turn.batch for turn in turns) else "cases"
    failing = {}
    for label in labels:
        n = len({turn.unit for turn in turns if turn.label == label and turn.status == "failed"})
        if n > FAILED_SHARE * n_units:
            failing[label] = f"It failed in {n} of {n_units} {kind}, more than {FAILED_SHARE:.0%}"
    return {} if len(failing) == len(labels) else failing


def left_out(
    records: Sequence[CaseRecord],
    manifest: RunManifest,
    errors: Iterable[Mapping[str, object]] = (),
) -> dict[str, str]:
    """Find the labels of a run that do not count, with their reasons.

    Args:
        records: of the run.
        manifest: names those that could not run, or failed in their warm-up.
        errors: the lines of ``errors.jsonl``, of which the first of a label is part of its reason.
    """
    first: dict[str, str] = {}
    for error in errors:
        message = message_line(Exception(error["message"]))
        first.setdefault(str(error["label"]), f" ({error['type']}: {message})")
    failing = {
        label: f"{reason}{first.get(label, '')}. Its records are in {CASES}."
        for label, reason in failing_labels(records, manifest.labels).items()
    }
    return {**(manifest.left_out or {}), **failing}


def wrong_outputs(records: Iterable[CaseRecord], labels: Collection[str]) -> dict[str, str]:
    """Find the labels that may not be ranked because of their outputs, with how many are wrong."""
    by_label = group_by(records, lambda record: record.label)
    wrong = {}
    for label in labels:
        audited = [r for r in by_label.get(label, ()) if r.lossless.verdict != "not_audited"]
        if bugs := [record for record in audited if record.lossless.verdict == "bug"]:
            first = min(bugs, key=lambda r: (r.repeat, r.stream_index, r.turn))
            token = first.lossless.first_diff
            position = "" if token is None else f", at token {token} of the output"
            wrong[label] = (
                f"{len(bugs)} of {len(audited)} are not what plain decoding gives; first in case "
                f"{first.case_id}, turn {first.turn}{position}."
            )
    return wrong


def rankable(
    labels: Iterable[str], wrong: Collection[str], baseline: str | None = BASELINE
) -> list[str]:
    """Choose the labels that may have a standing, given those whose outputs are wrong."""
    return [] if baseline in wrong else [label for label in labels if label not in wrong]


def wrong_output_texts(wrong: Mapping[str, str], baseline: str | None = BASELINE) -> list[str]:
    """Name each label's wrong outputs in a sentence; ``wrong``: from `wrong_outputs`."""
    return [
        f"WRONG OUTPUTS of {label}, so {'no label' if label == baseline else 'it'} has "
        f"{'a' if label == baseline else 'no'} standing: {outputs}"
        for label, outputs in wrong.items()
    ]
