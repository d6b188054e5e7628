"""How figures look: one place for colors, sizes, fonts, and what axes are called.

On a screen a figure has the size that its content asks for; in print it has the width of a column
or a page of a paper, and letters that are read at that width.

Within a picture each label has a color and a marker that no other one has (:func:`looks`). A method
has a usual look, which its label has wherever no other label of the picture takes it first.
Methods that share a paper's table or figure have hues of their own, which people with any common
color blindness tell apart (the tests simulate it); hatching and marker do the same in print without
color. The first hues are those of Okabe and Ito without yellow, which nobody sees on white, and two
dark ones of Paul Tol's; the others are as far from these, to any eyes, as there is room.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.path import Path
from matplotlib.patheffects import Normal, Stroke

from specbench.results.names import display_name

Keywords: TypeAlias = dict[str, Any]  # arguments of matplotlib

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _RED, _PURPLE, _WINE, _INDIGO = "#0072B2", "#D55E00", "#CC79A7", "#882255", "#332288"
_BROWN, _VIOLET, _CRIMSON, _LEAF = "#4C3300", "#9326FF", "#E6004D", "#96CC7A"
_PLUM, _LAVENDER, _OLIVE, _MAGENTA = "#660F66", "#8A73FF", "#5F663D", "#CC00AA"
_GREY, _YELLOW = "#999999", "#F0E442"
_COLORS = (
    _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE, _WINE, _INDIGO,
    _BROWN, _VIOLET, _CRIMSON, _LEAF, _PLUM, _LAVENDER, _OLIVE, _MAGENTA,
)  # fmt: skip
# All are filled: strokes are lost where markers have no edge. The last: stars of 4 and 8 points.
_DOME, _STAR4, _STAR8 = Path.wedge(0, 180), (4, 1, 0), (8, 1, 0)
_MARKERS: tuple[Any, ...] = (
    "o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "d", "h", _DOME, _STAR4, _STAR8,
)  # fmt: skip
_HATCHES = ("", "//", "\\\\", "..", "xx", "--", "||", "++", "oo", "**", "OO", "////", "----")

# The usual color, hatching and marker by method; below, by source of N-Grammys' rows. Where two
# labels of a picture want the same, the upper one here has it.
_METHODS: dict[str, tuple[str, str, Any]] = {
    "ar": (_GREY, "", "o"),
    "cacheback": (_RED, "", "o"),
    "pld": (_BLUE, "//", "s"),
    "lookahead": (_SKY, "..", "^"),
    "rest": (_INDIGO, "xx", "D"),
    "sam": (_ORANGE, "\\\\", "v"),
    "token_recycling": (_GREEN, "--", "P"),
    "ngrammys": (_PURPLE, "||", "X"),
    "ssd": (_WINE, "++", "*"),
    "suffix_decoding": (_BROWN, "oo", "<"),
    "union": (_VIOLET, "**", "h"),
    "medusa": (_CRIMSON, "////", ">"),
    "hydra": (_LEAF, "OO", "p"),
    "eagle": (_LAVENDER, "----", "d"),
    "eagle2": (_PLUM, "..", _STAR4),
    "eagle3": (_OLIVE, "\\\\", _DOME),
    "sam_eagle2": (_MAGENTA, "xx", _STAR8),
    "jacobi": (_PURPLE, "//", ">"),
    "card": (_RED, "||", "p"),
    "sps": (_BLUE, "", "h"),
    "pearl": (_GREEN, "//", "<"),
    "ouroboros": (_WINE, "..", ">"),
    "opt_tree": (_ORANGE, "xx", "d"),
    "random_drafts": (_GREY, "xx", "h"),
    "oracle": (_BLACK, "", "o"),
    "ngrammys/context": (_ORANGE, "", "o"),
    "ngrammys/bigram": (_BLUE, "//", "s"),
    "ngrammys/unigram": (_SKY, "..", "^"),
    "ngrammys/extended": (_WINE, "xx", "D"),
}
_RANKS = {method: rank for rank, method in enumerate(_METHODS)}
REFERENCE = "#333333"  # lines that stand for no method: borders, the height of plain decoding
BAND = "#E4E4E4"  # the background of the numbers
HEATMAP = "cividis"  # even steps of lightness, the same to any color vision and in grey
# Parts of a whole, e.g. the phases of a step; a part is not a method.
_PARTS = (
    ("#DDDDDD", ""), (_ORANGE, ""), (_SKY, ""), (_GREEN, "//"), (_BLUE, ""), (_RED, "//"),
    (_PURPLE, ""), (_YELLOW, "//"),
)  # fmt: skip
RC: Keywords = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    # As outlines in SVG, because the reader's machine need not have the font; in PDF the font is
    # inside, as publishers ask. The same data gives the same file.
    "svg.fonttype": "path",
    "svg.hashsalt": "specbench",
    "pdf.fonttype": 42,
}
# Inches across the column of a two-column paper, and across its page.
WIDTHS = {"column": 3.3, "page": 6.9}
_PRINT: Keywords = {"savefig.dpi": 300, "font.size": 8, "hatch.linewidth": 0.4}


@contextmanager
def styled(width: str | None = None) -> Iterator[None]:
    """Draw in the project's style: for a screen, or for print at one of :data:`WIDTHS`."""
    sized = _PRINT | {"figure.figsize": (WIDTHS[width], 2.3)} if width else {}
    with mpl.rc_context(RC | sized):
        yield


