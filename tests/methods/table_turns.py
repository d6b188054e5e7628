"""Turns of a target and a draft that are tables of logits; see ``tests.decoding.table_models``."""

import numpy as np

from specbench.decoding.engine import Engine
from specbench.decoding.sampling import GREEDY
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import GreedyVerifier
from tests.decoding.table_models import TableDraft, TableTarget, table

VOCAB = 8
PROMPT = np.array([3, 1, 4], dtype=np.int64)


def turn(target, drafter, n=60, eos=frozenset(), overlap="serial", verifier=None, seed=0):
    loop = Engine(target, verifier or GreedyVerifier(), eos_ids=eos, overlap=overlap)
    return loop.decode(PROMPT, drafter, max_new_tokens=n, seed=seed)


def pair(seed=0, noise=0.0, room=10**6, vocab_size=VOCAB):
    """Make a target, and a draft model that is the target with noise."""
    logits = table(seed, vocab_size, 3.0)
    return TableTarget(logits), TableDraft(logits + noise * table(seed + 1, vocab_size), room)


def ready(drafter, draft, target=None, sampling=GREEDY, eos=frozenset(), vocab=None):
    """Return the drafter, set up with a draft model and empty."""
    size = vocab or draft.vocab_size
    drafter.setup(DraftContext(size, eos, sampling=sampling, target=target, draft_model=draft))
    drafter.reset()
    return drafter
