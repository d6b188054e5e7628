"""The rule about disturbed turns favors nobody: simulated runs through the project's own code.

``pytest -s -m slow tests/runners/test_noisy_runs.py`` makes 4,000 runs of each world, prints a line
for each.
"""

import pytest

from tests.runners.noisy_world import Bursts, Own, World, one_run, study

# Slowness of the methods' own, or of ar alone: no world outside has a part in it.
OWN = {
    **{f"2 x slower in {p:.0%} of the turns": World({"a": Own(p)}) for p in (0.05, 0.1, 0.2, 0.4)},
    "2 x slower on 40% of the prompts": World({"a": Own(0.4, by_prompt=True)}),
    **{
        f"threads wait on {p:.0%} of the prompts": World({"a": Own(p, 1.3, True, waits=True)})
        for p in (0.48, 0.52)
    },
    "ar slow in 20% of the turns": World({"ar": Own(0.2)}),
    "ar slow on 20% of the prompts": World({"ar": Own(0.2, by_prompt=True)}),
}
BURSTS = {
    "bursts that counters show": World(bursts=Bursts(0.1, counted=True)),
    "bursts that ar shows": World(bursts=Bursts(0.1, counted=False)),
    "bursts, and 2 x slower on 40% of the prompts": World(
        {"a": Own(0.4, by_prompt=True)}, Bursts(0.1, counted=True)
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_slowness_of_a_label_alone_is_never_left_out(name):
    for seed in range(2):
        ruled, plain, records, _ = one_run(OWN[name], seed)
        assert not any(record.disturbed_by or record.attempt for record in records)
        assert ruled == plain


def test_a_label_does_not_suffer_where_ar_and_another_one_are_slow():
    world = World({"ar": Own(0.1), "a": Own(0.4)}, labels=("ar", "a", "b"))
    for seed in range(3):
        ruled, plain, *_ = one_run(world, seed, "b")
        assert ruled["speedup"] == plain["speedup"]


@pytest.mark.parametrize(("counted", "left"), [(True, 0.3), (False, 0.8)])
def test_bursts_from_outside_lose_their_variance(counted, left):
    """All of it where counters show every turn that was hit; ``ar`` shows whole cases."""
    found = study(World(bursts=Bursts(0.08, counted, turns=8), n=80), draws=10, seed=90)
    assert found.speed_sd[0] < left * found.speed_sd[1]
    assert found.sd[0] < found.sd[1]


def test_a_machine_that_is_busy_throughout_has_numbers_all_the_same():
    ruled, _, records, _ = one_run(World(bursts=Bursts(1.0, counted=True)), 0)
    assert ruled["speedup"] is not None
    assert ruled["disturbed_counted"] is True
    assert {record.status for record in records} == {"disturbed"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*OWN, *BURSTS])
def test_no_bias_and_intervals_that_cover(name):
    found = study((OWN | BURSTS)[name], draws=4000)
    print(f"\n{name} | {found}", flush=True)
    assert abs(found.bias[0]) <= 0.01
    assert found.coverage[0] >= found.coverage[1] - 0.01
    if name in BURSTS:
        assert found.sd[0] < 0.9 * found.sd[1]