@dataclass(frozen=True)
class Look:
    """What a label is drawn with: as bar, line or point."""

    color: str
    hatch: str
    marker: Any


def looks(labels: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """A look for each label of a picture, given as (method, name), whatever their order.

    Colors and markers are all different while there are enough, 16; beyond, the pairs of them.
    """

    def place(label: tuple[str, str]) -> tuple[int, str, bool, str]:
        method, name = label
        named_so = name in (method, display_name(method))  # before other settings of the method
        return _RANKS.get(method, len(_RANKS)), method, not named_so, name

    found = sorted(set(labels), key=place)
    usual = [_usual(method) for method, _ in found]
    colors = _allotted([look.color for look in usual], _COLORS)
    hatches = _allotted([look.hatch for look in usual], _HATCHES)
    markers = _allotted([look.marker for look in usual], _MARKERS)
    taken: set[tuple[str, Any]] = set()
    for i, pair in enumerate(zip(colors, markers, strict=True)):
        free = (m for m in (pair[1], *_MARKERS) if (pair[0], m) not in taken)
        markers[i] = next(free, pair[1])
        taken.add((pair[0], markers[i]))
    every = zip(colors, hatches, markers, strict=True)
    return {label: Look(*parts) for label, parts in zip(found, every, strict=True)}


def _usual(method: str) -> Look:
    """A method's look; one that is not listed gets it by its name."""
    number = zlib.crc32(method.encode())
    each = (pool[number % len(pool)] for pool in (_COLORS, _HATCHES, _MARKERS))
    return Look(*_METHODS.get(method, tuple(each)))


def _allotted(wanted: Sequence[Any], pool: Sequence[Any]) -> list[Any]:
    """To each what it wants where it is the first, else what nobody wants; then again all."""
    left = itertools.chain([one for one in pool if one not in wanted], itertools.cycle(pool))
    return [one if one not in wanted[:i] else next(left) for i, one in enumerate(wanted)]


def bar_style(look: Look) -> dict[str, str]:
    """Of a bar."""
    return {"facecolor": look.color, "hatch": look.hatch, "edgecolor": REFERENCE}


def line_style(look: Look, claimed: bool = False) -> Keywords:
    """Of a line with markers; a paper's claimed values are drawn hollow and dotted."""
    return {
        "color": look.color,
        "marker": look.marker,
        "linestyle": ":" if claimed else "-",
        "markersize": 4.5 * _wider(look),
        "linewidth": 1.4,
        "markerfacecolor": "white" if claimed else None,
    }


# An upper bound points down from its value, a lower one up: the number is below it, or above.
_BOUNDS = {"": "D", "upper": "v", "lower": "^"}


def claimed_style(bound: str = "") -> Keywords:
    """Of a paper's single values; a light ring keeps the outline visible inside a dark bar."""
    return {
        "linestyle": "none",
        "marker": _BOUNDS[bound],
        "markersize": 5,
        "markerfacecolor": "white",
        "markeredgecolor": REFERENCE,
        "markeredgewidth": 1.3,
        "path_effects": [Stroke(linewidth=3.2, foreground="white"), Normal()],
        "zorder": 4,
    }


def dot_style(look: Look, faint: bool = False) -> Keywords:
    """Of a single point; ``faint`` ones are many."""
    style: Keywords = {"color": look.color, "marker": look.marker, "linestyle": "none"}
    dense = {"alpha": 0.6, "markersize": 5.5 * _wider(look), "markeredgewidth": 0}
    return style | (dense if faint else {"markersize": 6.0 * _wider(look)})


def _wider(look: Look) -> float:
    """Stars have little area for their width."""
    return 1.45 if look.marker == "*" or isinstance(look.marker, tuple) else 1.0


def leader_style(best: bool) -> Keywords:
    """Of the ring around the best point of a line, or around one that may be as good."""
    return {
        "linestyle": "none",
        "marker": "o",
        "markersize": 11 if best else 8.5,
        "markerfacecolor": "none",
        "markeredgecolor": "black" if best else _GREY,
        "markeredgewidth": 1.5 if best else 1.1,
        "zorder": 1.5,
    }


def row_marker(place: int) -> Any:
    """The marker of the ``place``-th row of a figure whose colors stand for parts."""
    return _MARKERS[place % len(_MARKERS)]


def part_style(place: int) -> dict[str, str]:
    """Of a bar that is the ``place``-th part of a whole."""
    color, hatch = _PARTS[place % len(_PARTS)]
    return {"facecolor": color, "hatch": hatch, "edgecolor": REFERENCE, "linewidth": "0.5"}


# What axes are called.
MAT = "MAT, axis from 1\n(tokens per target pass)"
PLAIN = "plain decoding"  # of a line across, at 1.0

_MAT_ALONE = "MAT (tokens per target pass)"
_SPEEDUP = "speedup\n(ratio of tokens/s)"


def speedup_words(timing: str) -> str:
    """Of an axis; a picture without its caption must still say that it was not measured."""
    return f"predicted {_SPEEDUP}" if timing == "predicted" else _SPEEDUP


def speed_words(timing: str) -> str:
    """Of an axis of tokens/s."""
    return "tokens/s, predicted" if timing == "predicted" else "tokens/s"


def unit_of(key: str, timing: str) -> str:
    """Of a color scale, which is short: of ``mat`` or ``speedup``."""
    if key == "mat":
        return _MAT_ALONE
    return "predicted speedup" if timing == "predicted" else "speedup over plain decoding"
