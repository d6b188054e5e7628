"""runner=serve against servers that answer as vLLM and SGLang document it."""

import json

import pytest

from runners.launch.dispatch import Invocation, execute
from specbench.config.compose import compose
from specbench.results.records import read_records
from tests.servers.fake import serving

QUIET = "measure.disturbed={steal: null, others: null, slowdown: null}"


def run(path, *words, fresh=False):
    """The exit code, the records and the summary of a run in this process."""
    words = ["runner=serve", "server=openai", "dataset.limit=2", "server.retry_wait_s=0", *words]
    words += ["measure.warmup=0", "measure.exclusive=false", QUIET, f"output_dir={path}"]
    cfg = compose(words)
    code = execute(cfg, Invocation(tuple(words)), launch=lambda work, job: work(job))
    records, _ = read_records(path)
    return code, records, json.loads((path / "summary.json").read_text())


def row(summary, label):
    return next(r for r in summary["rows"] if r["label"] == label and r["task"] == "overall")


# 12 tokens: the prompt's pass gives one, a step without a draft one, three steps 3, 1 and 6.
# MAT is 11 tokens over 4 steps.
SCRIPT = {"accepted": (2, 0, 5), "drafted": 6, "idle": 1}
MAT = 11 / 4


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("per_request", [True, False])
def test_mat_is_what_a_hand_computes_from_the_servers_counters(tmp_path, engine, per_request):
    with (
        serving(engine=engine) as (plain, _),
        serving(engine=engine, per_request=per_request, **SCRIPT) as (drafting, _),
    ):
        code, records, summary = run(
            tmp_path / "r",
            f"server.base_url={drafting}",
            f"server.plain_url={plain}",
            "server.speculation=eagle3",
        )
    assert code == 0
    assert row(summary, "openai_eagle3")["mat"] == pytest.approx(MAT)
    assert row(summary, "ar")["mat"] == 1.0
    assert row(summary, "openai_eagle3")["lossless"]["equal"] == len(records) // 2
    assert {r.method for r in records} == {"openai_none", "openai_eagle3"}
    assert {r.n_target_passes for r in records if r.label != "ar"} == {4}
    version = {"vllm": "vLLM 0.30.1", "sglang": "SGLang 0.6.2"}[engine]
    assert {r.engine for r in records} == {version}
    assert version in summary["caption"]
