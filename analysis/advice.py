"""The picture of advice: ``python -m analysis.advice FOLDER``; ``run.py advise`` calls it.

Predicted speedups and measured ones have panels of their own, with one scale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.plots.charts import Row, ranked
from analysis.plots.style import save, styled
from analysis.runs.command import parser_of, reporting_errors
from specbench.errors import ResultsError, first_line
from specbench.results.estimate import FEWEST, Estimate
from specbench.storage import jsonl

FILE, NAME = "advice.json", "advice"


def rows_of(advice: Mapping[str, Any]) -> Iterator[Row]:
    """Predicted and measured speedup of all methods that have one of them."""
    for option in advice["options"]:
        predicted, measured = option["predicted"], option["measured"]
        if predicted is None and measured is None:
            continue  # it was only tried on prompts for choosing
        yield Row(option["method"], option["method"], [_estimate(predicted), _estimate(measured)])


def _estimate(speed: Mapping[str, Any] | None) -> Estimate:
    if speed is None:
        return Estimate(None)
    low_high = speed["interval"]
    interval = None if low_high is None else (low_high[0], low_high[1])
    return Estimate(speed["value"], interval, few=speed["prompts"] < FEWEST, compares=True)


def draw(folder: Path) -> int:
    """Draw the advice in a folder beside it; 0.

    Raises:
        ResultsError: there is none, or it is damaged.
    """
    if not (folder / FILE).is_file():
        raise ResultsError(f"{folder} holds no {FILE}. Make it: python run.py advise prompts=FILE")
    advice = jsonl.read_json(folder / FILE)
    try:
        rows = list(rows_of(advice))
        caption = (
            f"{advice['model']} on {advice['questions']}: settings chosen by {advice['choosing']} "
            f"prompts, speedups of {advice['confirming']} others with 95 % intervals."
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ResultsError(f"{folder / FILE} is damaged ({first_line(error)}).") from error
    if rows:
        with styled():
            units = ("PREDICTED speedup", "measured speedup")
            figure = ranked(rows, units, "Which method for these prompts?", caption)
            save(figure, folder, NAME)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="of advice")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: draw(options.folder))


if __name__ == "__main__":
    sys.exit(main())
