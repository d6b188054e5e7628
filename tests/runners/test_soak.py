"""A thousand cases in one run: memory stays flat, and a case that fails costs itself alone.

``make soak`` runs it and prints the figures; `test_kills.py` kills runs, and full disks are in
`test_dispatch.py`.
"""

import json
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from runners.measure import blocks
from specbench.results import records
from specbench.storage import jsonl
from tests.small_run import _WORDS, run_here, without_times

N_CASES = 1000
FAULT_EVERY = 50
FAULTS = ("exception", "nan", "out_of_memory")
SETTLED = 100  # cases after which nothing may grow any more
MAX_GROWTH = 0.02  # a run holds its records, some 4 kB of each; a cache would take far more

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Saboteur:
    """Stands before ``BlockRunner.run``: does the block's fault, and notes the memory."""

    def __init__(self, faults, memory):
        self.faults, self.memory = faults, memory

    def run(self, runner, block, run):
        kind = self.faults.get(block.index)
        put_back = getattr(self, kind)(runner) if kind else lambda: None
        try:
            result = run(runner, block)
        finally:
            put_back()
        with self.memory.open("a") as file:
            file.write(f"{block.index} {psutil.Process().memory_info().rss}\n")
        return result

    def _drafter(self, runner, method, act):
        """Let a method of pld's drafter act up."""
        drafter = runner.runs["pld"].drafter
        original = getattr(drafter, method)

        def acting_up(*arguments):
            act()  # in the first step: a short answer has no other
            return original(*arguments)

        setattr(drafter, method, acting_up)
        return lambda: delattr(drafter, method)

    def exception(self, runner):
        return self._drafter(runner, "propose", lambda: {}["made up"])

    def out_of_memory(self, runner):
        def fail():
            raise torch.OutOfMemoryError("made up: CUDA out of memory")

        return self._drafter(runner, "observe", fail)

    def nan(self, runner):
        """Make the target's last norm NaN, and so the logits of every label."""
        weight = runner.source._session._model.model.model.norm.weight.data
        good = weight.clone()
        weight.fill_(float("nan"))
        return lambda: weight.copy_(good)


def measure(overrides, faults, memory):
    """Measure as the child process does, in this process, sabotaged."""
    torch.set_num_threads(1)  # the model is too small for more
    saboteur, run = Saboteur(faults, memory), blocks.BlockRunner.run
    blocks.BlockRunner.run = lambda runner, batch, *more: saboteur.run(
        runner, batch[0], lambda *_: run(runner, batch, *more)
    )
    os._exit(run_here(overrides))


def exit_code(folder, overrides, faults):
    """Of a run in a process of its own, whose memory is nobody else's."""
    arguments = [*overrides, f"output_dir={folder}"]
    memory = folder.with_name(f"{folder.name}-memory")
    process = multiprocessing.get_context("spawn").Process(
        target=measure, args=(arguments, faults, memory)
    )
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def overrides(small, tmp_path):
    vocab = [word for word in _WORDS.split() if word not in ("user", "assistant")]
    questions = tmp_path / "thousand.jsonl"
    with questions.open("w") as file:
        for i in range(N_CASES):
            text = " ".join(vocab[(i * k + k * k) % len(vocab)] for k in range(1, 7 + i % 5))
            case = {"question_id": i, "category": ("qa", "rag")[i % 2], "turns": [text]}
            file.write(json.dumps(case) + "\n")
    return [*small, f"dataset.path={questions}", "generation.max_new_tokens=8"]


def by_key(folder):
    lines, truncated = jsonl.read_jsonl(folder / records.CASES)
    assert not truncated
    by_turn = {(x["repeat"], x["case_id"], x["turn"], x["label"]): without_times(x) for x in lines}
    assert len(by_turn) == len(lines), "a record is there twice"
    return by_turn


def resident(path: Path):
    """Bytes after each case, of a run in one process."""
    return [int(line.split()[1]) for line in path.read_text().splitlines()]


def test_a_thousand_cases_with_a_fault_in_every_fiftieth(overrides, tmp_path):
    assert exit_code(tmp_path / "quiet", overrides, {}) == 0
    faults = {
        index: FAULTS[i % len(FAULTS)]
        for i, index in enumerate(range(FAULT_EVERY - 1, N_CASES, FAULT_EVERY))
    }
    assert exit_code(tmp_path / "loud", overrides, faults) == 1
    n_each = Counter(faults.values())

    memory = resident(tmp_path / "quiet-memory")
    assert len(memory) == N_CASES
    growth = max(memory[SETTLED:]) / memory[SETTLED - 1] - 1
    print(
        f"\nsoak: {N_CASES} cases; memory after case {SETTLED}: {memory[SETTLED - 1] / 1e6:.1f} "
        f"MB, after the last: {memory[-1] / 1e6:.1f} MB, largest growth {growth:.2%}; "
        f"{len(faults)} faults ({', '.join(f'{n} {kind}' for kind, n in n_each.items())})"
    )
    assert growth < MAX_GROWTH

    quiet, loud = by_key(tmp_path / "quiet"), by_key(tmp_path / "loud")
    assert quiet.keys() == loud.keys()
    assert len(quiet) == 2 * N_CASES
    expected = set()
    for index, kind in faults.items():
        labels = {"nan": ("ar", "pld"), "exception": ("pld",), "out_of_memory": ("pld",)}
        expected |= {(0, str(index), 0, label) for label in labels[kind]}
    failed = {key for key, record in loud.items() if record["status"] == "failed"}
    assert failed == expected
    assert all(loud[key] == quiet[key] for key in quiet.keys() - failed)
    errors, _ = jsonl.read_jsonl(tmp_path / "loud" / records.ERRORS)
    assert {(e["repeat"], e["case_id"], e["turn"], e["label"]) for e in errors} == failed
    assert Counter(e["type"] for e in errors) == {
        "KeyError": n_each["exception"],
        "nan_logits": 2 * n_each["nan"],
        "OutOfMemoryError": n_each["out_of_memory"],
    }
