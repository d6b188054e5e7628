"""The documents' measured tables, each a function of its records: parsed records in, Markdown out.

Labels, and the values that papers published, stand here; every measured number is the record's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
TASK_HEADINGS = ("mt_bench", "translation", "summarization", "qa", "math", "rag")


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _overall(summary: Any) -> dict[str, Any]:
    return {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}


def _interval(value: float, ends: Sequence[float], digits: int = 2) -> str:
    return f"{value:.{digits}f} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def _speedup(row: Any) -> str:
    return _interval(row["speedup"], row["speedup_ci"])


def _joined(values: Iterable[str]) -> str:
    return " / ".join(values)


def bench(summary: Any) -> str:
    rows = _overall(summary)
    names = {"cacheback": "Cacheback (8 draft slots, merged)", "pld": "PLD (3, 10)"}
    cells = []
    for label, name in names.items():
        row = rows[label]
        equal, total = row["lossless"]["equal"], sum(row["lossless"].values())
        cells.append([name, f"{row['mat']:.2f}", _speedup(row), f"{equal}/{total}"])
    first = "`make bench`, SmolLM2-135M, 2 CPU cores, 12 shipped prompts"
    return _markdown([first, "MAT", "speedup over plain decoding [95 %]", "outputs equal"], cells)


def cacheback_table1(page: str) -> str:
    """A choice of the columns of the table that ``scripts/reproduce.py`` wrote."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    header, _, *rows = lines
    left_out = ("over eager ar [95 %]", "over graph ar [95 %]", "bandwidth share")
    kept = [i for i, name in enumerate(header) if name not in (*left_out, "claimed tokens/s")]
    padded = [row + [""] * (len(header) - len(row)) for row in rows]
    return _markdown([header[i] for i in kept], [[row[i] for i in kept] for row in padded])


def engine(record: Any) -> str:
    against = record["against_generate"]
    ours, theirs = against["ours_tokens_per_s"], against["generate_tokens_per_s"]
    low, high = min(against["ratios"]), max(against["ratios"])
    rows = [
        [
            "plain decoding against `generate`, float32, interleaved, 4 prompts",
            f"**{against['ratio']:.2f}×** ({ours:.1f} against {theirs:.1f} tokens/s; {low:.2f} to "
            f"{high:.2f} by prompt; outputs equal {against['equal_outputs']})",
        ]
    ]
    rows += [
        [
            f"a {one['rows']}-row pass outside products and attention ({one['whole_ms']:.1f} ms)",
            f"both left out: {one['left_ms']:.1f} ms, {one['left_ms'] / one['whole_ms']:.0%}; "
            f"clocked around them: {one['around_ms']:.1f} ms, **{one['share']:.0%}**",
        ]
        for one in record["outside_arithmetic"]
    ]
    work, key = record["host_work"], "outside_us"
    nodes = _joined(str(one["nodes"]) for one in work)
    rows.append(
        [
            f"host work per step outside pass and drafter, {nodes} nodes, tiny model",
            f"{_joined(f'{one[key]:.0f}' for one in work)} µs",
        ]
    )
    return _markdown(["what", "figure"], rows)


def passes(record: Any) -> str:
    found = {(row["context"], row["rows"]): row for row in record["pass_by_rows"]}

    def pair(key: str, rows: int, digits: int) -> str:
        return _joined(f"{found[context, rows][key]:.{digits}f}" for context in (256, 1024))

    header = [
        *("rows", "packed, ms, context 256 / 1024", "over its 1-row pass"),
        *("best of the libraries, ms", "unpacked, ms"),
    ]
    return _markdown(
        header,
        [
            [
                str(rows),
                pair("packed_ms", rows, 1),
                pair("packed_ratio", rows, 2),
                pair("libraries_ms", rows, 1),
                pair("plain_ms", rows, 1),
            ]
            for rows in sorted({rows for _, rows in found})
        ],
    )


