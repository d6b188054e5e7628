"""How drafting time grows with the context and with what is stored, and what building stores costs.

    python -m scripts.bench.growth                     # all parts, about five minutes
    python -m scripts.bench.growth --parts context
    python -m scripts.bench.growth --plot growth.json  # draw a measured file again

Parts: `context` (256 to 8192 tokens of Python's own documentation), `stores` (10^4 to 10^7 tokens,
to 10^6 where a method bounds its memory), `builds` (suffix array, static automaton, SSD's rebuild
while decoding), `recycling` (Token Recycling's step over 81 x 49152 logits). Stored text is
synthetic: ids drawn by Zipf's law, seeded, half of every document being pieces of earlier ones, so
that look-ups find long and short matches. Steps commit one to three tokens, as in bench_drafters.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from scripts.bench.drafters import documentation_tokens, make, measure
from specbench.artifacts import resolve
from specbench.artifacts.datastore import build_datastore
from specbench.artifacts.static_automaton import DocumentAutomaton
from specbench.config.compose import compose, option_names
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.errors import SpecBenchError
from specbench.index.suffix.array import build_suffix_array
from specbench.index.suffix.ring import RingIndex
from specbench.models import loading, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specbench.arrays import IntArray
    from specbench.decoding.drafter import Drafter

PARTS = ("context", "stores", "builds", "recycling")
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
STORES = (10**4, 10**5, 10**6, 10**7)
STEPS = 200
DOCUMENT = 500
VOCAB = 49152
# Worst case of one step. n: tokens of context, N: tokens stored; the rest are knobs of the method.
# "papers" where it is published, else of the structure that is used.
COMPLEXITY = {
    "pld": {"context": "O(n)", "stores": "-", "what": "a scan of the text for each n-gram length"},
    "ngrammys": {"context": "O(n)", "stores": "-", "what": "a scan for the last q tokens (paper)"},
    "cacheback": {"context": "O(1)", "stores": "O(1)", "what": "hash tables of fixed size (paper)"},
    "sam": {"context": "O(1)", "stores": "O(1)", "what": "suffix automata, amortised (paper)"},
    "suffix_decoding": {
        "context": "O(1)", "stores": "O(1)", "what": "O(depth^2) look-ups of tree nodes (paper)",
    },
    "rest": {
        "context": "O(1)", "stores": "O(log N)", "what": "binary searches, k matches (paper)",
    },
    "ssd": {
        "context": "O(1)", "stores": "O(log N)", "what": "binary searches, K matches (source)",
    },
}  # fmt: skip
# Growth from the smallest to the largest size as a power of it: 1 is linear. Caches that stop
# fitting make a constant number of look-ups dearer, so what is O(1) or O(log N) may show some.
_ALLOWED = {"O(1)": 0.35, "O(log N)": 0.35, "O(n)": 1.1}

console = Console(width=120)


def zipf_tokens(count: int, seed: int) -> IntArray:
    """``[count]`` ids of a text with Zipf's frequencies in which half of every document repeats."""
    random = np.random.default_rng(seed)
    text = np.minimum(random.zipf(1.3, count), VOCAB - 1).astype(np.int64)
    piece = 25
    for begin in range(DOCUMENT, count - DOCUMENT, 2 * piece):
        source = int(random.integers(0, begin - piece))
        text[begin : begin + piece] = text[source : source + piece]
    return text


def documents(count: int, seed: int) -> Iterator[IntArray]:
    text = zipf_tokens(count, seed)
    for begin in range(0, count, DOCUMENT):
        yield text[begin : begin + DOCUMENT]


def query_text(store: IntArray, length: int, seed: int) -> IntArray:
    """A text made of pieces of the store and of new ids, half and half."""
    random = np.random.default_rng(seed)
    pieces: list[IntArray] = []
    while sum(map(len, pieces)) < length:
        begin = int(random.integers(0, len(store) - 40))
        pieces.append(store[begin : begin + int(random.integers(5, 30))])
        fresh = random.zipf(1.3, int(random.integers(5, 30)))
        pieces.append(np.minimum(fresh, VOCAB - 1).astype(np.int64))
    return np.concatenate(pieces)[:length]


