"""Standings of methods: each against plain decoding and against the best, in one run or several.

Ratios point as speedups do: above 1 the first is faster than the second. They are of the same
estimator as the speedups of the rows, over the same timed cases; of a single method the interval
is that of its speedup. :mod:`specbench.results.statistics.multiple` says how intervals hold
together, and what makes the comparison with the best honest although the data picked it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.results.decision import LEADERS_NAMED
from specbench.results.estimate import FEWEST, Interval
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

DEFAULT_MARGIN = 0.02
# From how many methods, and from which excess on, a sentence says what being picked does.
_MANY, _SHOWN_BIAS = 5, 0.01


def verdict(interval: Interval | None, margin: float = DEFAULT_MARGIN) -> str:
    """Say what an interval of a speed ratio shows about two methods.

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


@dataclass(frozen=True)
class Ranking:
    """How k methods stand; all outputs of one run and of several ask this one place.

    Attributes:
        order: ``[k]`` methods, the fastest first.
        over_plain: ``[k]`` each against plain decoding; None for too few cases, empty without it.
        over_best: all but the fastest against the best of the others; None for too few cases.
        selection: how much the first one's speedup owes to being picked.
        margin: ratios from 1/(1 + margin) to 1 + margin are a tie.
    """

    order: list[int]
    over_plain: list[Against | None]
    over_best: dict[int, Against | None]
    selection: Selection | None = None
    margin: float = DEFAULT_MARGIN

    @classmethod
    def of(
        cls,
        speeds: LogRatios | None,
        over_plain: LogRatios | None,
        values: Sequence[float],
        *,
        plain: bool = True,
        margin: float = DEFAULT_MARGIN,
    ) -> Ranking:
        """Compare ``[k]`` methods.

        Args:
            speeds: their speeds, or speedups each over its own baseline; None for too few cases.
            over_plain: their speedups.
            values: their numbers, for the order where there are too few cases.
            plain: whether plain decoding was measured.
            margin: of a tie.
        """
        if speeds is None:
            order = np.argsort(-np.asarray(values), kind="stable").tolist()
            few: list[Against | None] = [None] * len(values)
            return cls(order, few if plain else [], dict.fromkeys(order[1:]), None, margin)
        order = np.argsort(-speeds.values, kind="stable").tolist()
        best: dict[int, Against | None] = {**against_best(speeds)} if len(order) > 1 else {}
        if over_plain is None:
            return cls(order, [], best, None, margin)
        return cls(order, [*against(over_plain)], best, selection(over_plain), margin)

    def _standing(self, found: Against | None) -> Standing:
        if found is None:
            return Standing(verdict="too few", p=None)
        return Standing(verdict=verdict(found.interval, self.margin), p=found.p_family)

    @property
    def leaders(self) -> list[int]:
        """The methods that may be the best: the fastest first, without those shown slower."""
        return [
            i
            for i in self.order
            if i not in self.over_best or self._standing(self.over_best[i])["verdict"] != "slower"
        ]

    @property
    def plain_verdicts(self) -> list[str]:
        """Each method's verdict against plain decoding; all of them hold together."""
        return [self._standing(found)["verdict"] for found in self.over_plain]

    @property
    def faster(self) -> list[int]:
        """The methods that are shown faster than plain decoding, the fastest first."""
        verdicts = self.plain_verdicts
        return [i for i in self.order if verdicts and verdicts[i] == "faster"]

    def standings(self, plain: str = BASELINE) -> tuple[dict[int, Standing], Standing | None]:
        """Give the methods' standings against the fastest, and plain decoding's.

        Args:
            plain: what plain decoding is called.
        """
        if not self.over_plain and not self.over_best:
            return {}, None
        top, *others = self.order
        found = {i: self._standing(self.over_best[i]) for i in others}
        over_plain = self._standing(self.over_plain[top]) if self.over_plain else None
        of_plain = None
        if over_plain is not None:
            mirrored = {"faster": "slower", "slower": "faster"}
            words = over_plain["verdict"]
            of_plain = Standing(verdict=mirrored.get(words, words), p=over_plain["p"])
        verdicts = {each["verdict"] for each in (*found.values(), of_plain) if each}
        lead = over_plain["verdict"] if over_plain else ""
        against_plain = self.over_plain[top] if self.over_plain else None
        if "too few" in verdicts:
            first = Standing(verdict="too few", p=None)
        elif over_plain and against_plain and against_plain.log_ratio < 0 and lead != "slower":
            first = over_plain
        else:
            best = "best" if verdicts == {"slower"} else "highest"
            first = Standing(verdict=f"slower than {plain}" if lead == "slower" else best, p=None)
        return {top: first, **found}, of_plain

    def sentence(self, names: Sequence[str], timing: str = "measured", unit: str = "cases") -> str:
        """Say in one sentence what the comparison shows, for the head of whatever shows it.

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
        top = self.order[0]
        if self.over_plain[top] is None:
            return (
                f"{predicted}Too few {unit} to say what is faster than plain decoding: {FEWEST} "
                "are needed at least."
            )
        shown = [i for i in self.leaders if i in self.faster] or self.faster
        together = f" (95 % for all {len(names)} together)" if len(names) > 1 else ""
        if set(self.plain_verdicts) == {"slower"}:
            head = f"All {len(names)} are" if len(names) > 1 else f"{names[top]} is"
            best = f"{names[top]}, the fastest of them, is " if len(names) > 1 else "it is "
            return (
                f"{predicted}{head} slower than plain decoding; {best}{self._times(top)} as fast"
                f"{together}."
            )
        if not shown:
            words = (
                f"Nothing is shown faster than plain decoding; {names[top]}, the fastest here, is "
                f"{self._times(top)} as fast{together}"
            )
            return f"{predicted}{words}.{self._bias(names[top])}"
        first = shown[0]
        words = f"{names[first]} is {self._times(first)} as fast as plain decoding{together}"
        if first != top:
            words = (
                f"{names[top]}, the fastest here, is {self._times(top)} as fast as plain decoding, "
                f"so no gain is shown; {names[first]} is {self._times(first)} as fast{together}"
            )
        others = [names[i] for i in self.leaders if i not in (first, top)]
        if others:
            words += f"; {listed(others)} may be as fast"
        elif len(self.leaders) == 1 and len(names) > 1:
            words += "; the other methods are slower than it"
        return f"{predicted}{words}.{self._bias(names[top])}"

    def _times(self, i: int) -> str:
        found = self.over_plain[i]
        assert found is not None
        low, high = (f"{bound:.2f}" for bound in found.interval)
        return f"{low} times" if low == high else f"{low} to {high} times"

    def _bias(self, name: str) -> str:
        """How much too high the first one's number is expected to be, where that is much."""
        few = len(self.order) < _MANY
        if few or self.selection is None or self.selection.if_equal < _SHOWN_BIAS:
            return ""
        low, high = (f"{100 * x:.0f}" for x in (self.selection.bias, self.selection.if_equal))
        span = high if low == high else f"{low} to {high}"
        return (
            f" Picked as the fastest of {len(self.order)} by the same cases, {name} is expected to "
            f"look {span} % too fast."
        )