def linears(record: Any) -> str:
    """GB/s at which one row reads each weight, float32, and ms of all products of a pass."""
    sizes = {
        "query, key, value": 960 * 576,
        "output": 576 * 576,
        "gate, up": 3072 * 576,
        "down": 576 * 1536,
        "vocabulary": 49152 * 576,
    }
    kernels = {
        "plain": "`F.linear`",
        "transposed": "transposed `mm`",
        "mkl": "MKL packed",
        "onednn": "oneDNN packed",
        "panels": "panels",
        "read": "a plain sum",
    }
    rows = []
    for kernel, name in kernels.items():
        counts = (0,) if kernel == "read" else (1, 2, 4, 8)
        key = f"{kernel} {counts[0]}"
        speeds = [4 * size / record["seconds"][what][key] / 1e9 for what, size in sizes.items()]
        times = [1e3 * record["pass_s"][f"{kernel} {count}"] for count in counts]
        rows.append(
            [name, *(f"{speed:.1f}" for speed in speeds), _joined(f"{ms:.1f}" for ms in times)]
        )
    return _markdown(["kernel", *sizes, "all, ms"], rows)


def budget(summary: Any) -> str:
    found = _overall(summary)
    groups: list[tuple[str, tuple[str, ...]]] = [
        (f"Cacheback TDL {size} / merged", (f"cb{size}", f"cb{size}_merged"))
        for size in (4, 8, 16, 32, 64, 96)
    ]
    groups += [
        ("PLD 1 / 2 / 4 tokens", ("pld1", "pld2", "pld4")),
        ("PLD 8 / 16 / 32 tokens", ("pld8", "pld16", "pld32")),
    ]
    rows = [
        [
            name,
            _joined(f"{found[label]['mat']:.2f}" for label in labels),
            _joined(_speedup(found[label]) for label in labels),
        ]
        for name, labels in groups
    ]
    return _markdown(["label", "MAT", "speedup [95 %]"], rows)


def predicted_budgets(summary: Any) -> str:
    found = _overall(summary)
    names = {
        "suffix": "Suffix decoding",
        "sam": "SAM",
        "pld": "PLD",
        "cb": "Cacheback, merged, kept for the run",
        "union": "union of suffix decoding and Cacheback",
    }
    budgets = (2, 3, 4, 5, 6, 7, 8, 10)
    rows = []
    for prefix, name in names.items():
        cells = [found.get(f"{prefix}_{size}") for size in budgets]
        rows.append([name, *(f"{cell['speedup']:.2f}" if cell else "–" for cell in cells)])
    return _markdown(["method", *(str(size) for size in budgets)], rows)


def best_training_free(short: Any, long: Any) -> str:
    names = {
        "suffix_decoding": "Suffix decoding, 7 tokens",
        "sam_5": "SAM, 5 rows",
        "pld_4": "PLD, 4 tokens",
        "cacheback_7": "Cacheback, 7 slots",
    }
    rows = []
    for label, name in names.items():
        cells = []
        for summary in (short, long):
            row = _overall(summary).get(label)
            cells += [f"{row['mat']:.2f}", _speedup(row)] if row else ["", ""]
        rows.append([name, *cells])
    header = [
        *("method", "36 questions, 96 tokens: MAT", "speedup [95 %]"),
        *("24 questions, 160 tokens: MAT", "speedup [95 %]"),
    ]
    return _markdown(header, rows)


def cacheback_mat(record: Any) -> str:
    found = {row["label"]: row for row in record["rows"]}
    names = {
        "dynamic": ("dynamic (no frozen)", "1.96"),
        "dual": ("dual", "2.42"),
        "dual_merged": ("dual, merged", ""),
        "only_frozen": ("only frozen", "1.59"),
        "pld": ("PLD (3, 10)", "1.75"),
    }
    rows = []
    for label, (name, published) in names.items():
        row = found[label]
        ratio = "1" if label == "dynamic" else _interval(row["mat_ratio"], row["mat_ratio_ci"], 3)
        rows.append([name, f"{row['mat']:.2f}", ratio, published])
    header = ["label", "MAT", "ratio to dynamic, paired [95 %]", "paper (Vicuna-7B)"]
    return _markdown(header, rows)


