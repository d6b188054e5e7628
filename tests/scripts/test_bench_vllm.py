"""`python -m scripts.bench vllm` with the fake scheduler in vLLM's place."""

import json
import sys
from types import SimpleNamespace

import pytest

from scripts.bench import __main__ as bench
from scripts.bench import vllm
from specbench.results.lines import StepTrace
from specbench.results.records import CASES
from tests.engines import vllm_scheduler
from tests.engines.test_vllm import made
from tests.small_run import run_here

K = 4
COMPARE = (
    f"compare=[{{method: suffix_decoding, max_spec_tokens: {K}}}, "
    f"{{method: adaptive, drafter: {{method: suffix_decoding, max_spec_tokens: {K}}}}}, "
    "{method: cacheback, table: dynamic, total_draft_len: 12, chaining_reserved: 2}]"
)


def a_vllm(answers, wrong=()):
    """A module vllm whose model says what our engine answered; ``wrong``: methods that break it."""

    class LLM:
        def __init__(self, *, max_model_len, max_num_seqs, additional_config=None, **more):
            knobs = (additional_config or {}).get("specbench")
            config = vllm_scheduler.config(K, max_num_seqs, max_model_len, 64, knobs)
            config.model_config.hf_config.eos_token_id = 2  # the tiny model's
            drafter = made(knobs["name"], config) if knobs else None
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
            self.broken = bool(knobs) and knobs["name"] in wrong
            nothing = SimpleNamespace(propose=lambda sampled, *_, **__: [[] for _ in sampled])
            self.engine = vllm_scheduler.Engine(
                drafter or nothing, config, budget=32, block=8, blocks=1000
            )

        def generate(self, prompts, sampling, use_tqdm):
            asked = []
            for prompt in prompts:
                ids = prompt["prompt_token_ids"]
                whole = [*ids, *answers[tuple(ids)], 0]

                def rule(text, whole=whole):
                    return whole[min(len(text), len(whole) - 1)]

                limit = min(sampling.max_tokens, len(answers[tuple(ids)]))
                asked.append(vllm_scheduler.Request(ids, limit, rule, ignore_eos=True))
            self.engine.run(asked)
            return [SimpleNamespace(outputs=[self.completion(request)]) for request in asked]

        def completion(self, request):
            noted = SimpleNamespace(
                per_step_drafted=[drafted for drafted, _ in request.steps],
                per_step_accepted=[accepted for _, accepted in request.steps],
            )
            output = [*request.output[:-1], 9] if self.broken else request.output
            return SimpleNamespace(token_ids=output, spec_decode_metrics=noted)

    found = vllm_scheduler.modules()
    found["vllm"].LLM, found["vllm"].SamplingParams = LLM, SimpleNamespace
    return found


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("live") / "run"
    typed = [f"method.num_tokens={K}", COMPARE, "state_scope=turn", f"output_dir={out}"]
    assert run_here([*small, *typed]) == 0
    return out


def test_drafters_in_vllm_stand_beside_our_engine(run, monkeypatch, tmp_path, capsys):
    lines = [json.loads(line) for line in (run / CASES).read_text().splitlines()]
    plain = [line for line in lines if line["label"] == "ar"]
    answers = {tuple(line["prompt_ids"]): line["output_ids"] for line in plain}
    for name, module in a_vllm(answers, wrong=["cacheback"]).items():
        monkeypatch.setitem(sys.modules, name, module)
    out = tmp_path / "vllm.json"
    typed = [str(run), "--model", str(tmp_path), "--tokens", str(K), "--rows", "2"]
    assert bench.main(["vllm", *typed, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["vllm"] == "0.32.0" and str(tmp_path) not in found["command"]
    assert found["requests"] == found["plain_equal_to_ours"] == len(plain)
    for label in ("pld", "suffix_decoding", "adaptive"):
        of = found["methods"][label]
        assert of["equal_to_plain"] == of["same_steps"] == len(plain)
        mine = [line for line in lines if line["label"] == label]
        assert of["here"]["accepted"] == sum(r["n_new"] - 1 - r["n_target_passes"] for r in mine)
        for place in ("here", "in_vllm"):
            assert sum(of[place]["accepted_by_position"]) == of[place]["accepted"]
        assert of["in_vllm"]["accepted"] >= of["here"]["accepted"] > 0
    assert found["methods"]["cacheback"]["equal_to_plain"] == 0
    assert f"{len(plain)}/{len(plain)}" in capsys.readouterr().out


def test_only_the_last_step_may_differ():
    committed, drafted = [3, 1, 1, 2], [4, 4, 0, 1]
    trace = StepTrace(
        label="pld", case_id="a", turn=0, repeat=0,
        drafted=drafted, depth=drafted, committed=committed,
    )  # fmt: skip
    assert vllm.same_steps([(4, 2), (4, 0), (4, 4)], trace)  # drafted beyond the limit
    assert vllm.same_steps([(4, 2), (4, 0)], trace)
    assert not vllm.same_steps([(4, 2), (4, 1), (4, 1)], trace)
    assert not vllm.same_steps([(4, 2)], trace)
    assert not vllm.same_steps([(4, 2), (4, 0), (4, 1), (4, 1)], trace)


def test_counts_are_of_steps_with_a_draft():
    assert vllm.counts([[(4, 2), (1, 1)], [(3, 0)]], 3) == {
        "drafts": 3, "drafted": 8, "accepted": 3, "accepted_by_position": [2, 1, 0],
    }  # fmt: skip
