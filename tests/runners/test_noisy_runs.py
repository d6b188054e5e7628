"""The rule about disturbed cases favors nobody: simulated runs through the project's own code.

``pytest -s -m slow tests/runners/test_noisy_runs.py`` makes 1,000 runs of each world and prints a
line for each, with the rule and without it.
"""

import pytest

from tests.runners.noisy_world import Bursts, Own, World, one_run, study

# Slowness of the methods' own, or of ar alone: no world outside has a part in it.
OWN = {
    "method 2 x slower in 20% of its turns": World({"a": Own(0.2)}),
    "method 2 x slower on 40% of the prompts": World({"a": Own(0.4, by_prompt=True)}),
    "its threads wait on 48% of the prompts": World({"a": Own(0.48, 1.3, True, waits=True)}),
    "ar 2 x slower in 20% of its turns": World({"ar": Own(0.2)}),
}
SHORT = Bursts(0.04, counted=True, seconds=0.3)
LONG = Bursts(0.1, counted=True)
COUNTED = {
    "bursts of 6 s, 10% of the time": World(bursts=LONG),
    "the same, six labels": World(bursts=LONG, labels=("ar", *"abcde")),
    "bursts of 2 s, 8%, turns of 1 to 2 s": World(
        bursts=Bursts(0.08, counted=True, seconds=2.0), scale=4
    ),
    "bursts of 0.3 s, 4%, turns of 0.2 to 0.6 s": World(bursts=SHORT),
    "turns of 1 to 2 s": World(bursts=SHORT, scale=4),
    "turns of 2 to 5 s": World(bursts=SHORT, scale=8),
    "the same short bursts, six labels": World(bursts=SHORT, scale=2, labels=("ar", *"abcde")),
    "method alone hit by bursts of 0.3 s, 4%": World(
        bursts=Bursts(0.04, counted=True, seconds=0.3, hits="a")
    ),
    "method alone hit by bursts of 2 s, 8%": World(
        bursts=Bursts(0.08, counted=True, seconds=2.0, hits="a")
    ),
    "bursts of 1 s, 30% of the time": World(bursts=Bursts(0.3, counted=True, seconds=1.0), scale=2),
    "4% always taken": World(bursts=Bursts(1.0, counted=True, factor=1 / 0.96)),
    "bursts of 6 s, 2 x slower on 40% of the prompts": World({"a": Own(0.4, by_prompt=True)}, LONG),
}
# A method is slow at random where bursts are frequent: the slow turn is hit more often, and faster
# when it is measured again.
HARD = {
    "bursts of 0.3 s, 4%, 2 x slower in 40% of its turns": World({"a": Own(0.4)}, SHORT),
}
HIDDEN = {
    "bursts of 6 s, 10%, no counters": World(bursts=Bursts(0.1, counted=False)),
    "bursts of 0.3 s, 4%, no counters": World(bursts=Bursts(0.04, counted=False, seconds=0.3)),
    "method alone, 20% of its time, no counters": World(
        bursts=Bursts(0.2, counted=False, seconds=2.0, hits="a")
    ),
}
DRIFT = {
    "30% slower at the end, task after task": World(drift=0.3, order="file"),
    "30% slower at the end, tasks interleaved": World(drift=0.3, order="interleaved"),
}


@pytest.mark.parametrize("name", OWN)
def test_slowness_of_a_label_alone_is_never_disturbed(name):
    draw = one_run(OWN[name], 0)
    assert not any(record.disturbed_by or record.attempt for record in draw.records)
    assert draw.ruled == draw.plain


def test_a_label_does_not_suffer_where_ar_and_another_one_are_slow():
    world = World({"ar": Own(0.1), "a": Own(0.4)}, labels=("ar", "a", "b"))
    draw = one_run(world, 0, "b")
    assert draw.ruled["speedup"] == draw.plain["speedup"]


@pytest.mark.parametrize(("counted", "left"), [(True, 0.4), (False, 0.8)])
def test_bursts_from_outside_lose_their_variance(counted, left):
    """All of it where counters show every turn that was hit; ``ar`` shows whole cases."""
    found = study(World(bursts=Bursts(0.08, counted), n=60), draws=8, seed=90)
    assert found.error[0] < left * found.error[1]


def test_a_burst_favors_no_label_however_short_its_turns_are():
    """Per turn, its share is larger in the method's than in ar's, which is 1.4 times as long."""
    draw = one_run(COUNTED["turns of 1 to 2 s"], 1)
    flagged = {(r.label, r.case_id) for r in draw.first if r.disturbed_by}
    assert {case for label, case in flagged if label == "ar"} == {
        case for label, case in flagged if label == "a"
    }
    assert 20 < len(flagged) < 200
    assert {label for label, _ in flagged} == {"ar", "a"}


def test_a_load_that_never_changes_disturbs_nothing_below_its_limit():
    draw = one_run(COUNTED["4% always taken"], 0)
    assert draw.ruled == draw.plain
    assert not any(record.disturbed_by for record in draw.first)


def test_a_drift_weighs_tasks_alike_where_they_are_interleaved():
    apart, mixed = (study(world, draws=4) for world in DRIFT.values())
    assert abs(mixed.bias[0]) < 0.5 * abs(apart.bias[0])


def test_a_machine_that_is_busy_throughout_has_numbers_all_the_same():
    draw = one_run(World(bursts=Bursts(1.0, counted=True), n=20), 0)
    assert draw.ruled["speedup"] is not None
    assert {record.status for record in draw.records} == {"disturbed"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*OWN, *COUNTED, *HARD, *HIDDEN, *DRIFT])
def test_no_bias_and_intervals_that_cover(name):
    found = study((OWN | COUNTED | HARD | HIDDEN | DRIFT)[name], draws=1000)
    print(f"\n| {name} | {found} |", flush=True)
    if name in OWN or name in COUNTED or "interleaved" in name:
        assert abs(found.bias[0]) <= 0.002 + 2 * found.error[0]
        assert 0.93 <= found.coverage[0] <= 0.97
