"""The GPU check runs on a CPU too, small: its report must be complete before a GPU is at hand."""

import gc
import json
import re
import subprocess
import sys
import time
import weakref
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import hydra.utils
import numpy as np
import pytest
import torch

from scripts import gpu_check
from scripts.gpu import measurements as gpu_measurements
from scripts.gpu import methods as gpu_methods
from scripts.gpu import progress as gpu_progress
from scripts.gpu import report as gpu_report
from scripts.gpu import steps as gpu_steps
from specbench.config.compare import with_parts
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.replay.cost_surface import CostSurface
from tests.contract.driver import compose_method, method_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_weights_to_free(monkeypatch):
    monkeypatch.setattr(gpu_check, "gc", mock.Mock())


def trial(folder):
    """A check of the tiny model on the CPU."""
    words = ["--device", "cpu", "--models", "tiny", "--out", str(folder)]
    return gpu_check.Check(gpu_check.arguments(words))


@pytest.mark.slow
@pytest.mark.timeout(600)  # machines that do other work beside it
def test_a_trial_on_the_cpu(tmp_path):
    code = gpu_check.main(
        ["--device", "cpu", "--models", "tiny", "--tokens", "24", "--repeats", "1",
         "--contexts", "32,64", "--only", "bandwidth,decoding,rows,drafts,steps",
         "--out", str(tmp_path)]
    )  # fmt: skip
    report = (tmp_path / "gpu_check.md").read_text()
    data = json.loads((tmp_path / "gpu_check.json").read_text())
    assert code == 0, data["missing"]
    rows = data["results"]["rows tiny"]
    assert {(r["engine"], r["context"]) for r in rows} == {
        (e, c) for e in ("eager", "graph") for c in (32, 64)
    }
    assert all(r["ms"] > 0 for r in rows)
    surface = CostSurface.read(tmp_path / "tiny-cpu-trial-graph.json")
    assert surface.tree.axes == {"rows": gpu_measurements.ROWS, "context": (32, 64)}
    assert data["results"]["decoding tiny"]["passes"]["engine"] == "graph"
    drafts = data["results"]["drafts tiny"]
    assert {(d["engine"], d["nodes"]) for d in drafts} == {
        (e, n) for e in ("eager", "graph") for n in gpu_measurements.DRAFT_NODES
    }
    steps = data["results"]["steps"]
    assert set(steps) == {m for m in method_names() if not gpu_methods.build(m).needs.heads}
    assert steps["ngrammys"]["nodes_per_step"] == 100 and steps["rest"]["nodes_per_step"] > 1
    assert steps["cacheback"]["nodes_per_step"] >= 80  # of 95: the bound is on a full tree
    assert steps["token_recycling"]["nodes_per_step"] == 80
    for word in ("CPU (a trial)", "GB/s read", "| tiny |", "cacheback", "token_recycling"):
        assert word in report
    assert (tmp_path / "gpu_check.png").stat().st_size > 5000


def test_the_share_of_the_bandwidth_is_that_of_the_passes_after_the_prompt(tmp_path, monkeypatch):
    """Not that of making an engine, whose clock records thousands of events, nor the prompt's."""
    made, decoded = [], []
    real_init, real_decode = gpu_measurements.Engine.__init__, gpu_measurements.Engine.decode

    def init(self, *words, **options):
        made.append(len(decoded))
        real_init(self, *words, **options)

    def decode(self, *words, **options):
        result = real_decode(self, *words, **options)
        decoded.append(result)
        timings = replace(result.timings, prefill_s=9.0, decode_s=0.5)
        return replace(result, timings=timings)

    monkeypatch.setattr(gpu_measurements.Engine, "__init__", init)
    monkeypatch.setattr(gpu_measurements.Engine, "decode", decode)
    check = trial(tmp_path)
    check.results["bandwidth"] = {"read_gb_per_s": 2.0}
    found = gpu_measurements.decoding(check, "tiny", tokens=6, repeats=1)
    assert made == [0, 0] and len(decoded) == 4
    assert found["passes_per_s"]["graph"] == pytest.approx(5 / 0.5)
    share = found["weight_bytes"] * 10 / 2e9
    assert found["bandwidth_share"]["eager"] == pytest.approx(share)
    assert found["tokens_per_s"]["graph"] != pytest.approx(10, rel=1e-6)


