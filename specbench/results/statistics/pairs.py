"""Standings of methods: each against plain decoding and against the best, in one run or several.

Ratios point as speedups do: above 1 the first is faster than the second. They are of the same
estimator as the speedups of the rows, over the same timed cases; of a single method the interval
is that of its speedup. How intervals hold together: :mod:`specbench.results.statistics.multiple`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.results.cells import FEWEST, Interval
from specbench.results.headline_table import join_names
from specbench.results.manifest import BASELINE
from specbench.results.records import CaseRecord
from specbench.results.statistics.bootstrap import N_RESAMPLES, LogRatios
from specbench.results.statistics.counted import rankable, wrong_outputs
from specbench.results.statistics.multiple import (
    Against,
    Selection,
    against,
    against_best,
    selection,
)
from specbench.results.statistics.summary import Sample, pool
from specbench.results.summary_schema import Pair, Standing

MARGIN = 0.02  # ratios from 1/1.02 to 1.02 are a tie
_MIRRORED = {"faster": "slower", "slower": "faster"}
# From how many methods, and from which excess on, a sentence says what being picked does.
_MANY, _SHOWN_BIAS = 5, 0.01


def pair_outcome(interval: Interval | None, margin: float = MARGIN) -> str:
    """Say what an interval of a speed ratio, the first's over the second's, shows.

    Returns:
        ``tie``: it lies within the margin, whether or not it contains 1; ``faster`` or ``slower``:
        it excludes 1; ``undecided``: it does not; ``too few``: there is none.
    """
    if interval is None:
        return "too few"
    low, high = interval
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "tie"
    return "faster" if low > 1 else "slower" if high < 1 else "undecided"


@dataclass(frozen=True)
class Ranking:
    """The ranking of k methods, for all tables of one run and of several."""

    order: list[int]  # ``[k]`` methods, the fastest first
    over_plain: Sequence[Against | None]  # each, None for too few cases; empty without plain
    over_best: Mapping[int, Against | None]  # all but the fastest against the best of the others
    selection: Selection | None = None  # what the first one's speedup owes to being picked

    @classmethod
    def compare(
        cls,
        speeds: LogRatios | None,
        over_plain: LogRatios | None,
        values: Sequence[float],
        *,
        plain: bool = True,
    ) -> Ranking:
        """Compare ``[k]`` methods.

        Args:
            speeds: their speeds, or speedups each over its own baseline; None for too few cases.
            over_plain: their speedups.
            values: their numbers, for the order where there are too few cases.
            plain: whether plain decoding was measured.
        """
        order = np.argsort(-np.asarray(speeds.values if speeds else values), kind="stable").tolist()
        if speeds is None:
            return cls(order, [None] * len(order) * plain, dict.fromkeys(order[1:]))
        best = against_best(speeds)
        if over_plain is None:
            return cls(order, [], best)
        return cls(order, [*against(over_plain)], best, selection(over_plain))

    @property
    def leaders(self) -> list[int]:
        """The methods that may be the best: the fastest first, without those shown slower."""
        slower = {i for i, over in self.over_best.items() if _standing(over)["verdict"] == "slower"}
        return [i for i in self.order if i not in slower]

    @property
    def plain_outcomes(self) -> list[str]:
        """Each method's verdict against plain decoding; all of them hold together."""
        return [_standing(comparison)["verdict"] for comparison in self.over_plain]

    def standings(self, plain: str = BASELINE) -> tuple[dict[int, Standing], Standing | None]:
        """Give the methods' standings against the fastest, then that of plain decoding."""
        if not self.over_plain and not self.over_best:
            return {}, None
        top, *others = self.order
        standings = {i: _standing(self.over_best[i]) for i in others}
        verdicts = {standing["verdict"] for standing in standings.values()}
        over_plain = self.over_plain[top] if self.over_plain else None
        lead = _standing(over_plain) if self.over_plain else None
        ahead = lead is None or lead["verdict"] == "faster"
        first = Standing(verdict="best" if ahead and verdicts <= {"slower"} else "highest", p=None)
        if "too few" in verdicts | {lead["verdict"] if lead else ""}:
            first = Standing(verdict="too few", p=None)
        elif lead and lead["verdict"] == "slower":
            first = Standing(verdict=f"slower than {plain}", p=None)
        elif lead and over_plain and over_plain.log_ratio < 0:
            first = lead
        of_plain = lead and lead | {"verdict": _MIRRORED.get(lead["verdict"], lead["verdict"])}
        return {top: first, **standings}, of_plain

    def sentence(self, names: Sequence[str], timing: str = "measured", unit: str = "cases") -> str:
        """Say in one sentence what the comparison shows, for the head of tables and pages.

        ``pld is 1.31 to 1.60 times as fast as plain decoding; sam may be as fast.`` The interval is
        the one that decides: where methods are several, all their intervals hold together.

        Args:
            names: ``[k]`` of the methods.
            timing: where the times come from.
            unit: what there are too few of for an interval.

        Returns:
            "" where nothing was timed against plain decoding.
        """
        if not self.over_plain or timing == "none":
            return ""
        predicted = "Predicted, not measured: " if timing == "predicted" else ""
        return predicted + self._sentence(names, unit)

    def _sentence(self, names: Sequence[str], unit: str) -> str:
        top = self.order[0]
        if self.over_plain[top] is None:
            return (
                f"Too few {unit} to say what is faster than plain decoding: {FEWEST} are needed at "
                "least."
            )
        verdicts, leaders = self.plain_outcomes, self.leaders
        faster = [i for i in self.order if verdicts[i] == "faster"]
        together = f" (95 % for all {len(names)} together)" if len(names) > 1 else ""
        fastest = f"{names[top]}, the fastest here, is {self._times(top)} as fast"
        if set(verdicts) == {"slower"}:
            head = f"All {len(names)} are" if len(names) > 1 else f"{names[top]} is"
            best = f"{names[top]}, the fastest of them, is " if len(names) > 1 else "it is "
            return f"{head} slower than plain decoding; {best}{self._times(top)} as fast{together}."
        if not faster:
            head = f"Nothing is shown faster than plain decoding; {fastest}{together}"
            return f"{head}.{self._bias(names[top])}"
        first = next((i for i in leaders if i in faster), faster[0])
        text = f"{names[first]} is {self._times(first)} as fast"
        if first == top:
            text += f" as plain decoding{together}"
        else:
            text = f"{fastest} as plain decoding, so no gain is shown; {text}{together}"
        if others := [names[i] for i in leaders if i not in (first, top)]:
            text += f"; {join_names(others)} may be as fast"
        elif len(leaders) == 1 and len(names) > 1:
            text += "; the other methods are slower than it"
        return f"{text}.{self._bias(names[top])}"

    def _times(self, i: int) -> str:
        comparison = self.over_plain[i]
        assert comparison is not None
        low, high = (f"{bound:.2f}" for bound in comparison.interval)
        return f"{low} times" if low == high else f"{low} to {high} times"

    def _bias(self, name: str) -> str:
        """Say how much too high the first method's number is expected to be, if that is much."""
        few = len(self.order) < _MANY
        if few or self.selection is None or self.selection.if_equal < _SHOWN_BIAS:
            return ""
        low, high = (f"{100 * x:.0f}" for x in (self.selection.bias, self.selection.if_equal))
        span = high if low == high else f"{low} to {high}"
        return (
            f" Picked as the fastest of {len(self.order)} by the same cases, {name} is expected to "
            f"look {span} % too fast."
        )


