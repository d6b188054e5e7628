"""Writes the synthetic runs that the golden tables are made from.

    python tests/golden/make_records.py tests/golden

Nothing in them was measured, and their manifests and every table made of them say so. Every
call writes the same bytes.
"""

import functools
import itertools
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
MT_BENCH = ("writing", "roleplay", "reasoning", "math")


class Numbers:
    """Lehmer's generator; integers only, so no library or machine can change what it gives."""

    def __init__(self, seed):
        self._state = seed

    def below(self, bound):
        self._state = self._state * 48271 % 2147483647
        return self._state % bound


@dataclass(frozen=True)
class Entry:
    """A label of a made-up run."""

    method: str
    knobs: dict[str, Any] = field(default_factory=dict)
    chance: int = 0  # in percent, that one more draft token is accepted
    cost: int = 100  # of a step, in tens of microseconds times about a hundred
    draft: int = 0  # forwards of a draft model in a step
    devices: tuple[int, int] | None = None  # used and asked for


@dataclass(frozen=True)
class Run:
    """A made-up run."""

    folder: str
    entries: dict[str, Entry]  # by label, ``ar`` first
    cases: tuple[tuple[str, str, str, int], ...]  # (case id, task, category, turns)
    dataset: str = "specbench"
    model: str = "vicuna7b"
    experiment: str | None = None
    repeats: int = 1
    phases: bool = False
    timing: str = "measured"
    scope: str = "prompt"
    accidents: bool = False  # failed, disturbed and near-tie turns


AR = Entry("ar")