@pytest.mark.parametrize("replay_s", [1e-9, 9.0])
def test_a_step_outside_the_pass_is_the_larger_of_two_counts(tmp_path, monkeypatch, replay_s):
    """By phases all of the host's work before the launch is the pass; by bare replays none is."""
    monkeypatch.setattr(gpu_steps, "STEP_METHODS", ("pld",))
    monkeypatch.setattr(gpu_methods, "names", lambda: ["pld"])
    monkeypatch.setattr(gpu_steps, "replay_s", lambda *_: replay_s)
    check = trial(tmp_path)
    check.part("steps", lambda: gpu_steps.steps(check, "tiny", "tiny"))
    found = check.results["steps"]["pld"]
    step_us = sum(found["us_per_step"].values())
    assert found["outside_by_phases"] == pytest.approx(1 - found["shares"]["verify"])
    assert found["outside_by_replays"] == pytest.approx(1 - 1e6 * replay_s / step_us)
    larger = max(found["outside_by_phases"], found["outside_by_replays"])
    assert found["outside_the_pass"] == larger
    assert f" | {larger:.1%} | ≤ 8 % |" in (tmp_path / "gpu_check.md").read_text()


def test_bare_replays_are_of_the_shapes_that_the_passes_had(tmp_path, monkeypatch):
    check = trial(tmp_path)
    target = gpu_steps.WatchedTarget(
        gpu_measurements.load(check, "tiny"), capture=False, max_len=64, max_nodes=15
    )
    target.prefill(np.arange(3, 9))
    for nodes in (3, 2, 7):
        target.forward(5, DraftTree.chain(np.arange(3, 3 + nodes)))
    assert [step.rows for step in target.chosen] == [4, 4, 8]
    assert all(gpu_steps.replay_s(check, target, step) > 0 for step in target.chosen)
    monkeypatch.setattr(gpu_steps, "replay_s", lambda _check, _target, step: float(step.rows))
    assert gpu_steps.replays_s(check, target) == 16
    target.chosen.append(None)
    assert gpu_steps.replays_s(check, target) is None  # a pass that no shape was chosen for


def test_a_tree_below_half_its_budget_is_named():
    half = {"nodes_per_step": 47.5, "most_nodes": 95}
    assert gpu_report._nodes(half) == "47.5"
    assert gpu_report._nodes(half | {"nodes_per_step": 32.4}) == "32.4, below half of 95"


def test_the_steps_text_branches_and_its_answer_says_its_words(tmp_path):
    check = trial(tmp_path)
    words = np.arange(7, 37)
    prompt = gpu_steps.branching(words, np.random.default_rng(0))
    after = {w: set(prompt[1:][prompt[:-1] == w].tolist()) for w in words}
    assert 4 <= np.mean([len(found) for found in after.values()]) <= 5
    model = gpu_measurements.load(check, "tiny")
    gpu_steps.say_only(model, words)
    target = gpu_measurements.engines(check, model, max_len=256, max_nodes=1)["graph"]
    loop = Engine(target, GreedyVerifier(), eos_ids=frozenset())
    out = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=12).output_ids
    assert set(out) <= set(words.tolist())


def short_of_time(monkeypatch, tmp_path, answers):
    """A check that has time so many times when asked, and then none."""
    check = trial(tmp_path)
    left = iter([1000.0] * answers)
    monkeypatch.setattr(gpu_check.Check, "left_s", property(lambda _: next(left, 0.4)))
    return check


def test_contexts_for_which_no_time_is_left_are_left_out_whole(monkeypatch, tmp_path):
    asked = 2 * (1 + len(gpu_measurements.ROWS))  # for a context, by both engines
    check = short_of_time(monkeypatch, tmp_path, asked + 5)
    points = gpu_measurements.pass_by_rows(check, "tiny", (16, 32, 64))
    assert {p["context"] for p in points} == {16}
    assert len(points) == 2 * len(gpu_measurements.ROWS)
    assert check.missing == {"rows tiny, contexts 32, 64": "0 s were left"}
    surface = CostSurface.read(tmp_path / check.surfaces[0])
    assert surface.tree.axes["context"] == (16,)
    check.results["rows tiny"] = points
    assert "not measured: rows tiny, contexts 32, 64" in gpu_report.report(check)
    with pytest.raises(gpu_measurements.OutOfTime):
        gpu_measurements.pass_by_rows(check, "tiny", (16,))


