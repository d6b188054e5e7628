"""The answer: a decision, its setting, one command to paste; then a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.search.space import shown
from specbench.results.estimate import ABSENT, FEWEST, Cell, Estimate, Interval
from specbench.results.manifest import BASELINE
from specbench.storage import jsonl

if TYPE_CHECKING:
    from rich.console import Console

FILE, PAGE = "advice.json", "advice.txt"
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
        """The ends of the measured interval; everything is possible without one."""
        return (self.measured.interval if self.measured else None) or (0.0, math.inf)

    @property
    def rank(self) -> tuple[float, float, float]:
        """What was measured, then what is predicted, then the score."""
        measured, predicted = (s.value if s else 0.0 for s in (self.measured, self.predicted))
        return measured, predicted, self.score

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
    """What `advise` decides. Printed, it is the decision, the command and the table.

    Attributes:
        options: the methods that were tried, the best first.
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
    def option(self) -> Option | None:
        """The option that the decision is about; None where no method was tried."""
        exact = [option for option in self.options if option.exact]
        measured = [option for option in exact if option.measured]
        faster = [option for option in measured if option.ends[0] > 1]
        undecided = [option for option in measured if option.ends[1] >= 1]
        if chosen := faster or undecided or measured:
            return max(chosen, key=lambda option: option.rank)
        return max(exact, key=lambda option: option.score, default=None)

    @property
    def decision(self) -> str:
        """Use it, use plain decoding, undecided, not confirmed, or nothing was tried."""
        option = self.option
        if option is None or option.measured is None:
            return UNCONFIRMED if option else UNTRIED
        return USE if option.ends[0] > 1 else PLAIN if option.ends[1] < 1 else UNDECIDED

    @property
    def best(self) -> Option | None:
        """The option that is shown to be faster than plain decoding; the fastest of them."""
        return self.option if self.decision == USE else None

    @property
    def item(self) -> dict[str, Any]:
        """What ``compare`` takes for the decision: a method with its knobs, or plain decoding."""
        best = self.best
        return {"method": best.method, **best.knobs} if best else {"method": BASELINE}

    @property
    def undecided(self) -> list[str]:
        measured = [option.method for option in self.options if option.exact and option.measured]
        return measured or ([self.option.method] if self.option else [])

    @property
    def minutes_to_decide(self) -> int:
        """Minutes that would decide what these did not, as far as can be said."""
        enough = self.option.prompts_to_decide if self.option else None
        return math.ceil(self.minutes * (enough / self.confirming if enough else 2))

    @property
    def lines(self) -> list[str]:
        """The decision with its numbers, its setting, the command and what that is for."""
        option, decision = self.option, self.decision
        if option is None:
            why = "the minutes ended first" if self.more else "the reasons are below"
            lines = [f"Undecided: no method was tried ({why})."]
        elif option.measured is None:
            speed = f"predicted {option.predicted}" if option.predicted else f"{option.score:.2f}"
            lines = [f"Not confirmed: {option.method} may be the fastest ({speed}), not run live."]
        else:
            begins = {
                USE: f"Use {option.method}: measured",
                PLAIN: f"Use plain decoding: {option.method} was measured at",
                UNDECIDED: f"Undecided: {option.method} may pay, measured",
            }
            predicted = f"; predicted {option.predicted}" if option.predicted else ""
            lines = [
                f"{begins[decision]} {option.measured} times plain decoding's speed on "
                f"{option.measured.prompts} prompts that it was not chosen by{predicted}."
            ]
        if option is not None and decision != PLAIN:
            lines.append(f"Setting: {shown(option.knobs)}")
        if self.command:
            purpose = {USE: "To use it", PLAIN: "To use it", UNCONFIRMED: "To confirm it"}
            label = purpose.get(decision, "To decide")
            if decision == UNDECIDED and option and (enough := option.prompts_to_decide):
                prompts = self.choosing + self.confirming
                label += f", with about {2 * enough} prompts ({prompts} now)"
            lines.append(f"{label}:\n    {self.command}")
        return lines

    @property
    def remarks(self) -> list[str]:
        """Lines below the table: methods that were not tried, notes, what more minutes would do."""
        by_reason: dict[str, list[str]] = {}
        for method, reason in self.not_run.items():
            by_reason.setdefault(" ".join(reason.split()), []).append(method)
        lines = [f"not tried: {', '.join(names)}: {why}" for why, names in by_reason.items()]
        lines += [f"note: {note}" for note in self.notes]
        return lines + ([f"More minutes would: {'; '.join(self.more)}."] if self.more else [])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "decision": self.decision, "sentence": self.lines[0]}

    def write(self, folder: Path) -> None:
        """Write what is printed, and all fields as JSON, into the folder."""
        jsonl.write_json(folder / FILE, self.to_json())
        jsonl.write_text(folder / PAGE, f"{self}\n")

    def __str__(self) -> str:
        from rich.console import Console

        terminal = Console(width=120, color_system=None)
        with terminal.capture() as printed:
            show(self, terminal)
        return str(printed.get()).strip()


def show(advice: Advice, console: Console) -> None:
    """Print the decision, its setting, the command, the table and what was not tried."""
    from specbench.results.fitted_table import FittedTable, columns_of

    def write(lines: list[str]) -> None:
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def cell(speed: Speed | None) -> Cell:
        if speed is None:
            return ABSENT
        return Estimate(speed.value, speed.interval, few=speed.prompts < FEWEST, compares=True)

    write(["", *advice.lines, ""])
    rows: list[dict[str, Cell]] = [
        {
            "method": option.method,
            "measured speedup [95 %]": cell(option.measured),
            "PREDICTED speedup [95 %]": cell(option.predicted),
            "setting": shown(option.knobs),
        }
        for option in advice.options
    ]
    if rows:
        caption = (
            f"{advice.model} on {advice.questions}: settings chosen by {advice.choosing} prompts, "
            f"both speedups on {advice.confirming} others. PREDICTED: recorded answers replayed, "
            "passes priced by this machine's cost surface. Measured: live, interleaved with plain "
            "decoding."
        )
        console.print(FittedTable(columns_of(rows), "", caption))
    write(advice.remarks)