def _standing(comparison: Against | None) -> Standing:
    if comparison is None:
        return Standing(verdict="too few", p=None)
    return Standing(verdict=pair_outcome(comparison.interval), p=comparison.p_family)


@dataclass(frozen=True)
class RankedLabels:
    """The methods of one run, ranked; those with wrong outputs are not among them."""

    methods: list[str]
    baseline: str | None
    ranking: Ranking
    sample: Sample

    @property
    def leaders(self) -> list[str]:
        """The methods that may be the best, the fastest first."""
        several = self.ranking.over_plain or self.ranking.over_best
        return [self.methods[i] for i in self.ranking.leaders] if several else []

    @property
    def standings(self) -> dict[str, Standing]:
        """Every label's standing against the fastest method, plain decoding's too."""
        of_methods, of_plain = self.ranking.standings(self.baseline or BASELINE)
        plain = {self.baseline: of_plain} if self.baseline and of_plain else {}
        return {self.methods[i]: standing for i, standing in of_methods.items()} | plain

    @property
    def pairs(self) -> list[Pair]:
        """Every method against plain decoding, then against the fastest of them."""
        methods, ranking, rows = self.methods, self.ranking, list[Pair]()
        if self.baseline is not None:
            rows = [
                self._pair(method, self.baseline, comparison, BASELINE)
                for method, comparison in zip(methods, ranking.over_plain, strict=False)
            ]
        return rows + [
            self._pair(methods[i], methods[ranking.order[0]], ranking.over_best[i], "best")
            for i in ranking.order[1:]
        ]

    def _pair(self, first: str, second: str, over: Against | None, family: str) -> Pair:
        n_timed, needed = self.sample.n_timed, over.needed if over else FEWEST
        if needed is not None:
            needed = math.ceil(needed * self.sample.unit_size)
        interval = over.interval if over else None
        return {
            "first": first,
            "second": second,
            "family": family,
            "n_cases": n_timed,
            "ratio": self.sample.speed.over(first, second)[0],
            "ratio_ci": interval,
            "p": over.p if over else 1.0,
            "p_family": over.p_family if over else 1.0,
            "verdict": pair_outcome(interval),
            "margin": MARGIN,
            "detectable": over.detectable if over else None,
            "needed": needed if (needed and needed > n_timed) or not over else None,
        }


