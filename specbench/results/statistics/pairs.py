"""Pairs of ``summary.json``: each method against plain decoding and against the best, and leaders.

Ratios point as speedups do: above 1 the first is faster than the second. They are of the same
estimator as the speedups of the rows, over the same timed cases; of a single method the interval
is that of its speedup. :mod:`specbench.results.statistics.multiple` says how intervals hold
together, and what makes the comparison with the best honest although the data picked it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specbench.arrays import FloatArray
from specbench.results.decision import verdict_sentence
from specbench.results.estimate import FEWEST, Interval
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord
from specbench.results.statistics.aggregate import pool
from specbench.results.statistics.bootstrap import N_RESAMPLES, LogRatios
from specbench.results.statistics.counted import rankable, wrong_outputs
from specbench.results.statistics.multiple import Against, against, against_best
from specbench.results.statistics.summary import Sample
from specbench.results.summary_schema import Pair, Standing, SummaryRow
from specbench.results.tasks import OVERALL

DEFAULT_MARGIN = 0.02


def verdict(interval: Interval | None, margin: float = DEFAULT_MARGIN) -> str:
    """What an interval of a speed ratio says about two methods.

    Args:
        interval: of the first's speed over the second's.
        margin: what counts as no difference, e.g. 0.02: ratios from 1/1.02 to 1.02.

    Returns:
        ``tie``: the whole interval lies within the margin, whether or not it contains 1;
        ``faster`` or ``slower``: it excludes 1; ``undecided``: it does not; ``too few``: there is
        none, because of fewer than :data:`specbench.results.estimate.FEWEST` cases.
    """
    if interval is None:
        return "too few"
    low, high = interval
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "tie"
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


def compare_pairs(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    baseline: str | None = BASELINE,
    seed: int = 0,
    estimator: str = "paired",
    margin: float = DEFAULT_MARGIN,
    n_resamples: int = N_RESAMPLES,
) -> list[Pair]:
    """Every method against the baseline, then against the fastest of them.

    Methods whose outputs are wrong are in no pair.

    Args:
        records: of one run.
        labels: of its table; plain decoding's are not methods.
        baseline: what speedups refer to; None: only the best.
        seed: of the bootstrap.
        estimator: of the speeds, as for :func:`specbench.results.statistics.summary.summarize`.
        margin: ratios from 1/(1 + margin) to 1 + margin count as a tie.
        n_resamples: of the bootstrap.
    """
    pooled = pool(records, labels)
    sample = Sample(pooled, estimator, seed, n_resamples)
    plain = {baseline} | {label for label in labels if pooled.methods.get(label) == BASELINE}
    ranked = rankable(labels, wrong_outputs(records, labels), baseline)
    methods = [label for label in ranked if label not in plain]
    if not methods or not sample.n_timed:
        return []
    all_speeds = sample.speeds
    of_method = np.eye(len(labels))[[labels.index(label) for label in methods]]
    known: dict[str, Against] = {}
    if baseline is not None and baseline in labels:
        if all_speeds is not None:
            contrasts = of_method - np.eye(len(labels))[labels.index(baseline)]
            known = dict(zip(methods, against(all_speeds.of(contrasts)), strict=True))
        rows = [_pair(sample, label, baseline, known.get(label), margin) for label in methods]
    else:
        rows = []
    if len(methods) == 1:
        return rows
    if all_speeds is None:
        places, found = _descending([sample.tokens_per_s(label)[0] or 0.0 for label in methods]), {}
    else:
        speeds = all_speeds.of(of_method)
        places, found = _descending(speeds.values), against_best(speeds)
    top = methods[places[0]]
    others = places[1:]
    return rows + [_pair(sample, methods[i], top, found.get(i), margin, "best") for i in others]


def _descending(values: Sequence[float] | FloatArray) -> list[int]:
    order: list[int] = np.argsort(-np.asarray(values), kind="stable").tolist()
    return order


def _pair(
    sample: Sample,
    first: str,
    second: str,
    found: Against | None,
    margin: float,
    family: str = BASELINE,
) -> Pair:
    interval, needed = (found.interval, found.needed) if found else (None, FEWEST)
    if needed is not None:
        needed = math.ceil(needed * sample.unit_size)
    return {
        "first": first,
        "second": second,
        "family": family,
        "n_cases": sample.n_timed,
        "ratio": sample.speedup(first, second)[0],
        "ratio_ci": interval,
        "p": found.p if found else 1.0,
        "p_family": found.p_family if found else 1.0,
        "verdict": verdict(interval, margin),
        "margin": margin,
        "detectable": found.detectable if found else None,
        "needed": needed if (needed and needed > sample.n_timed) or not found else None,
    }


def leaders(speeds: LogRatios, margin: float = DEFAULT_MARGIN) -> list[int]:
    """Which of ``[k]`` methods may be the best: the fastest first, without those shown slower."""
    order = _descending(speeds.values)
    if len(order) == 1:
        return order
    found = against_best(speeds)
    behind = {i for i in found if verdict(found[i].interval, margin) == "slower"}
    return [i for i in order if i not in behind]


def verdict_of(pairs: Sequence[Pair], rows: Iterable[SummaryRow]) -> str:
    """A run in one sentence, of its pairs and its rows over the whole run."""
    against_plain = [pair for pair in pairs if pair["family"] == BASELINE]
    if not against_plain:
        return ""
    methods = {pair["first"] for pair in against_plain}
    own = {row["label"]: row for row in rows if row["task"] == OVERALL and row["label"] in methods}
    return verdict_sentence(
        {label: row["speedup_ci"] for label, row in own.items()},
        leaders_of(pairs),
        {pair["first"] for pair in against_plain if pair["verdict"] == "faster"},
        next(iter(own.values()))["timing"],
    )


def leaders_of(pairs: Sequence[Pair]) -> list[str]:
    """The labels that may be the best, of pairs as :func:`compare_pairs` gives them."""
    rows = [pair for pair in pairs if pair["family"] == "best"]
    if not rows:
        return [pair["first"] for pair in pairs]
    return [rows[0]["second"], *(row["first"] for row in rows if row["verdict"] != "slower")]


def standings_of(pairs: Sequence[Pair]) -> dict[str, Standing]:
    """How each label stands against the fastest method, of pairs as :func:`compare_pairs` gives.

    Plain decoding has a stand where the fastest method was compared with it.
    """
    over = {pair["first"]: pair for pair in pairs if pair["family"] == BASELINE}
    best = [pair for pair in pairs if pair["family"] != BASELINE]
    if not pairs:
        return {}
    top = best[0]["second"] if best else pairs[0]["first"]
    others = {pair["first"]: Standing(verdict=pair["verdict"], p=pair["p_family"]) for pair in best}
    if top not in over:
        return standings(top, others)
    plain = over[top]
    over_plain = Standing(verdict=plain["verdict"], p=plain["p_family"])
    return standings(top, others, plain["second"], over_plain, behind=(plain["ratio"] or 1.0) < 1)


def standings(
    top: str,
    others: Mapping[str, Standing],
    plain: str | None = None,
    over_plain: Standing | None = None,
    *,
    behind: bool = False,
) -> dict[str, Standing]:
    """Stands by label, of what is known of each pair.

    Args:
        top: the fastest method.
        others: the other methods against it.
        plain: the label of plain decoding; ``over_plain``: the fastest method against it;
            ``behind``: that is the slower one here, whether or not it is shown to be.
    """
    found = dict(others)
    verdict = over_plain["verdict"] if over_plain else ""
    if plain is not None and over_plain is not None:
        mirrored = {"faster": "slower", "slower": "faster"}.get(verdict, verdict)
        found[plain] = Standing(verdict=mirrored, p=over_plain["p"])
    if any(standing["verdict"] == "too few" for standing in found.values()):
        return {top: Standing(verdict="too few", p=None), **found}
    shown = all(standing["verdict"] == "slower" for standing in found.values())
    if behind and over_plain is not None and verdict != "slower":
        return {top: over_plain, **found}
    own = f"slower than {plain}" if verdict == "slower" else "best" if shown else "highest"
    return {top: Standing(verdict=own, p=None), **found}
