"""How drafting time grows with the context and with what is stored, and what building stores costs.

    python -m scripts.bench growth                     # all parts, about five minutes
    python -m scripts.bench growth --parts context

Parts: context (256 to 8192 tokens of Python's own documentation), stores (10^4 to 10^7 tokens,
to 10^6 where a method bounds its memory), builds (suffix array, static automaton, SSD's rebuild
while decoding), recycling (Token Recycling's step over 81 x 49152 logits). Stored text is
synthetic: ids drawn by Zipf's law, seeded, half of every document being pieces of earlier ones, so
that look-ups find long and short matches. Steps commit one to three tokens.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from methods.rest.builder import build_datastore
from methods.sam.builder import DocumentAutomaton
from methods.ssd.ring import RingIndex
from scripts.bench.drafters import Documentation, label_of, make, time_steps
from scripts.bench.harness import console, print_table, seconds
from specbench.arrays import IntArray
from specbench.config.compose import option_names
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.index.suffix_array import build_suffix_array

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
STORES = (10**4, 10**5, 10**6, 10**7)
# Cacheback's tables and suffix decoding's trees hold a million at most.
LARGEST = {"rest": 10**7, "ssd": 10**7, "sam": 10**7, "cacheback": 10**6, "suffix_decoding": 10**6}
STEPS = 200
DOCUMENT = 500
VOCAB = 49152
MAX_LEN = CONTEXTS[-1] + 4 * STEPS + 100
# Worst case of one step by tokens of context (n) and tokens stored (N).
COMPLEXITY = {
    "pld": {"context": "O(n)"},
    "ngrammys": {"context": "O(n)"},
    "cacheback": {"context": "O(1)", "stores": "O(1)"},
    "sam": {"context": "O(1)", "stores": "O(1)"},
    "suffix_decoding": {"context": "O(1)", "stores": "O(1)"},
    "rest": {"context": "O(1)", "stores": "O(log N)"},
    "ssd": {"context": "O(1)", "stores": "O(log N)"},
}
# Growth from the smallest to the largest size as a power of it: 1 is linear. Caches that stop
# fitting make a constant number of look-ups dearer, so what is O(1) or O(log N) may show some.
_ALLOWED = {"O(1)": 0.35, "O(log N)": 0.35, "O(n)": 1.1}


def zipf_tokens(count: int, seed: int) -> IntArray:
    """``[count]`` ids of a text with Zipf's frequencies in which half of every document repeats."""
    random = np.random.default_rng(seed)
    text = np.minimum(random.zipf(1.3, count), VOCAB - 1).astype(np.int64)
    piece = 25
    for begin in range(DOCUMENT, count - DOCUMENT, 2 * piece):
        source = int(random.integers(0, begin - piece))
        text[begin : begin + piece] = text[source : source + piece]
    return text


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


def measure_contexts(seed: int) -> list[dict[str, Any]]:
    documentation = Documentation()
    text = documentation.tokens(CONTEXTS[-1] + 3 * STEPS)
    names = [name for name in option_names("method") if name in COMPLEXITY]
    rows = []
    for name, knobs in [*((name, {}) for name in names), ("ngrammys", {"strategy": "context"})]:
        drafter = make(name, knobs)
        documentation.set_up(drafter, MAX_LEN)
        for size in CONTEXTS:
            timed = time_steps(drafter, text[: size + 3 * STEPS], size, seed)
            rows.append({"label": label_of(name, knobs), "size": size, **timed})
        drafter.close()
    return rows


def measure_stores(seed: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, most in LARGEST.items():
            for size in (size for size in STORES if size <= most):
                text = zipf_tokens(size, seed)
                drafter = _with_store(name, text, Path(folder))
                asked = query_text(text, 1000 + 3 * STEPS, seed + 1)
                # `time_steps` begins with a reset, which would empty what was learnt.
                drafter.reset = lambda: None  # type: ignore[method-assign]
                rows.append({"label": name, "size": size, **time_steps(drafter, asked, 1000, seed)})
                drafter.close()
    return rows


def _made(name: str, knobs: dict[str, Any], files: dict[str, Path]) -> Drafter:
    drafter = make(name, knobs)
    drafter.setup(DraftContext(VOCAB, frozenset({2}), max_len=MAX_LEN, artifacts=files))
    return drafter


def _with_store(name: str, text: IntArray, folder: Path) -> Drafter:
    path = folder / f"{name}-{len(text)}.bin"
    parts = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    knobs: dict[str, Any] = {"state_scope": "run"}
    files: dict[str, Path] = {}
    if name == "rest":
        build_datastore(parts, path, tokenizer_hash="", corpus={}, vocab_size=VOCAB)
        knobs, files = {}, {"datastore": path}
    elif name == "sam":
        _automaton(parts).write(path, tokenizer_hash="", header={})
        knobs, files = {"automata": "static"}, {"static_automaton": path}
    elif name == "cacheback":
        knobs["table"] = "dynamic"
    elif name == "ssd":
        # All requests are there when the array is sorted, as after a long run.
        knobs |= {"buffer_tokens": len(text) + len(parts), "rebuild_requests": len(parts)}
    drafter = _made(name, knobs, files)
    if not files:
        for part in parts:
            _feed(drafter, part)
    if name == "ssd":
        drafter.wait()  # type: ignore[attr-defined]
    return drafter


def _automaton(parts: list[Any]) -> Any:
    documents = DocumentAutomaton()
    for part in parts:
        documents.add(part)
    return documents.finish(VOCAB)


def _feed(drafter: Drafter, text: IntArray) -> None:
    """One finished request: a tenth of it prompt, the rest answer."""
    head = len(text) // 10 + 1
    state = DecodeState(text[:head], len(text) - head)
    state.commit(text[head : head + 1])
    drafter.begin(state)
    state.step += 1
    state.commit(text[head + 1 :])
    drafter.observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, text[head + 1 :], None))
    drafter.end(state)


