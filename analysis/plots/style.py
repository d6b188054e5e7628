"""How figures look: one color for each family of methods, one style, what axes are called.

Within a family hatching, marker and dashes tell labels apart. The colors, most of them Okabe and
Ito's, look different to people with any common color blindness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import matplotlib as mpl

Keywords: TypeAlias = dict[str, Any]  # arguments of matplotlib

_GREY = "#AAAAAA"
REFERENCE = "#333333"  # lines that stand for no method: borders, the height of plain decoding
BAND = "#E4E4E4"  # behind the numbers
HEATMAP = "cividis"  # even steps of lightness, the same to any color vision and in grey

# What a family drafts from, its color, its methods. A method that is not listed is one of "other".
_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "text": (
        "#0072B2",
        (
            "cacheback", "ngram_map", "ngram_mod", "ngrammys", "pld", "rest", "sam", "ssd",
            "suffix_decoding",
        ),
    ),
    "the model's own passes": (
        "#009E73",
        ("jacobi", "logitspec", "lookahead", "racer", "token_recycling"),
    ),
    "trained heads": (
        "#D55E00",
        ("eagle", "eagle2", "eagle3", "hydra", "medusa"),
    ),
    "draft models": ("#AA3377", ("card", "opt_tree", "ouroboros", "pearl", "sps")),
    "combined": ("#E69F00", ("adaptive", "sam_eagle2", "suffix_else_head", "union")),
    "plain decoding": (_GREY, ("ar", "oracle", "random_drafts")),
    "other": ("#000000", ()),
}  # fmt: skip
_FAMILY_OF = {method: name for name, (_, methods) in _FAMILIES.items() for method in methods}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "d", "h")
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "|||", "ooo", "+++", "OO", "**", "//", "\\\\")
_DASHES = ("-", "--", "-.", ":")
# Parts of a whole, e.g. the phases of a step; a part is not a method.
PARTS = ("#DDDDDD", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442")

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


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the project's style."""
    with mpl.rc_context(RC):
        yield


@dataclass(frozen=True)
class Look:
    """What a label is drawn with: as bar, line or point."""

    color: str
    hatch: str = ""
    marker: str = "o"
    dashes: str = "-"


def family_of(method: str) -> str:
    """What a method drafts from; of ``ngrammys/context`` what ``ngrammys`` does."""
    return _FAMILY_OF.get(method.partition("/")[0], "other")


def color_of(family: str) -> str:
    """The color of a family as :func:`family_of` names it."""
    return _FAMILIES[family][0]


def looks(labels: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """A look for each label of a picture, given as (method, name).

    Labels of one family have its color; the first of them has the plainest marker.
    """
    members = Counter[str]()
    found: dict[tuple[str, str], Look] = {}
    for label in labels:
        if label in found:
            continue
        family = family_of(label[0])
        place = members[family]
        members[family] += 1
        found[label] = Look(
            color_of(family),
            _HATCHES[place % len(_HATCHES)],
            _MARKERS[place % len(_MARKERS)],
            _DASHES[place % len(_DASHES)],
        )
    return found


def dot_style(look: Look, hollow: bool = False) -> Keywords:
    """Of a single point; ``hollow``: not shown different from plain decoding."""
    return {
        "color": look.color,
        "marker": look.marker,
        "linestyle": "none",
        "markersize": 8.0 if look.marker == "*" else 6.0,
        "markerfacecolor": "white" if hollow else look.color,
    }


# What axes are called.
_UNITS = {
    "mat": "MAT (tokens per target pass)",
    "speedup": "speedup over plain decoding",
    "tokens_per_s": "tokens/s",
    "draft_share": "draft's share of time",
    "hit_rate": "hit rate",
}
PLAIN = "plain decoding"  # of a line across, at 1.0
HOLLOW = "hollow: not shown to differ from plain decoding"


def unit_of(key: str, timing: str) -> str:
    """What an axis of a metric is called.

    It says which times are predicted: a picture is shown without its caption, too.
    """
    words = _UNITS[key]
    timed = key in ("speedup", "tokens_per_s") and timing == "predicted"
    return f"predicted {words}" if timed else words