def context_of(files: dict[str, Path] | None = None, tokenizer_hash: str = "") -> DraftContext:
    return DraftContext(
        vocab_size=VOCAB,
        eos_ids=frozenset({2}),
        tokenizer_hash=tokenizer_hash,
        max_len=CONTEXTS[-1] + 4 * STEPS + 100,
        artifacts=files or {},
    )


def row(part: str, label: str, size: int, times: dict[str, IntArray]) -> dict[str, Any]:
    both = times["propose"] + times["observe"]
    return {
        "part": part,
        "label": label,
        "size": size,
        "steps": len(both),
        "nodes_median": float(np.median(times["nodes"])),
        "propose_median_us": round(float(np.median(times["propose"])) / 1e3, 2),
        "observe_median_us": round(float(np.median(times["observe"])) / 1e3, 2),
        "both_median_us": round(float(np.median(both)) / 1e3, 2),
        "both_p95_us": round(float(np.percentile(both, 95)) / 1e3, 2),
    }


def measure_contexts(seed: int) -> list[dict[str, Any]]:
    cfg = compose([])
    tokenizer = loading.load_tokenizer(cfg)
    tokenizer_hash = loading.tokenizer_hash(tokenizer)
    text = documentation_tokens(tokenizer, CONTEXTS[-1] + 3 * STEPS)
    entries: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name in option_names("method") if name in COMPLEXITY
    ]
    entries.append(("ngrammys", {"strategy": "context"}))
    rows = []
    for name, knobs in entries:
        label = " ".join([name, *(f"{key}={value}" for key, value in knobs.items())])
        drafter = make(name, knobs)
        files = resolve.resolve(
            drafter.needs.artifacts,
            tokenizer=tokenizer,
            bundled=True,
            cache_dir=cfg.cache_dir,
            model_key=weights.identity(cfg),
        )
        drafter.setup(context_of(files, tokenizer_hash))
        for size in CONTEXTS:
            timed = measure(drafter, text[: size + 3 * STEPS], size, seed)
            rows.append(row("context", label, size, timed))
        drafter.close()
    return rows


def feed(drafter: Drafter, text: IntArray) -> None:
    """One finished request: a tenth of it prompt, the rest answer."""
    head = len(text) // 10 + 1
    state = DecodeState(text[:head], len(text) - head)
    state.commit(text[head : head + 1])
    drafter.begin(state)
    state.step += 1
    state.commit(text[head + 1 :])
    drafter.observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, text[head + 1 :], None))
    drafter.end(state)


def stored(name: str, size: int, folder: Path, seed: int) -> tuple[Drafter, IntArray]:
    """A drafter with a store of ``size`` tokens, and the store."""
    text = zipf_tokens(size, seed)
    parts = [text[i : i + DOCUMENT] for i in range(0, size, DOCUMENT)]
    if name == "rest":
        path = folder / f"datastore-{size}.bin"
        build_datastore(parts, path, tokenizer_hash="", corpus={}, vocab_size=VOCAB)
        drafter = make(name, {})
        drafter.setup(context_of({"datastore": path}))
    elif name == "sam":
        path = folder / f"automaton-{size}.bin"
        automaton = DocumentAutomaton()
        for part in parts:
            automaton.add(part)
        automaton.finish(VOCAB).write(path, tokenizer_hash="", header={})
        drafter = make(name, {"automata": "static"})
        drafter.setup(context_of({"static_automaton": path}))
        path.unlink()
    else:
        knobs: dict[str, Any] = {"state_scope": "run"}
        if name == "cacheback":
            knobs["table"] = "dynamic"
        if name == "ssd":
            # All requests are there when the array is sorted, as after a long run.
            knobs |= {"buffer_tokens": size + len(parts), "rebuild_requests": len(parts)}
        drafter = make(name, knobs)
        drafter.setup(context_of())
        for part in parts:
            feed(drafter, part)
        if name == "ssd":
            drafter.wait()  # type: ignore[attr-defined]
    return drafter, text


