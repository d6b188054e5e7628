"""What a `run`-scope drafter learnt, kept in the run's folder and taken up again."""

import numpy as np
import pytest

from methods.ssd import Spacelike
from runners.session.method_runs import feed
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext
from specbench.results.conditions import accepted_by_part
from tests.small_run import case_record


def record(number, prompt, output):
    ids = {"n_prompt": len(prompt), "prompt_ids": prompt, "output_ids": output}
    own = {"state_scope": "run", "started_at": f"2026-01-01T00:00:{number:02}"}
    return case_record(str(number), "ssd", len(output), stream_index=number, **ids, **own)


@pytest.fixture
def turns():
    random = np.random.default_rng(0)
    return [
        record(i, random.integers(0, 6, 8).tolist(), random.integers(0, 6, 12).tolist())
        for i in range(5)
    ]


def made(turns):
    drafter = Spacelike(rebuild="sync", rebuild_requests=2, buffer_tokens=50)
    drafter.setup(DraftContext(8, frozenset(), "toy", 64, {}))
    drafter.reset()
    for record in turns:
        feed(drafter, record, NO_TOKENS)
    return drafter


def drafts(drafter):
    """What it drafts after every pair of tokens."""
    found = []
    for a in range(6):
        for b in range(6):
            state = DecodeState(np.array([a, b]), 8)
            found.append(drafter.propose(state).tokens.tolist())
    return found


def test_a_drafter_that_is_fed_turns_learns_what_they_hold(turns):
    whole, fewer = made(turns), made(turns[:3])
    assert drafts(whole) != drafts(fewer)
    for record in turns[3:]:
        feed(fewer, record, NO_TOKENS)
    assert drafts(fewer) == drafts(whole)
    # Every second request rebuilds the array, so the fifth is in the buffer but not yet searched.
    assert whole.staleness.requests == 1


def test_the_notes_say_which_part_accepted_tokens_came_from(turns):
    counts = {"accepted_from_a": 30, "accepted_from_b": 10, "found_by_a": 30, "found_by_b": 20}
    done = [
        turns[0].replace(label="both", drafter=counts),
        turns[1].replace(label="both", drafter=counts),
        turns[2].replace(label="both", drafter=counts, status="failed"),
        turns[3].replace(label="other", drafter={"stale_tokens": 7}),
    ]
    assert accepted_by_part(done) == ["80 of both: a 75% (had 75%), b 25% (had 50%)"]