def training_free(record: Any) -> str:
    mat = {(row["label"], row["task"]): row["mat"] for row in record["rows"]}
    names = {
        "pld": ("PLD, Spec-Bench's (3, 10)", "1.75"),
        "pld_hf": ("PLD, transformers' (2, 10)", ""),
        "pld_vllm": ("PLD, vLLM's (5, 10)", ""),
        "cacheback": ("Cacheback dual (96, 16)", "2.42"),
        "cacheback_dynamic": ("Cacheback dynamic", "1.96"),
        "cacheback_frozen": ("Cacheback frozen", "1.59"),
        "ngrammys": ("N-Grammys mixed (10, 10)", "2.13"),
        "ngrammys_context": ("N-Grammys context", ""),
        "ngrammys_bigram": ("N-Grammys bigram, extended bigram", ""),
        "ngrammys_unigram": (
            "N-Grammys unigram, ranked by its paper's text (since then: by its listing)",
            "",
        ),
        "sam": ("SAM", "2.30"),
        "sam_dynamic": ("SAM, dynamic automaton alone", ""),
        "rest": ("REST", "1.82"),
        "suffix_decoding": ("suffix decoding, state of the run", ""),
        "suffix_prompt": ("suffix decoding, state of a case", ""),
        "ssd": ("SSD, state of the run, cold start", ""),
    }
    rows = [
        [name, *(f"{mat[label, task]:.2f}" for task in ("overall", *TASKS)), published]
        for label, (name, published) in names.items()
    ]
    return _markdown(["label", "MAT", *TASK_HEADINGS, "published"], rows)


def union(record: Any) -> str:
    names = {
        "union": "union",
        "cacheback": "Cacheback, merged",
        "token_recycling": "Token Recycling",
        "sam": "SAM",
    }
    rows = []
    for label, name in names.items():
        row = record[label]
        over = _interval(row["union_over_it"], row["ci"], 3) if row["ci"] else "1"
        by_task = [f"{row['by_task'][task]:.2f}" for task in TASKS]
        rows.append([name, f"{row['mat']:.2f}", *by_task, over])
    return _markdown(["label", "MAT", *TASK_HEADINGS, "union's MAT over it [95 %]"], rows)


def card_by_k(tables: Any) -> str:
    rows = tables[0]
    counts = list(dict.fromkeys(row["K"] for row in rows))
    lines = []
    for data, name in {"gsm8k": "GSM8K", "mtbench": "MT-Bench"}.items():
        for key in ("hit rate", "MAT", "speedup"):
            cells = [float(row[key]) for row in rows if row["data"] == data]
            lines.append([f"{name}, {key}", *(f"{cell:.2f}" for cell in cells)])
    return _markdown(["K", *counts], lines)


def draft_models(tables: Any) -> str:
    found = {row["method"]: {k: _number(v) for k, v in row.items()} for row in tables[0]}
    rows, keys = [], ("MAT", "speedup")
    for method in ("sps", "opt_tree", "card", "pearl", "ouroboros"):
        row = found[method]
        hit = row["hit rate"]
        rows.append(
            [
                "card (K 20, r 3)" if method == "card" else method,
                *(_interval(row[k], (row[f"{k} low"], row[f"{k} high"])) for k in keys),
                f"{row['draft share']:.2f}",
                "–" if hit is None else f"{hit:.2f}",
                f"{row['draft passes']:.2f} / {row['draft tokens']:.3g}",
            ]
        )
    header = [
        *("method", "MAT [95 %]", "speedup [95 %]", "draft's share of time", "hit rate"),
        "draft passes / tokens per token",
    ]
    return _markdown(header, rows)