def measure_builds(seed: int) -> list[dict[str, Any]]:
    text = zipf_tokens(10**7, seed).astype(np.int32)
    parts = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
    # The first calls compile.
    build_suffix_array(text[:1000])
    _automaton(parts[:1])
    ring = RingIndex(10**6, every_requests=10**9)
    ring.add(parts[0])
    ring.close()
    array = seconds(lambda: build_suffix_array(text))
    automaton = seconds(lambda: _automaton(parts))
    ring = RingIndex(10**6)
    ring.start_with(iter(parts[: 10**6 // DOCUMENT]))
    adding = seconds(lambda: ring.add(parts[0]))
    rebuild = adding + seconds(ring.wait)
    ring.close()
    found = [
        ("suffix array", 10**7, array),
        ("static automaton", 10**7, automaton),
        ("SSD: background rebuild", 10**6, rebuild),
        ("SSD: what it costs the request that ends", 10**6, adding),
    ]
    return [{"what": what, "size": size, "s": round(s, 6)} for what, size, s in found]


def measure_recycling(seed: int) -> list[dict[str, Any]]:
    # Several threads wait for the slowest, and so for whatever else runs on its core.
    torch.set_num_threads(1)
    drafter = _made("token_recycling", {}, {})
    state = DecodeState(np.arange(1000), 8)
    state.commit(np.array([5]))
    logits = torch.randn(81, VOCAB, generator=torch.Generator().manual_seed(seed))

    def step() -> None:
        tree = drafter.propose(state)
        drafter.observe(state, StepOutcome(tree, NO_TOKENS, np.array([5]), None, logits=logits))

    taken = [seconds(step) for _ in range(220)]
    what = "Token Recycling: fill and update, 81 rows, one thread"
    median, p95 = np.median(taken[20:]), np.percentile(taken[20:], 95)
    return [{"what": what, "size": VOCAB, "s": round(median, 6), "p95_s": round(p95, 6)}]


PARTS = {
    "context": measure_contexts,
    "stores": measure_stores,
    "builds": measure_builds,
    "recycling": measure_recycling,
}


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method and part: the power its time grows with, and whether that is allowed."""
    found = []
    for part, label in dict.fromkeys((r["part"], r["label"]) for r in rows if "label" in r):
        line = [r for r in rows if (r["part"], r.get("label")) == (part, label)]
        sizes = np.log([r["size"] for r in line])
        power = float(np.polyfit(sizes, np.log([r["both_median_us"] for r in line]), 1)[0])
        stated = COMPLEXITY[label.split()[0]][part]
        facts = {"power": round(power, 3), "within": power <= _ALLOWED[stated]}
        found.append({"part": part, "label": label, "complexity": stated, **facts})
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="those in --out are kept")
    add("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    if options.out and options.out.is_file():
        known = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in known if row["part"] not in options.parts]
    for part in options.parts:
        rows += [{"part": part, **row} for row in PARTS[part](options.seed)]
    return {"seed": options.seed, "rows": rows, "growth": growth(rows)}


def show(results: dict[str, Any]) -> None:
    for part, sizes in (("context", CONTEXTS), ("stores", STORES)):
        cells = []
        for line in (line for line in results["growth"] if line["part"] == part):
            at = {
                r["size"]: f"{r['both_median_us']:.1f}"
                for r in results["rows"]
                if (r["part"], r.get("label")) == (part, line["label"])
            }
            times = (at.get(size, "") for size in sizes)
            power = f"size^{line['power']:.2f}"
            cells.append([line["label"], *times, power, line["complexity"]])
        if cells:
            columns = ("method", *(f"{size:,}" for size in sizes), "grows as", "stated")
            print_table(f"µs per step (median) by tokens of {part}", columns, cells)
    for row in results["rows"]:
        if "what" in row:
            console.print(f"{row['what']}, {row['size']:,}: {row['s']:.4f} s", highlight=False)
