"""What all figures share: title and legend above, caption below, and their files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

_CHARACTERS_PER_INCH = 18
# In a legend, by bound.
CLAIMED = {"": "claimed", "upper": "claimed at most", "lower": "claimed at least"}
TITLE, CAPTION = "title", "caption"  # ids of a figure's words, for a page that sets them itself


def legend_of(all_axes: Sequence[Axes]) -> dict[str, Artist]:
    """Handles by name, each once; claims last, because what was measured comes first."""
    handles: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    return dict(sorted(handles.items(), key=lambda item: item[0] in CLAIMED.values()))


def finish(
    figure: Figure, title: str, caption: str, legend: Mapping[str, Artist] | None = None
) -> None:
    """Title and legend above, caption below; ``savefig.bbox=tight`` keeps them in the picture."""
    inches, height = figure.get_size_inches()
    top = 1.0 + 0.02 / height
    if legend and len(legend) > 1:
        columns = max(2, min(len(legend), int(inches / 1.25)))
        lines = math.ceil(len(legend) / columns)
        figure.legend(
            legend.values(), legend.keys(), loc="lower left", bbox_to_anchor=(0.02, top),
            ncols=columns, fontsize=8,
        )  # fmt: skip
        top += (0.1 + 0.19 * lines) / height
    figure.text(0.02, top + 0.06 / height, title, fontsize=10, va="bottom", gid=TITLE)
    lines_below = [
        line
        for part in caption.replace(" %", "\N{NO-BREAK SPACE}%").splitlines()
        for line in textwrap.wrap(part, int(inches * _CHARACTERS_PER_INCH))
    ]
    words = "\n".join(lines_below)
    figure.text(0.02, -0.08 / height, words, fontsize=7, va="top", gid=CAPTION)


def ratio_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, … of a logarithmic axis, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        paths.append(folder / f"{name}.{suffix}")
        figure.savefig(paths[-1], metadata=metadata)
    return paths