def measure_stores(seed: int) -> list[dict[str, Any]]:
    rows = []
    # Cacheback's tables and suffix decoding's trees hold a million at most.
    largest = {"rest": 10**7, "ssd": 10**7, "sam": 10**7, "cacheback": 10**6}
    largest["suffix_decoding"] = 10**6
    with tempfile.TemporaryDirectory() as folder:
        for name, most in largest.items():
            for size in (size for size in STORES if size <= most):
                drafter, text = stored(name, size, Path(folder), seed)
                asked = query_text(text, 1000 + 3 * STEPS, seed + 1)
                # `measure` begins with a reset, which would empty what was learnt.
                drafter.reset = lambda: None  # type: ignore[method-assign]
                timed = measure(drafter, asked, 1000, seed)
                rows.append(row("stores", name, size, timed))
                drafter.close()
    return rows


def seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_builds(seed: int) -> list[dict[str, Any]]:
    text = zipf_tokens(10**7, seed).astype(np.int32)
    build_suffix_array(text[:1000])
    rows = [{"what": "suffix array", "size": 10**7, "s": seconds(lambda: build_suffix_array(text))}]

    automaton = DocumentAutomaton()
    automaton.add(text[:DOCUMENT].tolist())  # compiles
    automaton = DocumentAutomaton()

    def build() -> None:
        for begin in range(0, len(text), DOCUMENT):
            automaton.add(text[begin : begin + DOCUMENT])
        automaton.finish(VOCAB)

    rows.append({"what": "static automaton", "size": 10**7, "s": seconds(build)})

    ring = RingIndex(10**6, every_requests=10**9)
    for begin in range(0, 10**6, DOCUMENT):
        ring.add(text[begin : begin + DOCUMENT])
    ring.close()
    ring = RingIndex(10**6)
    ring.start_with(text[begin : begin + DOCUMENT] for begin in range(0, 10**6, DOCUMENT))
    adding = [seconds(lambda: ring.add(text[:DOCUMENT]))]
    rebuild = adding[0] + seconds(ring.wait)
    ring.close()
    rows.append({"what": "SSD: background rebuild", "size": 10**6, "s": rebuild})
    rows.append({"what": "SSD: what it costs the request that ends", "size": 10**6, "s": adding[0]})
    return [{"part": "builds", **each, "s": round(each["s"], 6)} for each in rows]


