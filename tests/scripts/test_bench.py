"""`python -m scripts.bench`: what is compared takes turns, and counts are those of the runs."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts import bench
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.verify import GreedyVerifier
from specbench.models.target import Target
from specbench.results.jsonl_schema import StepTrace
from specbench.results.records import CASES
from tests.conftest import tiny_model
from tests.integrations import vllm_scheduler
from tests.integrations.test_vllm import build
from tests.small_run import run_here

K = 4


def test_other_engines_are_compared_prompt_by_prompt(monkeypatch):
    """Two that take twice and half the time of the first, on a clock that they move themselves."""
    now, calls = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def that_takes(seconds, last):
        def answer(prompt):
            calls.append(seconds)
            now[0] += seconds * len(prompt)
            return [1, last]

        return answer

    answers = {"ours": that_takes(1.0, 2), "slow": that_takes(2.0, 2), "fast": that_takes(0.5, 3)}
    rates = bench.compare_with_first(answers, [[5], [5, 6], [5, 6, 7]], rounds=2)
    assert rates["ours"] == {"tokens_per_s": 1.0, "ratio": pytest.approx(1), "equal": "6/6"}
    assert rates["slow"]["ratio"] == pytest.approx(0.5) and rates["slow"]["equal"] == "6/6"
    assert rates["fast"]["ratio"] == pytest.approx(2.0) and rates["fast"]["equal"] == "0/6"
    assert len(calls) == 3 * 7 and calls[:6] == [0.5, 2.0, 1.0, 1.0, 2.0, 0.5]


def test_a_step_is_divided_into_its_phases():
    target = Target(tiny_model("llama", dtype=torch.float64), max_len=64, max_nodes=4)
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset(), phases=True)
    answer = partial(bench.decode, engine=engine, drafter=Drafter(name="ar"), tokens=9)
    phases = bench.step_of([answer(np.arange(5)), answer(np.arange(7))])
    assert {"draft_us", "verify_us", "observe_us"} <= phases.keys() and "prefill_us" not in phases
    assert all(us > 0 for us in phases.values())


def fake_vllm(answers, broken):
    """A module vllm whose model says what our engine answered; ``broken``: a method ends it."""

    class LLM:
        def __init__(self, *, max_model_len, max_num_seqs, additional_config=None, **more):
            knobs = (additional_config or {}).get("specbench")
            config = vllm_scheduler.config(K, max_num_seqs, max_model_len, 64, knobs)
            config.model_config.hf_config.eos_token_id = 2  # the tiny model's
            nothing = SimpleNamespace(propose=lambda sampled, *_, **__: [[] for _ in sampled])
            drafter = build(knobs["name"], config) if knobs else nothing
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
            self.last = [9] if knobs and knobs["name"] == broken else []
            self.engine = vllm_scheduler.Engine(drafter, config)

        def generate(self, prompts, sampling, use_tqdm):
            requests = []
            for ids in (prompt["prompt_token_ids"] for prompt in prompts):
                whole, n = [*ids, *answers[tuple(ids)], 0], len(answers[tuple(ids)])
                rule = partial(lambda whole, text: whole[min(len(text), len(whole) - 1)], whole)
                limit = min(sampling.max_tokens, n)
                requests.append(vllm_scheduler.Request(ids, limit, rule, ignore_eos=True))
            self.engine.run(requests)
            return [SimpleNamespace(outputs=[self.completion(request)]) for request in requests]

        def completion(self, request):
            drafted, accepted = zip(*request.steps, strict=True) if request.steps else ((), ())
            noted = SimpleNamespace(per_step_drafted=drafted, per_step_accepted=accepted)
            output = [*request.output, *self.last]
            return SimpleNamespace(token_ids=output, spec_decode_metrics=noted)

    modules = vllm_scheduler.modules()
    modules["vllm"].LLM, modules["vllm"].SamplingParams = LLM, SimpleNamespace
    return modules


@pytest.mark.slow  # over a second
def test_drafters_in_vllm_stand_beside_our_engine(small, monkeypatch, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "vllm.json"
    chain = "total_draft_len: 12, chaining_reserved: 2"
    suffixes = f"{{method: suffix_decoding, max_spec_tokens: {K}}}"
    compare = (
        f"compare=[{{method: adaptive, drafter: {suffixes}}}, "
        f"{{method: cacheback, table: dynamic, {chain}}}]"
    )
    knobs = [f"method.num_tokens={K}", compare, "state_scope=turn"]
    assert run_here([*small, *knobs, f"output_dir={run}"]) == 0
    lines = [json.loads(line) for line in (run / CASES).read_text().splitlines()]
    plain = [line for line in lines if line["label"] == "ar"]
    answers = {tuple(line["prompt_ids"]): line["output_ids"] for line in plain}
    for name, module in fake_vllm(answers, "cacheback").items():
        monkeypatch.setitem(sys.modules, name, module)
    arguments = [str(run), "--model", str(tmp_path), "--tokens", str(K), "--rows", "2"]
    assert bench.main(["vllm", *arguments, "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["requests"] == results["plain_equal_to_ours"] == len(plain)
    for label in ("pld", "adaptive"):
        of = results["rows"][label]
        assert of["equal_to_plain"] == of["same_steps"] == len(plain)
        mine = [line for line in lines if line["label"] == label]
        assert of["here"]["accepted"] == sum(r["n_new"] - 1 - r["n_target_passes"] for r in mine)
        assert sum(of["in_vllm"]["accepted_by_position"]) == of["in_vllm"]["accepted"]
        assert of["in_vllm"]["accepted"] >= of["here"]["accepted"] > 0
    assert results["rows"]["cacheback"]["equal_to_plain"] == 0
    assert "cacheback" in capsys.readouterr().out


def test_only_the_last_step_in_vllm_may_differ():
    committed, drafted = [3, 1, 1, 2], [4, 4, 0, 1]
    trace = StepTrace(
        label="pld", case_id="a", turn=0, repeat=0,
        drafted=drafted, depth=drafted, committed=committed,
    )  # fmt: skip
    assert bench.same_steps([(4, 2), (4, 0), (4, 4)], trace)  # drafted beyond the limit
    assert bench.same_steps([(4, 2), (4, 0)], trace)
    assert not bench.same_steps([(4, 2), (4, 1), (4, 1)], trace)
    assert not bench.same_steps([(4, 2)], trace)
