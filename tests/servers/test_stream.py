"""Streamed answers of every engine, whole and damaged in thousands of ways."""

import json
import random

import pytest

from specbench.servers.client import NoAnswer, read_events
from specbench.servers.counters import find_counts
from specbench.servers.engines import ENGINES
from specbench.servers.stream import read_answer
from tests.servers.fake import Fake

BODY = {"messages": [{"role": "user", "content": "a question"}], "return_token_ids": True}


def llamacpp_lines():
    """llama.cpp's own interface, as its server wrote it."""
    words = ["The", " harbour", " master", " keeps", " two", ""]
    for i, word in enumerate(words):
        said = {"index": 0, "content": word, "tokens": [100 + i], "stop": False, "id_slot": -1}
        yield {**said, "tokens_predicted": i + 1, "tokens_evaluated": 41}
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
    return [b"data: " + json.dumps(event).encode() for event in events] + [b"data: [DONE]"]


def read(lines):
    return read_answer(read_events((0.001 * (i + 1), line) for i, line in enumerate(lines)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_answer_is_read(engine):
    answer = read(lines_of(engine))
    counts = find_counts(ENGINES[engine].counters, answer.counters, answer.n_new)
    if engine == "llamacpp":
        assert (answer.text, answer.finish_reason) == ("The harbour master keeps two", "eos")
        assert answer.output_ids == [100, 101, 102, 103, 104, 105]
        assert (answer.n_new, answer.n_prompt, counts.steps) == (6, 41, 2)
        assert answer.ttft_s == 0.001
        assert answer.last_s == pytest.approx(0.006)  # the end token came, without text
    else:
        assert (answer.n_new, answer.n_prompt, answer.finish_reason) == (12, 5, "length")
        assert answer.ttft_s == pytest.approx(0.002)  # the first event has a role and no text
        assert counts is None if engine == "other" else counts.steps == 4
        assert len(answer.output_ids) == (12 if engine == "vllm" else 0)


def chunk(reason=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(n_new):
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": n_new}}


def read_events_of(events):
    return read_answer((float(i + 1), event) for i, event in enumerate(events))


@pytest.mark.parametrize(
    ("events", "text", "times"),
    [
        # The time of an end token without text counts.
        ([chunk(content="Yes"), chunk(content=", sir"), chunk("stop", content=""), usage(3)],
         "Yes, sir", (1.0, 3.0)),
        ([chunk(content="Yes"), chunk("stop"), usage(2)], "Yes", (1.0, 2.0)),
        # Reasoning is part of the answer.
        ([chunk(role="assistant", content=""), chunk(reasoning_content="Hm. "),
          chunk(content="Yes"), chunk("stop", content="."), usage(4)], "Hm. Yes.", (2.0, 4.0)),
    ],
    ids=["end token", "one word", "reasoning"],
)  # fmt: skip
def test_the_times_of_an_answer_are_its_first_and_last_tokens(events, text, times):
    answer = read_events_of(events)
    assert (answer.text, answer.ttft_s, answer.last_s) == (text, *times)
    assert answer.n_new == events[-1]["usage"]["completion_tokens"]


def test_an_answer_in_one_piece_has_no_speed():
    with pytest.raises(NoAnswer, match="does not stream"):
        read_events_of([chunk(content="All of it at once"), chunk("stop"), usage(5)])


VALUES = (None, True, -1, 0, 2**40, 1e308, "x", "", [], {}, [None], [[1]], {"content": 1})


def damage(rng, lines):
    """One to three ways of damage."""
    lines = list(lines)
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(8)
        if not lines:
            break
        if kind == 0:
            del lines[i]
        elif kind == 1:
            lines.insert(i, lines[i])
        elif kind == 2:
            lines = lines[:i]
        elif kind == 3 and lines[i]:
            line = bytearray(lines[i])
            for _ in range(rng.randint(1, 4)):
                line[rng.randrange(len(line))] = rng.randrange(256)
            lines[i] = bytes(line)
        elif kind == 4:
            lines[i] = lines[i][: rng.randrange(len(lines[i]) + 1)]
        elif kind == 5:
            rng.shuffle(lines)
        elif kind == 6:
            lines[i] = rng.choice([b"", b": ping", b"event: x", b"data:", b"data: []", b"data: 1"])
        else:
            lines[i] = b"data: " + changed(rng, lines[i])
    return lines


def changed(rng, line):
    """The line's JSON with one value, anywhere in it, replaced."""
    try:
        node = json.loads(line.removeprefix(b"data:"))
    except ValueError:
        return b"{}"
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
    return json.dumps(node).encode()


def check(seed, n):
    rng = random.Random(seed)
    sound = {engine: lines_of(engine) for engine in ENGINES}
    read_whole = refused = 0
    for _ in range(n):
        engine = rng.choice(sorted(ENGINES))
        try:
            answer = read(damage(rng, sound[engine]))
        except NoAnswer as error:
            assert error.kind
            refused += 1
            continue
        read_whole += 1
        assert answer.n_new >= 1
        assert answer.finish_reason in ("eos", "length")
        assert answer.ttft_s > 0
        assert answer.n_new == 1 or answer.decode_s > 0
        assert not answer.output_ids or answer.n_new - 1 <= len(answer.output_ids) <= answer.n_new
        counts = find_counts(ENGINES[engine].counters, answer.counters, answer.n_new)
        if counts is not None:
            assert 0 <= counts.steps <= answer.n_new - 1
            assert not counts.committed or sum(counts.committed) == answer.n_new - 1
    return read_whole, refused


def test_a_damaged_answer_is_read_or_refused_in_words():
    read_whole, refused = check(seed=1, n=400)
    assert read_whole > 40
    assert refused > 40


@pytest.mark.slow
def test_ten_thousand_damaged_answers():
    read_whole, refused = check(seed=2, n=10_000)
    assert read_whole + refused == 10_000
