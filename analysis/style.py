"""How figures look: one place for colours, sizes and fonts.

A method has the same colour in every figure. The eight colours are those of Okabe and Ito, which
people with any common colour blindness tell apart; more than eight methods share them with another
hatching, so that a figure can also be read in print without colour.
"""

from __future__ import annotations

import zlib
from typing import Any

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_YELLOW, _BLUE, _RED, _PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
_GREY = "#999999"
_COLOURS = (_ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _RED, _PURPLE)

# Colour and hatching by method; a hatching says the same thing in all of a family.
_METHODS: dict[str, tuple[str, str]] = {
    "ar": (_GREY, ""),
    "cacheback": (_RED, ""),
    "pld": (_BLUE, ""),
    "token_recycling": (_GREEN, ""),
    "ngrammys": (_ORANGE, ""),
    "ssd": (_PURPLE, ""),
    "card": (_SKY, ""),
    "sam": (_YELLOW, ""),
    "rest": (_SKY, "//"),
    "suffix_decoding": (_YELLOW, "//"),
    "lookahead": (_BLUE, "//"),
    "jacobi": (_PURPLE, "//"),
    "union": (_RED, "//"),
    "sps": (_ORANGE, "//"),
    "pearl": (_GREEN, "//"),
    "ouroboros": (_BLUE, ".."),
    "opt_tree": (_GREEN, ".."),
    "medusa": (_SKY, ".."),
    "hydra": (_ORANGE, ".."),
    "eagle": (_PURPLE, ".."),
    "eagle2": (_YELLOW, ".."),
    "eagle3": (_RED, ".."),
    "random_drafts": (_GREY, "xx"),
    "oracle": (_BLACK, ""),
}
REFERENCE = "#333333"  # lines that are no method: borders, the height of plain decoding
HEATMAP = "cividis"  # even steps of lightness, the same to any colour vision and in grey
# Parts of a whole, e.g. the phases of a step; a part is no method.
_PARTS = (
    ("#DDDDDD", ""), (_ORANGE, ""), (_SKY, ""), (_GREEN, "//"), (_BLUE, ""), (_RED, "//"),
    (_PURPLE, ""), (_YELLOW, "//"),
)  # fmt: skip
# What sets several settings of one method apart within a figure.
_VARIANTS = ("", "\\\\", "xx", "oo", "++", "**")

RC: dict[str, Any] = {
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


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)))  # dotted is for what a paper claims
_FAMILIES = ("", "//", "..", "xx", "--")  # as hatchings; a line has another dash instead


def bar_style(method: str, variant: int = 0) -> dict[str, str]:
    """Keyword arguments of a bar.

    Args:
        method: its name; one that is not listed gets a colour by its name, the same everywhere.
        variant: 0 for the first entry of this method in the figure, 1 for the next, and so on.
    """
    unlisted = (_COLOURS[zlib.crc32(method.encode()) % len(_COLOURS)], "--")
    colour, hatch = _METHODS.get(method, unlisted)
    return {
        "facecolor": colour,
        "hatch": hatch + _VARIANTS[variant % len(_VARIANTS)],
        "edgecolor": REFERENCE,
    }


def line_style(method: str, variant: int = 0, claimed: bool = False) -> dict[str, Any]:
    """Keyword arguments of a line with markers.

    Args:
        method: decides the colour, as in :func:`bar_style`; where a bar is hatched, marker and
            dashes differ.
        variant: 0 for the first line of this method in the axes, 1 for the next, and so on.
        claimed: a paper's values, drawn hollow and dotted.
    """
    style = bar_style(method)
    colour, place = style["facecolor"], _FAMILIES.index(style["hatch"]) + variant
    return {
        # Yellow on white is hardly seen as a line.
        "color": "#B8A400" if colour == _YELLOW else colour,
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": ":" if claimed else _LINES[place % len(_LINES)],
        "markersize": 4,
        "linewidth": 1.4,
        "markerfacecolor": "white" if claimed else None,
    }


def part_style(place: int) -> dict[str, str]:
    """Keyword arguments of a bar that is the ``place``-th part of a whole."""
    colour, hatch = _PARTS[place % len(_PARTS)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": REFERENCE, "linewidth": "0.5"}
