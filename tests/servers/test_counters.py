"""Counters of servers, converted to ours: the table, the converter and their page."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.servers.adapters import ENGINES
from specbench.servers.counters import (
    Counts,
    convert,
    difference,
    drafts,
    find_counts,
    plain_counts,
    read_metrics,
)

ROWS = {
    (name, ".".join(names.json_path) or "/metrics"): names
    for name in ("vllm", "sglang", "llamacpp")
    for names in (*ENGINES[name].counters, ENGINES[name].metrics)
    if names is not None
}
TABLE = list(ROWS.values())
PAGE = Path(__file__).resolve().parents[2] / "docs" / "servers.md"
# The page's example, as each server counts it.
N_NEW, STEPS, ACCEPTED, DRAFTED = 12, 4, 7, 18
COUNTERS = {
    "num_spec_steps": 3,
    "num_draft_tokens": DRAFTED,
    "num_accepted_draft_tokens": ACCEPTED,
    "vllm:spec_decode_num_drafts_total": 3,
    "vllm:spec_decode_num_draft_tokens_total": DRAFTED,
    "vllm:spec_decode_num_accepted_tokens_total": ACCEPTED,
    "vllm:generation_tokens_total": N_NEW,
    "spec_verify_ct": STEPS,
    "spec_num_proposed_drafts": DRAFTED,
    "spec_num_correct_drafts": ACCEPTED,
    "sglang:spec_verify_calls_total": STEPS,
    "sglang:generation_tokens_total": N_NEW,
    "predicted_n": N_NEW,
    "draft_n": DRAFTED,
    "draft_n_accepted": ACCEPTED,
}


def of(engine):
    return ENGINES[engine].counters


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_every_row_gives_the_examples_steps(row):
    names = ROWS[row]
    counts = convert(names, COUNTERS, N_NEW)
    assert counts is not None
    assert counts.steps == STEPS
    assert (N_NEW - 1) / counts.steps == 2.75
    if names.drafted:
        assert (counts.drafted, counts.accepted) == (DRAFTED, ACCEPTED)


def test_single_steps_are_known_where_they_follow_from_the_counters():
    names = TABLE[0]
    counters = {"num_spec_steps": 3, "num_draft_tokens": 18, "num_accepted_draft_tokens": 7}
    exact = convert(names, {**counters, "per_step_accepted": [2, 0, 5]}, 11)
    assert exact == Counts(3, 18, 7, (3, 1, 6))
    # A step without a draft came somewhere between the others.
    assert convert(names, {**counters, "per_step_accepted": [2, 0, 5]}, 12).committed == ()
    # Tokens accepted behind the end cannot make steps fewer than drafts.
    assert convert(names, counters | {"num_accepted_draft_tokens": 9}, 11).steps == 3


@pytest.mark.parametrize(
    ("per_step", "per_event", "steps", "committed"),
    [
        # As a vLLM counted: the last of three steps accepted two tokens behind the end.
        ([4, 4], [1, 1, 5, 3], 3, (1, 5, 3)),
        # The last one brought one token of five.
        ([2, 4], [1, 3, 1, 1], 3, (3, 1, 1)),
        # Two events came as one: the counters know of a step more.
        ([2, 0], [1, 3, 2], 3, ()),
        # What the events show is not what was accepted.
        ([3, 1], [1, 1, 3, 1, 2], 4, ()),
        ([2], [], 6, ()),
    ],
)
def test_tokens_accepted_behind_an_answers_end_do_not_hide_steps(
    per_step, per_event, steps, committed
):
    names = TABLE[0]
    counters = {"num_spec_steps": len(per_step), "per_step_accepted": per_step}
    counters |= {"num_draft_tokens": 16, "num_accepted_draft_tokens": sum(per_step)}
    n_new = sum(per_event) or 9
    counts = convert(names, counters, n_new, per_event)
    assert (counts.steps, counts.committed) == (steps, committed)
    # Where an event may hold a part of a step, events say nothing.
    timings = {"draft_n": 16, "draft_n_accepted": sum(per_step)}
    assert convert(of("llamacpp")[0], timings, 20, [1] * 20).steps == 19 - sum(per_step)


@pytest.mark.parametrize(
    "counters",
    [
        {},
        {"draft_n": 5},
        {"draft_n": 5, "draft_n_accepted": 6},
        {"draft_n": 5, "draft_n_accepted": -1},
        {"draft_n": "5", "draft_n_accepted": 1},
        {"draft_n": 5, "draft_n_accepted": True},
        {"draft_n": 50, "draft_n_accepted": 40},
        {"draft_n": float("nan"), "draft_n_accepted": 1},
        {"draft_n": 10**400, "draft_n_accepted": 1},
    ],
)
def test_counters_that_contradict_themselves_or_the_answer_count_for_nothing(counters):
    assert find_counts(of("llamacpp"), {"timings": counters}, 12) is None


def test_llamacpp_leaves_its_words_out_where_nothing_was_drafted():
    counts = find_counts(of("llamacpp"), {"timings": {"predicted_n": 12}}, 12)
    assert counts == plain_counts(12) == Counts(11, 0, 0, (1,) * 11)


def test_prometheus_counters_are_added_up_over_labels_and_compared():
    names = ENGINES["vllm"].metrics
    before = read_metrics('# TYPE x counter\nvllm:generation_tokens_total{a="1"} 5.0\n')
    text = "\n".join(f'{k}{{e="{i}"}} {v}' for k, v in COUNTERS.items() if ":" in k for i in (0, 1))
    risen = difference(names, before, read_metrics(text + "\nbroken{ 1\nx NaN_\n"))
    assert risen["vllm:generation_tokens_total"] == 2 * N_NEW - 5
    assert risen["vllm:spec_decode_num_drafts_total"] == 6
    assert difference(names, {"vllm:generation_tokens_total": 1e9}, read_metrics(text)) is None
    assert difference(names, {}, {}) is None
    huge = text.replace('drafts_total{e="0"} 3', "drafts_total 1e300")
    assert huge != text
    assert difference(names, before, read_metrics(huge)) is None


@given(
    st.dictionaries(st.sampled_from(sorted(COUNTERS)), st.integers(-3, 30) | st.none()),
    st.integers(1, 20),
)
def test_what_is_converted_is_always_possible(counters, n_new):
    for names in TABLE:
        counts = convert(names, counters, n_new)
        if counts is not None:
            assert 0 <= counts.steps <= n_new - 1
            assert not counts.committed or sum(counts.committed) == n_new - 1


@pytest.mark.parametrize(
    ("engine", "answer", "drafted"),
    [
        ("vllm", {"metrics": {"speculative_decoding": {"num_spec_steps": 3}}}, True),
        ("vllm", {"metrics": {"speculative_decoding": None}}, False),
        ("sglang", {"sglext": {"spec_tokens_details": {"spec_verify_ct": 4}}}, True),
        ("sglang", {"sglext": {"spec_tokens_details": {"spec_verify_ct": 0}}}, False),
        ("llamacpp", {"timings": {"predicted_n": 9, "draft_n": 2}}, True),
        ("llamacpp", {"timings": {"predicted_n": 9}}, False),
        ("other", {"timings": {"predicted_n": 9, "draft_n": 2}}, True),
        ("other", {}, False),
    ],
)
def test_a_server_that_drafts_is_known_by_its_counters(engine, answer, drafted):
    assert drafts(of(engine), answer) == drafted
