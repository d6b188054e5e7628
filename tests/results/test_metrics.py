"""Tests of ``metrics.py``: one list, of which everything that shows numbers is made."""

import math

import numpy as np
import pytest
from scipy import stats

from specbench.results.headline_table import decision_cells
from specbench.results.metrics import METRICS
from specbench.results.statistics.summary import summarize
from tests.small_run import case_record


def turn(case, label, tokens, seconds, category, repeat=0, turn=0):
    return case_record(
        case, label, tokens + 1, committed_per_step=[1] * tokens, prefill_s=0.1, decode_s=seconds,
        wall_s=seconds + 0.1, category=category, task="t", repeat=repeat, turn=turn,
    )  # fmt: skip


def recipe(records, seed):
    """The steps of docs/metrics.md, "Intervals", for the speedup of pld over ar."""
    units = sorted({(r.case_id, r.category) for r in records})
    n_repeats = 1 + max(r.repeat for r in records)
    sums = np.zeros((4, n_repeats, len(units)))  # 1: tokens and seconds of pld and ar
    for r in records:
        row, at = 2 * (r.label == "ar"), units.index((r.case_id, r.category))
        sums[row, r.repeat, at] += r.n_new - 1
        sums[row + 1, r.repeat, at] += r.decode_s
    members = {}  # 2
    for i, (_, category) in enumerate(units):
        members.setdefault(category, []).append(i)
    single = [name for name in sorted(members) if len(members[name]) == 1]
    groups = {name: members[name] for name in sorted(members) if name not in single}
    joined = [i for name in single for i in members[name]]
    if len(joined) == 1:
        groups[min(groups, key=lambda name: (len(groups[name]), name))] += joined
    elif joined:
        groups["joined"] = joined
    df, generator = len(units) - len(groups), np.random.default_rng(seed)
    total = np.zeros((10_000, 4))  # 3
    for group in map(sorted, groups.values()):
        n = len(group)
        draws = generator.integers(0, n, (10_000, n - 1))
        total += sums.sum(axis=1)[:, group].T[draws].sum(axis=1) * n / (n - 1)
    ln = np.log(total[:, 0] / total[:, 1] * total[:, 3] / total[:, 2])
    s2 = ln.var(ddof=1)  # 4
    a, b, c, d = sums.sum(axis=2)
    r2 = np.log(a / b * d / c).var(ddof=1) / n_repeats if n_repeats > 1 else 0.0  # 5
    df = (s2 + r2) ** 2 / (s2**2 / df + r2**2 / max(1, n_repeats - 1))
    value = a.sum() / b.sum() * d.sum() / c.sum()  # 6
    half = stats.t.ppf(0.975, df) * math.sqrt(s2 + r2)
    return value, (value * math.exp(-half), value * math.exp(half))


@pytest.mark.parametrize(
    ("categories", "repeats", "turns"),
    [("aaabbcccc", 1, 1), ("abcaaddx", 1, 2), ("aabbx", 3, 1), ("abcd", 1, 1), ("aaaa", 2, 2)],
)
def test_the_recipe_on_the_page_gives_the_interval_of_the_table(categories, repeats, turns):
    generator = np.random.default_rng(len(categories))
    records = [
        turn(f"{i}", label, int(generator.integers(5, 60)), factor * generator.uniform(1, 3),
             category, repeat, t)
        for repeat in range(repeats)
        for i, category in enumerate(categories)
        for t in range(turns)
        for label, factor in (("ar", 2.0), ("pld", 1.0))
    ]  # fmt: skip
    row = summarize(records, ["ar", "pld"], seed=7)[-1]
    value, interval = recipe(records, seed=7)
    intervals = {metric.interval_name for metric in METRICS if metric.has_interval}
    assert {metric.name for metric in METRICS} <= set(row)
    assert {key for key in row if key.endswith("_ci")} == intervals
    assert row["speedup"] == pytest.approx(value, rel=1e-12)
    assert row["speedup_ci"] == pytest.approx(interval, rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_than_three_cases_show_no_speedup(n):
    """A single lucky case would be read as a number; its MAT is exact all the same."""
    records = [
        turn(f"{i}", label, 10, seconds + 0.1 * i, "a")
        for i in range(n)
        for label, seconds in (("ar", 7.41), ("pld", 1.0))
    ]
    row = summarize(records, ["ar", "pld"])[-1]
    assert all((row[key] is None) == (n < 3) for key in ("mat_ci", "speedup_ci", "tokens_per_s_ci"))
    cells = {name: str(cell) for name, cell in decision_cells(row, None).items()}
    for name in ("speedup [95 %]", "end-to-end [95 %]"):
        assert (cells[name] == "too few cases") == (n < 3)
    assert cells["MAT [95 %]"].startswith("1.00")
    bare = str(decision_cells(row, None)["end-to-end [95 %]"].without_interval)
    assert ("[" not in bare) and (bare == "too few cases") == (n < 3)
