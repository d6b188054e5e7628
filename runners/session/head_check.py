"""Heads that read states of several layers, checked on a text of the run's own target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runners.session.method_runs import MethodRun
from runners.session.session import Session
from specbench.arrays import IntArray
from specbench.decoding.head_drafter import heads_of
from specbench.decoding.structs import AFTER_FINAL_NORM

_ANSWER = 64  # tokens of the target's own that the heads are to guess


def check_heads(session: Session, runs: Sequence[MethodRun], prompt: IntArray) -> None:
    """Warn of heads that were trained on other layers than they read; untimed.

    ``prompt``: the target's plain answer to it is the text.
    """
    several = [
        head for run in runs for head in heads_of(run.drafter) if head.layers != (AFTER_FINAL_NORM,)
    ]
    if not several:
        return
    answer = session.plain(prompt, _ANSWER)
    layers = tuple(range(session.n_layers + 1))
    states = session.record(prompt, answer, 1, layers).states
    text = np.concatenate([prompt, answer])[:-1]
    if len(text) > 2:  # a head guesses from the third token on
        for head in several:
            head.check_layers(text, [states[layer] for layer in layers])
