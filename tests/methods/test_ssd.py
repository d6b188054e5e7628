import json
import logging
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.ssd import RingIndex, Spacelike, Staleness
from specbench.decoding.structs import DecodeState, DraftContext
from specbench.draft_structures.suffix_array import SEPARATOR, build_suffix_array
from specbench.errors import ArtifactError
from tests.conftest import VOCAB
from tests.methods.toy_turns import decode, plain
from tests.small_run import case_record

EOS = 2


def ready(files=None, tokenizer_hash="toy", **knobs):
    drafter = Spacelike(**{"rebuild": "sync", **knobs})
    drafter.setup(
        DraftContext(60, frozenset({EOS}), tokenizer_hash=tokenizer_hash, artifacts=files or {})
    )
    drafter.reset()
    return drafter


def state_of(text):
    return DecodeState(np.array(text, dtype=np.int64), 8)


def finish(drafter, *texts):
    for text in texts:
        drafter.end(state_of(text))


def draft(drafter, text):
    tree = drafter.propose(state_of(text))
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    return tree.tokens.tolist()


def test_the_present_request_is_not_searched():
    drafter = ready()
    state = state_of([5, 6, 7, 5, 6])
    drafter.begin(state)
    assert len(drafter.propose(state)) == 0


def test_queries_are_bounded():
    drafter = ready(max_query=2, min_query=2, draft_len=1)
    finish(drafter, [4, 5, 6, 7], [9, 5, 6, 8], [1, 5, 6, 8])
    assert draft(drafter, [4, 5, 6]) == [8]
    assert draft(drafter, [3, 6]) == []
    assert draft(drafter, [6]) == []


def test_matches_are_sampled_evenly_over_the_range():
    drafter = ready(draft_len=1, max_matches=3)
    # Nine continuations of 5 in order: 10 … 18. Every third is looked at: 10, 13, 16.
    finish(drafter, *[[5, 10 + i] for i in range(9)])
    assert draft(drafter, [5]) == [16]
    finish(drafter, *[[5, 10]] * 9)
    # Ten times 10, then 11 … 18: 10, 10 and 12.
    assert draft(drafter, [5]) == [10]


def test_reset_forgets_and_the_memory_is_bounded():
    drafter = ready(buffer_tokens=7, draft_len=2)
    finish(drafter, [1, 3, 4], [5, 6, 7])
    assert draft(drafter, [5]) == [6, 7]
    assert draft(drafter, [1]) == []
    assert draft(drafter, [3]) == [4]  # its request lost its beginning
    drafter.reset()
    assert draft(drafter, [5]) == []
    assert drafter.staleness == Staleness(0, 0, 0.0)
    finish(drafter, [1] * 50 + [8, 9])
    assert draft(drafter, [8]) == [9]


def test_staleness_is_recorded_per_turn():
    drafter = ready(rebuild_requests=2)
    reports = []
    for text in ([1, 3], [4, 5], [6, 7]):
        drafter.begin(state_of(text))
        finish(drafter, text)
        reports.append(drafter.report())
    assert [r["stale_requests"] for r in reports] == [0, 1, 0]
    assert [r["stale_tokens"] for r in reports] == [0, 3, 0]
    assert [r["searched_tokens"] for r in reports] == [0, 0, 6]
    assert reports[1]["stale_s"] > 0 == reports[2]["stale_s"] == reports[2]["failed_rebuilds"]
    assert drafter.staleness.requests == 1 and drafter.staleness.tokens == 3
    assert draft(drafter, [4]) == [5] and draft(drafter, [6]) == []


def test_the_array_is_rebuilt_after_seconds():
    now = [0.0]
    index = RingIndex(
        99, background=False, every_requests=None, every_seconds=5.0, clock=lambda: now[0]
    )
    index.add(np.array([1, 2]))
    assert len(index.current.tokens) == 0
    now[0] = 6.0
    index.refresh()
    assert index.current.tokens.tolist() == [1, 2, SEPARATOR]
    now[0] = 99.0
    built = index.current
    index.refresh()  # nothing new
    assert index.current is built


@pytest.fixture
def being_sorted():
    """Give an index whose thread sorts the text 1 2, and the event that lets it end."""
    sorting, may_end = threading.Event(), threading.Event()

    def build(tokens):
        sorting.set()
        assert may_end.wait(10)
        return build_suffix_array(tokens)

    index = RingIndex(99, build=build)
    index.add(np.array([1, 2]))
    assert sorting.wait(10)
    yield index, may_end
    index.wait()


def test_look_ups_go_on_with_the_older_array_while_a_thread_sorts(being_sorted):
    index, may_end = being_sorted
    index.add(np.array([3]))  # not in the array that is being built, but in the next one
    assert len(index.current.tokens) == 0 and index.staleness.requests == 2
    may_end.set()
    index.wait()
    assert index.current.tokens.tolist() == [1, 2, SEPARATOR, 3, SEPARATOR]
    assert index.staleness == Staleness(0, 0, 0.0)


def test_a_thread_ends_with_its_rebuild_and_takes_its_openmp_team_along(being_sorted):
    index, may_end = being_sorted
    assert "suffix-array" in {thread.name for thread in threading.enumerate()}
    may_end.set()
    index.wait()
    assert "suffix-array" not in {thread.name for thread in threading.enumerate()}


