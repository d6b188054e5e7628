"""How figures look: one place for colors, sizes and fonts.

A method has the same color, hatching and marker in every figure. Methods that share a paper's
table or figure have hues of their own, which people with any common color blindness tell apart
(the tests simulate it); hatching and marker do the same in print without color. The hues are those
of Okabe and Ito without yellow, which is no line on white, and two dark ones of Paul Tol's.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias

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
    "eagle3": (_PURPLE, "\\\\", "8"),
    "random_drafts": (_GREY, "xx", "x"),
    "oracle": (_BLACK, "", "o"),
    "ngrammys/context": (_ORANGE, "", "o"),
    "ngrammys/bigram": (_BLUE, "//", "s"),
    "ngrammys/unigram": (_SKY, "..", "^"),
    "ngrammys/extended": (_WINE, "xx", "D"),
}
REFERENCE = "#333333"  # lines that are no method: borders, the height of plain decoding
HEATMAP = "cividis"  # even steps of lightness, the same to any color vision and in grey
# Parts of a whole, e.g. the phases of a step; a part is no method.
_PARTS = (
    ("#DDDDDD", ""), (_ORANGE, ""), (_SKY, ""), (_GREEN, "//"), (_BLUE, ""), (_RED, "//"),
    (_PURPLE, ""), (_YELLOW, "//"),
)  # fmt: skip
# What sets several settings of one method apart within a figure.
_VARIANTS = ("", "oo", "**", "++", "O", "o")

RC: Keywords = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
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
    # Text stays text, and the same data gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "specbench",
}


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
        "facecolor": color,
        "hatch": hatch + _VARIANTS[variant % len(_VARIANTS)],
        "edgecolor": REFERENCE,
    }


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


def row_marker(place: int) -> str:
    """The marker of the ``place``-th row of a figure whose colors are those of parts."""
    return _MARKERS[place % len(_MARKERS)]


def part_style(place: int) -> dict[str, str]:
    """Of a bar that is the ``place``-th part of a whole."""
    color, hatch = _PARTS[place % len(_PARTS)]
    return {"facecolor": color, "hatch": hatch, "edgecolor": REFERENCE, "linewidth": "0.5"}
