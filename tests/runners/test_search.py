"""Search spaces and successive halving, against trying everything."""

import json
from collections import Counter

import numpy as np
import pytest

from runners.search import (
    Candidate,
    CaseCost,
    format_knobs,
    format_overrides,
    mix_tasks,
    settings,
    split_halves,
    successive_halving,
)
from specbench.config import compose
from specbench.data.cases import Case

SPACE = {"n": {"from": 1, "to": 32, "log": True}, "m": {"from": 0, "to": 2}, "kind": ["a", "b"]}
CASES = [f"c{i}" for i in range(8)]


def test_settings_fill_the_space_and_begin_alike():
    tried = settings(SPACE, 48, seed=0)
    assert tried[:2] == [{}, {"n": 1, "m": 0, "kind": "a"}]
    assert len({json.dumps(knobs, sort_keys=True) for knobs in tried}) == 48
    assert tried[:10] == settings(SPACE, 10, seed=0) != settings(SPACE, 10, seed=1)
    assert {knobs["m"] for knobs in tried[1:]} == {0, 1, 2}
    counts = Counter(knobs["kind"] for knobs in tried[1:])
    assert min(counts.values()) > 15
    # By doublings: about as many from 1 to 5 as from 6 to 32.
    small = sum(knobs["n"] <= 5 for knobs in tried[1:])
    assert 15 < small < 32
    assert {knobs["n"] for knobs in tried[1:]} <= set(range(1, 33))


def test_a_small_space_is_tried_whole_and_refused_settings_are_replaced():
    assert len(settings({"kind": ["a", "b", "c"]}, 16, 0)) == 4
    tried = settings(SPACE, 8, 0, usable=lambda knobs: knobs["m"] == 1)
    assert len(tried) == 8
    assert {knobs["m"] for knobs in tried[1:]} == {1}


def test_settings_are_written_as_they_are_typed():
    knobs = {"levels": [2, 1], "part": {"total": 4, "of": None}, "on": True}
    assert format_overrides(knobs) == [
        "method.levels=[2,1]", "method.part.total=4", "method.part.of=null", "method.on=true"
    ]  # fmt: skip
    assert format_knobs({}) == "its own"
    parts = {"drafters": ["sam", {"method": "eagle2", "total": 4}]}
    assert format_overrides(parts) == ["method.drafters=[sam,{method:eagle2,total:4}]"]
    assert compose.compose(["method=union", *format_overrides(parts)]).method.drafters[1].total == 4


def priced(speed):
    """Make a measure: a setting takes a second over its speed, plain decoding takes one."""

    def measure(candidates, cases):
        for candidate in candidates:
            if candidate.knobs.get("bad"):
                candidate.refused = "bad"
                continue
            for case in cases:
                candidate.costs.setdefault(case, CaseCost(10, 1 / speed(candidate, case), 10, 1.0))

    return measure


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_all_is_found_where_cases_agree(seed):
    rng = np.random.default_rng(seed)
    speeds = {"a": rng.random(13) + 0.5, "b": rng.random(13) + 0.5}
    candidates = {m: [Candidate(m, {"i": i}) for i in range(13)] for m in speeds}
    measure = priced(lambda item, case: speeds[item.method][item.knobs["i"]])
    best = successive_halving(candidates, CASES, measure)
    for method, values in speeds.items():
        assert best[method][0].knobs["i"] == int(np.argmax(values))
        assert best[method][0].speedup(CASES) == pytest.approx(values.max())
        # 13 on 2 cases, 7 on 4, 4 on 8; the first one goes through.
        assert all(candidate.costs for candidate in candidates[method])
        effort = sum(len(candidate.costs) for candidate in candidates[method])
        assert 13 * 2 + 7 * 2 + 4 * 4 <= effort <= 13 * 2 + 8 * 2 + 5 * 4
        assert candidates[method][0] in best[method]


def test_what_was_only_good_at_first_is_given_up():
    """Later cases decide: a setting that leads on the first two loses to one that is steady."""
    candidates = {"a": [Candidate("a", {"i": i}) for i in range(4)]}
    early = priced(lambda item, case: 3.0 if (item.knobs["i"] == 1) == (case in CASES[:2]) else 1.2)
    best = successive_halving(candidates, CASES, early)
    truth = {i: candidates["a"][i].speedup(CASES) for i in (0, 1)}
    assert best["a"][0].knobs["i"] == max(truth, key=truth.get) == 0


def test_refused_settings_are_never_chosen():
    candidates = {
        "a": [Candidate("a", {}), Candidate("a", {"bad": 1})],
        "b": [Candidate("b", {"bad": 1})],
    }
    best = successive_halving(candidates, CASES, priced(lambda item, case: 2.0))
    assert [candidate.knobs for candidate in best["a"]] == [{}]
    assert best["b"] == []


def case(name, task):
    return Case(name, task, task, ("x",))


def test_halves_are_disjoint_complete_and_even_over_tasks():
    cases = [case(f"q{i}", "qa") for i in range(8)] + [case(f"r{i}", "rag") for i in range(4)]
    cases.append(case("lone", "math"))
    first, second = split_halves(cases, seed=1)
    assert {c.case_id for c in first} | {c.case_id for c in second} == {c.case_id for c in cases}
    assert not {c.case_id for c in first} & {c.case_id for c in second}
    assert [Counter(c.task for c in half)["qa"] for half in (first, second)] == [4, 4]
    assert [Counter(c.task for c in half)["rag"] for half in (first, second)] == [2, 2]
    assert split_halves(cases, 1) == (first, second)
    assert {c.task for c in mix_tasks(cases, 0)[:3]} == {"qa", "rag", "math"}
