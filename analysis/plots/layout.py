"""What all figures share: their size, the legend above, their words, and their files.

A figure's title and caption stand beside it: in the page that shows it, or in a file of their own.
Only :func:`save` with ``caption`` writes them into the picture.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from PIL import Image

from analysis.plots.style import PLAIN, REFERENCE, WIDTHS
from specbench.paths import file_name
from specbench.results.names import display_name

if TYPE_CHECKING:
    from matplotlib.text import Text

_CHARACTERS_PER_INCH = 18
CUT_TEXT = "An arrowhead at the edge: an interval goes on beyond the picture."
# In a legend, of the best point of a line and of others.
LEADING = ("best", "may be as good")
# In a legend, by bound.
CLAIMED = {"": "claimed", "upper": "claimed at most", "lower": "claimed at least"}
# Of each form what would differ from day to day or tell the program's version.
_UNDATED: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


class Drawing(Figure):  # type: ignore[misc]  # matplotlib has no types
    """A figure with the words that belong beside it."""

    title: str = ""
    caption: str = ""


def print_width() -> float | None:
    """Inches of the column or page that is drawn for; None for a screen.

    :func:`analysis.plots.style.styled` sets it.
    """
    inches = float(mpl.rcParams["figure.figsize"][0])
    return inches if inches in WIDTHS.values() else None


def canvas(inches: float, height: float, keep_shape: bool = False) -> Drawing:
    """An empty figure of this size; in print as wide as its column or page.

    With ``keep_shape`` its height shrinks with its width.
    """
    width = print_width() or inches
    if keep_shape:
        height *= min(1.0, width / inches)
    return Drawing(figsize=(width, height), layout="constrained")


def in_column() -> bool:
    """Whether a column of print is drawn for, which has room for one pair of axes."""
    return print_width() == WIDTHS["column"]


def legend_of(all_axes: Sequence[Axes]) -> dict[str, Artist]:
    """Handles by name, each once; lines across and claims last: what was measured comes first."""
    handles: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    last = (*LEADING, PLAIN, *CLAIMED.values())
    return dict(sorted(handles.items(), key=lambda item: item[0] in last))


def mark_cut(all_axes: Iterable[Axes]) -> bool:
    """Mark error bars that go on beyond their axes by an arrowhead at the edge, if there are any.

    The limits of the axes must be set.
    """
    cut = False
    for axes in all_axes:
        for (x, y), edge in [*_cut_ends(axes)]:
            across = edge in "<>"
            axes.plot(
                [{"<": 0.0, ">": 1.0}.get(edge, x)], [{"v": 0.0, "^": 1.0}.get(edge, y)],
                transform=axes.get_yaxis_transform() if across else axes.get_xaxis_transform(),
                linestyle="none", marker=edge, color=REFERENCE, markersize=4.5, clip_on=False,
                scalex=False, scaley=False, zorder=5,
            )  # fmt: skip
            cut = True
    return cut


def _cut_ends(axes: Axes) -> Iterator[tuple[tuple[float, float], str]]:
    """Where error bars leave the axes, with the marker that points there."""
    limits = (sorted(axes.get_xlim()), sorted(axes.get_ylim()))
    found = (one for one in axes.containers if isinstance(one, ErrorbarContainer))
    for bars in (lines for container in found for lines in container.lines[2]):
        for segment in bars.get_segments():
            if len(segment) < 2 or not np.isfinite(segment).all():
                continue  # there is no interval
            along = 0 if segment[0][1] == segment[1][1] else 1
            (low, high), (least, most) = sorted(segment[:, along]), limits[along]
            room = 1e-6 * (most - least)
            if low < least - room:
                yield tuple(segment[0]), "<v"[along]
            if high > most + room:
                yield tuple(segment[0]), ">^"[along]


def with_cut(caption: str, all_axes: Iterable[Axes]) -> str:
    """The caption, which says what arrowheads are where :func:`mark_cut` draws some."""
    return f"{caption}\n{CUT_TEXT}" if mark_cut(all_axes) else caption


def shown(name: str) -> str:
    """A label or method as its table has it: as typed, in print by its printed name."""
    return display_name(name) if print_width() else name


def finish(
    figure: Drawing, title: str, caption: str, legend: Mapping[str, Any] | None = None
) -> None:
    """Give the figure its words, and a legend above the axes where there are several things.

    ``legend``: an artist by name, or several that stand for it together.
    """
    figure.title, figure.caption = title, caption
    if legend and len(legend) > 1:
        inches = figure.get_figwidth()
        points = 0.62 * 0.833 * mpl.rcParams["font.size"]  # across a letter of a small font
        widest = (max(map(len, legend)) * points + 34) / 72
        columns = max(1, min(len(legend), int((inches - 0.2) / widest)))
        lines = math.ceil(len(legend) / columns)
        columns = math.ceil(len(legend) / lines)
        # Matplotlib fills columns; a reader reads rows.
        names = [name for column in range(columns) for name in list(legend)[column::columns]]
        figure.legend(
            [legend[name] for name in names], names, loc="outside upper left", ncols=columns,
            fontsize="small", borderaxespad=0.2, handler_map={tuple: HandlerTuple(None)},
        )  # fmt: skip
        # The space that the legend takes is not taken from the axes.
        figure.set_figheight(figure.get_figheight() + 0.08 + 0.17 * lines)


def ratio_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, … of a logarithmic axis, as plain numbers; more of them in a short one."""
    low, high = sorted(axis.get_view_interval())
    dense = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if high > 8 * low else dense
    if axis.axis_name == "x" and in_column() and high > 3 * low:  # words would run into each other
        steps = (1.0, 2.0, 4.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def rows_down(axes: Axes, names: Sequence[str]) -> None:
    """Name the places 0, 1, … of the vertical axis, from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def save(figure: Drawing, folder: Path, name: str, caption: bool = False) -> list[Path]:
    """Write a figure as PNG, SVG and PDF; the same figure gives the same bytes.

    Its words go into ``<name>.md`` beside them, with ``caption`` into the pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(name)
    paths = []
    drawn = write_words(figure) if caption else []
    # Arranged once for all forms: that takes longer than drawing.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for legend in figure.legends if caption else ():  # else it goes to the top, over the title
        legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    for suffix, undated in _UNDATED.items():
        paths.append(folder / f"{name}.{suffix}")
        words = {"Title": figure.title} if suffix != "png" else {}
        bounds = {"bbox_inches": "tight"} if caption else {}
        figure.savefig(paths[-1], metadata={**undated, **words}, **bounds)
        if suffix == "png":
            _in_fewer_colors(paths[-1])
    for text in drawn:
        text.remove()
    if not caption:
        paths.append(folder / f"{name}.md")
        paths[-1].write_text(words_of(figure), encoding="utf-8")
    return paths


def _in_fewer_colors(path: Path) -> None:
    """Write a PNG again with the 256 colors that are nearest to its own: a third of the bytes."""
    with Image.open(path) as drawn:
        dots = drawn.info["dpi"]
        few = drawn.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(path, optimize=True, dpi=dots)


def words_of(figure: Drawing) -> str:
    """Title and caption as Markdown."""
    lines = "\n\n".join(filter(None, figure.caption.splitlines()))
    return f"**{figure.title}**\n\n{lines}\n"


def write_words(figure: Drawing) -> list[Text]:
    """Write the title above and the caption below the axes; saving must be ``tight``."""
    inches, height = figure.get_size_inches()
    across = max(20, int(inches * _CHARACTERS_PER_INCH))
    lines = [
        line
        for part in figure.caption.replace(" %", "\N{NO-BREAK SPACE}%").splitlines()
        for line in textwrap.wrap(part, across)
    ]
    title = textwrap.fill(figure.title, int(0.75 * across))
    below = -0.08 / height
    return [
        figure.text(0.02, 1.0 + 0.06 / height, title, fontsize="large", va="bottom"),
        figure.text(0.02, below, "\n".join(lines), fontsize="small", va="top"),
    ]
