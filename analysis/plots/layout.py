"""What all figures share: their width, the legend beside the axes, their words, and their files."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from specbench.paths import file_name

WIDTH = 7.2  # inches of every figure
# Of each form what would differ from day to day or tell the program's version.
_UNDATED: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


class Drawing(Figure):  # type: ignore[misc]  # matplotlib has no types
    """A figure with its words: a title that says the finding, a caption of two lines."""

    title: str = ""
    caption: str = ""
    legend_height: float = 0.0  # inches


def canvas(height: float) -> Drawing:
    """An empty figure, so many inches high without its words."""
    return Drawing(figsize=(WIDTH, height), layout="constrained")


def legend_of(all_axes: Sequence[Axes]) -> dict[str, Any]:
    """Handles by name, each once; what was measured has error bars, and comes before marks."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    return dict(sorted(handles.items(), key=lambda item: isinstance(item[1], Line2D)))


def finish(
    figure: Drawing, title: str, caption: str, legend: Mapping[str, Any] | None = None
) -> None:
    """Give the figure its words, and a legend beside the axes where there are several things."""
    figure.title, figure.caption = title, caption
    if legend and len(legend) > 1:
        names = [textwrap.fill(name, 26) for name in legend]
        figure.legend(
            list(legend.values()), names, loc="outside right center", borderaxespad=0.3,
            alignment="left",
        )  # fmt: skip
        # Names that stand below each other need room, however low the axes are.
        lines = sum(name.count("\n") + 1 for name in names)
        figure.legend_height = 0.3 + 0.168 * lines
        figure.set_figheight(max(figure.get_figheight(), figure.legend_height))


def ratio_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, … of a logarithmic axis, as plain numbers; more of them in a short one."""
    low, high = sorted(axis.get_view_interval())
    dense = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high > 8 * low else dense))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def rows_down(axes: Axes, names: Sequence[str]) -> None:
    """Name the places 0, 1, … of the vertical axis, from the top."""
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def write_words(figure: Drawing) -> None:
    """Write the title above and the caption below the axes, which keep their height."""
    title, caption = _wrapped(figure.title, 12.5), _wrapped(figure.caption, 17.5)
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize="large")
    figure.supxlabel("\n".join(caption), x=0.01, ha="left", fontsize="small")
    above, below = 0.1 + 0.19 * len(title), 0.145 * len(caption)
    height = figure.get_figheight() + above + below
    # The legend stands in the middle, and over neither.
    figure.set_figheight(max(height, figure.legend_height + 2 * max(above, below)))


def _wrapped(words: str, characters_per_inch: float) -> list[str]:
    width = int(WIDTH * characters_per_inch)
    return [line for part in words.splitlines() for line in textwrap.wrap(part, width)]


def save(figure: Drawing, folder: Path, name: str) -> list[Path]:
    """Write a figure with its words as PNG and PDF; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_words(figure)
    paths = [folder / f"{file_name(name)}.{suffix}" for suffix in _UNDATED]
    for path, undated in zip(paths, _UNDATED.values(), strict=True):
        figure.savefig(path, metadata=undated)
    return paths
