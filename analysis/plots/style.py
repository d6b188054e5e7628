"""How figures look: one place for colors, sizes, fonts, and what axes are called.

On a screen a figure has the size that its content asks for; in print it has the width of a column
or a page of a paper, and letters that are read at that width.

A method has the same color, hatching and marker in every figure. Methods that share a paper's
table or figure have hues of their own, which people with any common color blindness tell apart
(the tests simulate it); hatching and marker do the same in print without color. The hues are those
of Okabe and Ito without yellow, which nobody sees on white, and two dark ones of Paul Tol's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patheffects import Normal, Stroke

Keywords: TypeAlias = dict[str, Any]  # arguments of matplotlib

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _RED, _PURPLE, _WINE, _INDIGO = "#0072B2", "#D55E00", "#CC79A7", "#882255", "#332288"
_GREY, _YELLOW = "#999999", "#F0E442"
_COLORS = (_ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE, _WINE, _INDIGO)

# Color, hatching and marker by method; below, by source of N-Grammys' rows.
_METHODS: dict[str, tuple[str, str, str]] = {
    "ar": (_GREY, "", "o"),
    "cacheback": (_RED, "", "o"),
    "pld": (_BLUE, "//", "s"),
    "lookahead": (_SKY, "..", "^"),
    "rest": (_INDIGO, "xx", "D"),
    "sam": (_ORANGE, "\\\\", "v"),
    "token_recycling": (_GREEN, "--", "P"),
    "ngrammys": (_PURPLE, "", "X"),
    "ssd": (_WINE, "", "*"),
    "suffix_decoding": (_WINE, "\\\\", "<"),
    "jacobi": (_PURPLE, "//", ">"),
    "union": (_RED, "xx", "h"),
    "card": (_RED, "||", "p"),
    "sps": (_BLUE, "", "h"),
    "pearl": (_GREEN, "//", "<"),
    "ouroboros": (_WINE, "..", ">"),
    "opt_tree": (_ORANGE, "xx", "d"),
    "medusa": (_WINE, "//", "h"),
    "hydra": (_ORANGE, "..", "p"),
    "eagle": (_PURPLE, "..", "8"),
    "eagle2": (_SKY, "xx", "8"),
    "eagle3": (_INDIGO, "\\\\", "8"),
    "random_drafts": (_GREY, "xx", "x"),
    "oracle": (_BLACK, "", "o"),
    "ngrammys/context": (_ORANGE, "", "o"),
    "ngrammys/bigram": (_BLUE, "//", "s"),
    "ngrammys/unigram": (_SKY, "..", "^"),
    "ngrammys/extended": (_WINE, "xx", "D"),
}
REFERENCE = "#333333"  # lines that stand for no method: borders, the height of plain decoding
BAND = "#E4E4E4"  # the background of the numbers
HEATMAP = "cividis"  # even steps of lightness, the same to any color vision and in grey
# Parts of a whole, e.g. the phases of a step; a part is not a method.
_PARTS = (
    ("#DDDDDD", ""), (_ORANGE, ""), (_SKY, ""), (_GREEN, "//"), (_BLUE, ""), (_RED, "//"),
    (_PURPLE, ""), (_YELLOW, "//"),
)  # fmt: skip
# What sets several settings of one method apart within a figure: shares of white in its color, and
# beyond these what is added to its hatching.
_TINTS = (0.0, 0.45, 0.75)
_VARIANTS = ("", "oo", "**", "++")

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


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d", "8", "x")
_LINES = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)))  # dotted is for what a paper claims


def _look(method: str) -> tuple[str, str, str]:
    """Color, hatching and marker; a method that is not listed gets them by its name."""
    number = zlib.crc32(method.encode())
    unlisted = (_COLORS[number % len(_COLORS)], "++", _MARKERS[number % len(_MARKERS)])
    return _METHODS.get(method, unlisted)


def bar_style(method: str, variant: int = 0) -> dict[str, str]:
    """Of a bar; ``variant`` counts the entries of a method in the figure, from 0."""
    color, hatch, _ = _look(method)
    return {
        "facecolor": _tinted(color, variant),
        "hatch": hatch + _VARIANTS[variant // len(_TINTS) % len(_VARIANTS)],
        "edgecolor": REFERENCE,
    }


def _tinted(color: str, variant: int) -> str:
    white = _TINTS[variant % len(_TINTS)]
    return to_hex([white + (1 - white) * part for part in to_rgb(color)]) if white else color


def line_style(method: str, variant: int = 0, claimed: bool = False) -> Keywords:
    """Of a line with markers; a paper's claimed values are drawn hollow and dotted."""
    color, _, marker = _look(method)
    return {
        "color": color,
        "marker": _MARKERS[(_MARKERS.index(marker) + variant) % len(_MARKERS)],
        "linestyle": ":" if claimed else _LINES[variant % len(_LINES)],
        "markersize": 4.5,
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


def dot_style(method: str, faint: bool = False, variant: int = 0) -> Keywords:
    """Of a single point; ``faint`` ones are many, ``variant`` as for :func:`bar_style`."""
    color, _, marker = _look(method)
    marker = _MARKERS[(_MARKERS.index(marker) + variant // len(_TINTS)) % len(_MARKERS)]
    look: Keywords = {"color": color, "marker": marker, "linestyle": "none", "markersize": 6.0}
    if variant:
        look["markerfacecolor"] = _tinted(color, variant)
    return look | ({"alpha": 0.6, "markersize": 5.5, "markeredgewidth": 0} if faint else {})


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


def row_marker(place: int) -> str:
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