def test_a_draft_pass_without_time_is_a_gap_in_its_table(monkeypatch, tmp_path):
    check = short_of_time(monkeypatch, tmp_path, 5)
    check.results["drafts tiny"] = gpu_measurements.draft_passes(check, "tiny")
    assert [p["engine"] for p in check.results["drafts tiny"]] == ["eager"] * 4 + ["graph"]
    assert "drafts tiny, graph, 64 nodes" in check.missing
    row = next(r for r in gpu_report.report(check).splitlines() if r.startswith("| 64 | "))
    assert row.endswith("| – |")


def test_decoding_makes_fewer_repeats_where_time_is_short(monkeypatch, tmp_path):
    check = short_of_time(monkeypatch, tmp_path, 1)
    monkeypatch.setattr(gpu_measurements.time, "perf_counter", iter(range(10**6)).__next__)
    assert gpu_measurements.decoding(check, "tiny", tokens=4, repeats=5)["tokens_per_s"]
    assert check.missing == {"decoding tiny, more repeats": "2 of 5 made, 0 s were left"}


def test_numerics_come_second_and_each_part_leaves_the_others_their_time(monkeypatch, tmp_path):
    begun = []
    for name in ("memory_speed", "numerics", "decoding", "pass_by_rows", "draft_passes", "steps"):
        monkeypatch.setattr(
            gpu_check, name, lambda check, *_, name=name: begun.append((name, check.left_s))
        )
    monkeypatch.setattr(gpu_check, "drafters", lambda check: begun.append(("rest", check.left_s)))
    monkeypatch.setattr(gpu_check, "write", lambda check: None)
    clock = mock.Mock(wraps=time, monotonic=lambda: 0.0)  # nothing here takes time
    monkeypatch.setattr(gpu_progress, "time", clock)
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert gpu_check.main(words) == 0
    names = [name for name, _ in begun]
    assert names[:2] == ["memory_speed", "numerics"] and names[-2:] == ["steps", "rest"]
    assert dict(begun)["rest"] == 540
    assert dict(begun)["steps"] == 540 - 40
    assert 170 < dict(begun)["numerics"] < 240
    assert gpu_check.main([*words, "--minutes", "4", "--only", "numerics,steps"]) == 0
    assert begun[-2][1] == 240


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_rows_are_cost_surfaces_too(tmp_path, monkeypatch, on_gpu):
    check = trial(tmp_path / "out")
    model = gpu_measurements.load(check, "tiny")
    target = gpu_measurements.engines(check, model, max_len=64, max_nodes=1)["graph"]
    monkeypatch.setattr(gpu_measurements, "SURFACES", tmp_path / "surfaces")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H999 80GB")
    if on_gpu:
        check.device = torch.device("cuda")
    prompts, passes = np.full((2, 3), 0.5), np.ones((len(gpu_measurements.ROWS), 2, 7))
    passes[:, 1] = 2.0
    gpu_measurements.surface(check, "tiny", "graph", target, (32, 64), prompts, passes)
    name = "tiny-nvidia-h999-80gb-graph.json" if on_gpu else "tiny-cpu-trial-graph.json"
    assert check.surfaces == [name]
    found = CostSurface.read(tmp_path / ("surfaces" if on_gpu else "out") / name)
    assert found.tree.predict(np.array([8.0]), np.array([48.0])) == pytest.approx(1.5)
    assert found.model["shape"] and found.model["passes"]["engine"] == "graph"
    assert (tmp_path / "surfaces").exists() == on_gpu