def spec_bench(per_task=2):
    """Questions of each task, those of mt_bench with two turns."""
    for number in range(per_task * len(TASKS)):
        task = TASKS[number // per_task]
        category = MT_BENCH[number % per_task % 4] if task == "mt_bench" else task
        yield str(number + 81), task, category, 2 if task == "mt_bench" else 1


def dtype(model):
    """What the papers ran a model with, so that their claims stand beside it."""
    return "bfloat16" if model in ("llama3_70b", "mistral7b") else "float16"


def plain(dataset, count, turns=1, first=1):
    """Questions of a data set without tasks."""
    task = {"mtbench": "mt_bench", "gsm8k": "math_reasoning", "mgsm": "math_reasoning"}
    for number in range(count):
        yield str(number + first), task.get(dataset, "code"), dataset, turns


def steps_of(numbers, n_committed, chance):
    """Tokens committed by each step."""
    steps = []
    while sum(steps) < n_committed:
        count = 1
        while count < 6 and numbers.below(100) < chance:
            count += 1
        steps.append(min(count, n_committed - sum(steps)))
    return steps


def counters(entry, steps):
    """What the method would have counted in a turn."""
    if entry.method == "ngrammys":
        k = entry.knobs["k"]
        sources = [
            ("context", "bigram")[i % 3 == 0] if n > 1 else None for i, n in enumerate(steps)
        ]
        context = [min(k, 3 + i % 4) for i in range(len(steps))]
        return {
            "rows_context": context,
            "rows_bigram": [k - count for count in context],
            "won_row": [-1 if source is None else i % k for i, source in enumerate(sources)],
            "won_source": sources,
            "won_rank": [-1 if source is None else i % 5 for i, source in enumerate(sources)],
            "accepted": [n - 1 for n in steps],
        }
    if entry.draft:
        misses = sum(n == 1 for n in steps)
        counted = {
            "draft_forwards": entry.draft * len(steps),
            "draft_tokens": entry.draft * len(steps) * entry.knobs.get("k", 1),
            "hits": max(0, len(steps) - misses),
            "misses": misses,
        }
        if entry.devices is None:
            return counted
        if entry.method != "card":
            counted = {key: counted[key] for key in ("draft_forwards", "draft_tokens")}
        return counted | dict(zip(("devices", "devices_asked"), entry.devices, strict=True))
    return {}


def phases_of(decode_us, entry):
    """Seconds by phase; they sum to the decoding time."""
    draft = decode_us * entry.draft // (entry.draft + 6) if entry.draft else decode_us // 50
    parts = {"draft": draft, "accept": decode_us // 20, "cache": decode_us // 40}
    parts["observe"] = decode_us // 25 if entry.chance else 0
    parts["verify"] = decode_us - sum(parts.values())
    return {"prefill": 0.0, "setup": 0.0, **{name: us / 1e6 for name, us in parts.items()}}


def records(run):
    """All records of a run, in the order of a real one."""
    numbers = Numbers(20261121)
    labels = list(run.entries)
    stream = 0
    for repeat in range(run.repeats):
        for case_id, task, category, n_turns in run.cases:
            for turn in range(n_turns):
                n_new = 8 + Numbers(int(case_id) * 100 + turn + 1).below(30)
                output = [Numbers(int(case_id) + turn + i + 1).below(900) for i in range(n_new)]
                for position, label in enumerate(labels):
                    entry = run.entries[label]
                    failed = run.accidents and (label, case_id, repeat) == ("pld", "90", 1)
                    disturbed = run.accidents and (label, case_id, repeat) == ("cacheback", "97", 0)
                    near_tie = run.accidents and (label, case_id) == ("no_frozen", "93")
                    steps = [] if failed else steps_of(numbers, n_new - 1, entry.chance)
                    noise = 97 + numbers.below(7)
                    decode_us = sum(10 * entry.cost * noise for _ in steps)
                    decode_us += 500 if entry.chance else 0
                    decode_us *= 20 if disturbed else 1
                    prefill_us = 30_000 + 10 * noise
                    record = {
                        "schema_version": 1,
                        "run_key": "synthetic",
                        "label": label,
                        "method": entry.method,
                        "method_version": 1,
                        "model": run.model,
                        "dataset": run.dataset,
                        "task": task,
                        "category": category,
                        "case_id": case_id,
                        "turn": turn,
                        "repeat": repeat,
                        "stream_index": stream,
                        "position": position,
                        "status": "failed" if failed else "disturbed" if disturbed else "ok",
                        "n_prompt": 3,
                        "n_new": 0 if failed else n_new,
                        "finish_reason": None if failed else "eos",
                        "n_target_passes": len(steps),
                        "n_drafted": 8 * len(steps) if entry.chance else 0,
                        "n_aux": 0,
                        "accepted_per_step": steps,
                        "prompt_ids": [1, 2, 3],
                        "output_ids": [] if failed else output,
                        "prefill_s": 0.0 if failed else prefill_us / 1e6,
                        "decode_s": decode_us / 1e6 if steps else 0.0,
                        "drafter_setup_s": 0.0005 if entry.chance and steps else 0.0,
                        "wall_s": 0.0 if failed else prefill_us / 1e6 + decode_us / 1e6,
                        "phase_s": phases_of(decode_us, entry) if run.phases else None,
                        "state_scope": entry.knobs.get("state_scope", run.scope),
                        "seed": 1,
                        "lossless": {
                            "verdict": "not_audited" if failed else "near_tie" if near_tie
                            else "equal",
                            "first_diff": 4 if near_tie else None,
                            "gap": 0.0002 if near_tie else None,
                        },
                        "cpu_steal": 0.4 if disturbed else 0.0,
                        "started_at": "2026-11-21T00:00:00.000+00:00",
                        "host": "synthetic",
                        "forced_resume": False,
                    }  # fmt: skip
                    if run.timing != "measured":
                        record["timing"] = run.timing
                    if run.timing == "none":
                        record |= dict.fromkeys(
                            ("prefill_s", "decode_s", "drafter_setup_s", "wall_s"), 0.0
                        )
                    counted = counters(entry, steps)
                    if counted and not failed:
                        record["drafter"] = counted
                    yield record
            stream += 1


def manifest(run):
    """The manifest of a run."""
    made = {
        "schema_version": 1,
        "synthetic": True,
        "run_key": "synthetic",
        "status": "complete",
        "exit_code": 1 if run.accidents else 0,
        "config": {
            "model": {"name": run.model, "dtype": dtype(run.model)},
            "dataset": {"name": run.dataset},
            "generation": {"temperature": 0.0},
            "estimator": "paired",
            "repeats": run.repeats,
        },
        "labels": {
            label: {
                "method": entry.method,
                "method_version": 1,
                "state_scope": entry.knobs.get("state_scope", run.scope),
                "knobs": {"name": entry.method, "state_scope": run.scope, **entry.knobs},
            }
            for label, entry in run.entries.items()
        },
        "baseline": "ar",
        "seed": 0,
        "hardware": {"cpu": "Synthetic CPU", "cpus_usable": 2, "gpus": []},
        "versions": {},
        "git": None,
        "model": {"dtype": dtype(run.model), "device": "cpu"},
    }
    if run.experiment is None:  # a baseline's share of the memory's speed, which others lack
        made["model"] |= {"weight_bytes": 538_000_000, "copy_bytes_per_s": 20_000_000_000}
    if run.experiment is not None:
        made["overrides"] = [f"experiment={run.experiment}"]
        made["model"]["parameters"] = 134_000_000
        made["model"]["drafts"] = {
            label: {"parameters": 16_000_000} for label, e in run.entries.items() if e.draft
        }
    if any(entry.devices for entry in run.entries.values()):
        made["config"]["measure"] = {"phases": run.phases}
        made["model"]["overlap"] = "serial" if run.phases else "thread"
        made["model"]["memory"] = {
            label: {"target": 560_000_000}
            | ({"draft": 70_000_000 + 10_000 * e.cost} if e.draft else {})
            for label, e in run.entries.items()
        }
    return made


# --- the runs -------------------------------------------------------------------------------------

SYNTHETIC = Run(
    "records/synthetic",
    {
        "ar": AR,
        "cacheback": Entry("cacheback", {"table": "dual", "leader_len": 1}, 62, 118),
        "no_frozen": Entry("cacheback", {"table": "dynamic", "leader_len": 1}, 50, 112),
        "pld": Entry("pld", {"max_ngram": 3, "num_tokens": 10}, 43, 104),
    },
    tuple(spec_bench(4)),
    repeats=2,
    accidents=True,
)
_PLD = Entry("pld", {"max_ngram": 3, "num_tokens": 10}, 40, 104)
_REST = Entry("rest", {}, 20, 120)
_LOOKAHEAD = Entry("lookahead", {"state_scope": "turn"}, 30, 150)
_TR = Entry("token_recycling", {"update": "last"}, 64, 140)


def _named(experiment, entries, cases, dataset="specbench", part=None, **more):
    folder = "/".join(filter(None, ["experiments", experiment, part]))
    entries = {"ar": AR, **entries}
    return Run(folder, entries, tuple(cases), dataset, experiment=experiment, **more)


def _cacheback():
    budget = {"total_draft_len": 96, "chaining_reserved": 16}
    yield _named(
        "cacheback_table1",
        {
            "dual": Entry("cacheback", {"table": "dual", **budget}, 60, 118),
            "no_frozen": Entry("cacheback", {"table": "dynamic", **budget}, 50, 112),
            "only_frozen": Entry("cacheback", {"table": "frozen", **budget}, 36, 110),
        },
        spec_bench(),
    )
    methods = {
        "cacheback": Entry("cacheback", {"table": "dual", **budget}, 60, 118),
        "pld": _PLD, "lookahead": _LOOKAHEAD, "rest": _REST, "token_recycling": _TR,
    }  # fmt: skip
    for model in ("vicuna7b", "vicuna13b"):
        yield _named("cacheback_figure3", methods, spec_bench(), part=model, model=model)
    for leader, follower in itertools.product((1, 2), (1, 2, 3)):
        entry = Entry(
            "cacheback",
            {"table": "dual", "leader_len": leader, "follower_len": follower, **budget},
            52 + 6 * follower - 8 * leader, 112,
        )  # fmt: skip
        yield _named(
            "cacheback_figure4", {"cacheback": entry}, plain("qa", 4), timing="predicted",
            part=f"{leader}_{follower}",
        )  # fmt: skip


def _token_recycling():
    named = functools.partial(_named, scope="run")
    methods = {"lookahead": _LOOKAHEAD, "pld": _PLD, "rest": _REST, "token_recycling": _TR}
    yield named("token_recycling_table1", methods, spec_bench())
    yield named(
        "token_recycling_table1_shuffle", {"shuffle": replace(_TR, chance=63)}, spec_bench(),
    )  # fmt: skip
    yield named(
        "token_recycling_table1_mbpp", methods, plain("mbpp", 4), "mbpp", model="codellama7b",
    )  # fmt: skip
    trees = {
        rule: Entry("token_recycling", {"update": rule, "breadth": None, "depth": None}, 60, 140)
        for rule in ("last", "first", "parallel")
    }
    for nodes in (20, 40, 80):
        knobs = {"update": "last", "breadth": nodes, "depth": 6}
        trees[f"breadth_{nodes}"] = Entry("token_recycling", knobs, 40 + nodes // 4, 100 + nodes)
    for levels in (2, 4):
        knobs = {"update": "last", "breadth": 80, "depth": levels}
        trees[f"depth_{levels}"] = Entry("token_recycling", knobs, 30 + 6 * levels, 180)
    yield _named("token_recycling_figure3", trees, plain("mtbench", 3, 2), "mtbench")
    yield named("token_recycling_figure4", {"token_recycling": _TR}, spec_bench(), phases=True)


def _ngrammys():
    named = functools.partial(_named, model="mistral7b")
    for dataset, k in itertools.product(("mtbench", "humaneval"), (1, 5, 10)):
        rows = {
            "bigram": Entry("ngrammys", {"k": k, "w": 1}, 10 + k, 104),
            "unigram": Entry("ngrammys", {"k": k, "w": 1}, 2 + k, 104),
            "extended_2": Entry("ngrammys", {"k": k, "w": 2}, 15 + k, 104),
            "extended_3": Entry("ngrammys", {"k": k, "w": 3}, 16 + k, 104),
        }
        yield named(
            "ngrammys_figure2", rows, plain(dataset, 3), dataset, timing="none",
            part=f"{dataset}_{k}",
        )  # fmt: skip
    for dataset, k, w in itertools.product(("mtbench", "gsm8k"), (1, 5), (2, 6)):
        entry = Entry("ngrammys", {"k": k, "w": w}, 30 + 3 * k + w, 90 + k * (w + 1))
        for experiment, timing in (("ngrammys_figure3", "predicted"), ("ngrammys_figure5", "none")):
            yield named(
                experiment, {"ngrammys": entry}, plain(dataset, 3), dataset, timing=timing,
                part=f"{dataset}_{k}_{w}",
            )  # fmt: skip
    for dataset in ("mtbench", "humaneval"):
        yield named(
            "ngrammys_table1",
            {
                "k10_w10": Entry("ngrammys", {"k": 10, "w": 10}, 52, 130),
                "k5_w4": Entry("ngrammys", {"k": 5, "w": 4}, 46, 110),
            },
            plain(dataset, 3), dataset, part=dataset, repeats=3,
        )  # fmt: skip
        yield named(
            "ngrammys_figure4", {"ngrammys": Entry("ngrammys", {"k": 10, "w": 10}, 52, 130)},
            plain(dataset, 3), dataset, part=dataset, timing="none",
        )  # fmt: skip


def _ssd():
    ssd = Entry("ssd", {"buffer_tokens": 1_048_576}, 45, 104)
    yield _named(
        "ssd_stream", {"ssd": ssd, "rest": _REST}, plain("gsm8k", 15), "gsm8k", scope="run"
    )
    for size in (256, 1024, 4096):
        entry = Entry("ssd", {"buffer_tokens": size}, 20 + size.bit_length(), 104)
        rest = replace(_REST, knobs={"store_tokens": size})
        yield _named(
            "ssd_store_size", {"ssd": entry, "rest": rest}, plain("gsm8k", 6), "gsm8k",
            part=str(size), timing="none", scope="run",
        )  # fmt: skip


def _card():
    named = functools.partial(_named, model="llama3_70b", scope="turn")
    card = Entry("card", {"k": 100, "r": 7}, 70, 105, draft=7)
    methods = {
        "card": card,
        "sps": Entry("sps", {"gamma": 4}, 60, 130, draft=4),
        "pearl": Entry("pearl", {"gamma": 4}, 62, 115, draft=4),
    }
    for dataset in ("gsm8k", "mtbench"):
        turns = 2 if dataset == "mtbench" else 1
        yield named("card_table1", methods, plain(dataset, 3, turns), dataset, part=dataset)
        sizes = {
            f"k{k}": replace(card, knobs={"k": k, "r": 7}, chance=50 + k // 10) for k in (5, 25)
        }
        first = 81 if dataset == "mtbench" else 11  # the questions of the authors' logs
        yield named("card_figure6", sizes, plain(dataset, 3, turns, first), dataset, part=dataset)
    for dataset in ("humaneval", "mbpp"):
        yield named("card_figure5", methods, plain(dataset, 3), dataset, part=dataset)
    query = Entry("card", {"k": 100, "r": 7, "correct": False}, 55, 105, draft=7)
    yield named("card_table2", {"card": card, "query_only": query}, plain("gsm8k", 4), "gsm8k")
    trees = {**methods, "opt_tree": Entry("opt_tree", {}, 66, 180, draft=6)}
    yield named("card_table3", trees, plain("gsm8k", 4), "gsm8k")
    lengths = {f"r{r}": Entry("sps", {"gamma": r}, 50, 100 + 8 * r, draft=r) for r in (1, 4, 8)}
    yield named("card_figure1", lengths, plain("gsm8k", 4), "gsm8k", phases=True)


def _draft_models():
    methods = {
        "card": Entry("card", {"k": 100, "r": 7}, 70, 105, draft=7, devices=(1, 2)),
        "sps": Entry("sps", {"gamma": 4}, 60, 130, draft=4, devices=(1, 1)),
        "opt_tree": Entry("opt_tree", {}, 66, 180, draft=6, devices=(1, 1)),
        "pearl": Entry("pearl", {"gamma": 4}, 62, 115, draft=4, devices=(2, 2)),
        "ouroboros": Entry("ouroboros", {}, 64, 150, draft=3, devices=(1, 1)),
    }
    for part in ("timed", "phases"):
        yield _named(
            "draft_models", methods, spec_bench(1), part=part, phases=part == "phases",
            scope="turn",
        )  # fmt: skip


def _heads():
    heads = {
        "eagle2": Entry("eagle2", {"total": 60, "depth": 5, "top_k": 10}, 77, 150),
        "medusa": Entry("medusa", {"tree": "medusa_63"}, 56, 135),
        "eagle3": Entry("eagle3", {"total": 60, "depth": 5, "top_k": 10}, 82, 155),
        "pld": _PLD,
    }
    yield _named("specbench_board", heads, spec_bench(), model="vicuna13b", scope="run")
    heads["eagle2"] = replace(heads["eagle2"], knobs={"total": 50, "depth": 5, "top_k": 10})
    heads["eagle3"] = replace(heads["eagle3"], knobs={"total": 50, "depth": 7, "top_k": 10})
    for dataset in ("mtbench", "gsm8k"):
        turns = 2 if dataset == "mtbench" else 1
        yield _named(
            "eagle3_table1", heads, plain(dataset, 4, turns), dataset, part=dataset,
            model="vicuna13b",
        )  # fmt: skip


def runs():
    """All made-up runs."""
    yield SYNTHETIC
    for paper in (_cacheback, _token_recycling, _ngrammys, _ssd, _card, _draft_models, _heads):
        yield from paper()


def cost_surface():
    """A small grid of batch passes, five each, in seconds."""
    numbers = Numbers(7)
    axes = {"k": [1, 4, 16], "w": [0, 3, 7], "context": [25, 500]}
    samples = [
        [
            [
                [(4000 + 9 * k * (w + 1) + length + numbers.below(80)) / 1e5 for _ in range(5)]
                for length in axes["context"]
            ]
            for w in axes["w"]
        ]
        for k in axes["k"]
    ]
    return {
        "format": "specbench-surface",
        "version": 1,
        "batch": {"axes": axes, "samples_s": samples},
    }


def write(folder):
    """Write every run into a folder of its own below ``folder``."""
    home = folder / "experiments" / "ngrammys_figure1"
    home.mkdir(parents=True, exist_ok=True)
    stand_in = Run("", {"ar": AR}, (), model="mistral7b", experiment="ngrammys_figure1")
    (home / "manifest.json").write_text(json.dumps(manifest(stand_in), indent=1) + "\n")
    (home / "surface.json").write_text(json.dumps(cost_surface(), indent=1) + "\n")
    (home / "DONE").write_text("")
    for run in runs():
        home = folder / run.folder
        home.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record, separators=(",", ":")) for record in records(run)]
        (home / "cases.jsonl").write_text("\n".join(lines) + "\n")
        (home / "manifest.json").write_text(json.dumps(manifest(run), indent=1) + "\n")
        (home / "DONE").write_text("")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