def measure_recycling(seed: int) -> list[dict[str, Any]]:
    # Several threads wait for the slowest, and so for whatever else runs on its core.
    torch.set_num_threads(1)
    drafter = make("token_recycling", {})
    drafter.setup(context_of())
    state = DecodeState(np.arange(1000), 8)
    state.commit(np.array([5]))
    logits = torch.randn(81, VOCAB, generator=torch.Generator().manual_seed(seed))
    taken = []
    for _ in range(220):
        start = time.perf_counter()
        tree = drafter.propose(state)
        drafter.observe(state, StepOutcome(tree, NO_TOKENS, np.array([5]), None, logits=logits))
        taken.append(time.perf_counter() - start)
    return [
        {
            "part": "recycling",
            "what": "Token Recycling: fill and update, 81 rows, one thread",
            "size": VOCAB,
            "s": round(float(np.median(taken[20:])), 6),
            "p95_s": round(float(np.percentile(taken[20:], 95)), 6),
        }
    ]


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each line of the plots: the power its time grows with, and whether that is allowed."""
    found = []
    for part in ("context", "stores"):
        for label in dict.fromkeys(r["label"] for r in rows if r["part"] == part):
            line = [r for r in rows if r["part"] == part and r["label"] == label]
            sizes = np.log([r["size"] for r in line])
            power = float(np.polyfit(sizes, np.log([r["both_median_us"] for r in line]), 1)[0])
            stated = COMPLEXITY[label.split()[0]][part]
            found.append(
                {
                    "part": part,
                    "label": label,
                    "complexity": stated,
                    "why": COMPLEXITY[label.split()[0]]["what"],
                    "power": round(power, 3),
                    "within": power <= _ALLOWED[stated],
                }
            )
    return found


def show(rows: list[dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    for part, sizes in (("context", CONTEXTS), ("stores", STORES)):
        chosen = [line for line in lines if line["part"] == part]
        if not chosen:
            continue
        table = Table(title=f"µs per step (median) by tokens of {part}")
        for column in ("method", *(f"{size:,}" for size in sizes), "grows as", "stated"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for line in chosen:
            at = {
                r["size"]: f"{r['both_median_us']:.1f}"
                for r in rows
                if r["part"] == part and r["label"] == line["label"]
            }
            cells = [at.get(size, "") for size in sizes]
            power = f"size^{line['power']:.2f}"
            table.add_row(line["label"], *cells, power, line["complexity"])
        console.print(table)
    for each in rows:
        if "what" in each:
            console.print(f"{each['what']}, {each['size']:,}: {each['s']:.4f} s", highlight=False)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from analysis.plots.style import RC, bar_style

    with plt.rc_context({**RC, "axes.grid.axis": "both"}):
        titles = {
            "context": "tokens of context",
            "stores": "tokens stored (1,000 of context)",
        }
        parts = [part for part in titles if any(r["part"] == part for r in rows)]
        figure, grid = plt.subplots(
            1, len(parts), figsize=(4.5 * len(parts), 3.6), sharey=True, squeeze=False
        )
        axes = grid[0]
        for axis, part in zip(axes, parts, strict=True):
            ends: dict[str, tuple[float, float]] = {}
            for name in dict.fromkeys(r["label"] for r in rows if r["part"] == part):
                line = [r for r in rows if r["part"] == part and r["label"] == name]
                style = bar_style(name.split()[0])
                # Methods that share a colour differ in hatching, and here in dashes.
                dashes = ":" if " " in name else "--" if style["hatch"] else "-"
                x, y = [r["size"] for r in line], [r["both_median_us"] for r in line]
                axis.plot(x, y, dashes, marker="o", markersize=3, color=style["facecolor"])
                ends[name.removeprefix("ngrammys strategy=")] = (x[-1], y[-1])
            lowest = 0.0
            for name, (x_end, y_end) in sorted(ends.items(), key=lambda end: end[1][1]):
                lowest = max(y_end, lowest * 1.13)  # no name over another
                axis.annotate(
                    name,
                    (x_end, lowest),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
            axis.set(xscale="log", yscale="log", xlabel=titles[part])
            sizes = sorted({r["size"] for r in rows if r["part"] == part})
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
            axis.minorticks_off()
            axis.set_xlim(right=sizes[-1] * (sizes[-1] / sizes[0]) ** 0.25)
        axes[0].set_ylabel("propose + observe, median µs per step")
        figure.savefig(path)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON; parts not measured now are kept")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw this file")
    options = parser.parse_args(argv)
    try:
        if options.plot is not None:
            plot(json.loads(options.plot.read_text())["rows"], options.plot.with_suffix(".png"))
            return 0
        rows: list[dict[str, Any]] = []
        if options.out is not None and options.out.is_file():
            kept = json.loads(options.out.read_text())["rows"]
            rows = [r for r in kept if r["part"] not in options.parts]
        by_part = {
            "context": measure_contexts,
            "stores": measure_stores,
            "builds": measure_builds,
            "recycling": measure_recycling,
        }
        for part in options.parts:
            rows += by_part[part](options.seed)
    except SpecBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    lines = growth(rows)
    show(rows, lines)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"seed": options.seed, "machine": platform.platform()}
        options.out.write_text(json.dumps({**facts, "rows": rows, "growth": lines}, indent=1))
        if lines:
            plot(rows, options.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
