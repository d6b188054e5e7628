"""What trained heads guess right on questions of a file, and what more texts would be worth.

    python -m scripts.draft_model.head_scores spec_bench.jsonl --heads FOLDER [FOLDER ...]
    python -m scripts.draft_model.head_scores --curves FOLDER [--figure FILE.png] [--out FITS.json]

The first prints the shares of right first, second, … guesses on the target's greedy answers to
``--batch`` of the questions (first turns; the answers are kept in ``--work``). The second reads the
curves in the cards of FOLDER's heads: the scores of the first epoch, where every text is new, are
fitted by a - b * tokens**-c and continued to ten times as many. That is a guide and no forecast:
the learning rate is still high in the first epoch, and falls to nearly nothing in the last.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.optimize import curve_fit

from analysis.runs.command import parser_of, reporting_errors
from scripts.draft_model.folder import FACTS, HEADS_FOLDER
from scripts.draft_model.head_families import Teacher, make
from scripts.draft_model.head_lesson import Pupil, held_out, pack
from scripts.draft_model.sources import check, group, numbers, prepare, read_texts
from scripts.draft_model.train_heads import RECIPES
from specbench.config.compose import compose, typed
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.heads import eagle, eagle3, hydra_heads, medusa
from specbench.models.hidden_states import Embeddings
from specbench.storage import jsonl

_MORE = 10  # times the tokens, for the prediction
_SCORE = re.compile(r"(\w+) (\[[^\]]*\]|[-+.\de]+)")


def taught(
    name: str, folder: Path, teacher: Teacher, layers: tuple[int, ...], vocab: int = 0
) -> Pupil:
    """The head in a folder, as training scores it; ``vocab`` counts the ids that EAGLE-3 says."""
    where: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    ends = teacher.ends
    loaded: torch.nn.Module
    match name:
        case "eagle":
            loaded = eagle.load(folder, ends, **where)
        case "medusa":
            loaded = medusa.load(folder, ends, **where)
        case "hydra":
            loaded = hydra_heads.load(folder, ends, teacher.config, **where)
        case _:
            offsets = load_file(folder / "model.safetensors")["d2t"]
            ids = offsets + torch.arange(len(offsets))
            others = torch.ones(len(teacher.common), dtype=torch.bool)
            others[ids] = False
            common = torch.cat([ids, others.nonzero()[:, 0]])
            teacher = Teacher(ends, teacher.config, common, teacher.sample)
            loaded, vocab = eagle3.load(folder, ends, **where), len(ids)
    pupil = make(name, teacher, layers, vocab)
    pupil.head.load_state_dict(loaded.state_dict())
    return pupil


def score(options: argparse.Namespace) -> None:
    kept = (*options.layers, -1)
    prepare(options, kept)
    asked = group(options.work, "other", 0)
    check(options, [asked], kept)
    texts, _ = read_texts([asked])
    every = list(range(len(texts.prompts)))
    cfg = typed(compose(["model=smollm2_135m"]))
    target = loading.load_model(cfg).model
    ends = Embeddings(target)
    print(f"{len(every)} questions of {options.other}, {len(texts.tokens)} tokens")
    for folder in options.heads:
        for name, recipe in RECIPES.items():
            if not (folder / name / "config.json").is_file():
                continue
            sample = [pack(texts, every[:8], recipe.states)]
            ids = torch.arange(len(ends.embedding))
            teacher = Teacher(ends, target.config.to_dict(), ids, sample)
            pupil = taught(name, folder / name, teacher, options.layers)
            print(f"{folder / name}: {held_out(pupil, texts, every, recipe.states)}", flush=True)


def fitted(tokens: np.ndarray, shares: np.ndarray) -> tuple[float, float, float]:
    """a, b and c of ``a - b * tokens**-c``."""
    start = (float(shares[-1]) + 0.1, 1.0, 0.2)
    found, _ = curve_fit(
        lambda n, a, b, c: a - b * n**-c,
        tokens / tokens[0],
        shares,
        p0=start,
        bounds=((0, 0, 0.02), (1, 2, 2)),
        maxfev=20_000,
    )
    a, b, c = map(float, found)
    return a, b * float(tokens[0]) ** c, c


def curve_of(points: list[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens seen and share of right first guesses; how many points are of the first epoch."""
    key = "other_top1" if "other_top1" in points[-1] else "top1"
    seen = [point for point in points if point["visits"]]
    first = sum(point["epoch"] <= 1 for point in seen)
    shares = np.array([point[key][0] for point in seen])
    return np.array([float(point["visits"]) for point in seen]), shares, first


