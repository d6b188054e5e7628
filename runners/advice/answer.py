"""The answer: a decision, its setting, one command to paste; then a table, a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from runners.search.space import shown
from specbench.results.estimate import FEWEST, Cell, Estimate, Interval
from specbench.results.manifest import BASELINE

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

FILE, PAGE, PICTURE = "advice.json", "advice.md", "advice.png"
USE, PLAIN, UNDECIDED, UNCONFIRMED, UNTRIED = "use", "plain", "undecided", "unconfirmed", "untried"


@dataclass(frozen=True)
class Speed:
    """A speedup over plain decoding on so many prompts; no interval of fewer than three."""

    value: float
    interval: Interval | None
    prompts: int

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f} (too few prompts for an interval)"
        return f"{self.value:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"

    @property
    def cell(self) -> Estimate:
        return Estimate(self.value, self.interval, few=self.prompts < FEWEST, compares=True)


@dataclass
class Option:
    """A method at the best of its settings that were tried.

    Attributes:
        score: the speedup that it was chosen by, on the prompts for choosing.
        predicted: speedup on the prompts for confirming, which nothing was chosen by.
        measured: there, live; the intervals of both finalists hold together.
        exact: False where outputs differed from plain decoding's for more than rounding.
    """

    method: str
    knobs: Mapping[str, Any]
    score: float
    predicted: Speed | None = None
    measured: Speed | None = None
    exact: bool = True

    @property
    def ends(self) -> Interval:
        """The measured interval; everything is possible without one."""
        return (self.measured.interval if self.measured else None) or (0.0, math.inf)

    @property
    def prompts_to_decide(self) -> int | None:
        """Prompts for confirming that would show a speedup as large as was measured."""
        if self.measured is None or self.measured.interval is None or self.measured.value <= 1:
            return None
        low, high = self.measured.interval
        ratio = math.log(high / low) / 2 / math.log(self.measured.value)
        return max(self.measured.prompts + 1, math.ceil(self.measured.prompts * ratio**2))


@dataclass
class Advice:
    """What `advise` found. Printed, it is the decision, the command and the table.

    Attributes:
        options: the methods that were tried: those that were run by what was measured, then the
            others by what is predicted.
        not_run: by method why it could not be, and what to type.
        more: what more minutes would do.
        command: to paste; "" where there is nothing to type.
        folder: where its files are.
    """

    model: str
    questions: str
    minutes: float
    choosing: int
    confirming: int
    options: list[Option] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: str = ""
    folder: str = ""

    @property
    def best(self) -> Option | None:
        """The finalist that is shown to be faster than plain decoding; the fastest of them."""
        return self.option if self.decision == USE else None

    @property
    def option(self) -> Option | None:
        """The option that the decision is about; None where no method was tried."""
        exact = [option for option in self.options if option.exact]
        measured = [option for option in exact if option.measured]
        faster = [option for option in measured if option.ends[0] > 1]
        open_ones = [option for option in measured if option.ends[1] >= 1]
        ranked = sorted(faster or open_ones or measured, key=_measured, reverse=True)
        return next(iter(ranked), max(exact, key=lambda o: o.score, default=None))

    @property
    def decision(self) -> str:
        option = self.option
        if option is None:
            return UNTRIED
        if option.measured is None:
            return UNCONFIRMED
        return USE if option.ends[0] > 1 else PLAIN if option.ends[1] < 1 else UNDECIDED

    @property
    def sentence(self) -> str:
        """The decision with its numbers."""
        option = self.option
        if option is None:
            why = "the minutes ended first" if self.more else "the reasons are below"
            return f"Undecided: no method was tried ({why})."
        name, predicted = option.method, f"predicted {option.predicted}"
        if option.measured is None:
            value = predicted if option.predicted else f"{option.score:.2f}"
            return f"Not confirmed: {name} may be the fastest ({value}), and was not run live."
        prompts = f"{option.measured.prompts} prompts that it was not chosen by"
        reason = f"{option.measured} times plain decoding's speed on {prompts}"
        if option.predicted:
            reason += f"; {predicted}"
        if self.decision == USE:
            return f"Use {name}: measured {reason}."
        if self.decision == PLAIN:
            return f"Use plain decoding: {name} was measured at {reason}."
        return f"Undecided: {name} may pay, measured {reason}."

    @property
    def item(self) -> dict[str, Any]:
        """What ``compare`` takes for the decision: a method with its knobs, or plain decoding."""
        option = self.best
        return {"method": BASELINE} if option is None else {"method": option.method, **option.knobs}

    @property
    def undecided(self) -> list[str]:
        """The methods that a longer look should decide on."""
        measured = [option.method for option in self.options if option.exact and option.measured]
        return measured or ([self.option.method] if self.option else [])

    @property
    def purpose(self) -> str:
        """What the command is for."""
        if self.decision in (USE, PLAIN):
            return "To use it"
        if self.decision == UNCONFIRMED:
            return "To confirm it"
        enough = self.option.prompts_to_decide if self.option else None
        if enough is None:
            return "To decide"
        return f"To decide, with about {2 * enough} prompts ({self.choosing + self.confirming} now)"

    @property
    def setting(self) -> str:
        """The setting of the method that the decision is about, or of plain decoding."""
        knobs = self.option.knobs if self.option and self.decision != PLAIN else None
        return "" if knobs is None else f"Setting: {shown(knobs)}"

    def table(self) -> pd.DataFrame:
        """A row for each method; predicted and measured speedups in columns of their own."""
        import pandas as pd

        rows: list[dict[str, Cell]] = [
            {
                "method": option.method,
                "measured speedup [95 %]": _cell(option.measured),
                "PREDICTED speedup [95 %]": _cell(option.predicted),
                "setting": shown(option.knobs),
            }
            for option in self.options
        ]
        return pd.DataFrame(rows, dtype=object)

    @property
    def caption(self) -> str:
        """What the table's numbers are."""
        return (
            f"{self.model} on {self.questions}: settings chosen by {self.choosing} prompts, both "
            f"speedups on {self.confirming} others. PREDICTED: recorded answers replayed, passes "
            "priced by this machine's cost surface. Measured: live, interleaved with plain "
            "decoding."
        )

    @property
    def remarks(self) -> list[str]:
        """Lines below the table: methods that were not tried, notes, what more minutes would do."""
        by_reason: dict[str, list[str]] = {}
        for method, reason in self.not_run.items():
            by_reason.setdefault(" ".join(reason.split()), []).append(method)
        lines = [f"not tried: {', '.join(names)}: {why}" for why, names in by_reason.items()]
        lines += [f"note: {note}" for note in dict.fromkeys(self.notes)]
        return lines + ([f"More minutes would: {'; '.join(self.more)}."] if self.more else [])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "decision": self.decision, "sentence": self.sentence}

    def page(self, picture: bool) -> str:
        """The page, in Markdown."""
        lines = ["# Advice", "", f"**{self.sentence}**", ""]
        lines += [self.setting, ""] if self.setting else []
        if self.command:
            lines += [f"{self.purpose}:", "", "```bash", self.command, "```", ""]
        if picture:
            lines += [f"![predicted and measured speedups]({PICTURE})", ""]
        if self.options:
            lines += [self.table().map(str).to_markdown(index=False), ""]
        return "\n".join([*lines, self.caption, "", *(f"- {line}" for line in self.remarks), ""])

    def __str__(self) -> str:
        from rich.console import Console

        terminal = Console(width=120, color_system=None)
        with terminal.capture() as printed:
            show(self, terminal)
        return str(printed.get()).rstrip()


def show(advice: Advice, console: Console) -> None:
    """Print the decision, its setting, the command, the table and what was not tried."""
    from specbench.results.fitted_table import FittedTable

    def line(text: str, style: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)

    line(f"\n{advice.sentence}", "bold")
    if advice.setting:
        line(advice.setting)
    if advice.command:
        line(f"{advice.purpose}:\n    {advice.command}")
    line("")
    if advice.options:
        console.print(FittedTable(advice.table(), "", advice.caption))
    for remark in advice.remarks:
        line(remark)


def best_first(option: Option) -> tuple[float, float, float]:
    """Sort key: by what was measured, then by what is predicted, then by the score."""
    predicted = option.predicted.value if option.predicted else 0.0
    return -_measured(option), -predicted, -option.score


def _measured(option: Option) -> float:
    return option.measured.value if option.measured else 0.0


def _cell(speed: Speed | None) -> Cell:
    return Estimate(None) if speed is None else speed.cell
