"""Writes the synthetic run that the golden tables are made from: ``python make_records.py DIR``.

Nothing in it was measured, and its manifest and every table made of it say so. Same bytes at every
call and on every machine: the numbers come from a generator written out here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
MT_BENCH = ("writing", "roleplay", "reasoning", "math")
REPEATS = 2
# label: method, knobs, chance in percent that one more draft token is accepted, cost of a step
ENTRIES = {
    "ar": ("ar", {}, 0, 100),
    "cacheback": ("cacheback", {"table": "dual", "leader_len": 1}, 62, 118),
    "no_frozen": ("cacheback", {"table": "dynamic", "leader_len": 1}, 50, 112),
    "pld": ("pld", {"max_ngram": 3, "num_tokens": 10}, 43, 104),
}


class Numbers:
    """Lehmer's generator; integers only, so no library or machine can change what it gives."""

    def __init__(self, seed):
        self._state = seed

    def below(self, bound):
        self._state = self._state * 48271 % 2147483647
        return self._state % bound


def cases():
    """Four questions a task, those of mt_bench with two turns."""
    for number in range(4 * len(TASKS)):
        task = TASKS[number // 4]
        category = MT_BENCH[number % 4] if task == "mt_bench" else task
        yield str(number + 81), task, category, 2 if task == "mt_bench" else 1


def steps_of(numbers, n_committed, chance):
    """Tokens committed by each step."""
    steps = []
    while sum(steps) < n_committed:
        count = 1
        while count < 6 and numbers.below(100) < chance:
            count += 1
        steps.append(min(count, n_committed - sum(steps)))
    return steps


def records():
    numbers = Numbers(20261121)
    labels = list(ENTRIES)
    stream = 0
    for repeat in range(REPEATS):
        for case_id, task, category, n_turns in cases():
            for turn in range(n_turns):
                n_new = 8 + Numbers(int(case_id) * 100 + turn + 1).below(30)
                output = [Numbers(int(case_id) + turn + i + 1).below(900) for i in range(n_new)]
                for position, label in enumerate(labels):
                    method, _, chance, cost = ENTRIES[label]
                    failed = (label, case_id, repeat) == ("pld", "90", 1)
                    disturbed = (label, case_id, repeat) == ("cacheback", "97", 0)
                    near_tie = (label, case_id) == ("no_frozen", "93")
                    steps = [] if failed else steps_of(numbers, n_new - 1, chance)
                    noise = 97 + numbers.below(7)
                    decode_us = sum(10 * cost * noise for _ in steps) + (500 if chance else 0)
                    decode_us *= 20 if disturbed else 1
                    prefill_us = 30_000 + 10 * noise
                    yield {
                        "schema_version": 1,
                        "run_key": "synthetic",
                        "label": label,
                        "method": method,
                        "method_version": 1,
                        "model": "vicuna7b",
                        "dataset": "specbench",
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
                        "n_drafted": 8 * len(steps) if chance else 0,
                        "n_aux": 0,
                        "accepted_per_step": steps,
                        "prompt_ids": [1, 2, 3],
                        "output_ids": [] if failed else output,
                        "prefill_s": 0.0 if failed else prefill_us / 1e6,
                        "decode_s": decode_us / 1e6 if steps else 0.0,
                        "drafter_setup_s": 0.0005 if chance and steps else 0.0,
                        "wall_s": 0.0 if failed else prefill_us / 1e6 + decode_us / 1e6,
                        "phase_s": None,
                        "state_scope": "prompt",
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
            stream += 1


def manifest():
    return {
        "schema_version": 1,
        "synthetic": True,
        "run_key": "synthetic",
        "status": "complete",
        "exit_code": 1,
        "config": {
            "model": {"name": "vicuna7b", "dtype": "float32"},
            "dataset": {"name": "specbench"},
            "generation": {"temperature": 0.0},
            "estimator": "paired",
            "repeats": REPEATS,
        },
        "labels": {
            label: {
                "method": method,
                "method_version": 1,
                "state_scope": "prompt",
                "knobs": {"name": method, "state_scope": "prompt", **knobs},
            }
            for label, (method, knobs, _, _) in ENTRIES.items()
        },
        "baseline": "ar",
        "seed": 0,
        "hardware": {"cpu": "Synthetic CPU", "cpus_usable": 2, "gpus": []},
        "versions": {},
        "git": None,
        "model": {"dtype": "float32", "device": "cpu"},
    }


def write(folder):
    """Write the run into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, separators=(",", ":")) for record in records()]
    (folder / "cases.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "manifest.json").write_text(json.dumps(manifest(), indent=1) + "\n")
    (folder / "DONE").write_text("")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