def test_a_turn_s_record_waits_for_the_rebuild_so_that_no_other_method_pays_for_it():
    drafter = ready(rebuild="background")
    reports = []
    for text in ([1, 3], [4, 5], [6, 7]):
        drafter.begin(state_of(text))
        finish(drafter, text)
        reports.append(drafter.report())
        assert drafter.staleness.requests == 0
    assert [r["stale_requests"] for r in reports] == [0, 0, 0]
    assert [r["searched_tokens"] for r in reports] == [0, 3, 6]
    drafter.close()


def test_a_rebuild_under_way_does_not_undo_a_reset(being_sorted):
    index, may_end = being_sorted
    index.clear()
    may_end.set()
    index.wait()
    assert len(index.current.tokens) == 0


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_rebuild_is_reported_and_the_older_array_stays(background, caplog):
    fail = [False]

    def build(tokens):
        if fail[0]:
            raise MemoryError("no room")
        return build_suffix_array(tokens)

    index = RingIndex(99, background=background, build=build)
    index.add(np.array([1, 2]))
    index.wait()
    fail[0] = True
    with caplog.at_level(logging.WARNING):
        index.add(np.array([3]))
        index.wait()
    assert "no room" in caplog.text and "MemoryError" in caplog.text
    assert index.failures == 1
    assert index.current.tokens.tolist() == [1, 2, SEPARATOR]
    fail[0] = False
    index.add(np.array([4]))
    index.wait()
    assert index.staleness.requests == 0
    index.wait()


@given(
    texts=st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=12),
    capacity=st.integers(1, 20),
)
def test_the_searched_tokens_are_the_newest(texts, capacity):
    index, everything = RingIndex(capacity, background=False), []
    for text in texts:
        index.add(np.array(text, dtype=np.int32))
        everything += [*text, SEPARATOR]
        assert index.current.tokens.tolist() == everything[-capacity:]


def plain_draft(requests, text, max_query, draft_len):
    """Apply the rule over a list of requests, without an index."""
    for n in range(min(max_query, len(text)), 0, -1):
        counts, newest = Counter(), {}
        for age, request in enumerate(requests):
            for i in range(len(request) - n + 1):
                if request[i : i + n] == text[-n:]:
                    draft = request[i + n : i + n + draft_len]
                    if EOS in draft:
                        draft = draft[: draft.index(EOS) + 1]
                    if draft:
                        counts[tuple(draft)] += 1
                        newest[tuple(draft)] = (age, i)
        if counts:
            return list(max(counts, key=lambda draft: (counts[draft], newest[draft])))
    return []


@given(
    requests=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=8),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    max_query=st.integers(1, 5),
    draft_len=st.integers(1, 5),
)
def test_equals_the_plain_rule(requests, text, max_query, draft_len):
    drafter = ready(max_query=max_query, draft_len=draft_len)
    finish(drafter, *requests)
    expected = plain_draft(requests, text, max_query, draft_len)
    assert draft(drafter, text) == expected
    assert len(expected) <= drafter.needs.max_nodes == draft_len


def record(case_id, prompt, output, **other):
    return case_record(case_id, n_new=len(output), prompt_ids=prompt, output_ids=output, **other)


def write_run(folder, records, tokenizer_hash="toy"):
    path = folder / "cases.jsonl"
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in records))
    (folder / "manifest.json").write_text(json.dumps({"model": {"tokenizer_hash": tokenizer_hash}}))
    return path


def test_a_warm_start_is_there_from_the_start_and_after_a_reset(tmp_path):
    records = [
        record("a", [5, 6], [7, 8]),
        record("a", [5, 6], [7, 8], label="ssd"),  # the same turn, measured twice
        record("b", [5, 6], [9, 9]),
        record("c", [1, 1], [], status="failed", n_target_passes=0, committed_per_step=[]),
    ]
    path = write_run(tmp_path, records)
    drafter = ready({"warm_start": path}, warm_start=str(path), draft_len=2)
    assert drafter.needs.artifacts[0].path == str(path)
    assert draft(drafter, [5, 6]) == [9, 9]
    finish(drafter, [5, 6, 3, 3], [5, 6, 3, 3])
    assert draft(drafter, [5, 6]) == [3, 3]
    drafter.reset()
    assert draft(drafter, [5, 6]) == [9, 9]
    assert drafter.staleness == Staleness(0, 0, 0.0)


def test_a_warm_start_of_another_model_is_refused(tmp_path):
    path = write_run(tmp_path, [record("a", [5, 600], [7])])
    with pytest.raises(ArtifactError, match=r"(?s)'toy'.*'real'"):
        ready({"warm_start": path}, tokenizer_hash="real", warm_start=str(path))
    with pytest.raises(ArtifactError, match="vocabulary of 60"):
        ready({"warm_start": path}, warm_start=str(path))
    with pytest.raises(ArtifactError, match="no file"):
        ready({"warm_start": tmp_path / "x"}, warm_start="x")


@pytest.mark.parametrize("rebuild", ["sync", "background"])
def test_output_is_that_of_plain_decoding(rebuild, make_target, rng):
    target = make_target("mistral_window")
    drafter = Spacelike(rebuild=rebuild)
    drafter.setup(DraftContext(VOCAB, frozenset(), max_len=256))
    drafter.reset()
    prompts = [rng.integers(0, VOCAB, n) for n in (9, 14)]
    for prompt in prompts * 2:
        result = decode(target, drafter, prompt, 30)
        drafter.wait()
        assert result.output_ids == plain(target, prompt, 30)
    # The second time the whole answer is in the buffer.
    assert result.n_target_passes <= 29 / 10 + 1
    drafter.close()