def rank_labels(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    baseline: str | None = BASELINE,
    seed: int = 0,
    estimator: str = "paired",
    n_resamples: int = N_RESAMPLES,
) -> RankedLabels:
    """Rank the methods of a run.

    Args:
        records: of one run.
        labels: of its table; plain decoding's are not methods.
        baseline: what speedups refer to; None: only the best.
        seed, n_resamples: of the bootstrap.
        estimator: of the speeds, as for :func:`specbench.results.statistics.summary.summarize`.
    """
    sample = Sample(pool(records, labels), estimator, seed, n_resamples)
    return rank_sample(sample, wrong_outputs(records, labels), baseline)


def rank_sample(
    sample: Sample, wrong: Collection[str], baseline: str | None = BASELINE
) -> RankedLabels:
    """Rank the methods of a sample; ``wrong``: labels that have no standing."""
    labels, last = sample.pooled.labels, sample.pooled.last.items()
    plain = {baseline} | {label for label, turn in last if turn.method == BASELINE}
    ranked = rankable(labels, wrong, baseline)
    methods = [label for label in ranked if label not in plain] if sample.n_timed else []
    if baseline not in labels:
        baseline = None
    if not methods:
        return RankedLabels([], baseline, Ranking([], [], {}), sample)
    speeds = over_plain = None
    if sample.speed.logs is not None:
        rows = np.eye(len(labels))
        of_method = rows[[labels.index(label) for label in methods]]
        speeds = sample.speed.logs.contrast(of_method)
        if baseline is not None:
            over_plain = sample.speed.logs.contrast(of_method - rows[labels.index(baseline)])
    values = [sample.speed.value(label) or 0.0 for label in methods]
    ranking = Ranking.compare(speeds, over_plain, values, plain=baseline is not None)
    return RankedLabels(methods, baseline, ranking, sample)