def listed(names: Sequence[str]) -> str:
    """Join names: ``a``, ``a and b``, ``a, b, c and 3 others``."""
    shown = list(names)
    if len(shown) > LEADERS_NAMED:
        shown = [*shown[: LEADERS_NAMED - 1], f"{len(shown) - LEADERS_NAMED + 1} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


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
        found, of_plain = self.ranking.standings(self.baseline or BASELINE)
        plain = {self.baseline: of_plain} if self.baseline and of_plain else {}
        return {self.methods[i]: standing for i, standing in found.items()} | plain

    @property
    def pairs(self) -> list[Pair]:
        """Every method against plain decoding, then against the fastest of them."""
        ranking, rows = self.ranking, list[Pair]()
        if self.baseline is not None:
            rows = [
                self._pair(method, self.baseline, found, BASELINE)
                for method, found in zip(self.methods, ranking.over_plain, strict=False)
            ]
        top, *others = ranking.order or [0]
        return rows + [
            self._pair(self.methods[i], self.methods[top], ranking.over_best[i], "best")
            for i in others
        ]

    def _pair(self, first: str, second: str, found: Against | None, family: str) -> Pair:
        sample = self.sample
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
            "verdict": verdict(interval, self.ranking.margin),
            "margin": self.ranking.margin,
            "detectable": found.detectable if found else None,
            "needed": needed if (needed and needed > sample.n_timed) or not found else None,
        }


def rank_labels(
    records: Sequence[CaseRecord],
    labels: Sequence[str],
    baseline: str | None = BASELINE,
    seed: int = 0,
    estimator: str = "paired",
    margin: float = DEFAULT_MARGIN,
    n_resamples: int = N_RESAMPLES,
) -> RankedLabels:
    """Rank the methods of a run.

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
    plain = {baseline} | {label for label, turn in pooled.last.items() if turn.method == BASELINE}
    ranked = rankable(labels, wrong_outputs(records, labels), baseline)
    methods = [label for label in ranked if label not in plain] if sample.n_timed else []
    if baseline not in labels:
        baseline = None
    if not methods:
        return RankedLabels([], baseline, Ranking([], [], {}), sample)
    speeds = over_plain = None
    if sample.speeds is not None:
        rows = np.eye(len(labels))
        of_method = rows[[labels.index(label) for label in methods]]
        speeds = sample.speeds.of(of_method)
        if baseline is not None:
            over_plain = sample.speeds.of(of_method - rows[labels.index(baseline)])
    values = [sample.tokens_per_s(label)[0] or 0.0 for label in methods]
    ranking = Ranking.of(speeds, over_plain, values, plain=baseline is not None, margin=margin)
    return RankedLabels(methods, baseline, ranking, sample)
