"""Style of the figures: a color for each family of methods, title, caption and legend.

Within a family hatching, marker and dashes tell labels apart. The colors, most of them Okabe and
Ito's, look different to people with any common color blindness. Whoever imports this draws in the
project's style.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from specbench.paths import file_name

Keywords: TypeAlias = dict[str, Any]  # arguments of matplotlib

WIDTH = 7.2  # inches of every figure
REFERENCE = "#333333"  # lines of no method: borders, plain decoding
PLAIN = "plain decoding"  # of a line at 1.0
PLAIN_LINE: Keywords = {"color": REFERENCE, "linewidth": 0.8, "linestyle": "--", "label": PLAIN}
HOLLOW = "hollow: no significant difference from plain decoding"

# By what a family drafts from: its color and methods. Methods not listed belong to "other".
_FAMILIES = {
    "text": (
        "#0072B2",
        "cacheback ngram_map ngram_mod ngrammys pld rest sam ssd suffix_decoding",
    ),
    "the model's own passes": ("#009E73", "jacobi logitspec lookahead racer token_recycling"),
    "trained heads": ("#D55E00", "dflash dspark eagle eagle2 eagle3 hydra medusa mtp"),
    "draft models": ("#AA3377", "card opt_tree ouroboros pearl sps"),
    "combined": ("#E69F00", "adaptive choose sam_eagle2 suffix_else_head union"),
    "plain decoding": ("#AAAAAA", "ar oracle random_drafts"),
    "other": ("#000000", ""),
}
_FAMILY_OF = {m: family for family, (_, methods) in _FAMILIES.items() for m in methods.split()}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "d", "h")
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "|||", "ooo", "+++", "OO", "**", "//", "\\\\")
_DASHES = ("-", "--", "-.", ":")
_STYLE: Keywords = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelsize": 8,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": "small",
    # The same data gives the same file; publishers want a PDF's fonts inside it.
    "svg.fonttype": "path",
    "svg.hashsalt": "specbench",
    "pdf.fonttype": 42,
}
mpl.rcParams.update(_STYLE)
_UNITS = {
    "mat": "MAT (tokens per target pass)",
    "speedup": "speedup over plain decoding",
    "tokens_per_s": "tokens/s",
    "draft_share": "draft's share of time",
    "hit_rate": "hit rate",
}
# Metadata by file type that would differ from day to day or between program versions.
_UNDATED: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


class Drawing(Figure):  # type: ignore[misc]  # matplotlib has no types
    """A figure with its words: a title that says the finding, a caption of two lines."""

    title: str = ""
    caption: str = ""
    legend_height: float = 0.0  # inches


@dataclass(frozen=True)
class Look:
    """Style of a label's bars, lines or points."""

    color: str
    hatch: str = ""
    marker: str = "o"
    dashes: str = "-"

    def dot(self, hollow: bool = False) -> Keywords:
        """Return the style of a single point, white inside if it is ``hollow``."""
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": "none",
            "markersize": 8.0 if self.marker == "*" else 6.0,
            "markerfacecolor": "white" if hollow else self.color,
        }


def family_of(method: str) -> str:
    """Return what a method drafts from; ``ngrammys/context`` counts as ``ngrammys``."""
    return _FAMILY_OF.get(method.partition("/")[0], "other")


def color_of(family: str) -> str:
    """Return the color of a family as :func:`family_of` names it."""
    return _FAMILIES[family][0]


def looks(labels: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """Return a look for each label of a picture, given as (method, name).

    Labels of one family have its color; the first of them has the plainest marker.
    """
    members = Counter[str]()
    by_label: dict[tuple[str, str], Look] = {}
    for label in dict.fromkeys(labels):
        family = family_of(label[0])
        i = members[family]
        members[family] += 1
        marks = (marks[i % len(marks)] for marks in (_HATCHES, _MARKERS, _DASHES))
        by_label[label] = Look(color_of(family), *marks)
    return by_label


def unit_of(key: str, timing: str) -> str:
    """Return the name of a metric's axis.

    It marks predicted times, because pictures are also shown without captions.
    """
    timed = key in ("speedup", "tokens_per_s") and timing == "predicted"
    return f"predicted {_UNITS[key].partition(' over')[0]}" if timed else _UNITS[key]


def canvas(height: float) -> Drawing:
    """Make an empty figure of this height in inches, without title and caption."""
    return Drawing(figsize=(WIDTH, height), layout="constrained")


def finish(figure: Drawing, title: str, caption: str, hollow: bool = False) -> Drawing:
    """Add title, caption and, right of the axes, a legend of everything that is named in them.

    Args:
        title: the finding.
        caption: model, data, hardware.
        hollow: whether some marks are.
    """
    figure.title, figure.caption = title, caption
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    # Measured series have error bars and come before lines and marks.
    legend = dict(sorted(handles.items(), key=lambda item: isinstance(item[1], Line2D)))
    if hollow:
        legend[HOLLOW] = Line2D([], [], **Look(REFERENCE).dot(hollow=True))
    if legend:
        names = [textwrap.fill(name, 26) for name in legend]
        figure.legend(
            list(legend.values()), names, loc="outside right center", borderaxespad=0.3,
            alignment="left",
        )  # fmt: skip
        # A legend of many lines needs room, however low the axes are.
        lines = sum(name.count("\n") + 1 for name in names)
        figure.legend_height = 0.3 + 0.168 * lines
        figure.set_figheight(max(figure.get_figheight(), figure.legend_height))
    return figure


def ratio_ticks(axis: Axis) -> None:
    """Set 1, 2, 5, 10, … on a logarithmic axis, as plain numbers; more of them in a short one."""
    low, high = sorted(axis.get_view_interval())
    dense = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high > 8 * low else dense))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def rows_down(axes: Axes, names: Sequence[str]) -> None:
    """Name the positions 0, 1, … of the vertical axis, from the top."""
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def save(figure: Drawing, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and PDF, its title above and its caption below the axes.

    The same figure gives the same bytes.
    """
    title, caption = _wrapped(figure.title, 12.5), _wrapped(figure.caption, 16.5)
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize="large")
    figure.supxlabel("\n".join(caption), x=0.01, ha="left", fontsize="small")
    above, below = 0.1 + 0.19 * len(title), 0.145 * len(caption)
    height = figure.get_figheight() + above + below
    # The legend is centered and must not cover title or caption.
    figure.set_figheight(max(height, figure.legend_height + 2 * max(above, below)))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{file_name(name)}.{suffix}" for suffix in _UNDATED]
    for path, undated in zip(paths, _UNDATED.values(), strict=True):
        figure.savefig(path, metadata=undated)
    return paths


def _wrapped(text: str, characters_per_inch: float) -> list[str]:
    width = int(WIDTH * characters_per_inch)
    return [line for part in text.splitlines() for line in textwrap.wrap(part, width)]
