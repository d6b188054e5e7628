"""Warm-up on text that is never measured, at the prompt lengths that will be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from runners.session.method_runs import MethodRun
from specbench.arrays import IntArray

if TYPE_CHECKING:  # they load torch, which a finished run does not need
    from runners.session.session import Session

log = logging.getLogger(__name__)

_NEW_TOKENS = 16

# Plain prose with a few repeats, so that drafters which look for repeats draft something.
TEXT = """\
The harbour master keeps two books. In the first book he writes the name of every ship that
enters the harbour, the hour at which it enters, and the depth of water below its keel. In the
second book he writes the name of every ship that leaves the harbour, the hour at which it
leaves, and the cargo that it carries. At the end of the month he compares the two books line by
line: a ship that stands in the first book but not in the second is still in the harbour. When the
numbers do not agree, he walks along the quay and counts the ships himself, because a book can be
wrong and a ship cannot. Then he corrects the books, signs both, and begins a new page.
"""


def warm_up(
    session: Session, runs: Sequence[MethodRun], lengths: Sequence[int], rounds: int
) -> None:
    """Decode a few tokens with every label at several prompt lengths, then forget it all.

    Allocators, kernels, compiled code and row buckets are then in the state that the measured
    cases find them in. A label that fails here is not excused: it fails again where it is counted.

    Args:
        session, runs: every label is warmed.
        lengths: prompt lengths of the measured cases, in tokens.
        rounds: how often each bucket is run; 0 for no warm-up.
    """
    text = session.encode(TEXT)
    longest = session.context_length - _NEW_TOKENS
    fitting = [length for length in lengths if length <= longest]
    for _ in range(rounds):
        for length in buckets(fitting):
            prompt: IntArray = np.resize(text, length)
            for run in runs:
                try:
                    _decode(session, run, prompt)
                except Exception as error:
                    log.warning("warm-up of %s failed: %s", run.label, error)
                    session.recover()
    for run in runs:
        run.drafter.reset()


def _decode(session: Session, run: MethodRun, prompt: IntArray) -> None:
    drafter = run.drafter
    drafter.reset()
    if drafter.needs.reference:
        drafter.set_reference(session.plain(prompt, _NEW_TOKENS))
    session.decode(prompt, drafter, seed=0, max_new_tokens=_NEW_TOKENS)


def buckets(lengths: Sequence[int]) -> list[int]:
    """At most three lengths that stand for all: shortest, median, longest."""
    if not lengths:
        return []
    ordered = sorted(lengths)
    return sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]})
