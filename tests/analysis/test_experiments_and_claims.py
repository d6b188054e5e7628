"""The experiments' settings are the claims': a run of each in the paper's size gets its claims."""

import itertools
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf

from analysis.runs.claims import find_claim, load_claims
from analysis.runs.load import Run
from runners.launch.dispatch import resolve_entries
from specbench.config.compose import compose
from specbench.paths import CONF_DIR
from specbench.results.manifest import DraftInfo, LabelInfo, ModelInfo, RunManifest

# Tables and figures whose experiment has another name.
EXPERIMENTS = {
    "card_figure6_logs": "card_figure6",
    "spec_bench_leaderboard_a100": "specbench_board",
    "spec_bench_leaderboard_3090": "specbench_board",
    "eagle_eagle3_table1": "eagle3_table1",
}
# No configuration of a model, or no data set, or (the last) no trained head of that very model.
NOT_HERE = {"llama33_70b", "deepseek_llama_8b", "alpaca", "cnn_dm", "mean"}
NO_HEAD = {("card_table3", "eagle3")}


def experiment_of(claim) -> str:
    name = f"{claim.paper}_{claim.exhibit}"
    shuffled = "_shuffle" if claim.setting == "shuffle" else ""
    return EXPERIMENTS.get(name, name) + shuffled


CLAIMS: dict[str, list] = {}
for claim in load_claims():
    stands = any(claim.value(metric) is not None for metric in ("mat", "speedup", "tokens_per_s"))
    stated = claim.over is None and claim.model not in ("all", "unspecified") and not claim.quoted
    file = CONF_DIR / f"experiment/paper/{experiment_of(claim)}.yaml"
    here = not {claim.model, claim.dataset} & NOT_HERE
    here &= (experiment_of(claim), claim.method) not in NO_HEAD
    if stands and stated and here and file.is_file():
        CLAIMS.setdefault(experiment_of(claim), []).append(claim)


def sweep(name):
    """List the overrides of each job of an experiment in the paper's size."""
    params = {}
    for path in (f"experiment/{name}.yaml", f"experiment/paper/{name}.yaml"):
        config = yaml.safe_load((CONF_DIR / path).read_text())
        params |= config.get("hydra", {}).get("sweeper", {}).get("params", {})
    choices = [[f"{key}={value}" for value in str(params[key]).split(",")] for key in params]
    return itertools.product(*choices)


def run_of(cfg) -> Run:
    """Make the run that a folder with these settings would give, without running it."""
    rows = cfg.dataset.rows
    case_ids = range(rows.first, rows.last + 1) if cfg.dataset.limit is None and rows else (1,)
    entries = resolve_entries(cfg)
    labels = {e.label: LabelInfo(method=e.name, knobs=dict(e.method)) for e in entries}
    drafts = {e.label: DraftInfo(id=e.pair.draft.id) for e in entries if e.pair}
    plain = {
        group: OmegaConf.to_container(cfg[group], resolve=True)
        for group in ("model", "dataset", "generation")
    }
    manifest = RunManifest(config=plain, labels=labels, model=ModelInfo(drafts=drafts))
    records = [
        SimpleNamespace(model=cfg.model.name, dataset=cfg.dataset.name, case_id=str(case))
        for case in case_ids
    ]
    return Run(CONF_DIR, manifest, records, True)


def without_a_run(name, jobs) -> list:
    """List the claims of an experiment that no label of these jobs gets."""
    missing = list(CLAIMS[name])
    for overrides in jobs:
        run = run_of(compose([f"experiment={name}", "scale=paper", *overrides]))
        matches = [
            find_claim(run, label, info.method, [claim])
            for label, info in run.manifest.labels.items()
            for claim in missing
            if claim.model == run.model
        ]
        missing = [claim for claim in missing if claim not in matches]
    # The best of a grid belongs to no label; the papers' tables find it.
    return [claim for claim in missing if claim.setting != "best"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_an_experiment_in_the_paper_s_size_gets_the_paper_s_claims(name):
    assert without_a_run(name, sweep(name)) == []


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("token_recycling_table1_shuffle", ["model=vicuna7b"]),
        ("card_figure6", ["model=llama3_70b", "dataset=gsm8k"]),
        pytest.param("cacheback_table1", ["model=vicuna7b"], marks=pytest.mark.slow),
        pytest.param("eagle3_table1", ["model=llama3_8b", "dataset=gsm8k"], marks=pytest.mark.slow),
    ],
)
def test_its_claims_about_one_model_and_data_set(name, job):
    chosen = {"dataset": "specbench"} | dict(word.split("=") for word in job)
    left = without_a_run(name, [job])
    job_key = (chosen["model"], chosen["dataset"], 0.0)
    assert [c for c in left if (c.model, c.dataset, c.temperature) == job_key] == []
    assert len(left) < len(CLAIMS[name])


def test_an_experiment_with_other_settings_would_be_noticed():
    job = ["model=vicuna7b", "method.leader_len=2", "model.dtype=bfloat16"]
    assert without_a_run("cacheback_table1", [job]) == CLAIMS["cacheback_table1"]


def test_sam_as_its_authors_run_it_gets_their_number():
    """The command that conf/method/sam.yaml shows; its auxiliary's matrix lasts for the run."""
    auxiliary = "{method: token_recycling, tree: sam_60, learn_prompt: true}"
    model = ["model=vicuna7b", "dataset=specbench", "generation.max_new_tokens=1024"]
    mats = {}
    for scope in ("run", "turn"):
        method = ["method=sam", f"method.state_scope={scope}", f"method.auxiliary={auxiliary}"]
        match = find_claim(run_of(compose([*model, *method])), "sam", "sam", load_claims())
        mats[scope] = match and match.value("mat")
    assert mats == {"run": 3.03, "turn": None}
