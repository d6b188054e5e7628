"""What a `run`-scope drafter learnt, kept in the run's folder and taken up again."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from methods.cacheback import Cacheback
from methods.ssd import Spacelike
from runners.session.method_runs import MethodRun, keep_state, restore
from specbench.decoding.structs import DecodeState, DraftContext
from specbench.results.conditions import accepted_by_part
from specbench.storage.jsonl import DiskError
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


def method_run(folder, drafter=None):
    drafter = drafter or Spacelike(rebuild="sync", rebuild_requests=2, buffer_tokens=50)
    drafter.setup(DraftContext(8, frozenset(), "toy", 64, {}))
    entry = SimpleNamespace(label="ssd", name="ssd")
    return MethodRun(entry, drafter, folder / "state" / "0.bin")


def refuse(record):
    raise AssertionError("a drafter of tokens alone is never decoded again")


def drafts(run):
    """What it drafts after every pair of tokens."""
    found = []
    for a in range(6):
        for b in range(6):
            state = DecodeState(np.array([a, b]), 8)
            found.append(run.drafter.propose(state).tokens.tolist())
    return found


def test_a_kept_state_and_the_turns_after_it_give_what_all_turns_give(tmp_path, turns, monkeypatch):
    first = method_run(tmp_path)
    # Other labels and failed turns are none of its business.
    others = [turns[0].replace(label="ar"), turns[1].replace(status="failed")]
    restore(first, [*others, *turns[:3]], refuse)
    keep_state(first, [*others, *turns[:3]])
    restore(whole := method_run(tmp_path / "other"), turns, refuse)
    fed = []
    monkeypatch.setattr(Spacelike, "end", spy(Spacelike.end, fed))
    restore(resumed := method_run(tmp_path), turns, refuse)
    assert len(fed) == 2
    # Every second request rebuilds the array, so the fifth is in the buffer but not yet searched.
    assert resumed.drafter.staleness.requests == whole.drafter.staleness.requests == 1
    assert resumed.drafter.staleness.tokens == whole.drafter.staleness.tokens == 21
    assert drafts(resumed) == drafts(whole) != drafts(first)


def spy(method, calls):
    def called(self, state):
        calls.append(state)
        return method(self, state)

    return called


@pytest.mark.parametrize(
    "change",
    [
        lambda turns: [r.replace(repeat=1) for r in turns],
        lambda turns: [turns[0], turns[1].replace(started_at="2027"), *turns[2:]],
        lambda turns: turns[:2],
    ],
    ids=["another repeat", "a block measured again", "fewer turns than it saw"],
)
def test_a_state_of_other_turns_is_not_taken(tmp_path, turns, change):
    first = method_run(tmp_path)
    restore(first, turns[:3], refuse)
    keep_state(first, turns[:3])
    others = change(turns)
    restore(resumed := method_run(tmp_path), others, refuse)
    restore(fed := method_run(tmp_path / "other"), others, refuse)
    assert drafts(resumed) == drafts(fed)
    assert resumed.drafter.staleness.requests == fed.drafter.staleness.requests


def test_a_damaged_state_is_learnt_again(tmp_path, turns, caplog):
    first = method_run(tmp_path)
    restore(first, turns, refuse)
    keep_state(first, turns)
    expected = drafts(first)
    first.state_file.write_bytes(first.state_file.read_bytes()[:-70])
    with caplog.at_level(logging.WARNING):
        restore(resumed := method_run(tmp_path), turns, refuse)
    assert "learnt again" in caplog.text
    assert drafts(resumed) == expected


def test_only_a_snapshot_of_run_scope_leaves_a_file_unless_the_disk_refuses(tmp_path, turns):
    for drafter in (Cacheback(table="dynamic", state_scope="run"), Spacelike(state_scope="prompt")):
        keep_state(method_run(tmp_path, drafter), turns)
    assert not list(tmp_path.iterdir())
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(DiskError, match="state"):
        keep_state(method_run(tmp_path), turns)


def test_the_notes_say_which_part_accepted_tokens_came_from(turns):
    counts = {"accepted_from_a": 30, "accepted_from_b": 10, "found_by_a": 30, "found_by_b": 20}
    done = [
        turns[0].replace(label="both", drafter=counts),
        turns[1].replace(label="both", drafter=counts),
        turns[2].replace(label="both", drafter=counts, status="failed"),
        turns[3].replace(label="other", drafter={"stale_tokens": 7}),
    ]
    assert accepted_by_part(done) == ["80 of both: a 75% (had 75%), b 25% (had 50%)"]
