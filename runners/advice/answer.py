"""The answer: one sentence, a command to paste, a table, a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from runners.search.space import shown
from specbench.results.estimate import FEWEST, Cell, Estimate, Interval

if TYPE_CHECKING:
    import pandas as pd

FILE, PAGE, PICTURE = "advice.json", "advice.md", "advice.png"
NOTHING_PAYS = "Nothing is shown to pay here"
REPLAYED, LIVE = "replayed", "live"


@dataclass(frozen=True)
class Speed:
    """A speedup over plain decoding on so many prompts; no interval of fewer than three."""

    value: float
    interval: Interval | None
    prompts: int


@dataclass
class Option:
    """A method at the best of its settings that were tried.

    Attributes:
        way: how its settings were tried: `REPLAYED` or `LIVE`.
        score: what it was chosen by: on the prompts for choosing.
        predicted: on the prompts for confirming, which nothing was chosen by.
        measured: there, live; ``joint``: an interval that holds together with the other finalist's.
        predicted_by_task, measured_by_task: the same of each task.
        tried, effort: settings, and settings times prompts.
        exact: False where outputs differed from plain decoding's for more than rounding.
    """

    method: str
    knobs: Mapping[str, Any]
    way: str
    score: float
    tried: int
    effort: int
    predicted: Speed | None = None
    predicted_by_task: dict[str, Speed] = field(default_factory=dict)
    measured: Speed | None = None
    measured_by_task: dict[str, Speed] = field(default_factory=dict)
    joint: Interval | None = None
    exact: bool = True


@dataclass
class Advice:
    """What `advise` found. Printed, it is the sentence, the command and the table.

    Attributes:
        options: the methods that were tried: those that were run by what was measured, then the
            others by their score.
        not_run: by method why it could not be, and what to type.
        command: to paste; "" where the caller has no command line.
        more: what more minutes, or more prompts, would decide.
        folder: where its files are.
    """

    model: str
    questions: str
    minutes: float
    choosing: int
    confirming: int
    options: list[Option]
    not_run: dict[str, str]
    more: str
    command: str = ""
    folder: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Option | None:
        """The finalist that is shown to be faster than plain decoding; the fastest of them."""
        shown_faster = [o for o in self.options if o.joint and o.joint[0] > 1 and o.exact]
        return max(shown_faster, key=lambda o: o.measured.value if o.measured else 0, default=None)

    @property
    def candidate(self) -> Option | None:
        """The option to try where none is shown to pay."""
        return max((o for o in self.options if o.exact), key=lambda o: o.score, default=None)

    @property
    def sentence(self) -> str:
        """One sentence, with an interval."""
        best, candidate = self.best, self.candidate
        if best is not None and best.measured and best.joint:
            also = f"; predicted: {_range(best.predicted)}" if best.predicted else ""
            return (
                f"{_name(best)} decodes your prompts {best.joint[0]:.2f} to {best.joint[1]:.2f} "
                f"times as fast as plain decoding here (measured {best.measured.value:.2f} on "
                f"{best.measured.prompts} prompts that it was not chosen by{also})."
            )
        if candidate is None:
            why = "the minutes ended first" if self.more else "the reasons are below"
            return f"Nothing can be said yet: no method was tried ({why})."
        if candidate.measured is None:
            where = _range(candidate.predicted) if candidate.predicted else f"{candidate.score:.2f}"
            return (
                f"Nothing is confirmed yet: {_name(candidate)} is the first choice, PREDICTED to "
                f"decode {where} times as fast as plain decoding, and the minutes ended before a "
                "live run."
            )
        found = candidate.measured
        few = f" on {found.prompts} prompts, too few for an interval"
        joint = candidate.joint
        reach = f" [{joint[0]:.2f}, {joint[1]:.2f}]" if joint else few
        return (
            f"{NOTHING_PAYS}: the first choice, {_name(candidate)}, was measured at "
            f"{found.value:.2f}{reach} times plain decoding's speed."
        )

    def table(self) -> pd.DataFrame:
        """A row for each method; predicted and measured speedups in columns of their own."""
        import pandas as pd

        rows: list[dict[str, Cell]] = [
            {
                "method": o.method,
                "PREDICTED speedup [95 %]": _cell(o.predicted),
                "measured speedup [95 %]": _cell(o.measured),
                "tried": f"{o.tried} {o.way}",
                "settings × prompts": str(o.effort),
                "best setting": shown(o.knobs),
            }
            for o in self.options
        ]
        return pd.DataFrame(rows, dtype=object)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence}

    def page(self, picture: bool) -> str:
        """The page, in Markdown."""
        lines = ["# Advice", "", f"**{self.sentence}**", ""]
        if self.command:
            lines += ["```bash", self.command, "```", ""]
        if picture:
            lines += [f"![predicted and measured speedups]({PICTURE})", ""]
        if self.options:
            lines += [self.table().map(str).to_markdown(index=False), ""]
        lines += [caption(self), "", *(f"- {note}" for note in self.notes), "", self.more, ""]
        if self.not_run:
            lines += ["## Not tried", ""]
            lines += [f"- `{method}`: {_flat(why)}" for method, why in self.not_run.items()]
        return "\n".join(lines).rstrip() + "\n"

    def __str__(self) -> str:
        from rich.console import Console

        terminal = Console(width=120, color_system=None)
        with terminal.capture() as printed:
            show(self, terminal)
        return str(printed.get()).rstrip()


def show(advice: Advice, console: Any) -> None:
    """Print the sentence, the command, the table and what was not tried."""
    from specbench.results.fitted_table import FittedTable

    plain = {"markup": False, "highlight": False, "soft_wrap": True}
    console.print(f"\n{advice.sentence}\n", **plain, style="bold")
    if advice.command:
        console.print(f"    {advice.command}\n", **plain)
    if advice.options:
        console.print(FittedTable(advice.table(), "", caption(advice)))
    for method, why in advice.not_run.items():
        console.print(f"not tried: {method}: {_flat(why)}", **plain)
    for note in advice.notes:
        console.print(f"note: {note}", **plain)
    if advice.more:
        console.print(advice.more, **plain)


def caption(advice: Advice) -> str:
    """What the table's numbers are."""
    return (
        f"{advice.model} on {advice.questions}: settings chosen by {advice.choosing} prompts, both "
        f"speedups on {advice.confirming} others. PREDICTED: recorded answers replayed, passes "
        "priced by this machine's cost surface. Measured: live, interleaved with plain decoding."
    )


def prompts_for(option: Option) -> int | None:
    """Prompts that would show a speedup as large as was measured, as far as can be said."""
    found, joint = option.measured, option.joint
    if found is None or joint is None or found.value <= 1:
        return None
    half = math.log(joint[1] / joint[0]) / 2
    return max(found.prompts + 1, math.ceil(found.prompts * (half / math.log(found.value)) ** 2))


def _name(option: Option) -> str:
    return f"{option.method} ({shown(option.knobs)})" if option.knobs else option.method


def _range(speed: Speed) -> str:
    if speed.interval is None:
        return f"{speed.value:.2f}"
    return f"{speed.interval[0]:.2f} to {speed.interval[1]:.2f}"


def _cell(speed: Speed | None) -> Cell:
    if speed is None:
        return Estimate(None)
    return Estimate(speed.value, speed.interval, few=speed.prompts < FEWEST, compares=True)


def _flat(text: str) -> str:
    return " ".join(text.split())


def finalists(options: Sequence[Option], count: int = 2) -> list[Option]:
    """The options to confirm: those that scored best on the prompts for choosing."""
    return sorted(options, key=lambda o: o.score, reverse=True)[:count]
