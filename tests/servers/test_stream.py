"""Streamed answers of every engine, whole and damaged in many ways."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.servers.adapters import ENGINES
from specbench.servers.client import NoAnswer, read_events
from specbench.servers.counters import find_counts
from specbench.servers.stream import read_answer
from tests.servers.fake import Fake

BODY = {"messages": [{"role": "user", "content": "a question"}], "return_token_ids": True}


def llamacpp_lines():
    """llama.cpp's own interface, as its server wrote it."""
    texts = ["The", " harbour", " master", " keeps", " two", ""]
    for i, text in enumerate(texts):
        event = {"index": 0, "content": text, "tokens": [100 + i], "stop": False, "id_slot": -1}
        yield {**event, "tokens_predicted": i + 1, "tokens_evaluated": 41}
    yield {
        "index": 0, "content": "", "tokens": [], "id_slot": 0, "stop": True,
        "tokens_predicted": 6, "tokens_evaluated": 41, "stop_type": "eos", "truncated": False,
        "timings": {"cache_n": 0, "prompt_n": 41, "predicted_n": 6, "predicted_ms": 72.0,
                    "draft_n": 8, "draft_n_accepted": 3},
    }  # fmt: skip


def lines_of(engine):
    if engine == "llamacpp":
        events = list(llamacpp_lines())
    else:
        events = list(Fake(engine=engine, accepted=(2, 0, 5), drafted=6, idle=1).events(BODY))
    return ["data: " + json.dumps(event) for event in events] + ["data: [DONE]"]