@pytest.mark.slow  # a process of its own
def test_without_hydra_the_passes_are_still_measured(tmp_path):
    """It is no part of the images that machines with GPUs start from."""
    program = (
        "import sys\n"
        "missing = ('hydra', 'omegaconf', 'datasets', 'wandb', 'gguf')\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "sys.path[:0] = ['scripts', '.']\n"
        "import gpu_check\n"
        "sys.exit(gpu_check.main(sys.argv[1:]))"
    )
    words = ["--device", "cpu", "--models", "tiny", "--tokens", "4", "--repeats", "1",
             "--contexts", "32,64",
             "--only", "decoding,drafts,steps", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    report = (tmp_path / "gpu_check.md").read_text()
    assert "A draft model's pass, tiny" in report
    assert "total_draft_len=96, toy frozen_table" in report
    assert "token_recycling (at most 80 nodes)" in report
    assert "rest (at most 64 nodes, toy datastore)" in report
    assert "not measured: steps" not in report
    assert "not measured: drafters: not installed: hydra" in report


@pytest.mark.parametrize("name", method_names())
def test_a_method_built_without_hydra_is_the_one_built_with_it(name):
    wanted = hydra.utils.instantiate(with_parts(compose_method(name)), _convert_="all")
    assert facts(gpu_methods.build(name)) == facts(wanted)


def facts(drafter):
    """Class and knobs, those of parts too."""
    knobs = {field.name: getattr(drafter, field.name) for field in fields(drafter)}
    return type(drafter), {
        key: [facts(v) for v in value]
        if key == "drafters"
        else facts(value)
        if isinstance(value, Drafter)
        else value
        for key, value in knobs.items()
    }


@pytest.mark.slow  # a process of its own
def test_every_test_for_a_gpu_can_be_read_without_hydra_and_the_pytest_plugins(tmp_path):
    """And a run in which all of them were skipped is not taken for a success."""
    blocked = ("hydra", "omegaconf", "hypothesis", "pytest_timeout", "xdist")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
    )
    check = trial(tmp_path)
    real = subprocess.run

    def without(*words, env, **options):
        env = env | {"PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}", "CUDA_VISIBLE_DEVICES": ""}
        return real(*words, env=env, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no test ran"):
        patch.setattr(gpu_check.subprocess, "run", without)
        gpu_check.numerics(check)
    assert not list(tmp_path.glob("failed-*.log"))


@pytest.mark.parametrize(
    ("message", "said"),
    [("no such kernel\nmore", "RuntimeError: no such kernel"), ("", "RuntimeError")],
)
def test_a_part_that_fails_is_named_and_the_others_go_on(message, said, tmp_path, monkeypatch):
    def fail(check: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(gpu_check, "memory_speed", fail)
    monkeypatch.setattr(gpu_check, "numerics", lambda check: {"pytest": "1 passed", "skipped": []})
    words = ["--device", "cpu", "--models", "tiny", "--only", "bandwidth,numerics"]
    assert gpu_check.main([*words, "--out", str(tmp_path)]) == 1
    report = (tmp_path / "gpu_check.md").read_text()
    assert f"not measured: bandwidth: {said}\n" in report
    assert "Numerics: 1 passed" in report


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_leaves_no_weights_behind(tmp_path, monkeypatch, fails):
    """Objects that hold each other live until a collection; the next model needs the room."""
    monkeypatch.setattr(gpu_check, "gc", gc)
    check = trial(tmp_path)
    alive = []

    def work():
        model = gpu_measurements.load(check, "tiny")
        alive.append(weakref.ref(model))
        targets = gpu_measurements.engines(check, model, max_len=64, max_nodes=1)
        targets["graph"].prefill(np.arange(5))
        targets["graph"].cycle = targets
        if fails:
            raise RuntimeError("out of memory")
        return {}

    gc.disable()
    try:
        check.part("a part", work)
    finally:
        gc.enable()
    assert alive[0]() is None


def test_a_machine_without_a_gpu_is_told_what_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "--device cpu --models tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contexts", "abc"], "whole numbers from 1"),
        (["--contexts", "128,0"], "whole numbers from 1"),
        (["--only", "bandwidth,decode"], "unknown: decode; .*decoding"),
        (["--models", "vicuna7"], "unknown: vicuna7; .*vicuna7b"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused_with_what_does(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["--device", "cpu", *words, "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert re.search(said, capsys.readouterr().err)