def points_of(card: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The points of the curve in a head's ``training.json``."""
    return [
        {name: json.loads(value) for name, value in _SCORE.findall(f"{epoch}, {line}")}
        for epoch, line in card["curve"].items()
    ]


def curves(options: argparse.Namespace) -> None:
    drawn: dict[str, tuple[np.ndarray, np.ndarray, int]] = {}
    fits: list[jsonl.JsonObject] = []
    for name in RECIPES:
        path = options.curves / name / FACTS
        if not path.is_file():
            continue
        drawn[name] = curve_of(points_of(jsonl.read_json(path)))
        tokens, shares, first = drawn[name]
        print(f"{name}: first guess right, by tokens seen")
        for n, share in zip(tokens, shares, strict=True):
            print(f"  {n:12,.0f} {share:.4f}")
        if first >= 4:
            a, b, c = fitted(tokens[:first], shares[:first])
            more = _MORE * tokens[first - 1]
            print(f"  {a:.3f} - {b:.3g} * n^-{c:.3f}; {more:,.0f} tokens: {a - b * more**-c:.3f}")
            fit = {"a": a, "b": b, "c": c, "tokens": more, "predicted": a - b * more**-c}
            ends = {"first_epoch": shares[first - 1], "seen": tokens[-1], "reached": shares[-1]}
            fits.append({"label": name} | {k: float(v) for k, v in (ends | fit).items()})
    if not drawn:
        raise ConfigurationError(
            f"{options.curves} has no trained head (eagle/{FACTS}, …). Type a folder that "
            "train_heads wrote to with --out."
        )
    if options.figure:
        _draw(drawn, options.figure)
    if options.out:
        jsonl.write_json(options.out, {"rows": fits})


def _draw(drawn: Mapping[str, tuple[np.ndarray, np.ndarray, int]], figure: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(6.4, 4))
    for number, (name, (tokens, shares, first)) in enumerate(drawn.items()):
        color = f"C{number}"
        axes.plot(tokens[:first], shares[:first], "o", color=color, label=name)
        axes.plot(tokens[first:], shares[first:], "o", color=color, fillstyle="none")
        if first >= 4:
            a, b, c = fitted(tokens[:first], shares[:first])
            line = np.geomspace(tokens[0], _MORE * tokens[first - 1])
            axes.plot(line, a - b * line**-c, "--", color=color)
    axes.set(xscale="log", xlabel="tokens seen (open: seen before)", ylabel="first guess right")
    axes.legend()
    with jsonl.replacing(figure) as partial:
        canvas.savefig(partial, format=figure.suffix[1:], dpi=120, bbox_inches="tight")
    pyplot.close(canvas)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("other", type=Path, nargs="?", metavar="FILE.jsonl", help="questions")
    add("--heads", type=Path, nargs="+", default=[HEADS_FOLDER], help="folders with a head in each")
    add("--work", type=Path, default=Path(".cache/heads_measured"), help="where answers are kept")
    add("--batch", type=int, default=96, help="questions (default: %(default)s)")
    add("--new-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    add("--layers", type=numbers, default=(2, 19, 27), help="EAGLE-3's states: 2,19,27")
    add("--curves", type=Path, metavar="FOLDER", help="of trained heads")
    add("--figure", type=Path, help="where the curves are drawn")
    add("--out", type=Path, help="where the fits to the curves are written (.json)")
    nothing = {"groups": 0, "asked": 0, "read": 0, "share": (0, 1), "seed": 0, "data": None}
    parser.set_defaults(**nothing)
    options = parser.parse_args(argv)
    if options.curves is None and options.other is None:
        parser.error("type a file of questions, or --curves FOLDER")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)

    def work() -> int:
        (score if options.curves is None else curves)(options)
        return 0

    return reporting_errors(work)


if __name__ == "__main__":
    sys.exit(main())