def read(lines):
    return read_answer(read_events((0.01 * (i + 1), line) for i, line in enumerate(lines)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_answer_is_read(engine):
    answer = read(lines_of(engine))
    counts = find_counts(ENGINES[engine].counters, answer.counters, answer.n_new)
    if engine == "llamacpp":
        assert (answer.text, answer.finish_reason) == ("The harbour master keeps two", "eos")
        assert answer.output_ids == [100, 101, 102, 103, 104, 105]
        assert (answer.n_new, answer.n_prompt, counts.steps) == (6, 41, 2)
        assert answer.ttft_s == 0.01
        assert answer.last_s == pytest.approx(0.06)  # the end token came, without text
    else:
        assert (answer.n_new, answer.n_prompt, answer.finish_reason) == (12, 5, "length")
        assert answer.ttft_s == pytest.approx(0.02)  # the first event has a role and no text
        assert counts is None if engine == "other" else counts.steps == 4
        assert len(answer.output_ids) == (12 if engine == "vllm" else 0)


def chunk(reason=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(n_new):
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": n_new}}


def read_events_of(events):
    return read_answer((float(i + 1), event) for i, event in enumerate(events))


@pytest.mark.parametrize(
    ("events", "text", "times", "n_decoded"),
    [
        # The time of an end token without text counts.
        ([chunk(content="Yes"), chunk(content=", sir"), chunk("stop", content=""), usage(3)],
         "Yes, sir", (1.0, 3.0), 2),
        ([chunk(content="Yes"), chunk("stop"), usage(2)], "Yes", (1.0, 2.0), 1),
        # Reasoning is part of the answer.
        ([chunk(role="assistant", content=""), chunk(reasoning_content="Hm. "),
          chunk(content="Yes"), chunk("stop", content="."), usage(4)], "Hm. Yes.", (2.0, 4.0), 3),
    ],
    ids=["end token", "one word", "reasoning"],
)  # fmt: skip
def test_the_times_of_an_answer_are_its_first_and_last_tokens(events, text, times, n_decoded):
    answer = read_events_of(events)
    assert (answer.text, answer.ttft_s, answer.last_s) == (text, *times)
    assert answer.n_new - answer.n_first == n_decoded


@pytest.mark.parametrize("counted_by", ["ids", "running counts", "events", "text"])
@given(n_new=st.integers(2, 40), first=st.integers(1, 40), later=st.integers(1, 4), data=st.data())
def test_speed_does_not_depend_on_how_many_tokens_come_first(counted_by, n_new, first, later, data):
    """Tokens are made one every second, sent ``first`` of them together and then ``each``."""
    sizes = [min(first, n_new)]
    while sum(sizes) < n_new:
        sizes.append(min(later, n_new - sum(sizes)))
    events, so_far = [], 0
    for size in sizes:
        so_far += size
        pieces = [1] * size if counted_by == "events" else [size]
        for i, piece in enumerate(pieces):
            event = chunk("length" if so_far == n_new else None, content="word " * piece)
            if counted_by == "ids":
                event["choices"][0]["token_ids"] = [7] * piece
            if counted_by == "running counts":
                event["usage"] = {"completion_tokens": so_far}
            events.append((float(so_far) + 1e-5 * i, event))
    answer = read_answer([*events, (float(n_new), usage(n_new))])
    assert answer.last_s == pytest.approx(n_new, abs=1e-3)
    n_decoded, seconds = answer.n_new - answer.n_first, answer.last_s - answer.ttft_s
    if len(sizes) == 1:
        assert (n_decoded, seconds) == (0, 0.0)
    else:
        assert n_decoded == n_new - sizes[0]
        assert n_decoded / seconds == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("gap_s", [0.0, 1e-4, 0.02])
@pytest.mark.parametrize("ids", [True, False])
def test_a_short_answer_in_one_burst_is_kept_without_a_speed(ids, gap_s):
    event = chunk(content="Yes, of course.")
    if ids:
        event["choices"][0]["token_ids"] = [4, 5, 6, 7]
    answer = read_answer([(1.0, event), (1.0 + gap_s, chunk("stop")), (1.1 + gap_s, usage(5))])
    assert (answer.text, answer.n_new, answer.n_first) == ("Yes, of course.", 5, 5)
    assert answer.ttft_s == answer.last_s == 1.0 + gap_s


def test_tokens_faster_than_a_bursts_length_keep_their_speed():
    events = [(1 + 4e-4 * i, chunk(content="w ")) for i in range(50)]
    answer = read_answer([*events, (1.02, chunk("length")), (1.02, usage(50))])
    assert (answer.n_new - answer.n_first) / (answer.last_s - answer.ttft_s) == pytest.approx(2500)


VALUES = (None, True, -1, 0, 2**40, 1e308, "x", "", [], {}, [None], [[1]], {"content": 1})


def damage(rng, lines):
    """One to three ways of damage."""
    lines = list(lines)
    for _ in range(rng.randint(1, 3)):
        i, kind = rng.randrange(len(lines)), rng.randrange(7)
        if kind == 0 and len(lines) > 1:
            del lines[i]
        elif kind == 1:
            lines.insert(i, lines[i])
        elif kind == 2:
            lines = lines[: i + 1]
        elif kind == 3:
            lines[i] = lines[i][: rng.randrange(len(lines[i]) + 1)]
        elif kind == 4:
            rng.shuffle(lines)
        elif kind == 5:
            lines[i] = rng.choice(["", ": ping", "event: x", "data:", "data: []", "data: 1"])
        else:
            lines[i] = "data: " + changed(rng, lines[i])
    return lines


def changed(rng, line):
    """The line's JSON with one value, anywhere in it, replaced."""
    try:
        node = json.loads(line.removeprefix("data:"))
    except ValueError:
        return "{}"
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    if isinstance(node, dict | list):
        walk(node)
    if places:
        parent, key = rng.choice(places)
        parent[key] = rng.choice(VALUES)
    return json.dumps(node)


def test_a_damaged_answer_is_read_or_refused():
    rng = random.Random(1)
    sound = {engine: lines_of(engine) for engine in ENGINES}
    outcomes = Counter()
    for _ in range(1000):
        engine = rng.choice(sorted(ENGINES))
        try:
            answer = read(damage(rng, sound[engine]))
        except NoAnswer as error:
            outcomes[bool(error.kind)] += 1
            continue
        outcomes["read"] += 1
        assert answer.n_new >= 1
        assert answer.finish_reason in ("eos", "length")
        assert answer.ttft_s > 0
        assert answer.last_s > answer.ttft_s or answer.n_first == answer.n_new
        assert not answer.output_ids or answer.n_new - 1 <= len(answer.output_ids) <= answer.n_new
        counts = find_counts(ENGINES[engine].counters, answer.counters, answer.n_new)
        if counts is not None:
            assert 0 <= counts.steps <= answer.n_new - 1
            assert not counts.committed or sum(counts.committed) == answer.n_new - 1
    assert min(outcomes["read"], outcomes[True]) > 40
    assert not outcomes[False]