def _number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def residuals(record: Any) -> str:
    found = {row["label"]: row for row in record["rows"]}
    groups = [
        ("pld_2 / 5 / 12", ("pld_2", "pld_5", "pld_12")),
        ("cacheback_8 / 16 / 48", ("cacheback_8", "cacheback_16", "cacheback_48")),
        *(
            (f"{name} 2x3 / 4x4 / 8x6", tuple(f"{name}_{size}" for size in ("2x3", "4x4", "8x6")))
            for name in ("ngrammys_tree", "ngrammys_batch")
        ),
        ("suffix_4 / 16 / tree_16", ("suffix_4", "suffix_16", "suffix_tree_16")),
        ("sam_6 / 12 / 40", ("sam_6", "sam_12", "sam_40")),
    ]
    rows = []
    for name, labels in groups:
        three = [found[label] for label in labels]
        keys = ("mat_live", "speedup_measured", "speedup_predicted")
        cells = [_joined(f"{row[key]:.2f}" for row in three) for key in keys]
        residual = _joined(f"{100 * row['residual']:+.1f}" for row in three).replace("-", "−")
        rows.append([name, *cells, f"{residual} %"])
    return _markdown(["label", "MAT", "measured", "predicted", "residual"], rows)


def growth(record: Any) -> str:
    found = {
        (row["part"], row["label"], row["size"]): row["both_median_us"]
        for row in record["rows"]
        if "label" in row
    }

    def line(part: str, label: str, sizes: Sequence[int]) -> str:
        values = [found.get((part, label, size)) for size in sizes]
        return " → ".join(f"{value:.1f}" for value in values if value is not None)

    worst = {
        "pld": ("PLD", "O(context): a scan for each n-gram length"),
        "ngrammys": (
            "N-Grammys mixed (10, 10) / context only",
            "O(context): a scan for the last q tokens (paper)",
        ),
        "cacheback": ("Cacheback", "O(1): tables of fixed size (paper)"),
        "sam": (
            "SAM (stored: the static automaton alone)",
            "O(1), amortised over the tokens (paper)",
        ),
        "suffix_decoding": ("suffix decoding", "O(depth²) steps down the trees (paper)"),
        "rest": ("REST", "O(log N) and at most k matches (paper)"),
        "ssd": ("SSD (context: its store is empty)", "O(log N) and at most K matches (source)"),
    }
    rows = []
    for label, (name, why) in worst.items():
        both = ("ngrammys", "ngrammys strategy=context") if label == "ngrammys" else (label,)
        context = _joined(line("context", one, (256, 8192)) for one in both)
        rows.append([name, context, line("stores", label, (10**4, 10**6, 10**7)), why])
    header = [
        *("method", "context 256 → 8,192", "stored 10⁴ → 10⁶ → 10⁷"),
        "worst case of a step, and where it is from",
    ]
    return _markdown(header, rows)


def building(record: Any) -> str:
    seconds = {row["what"]: row["s"] for row in record["rows"] if "what" in row}
    waits = 1e3 * seconds["SSD: what it costs the request that ends"]
    fill = 1e3 * seconds["Token Recycling: fill and update, 81 rows, one thread"]
    return _markdown(
        ["building", "figure"],
        [
            ["suffix array over 10,000,000 tokens", f"{seconds['suffix array']:.1f} s"],
            [
                "static automaton of 10,000,000 tokens, with its counts",
                f"{seconds['static automaton']:.1f} s",
            ],
            [
                "SSD: background rebuild over 1,000,000 tokens",
                f"{seconds['SSD: background rebuild']:.2f} s; the request that ends waits "
                f"{waits:.1f} ms",
            ],
            [
                "Token Recycling: fill and update, 81 rows × 49,152 logits, one thread, other "
                "programs running",
                f"{fill:.1f} ms median",
            ],
        ],
    )


TABLES: dict[str, Callable[..., str]] = {
    table.__name__: table
    for table in (
        *(bench, cacheback_table1, engine, passes, linears, budget, predicted_budgets),
        *(best_training_free, cacheback_mat, training_free, union, card_by_k, draft_models),
        *(residuals, growth, building),
    )
}
