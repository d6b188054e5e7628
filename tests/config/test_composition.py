"""Every yaml composes, says what it is, and means what a run will do."""

import functools
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import hydra.utils
import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from analysis.runs.claims import load_claims
from runners.launch.dispatch import resolve_entries
from specbench import paths
from specbench.config.compose import compose, option_names, pair_name, to_config
from specbench.config.entries import compose_entry, with_parts
from specbench.config.run_key import run_identity, run_key
from specbench.config.schema import DTYPES
from specbench.config.validate import check_values
from specbench.decoding.drafter import Drafter
from specbench.errors import ConfigurationError
from specbench.paths import CONF_DIR
from tests.conftest import quick_first
from tests.contract import driver

ROOT = CONF_DIR.parent
GLOBAL_GROUPS = ("pair", "experiment", "scale", "debug")


@functools.cache
def composed(*typed):
    """Compose a configuration that several tests read, and none changes."""
    return compose(typed)


# Published parameter counts, in billions.
PARAMETERS = {
    "smollm2_135m": 0.1345, "vicuna7b": 6.738, "vicuna13b": 13.016, "vicuna33b": 32.529,
    "llama2_7b": 6.738, "llama2_13b": 13.016, "llama2_70b": 68.977, "llama3_8b": 8.030,
    "llama3_70b": 70.554, "llama3_1b": 1.236, "mistral7b": 7.242, "phi3_mini": 3.821,
    "codellama7b": 6.739, "codellama13b": 13.016, "codellama34b": 33.744, "qwen25_7b": 7.616,
    "qwen25_72b": 72.706, "qwen3_8b": 8.191, "gpt_oss_20b": 20.915, "qwen3_next_80b": 79.674,
    "qwen35_08b": 0.752, "qwen35_2b": 1.882, "qwen35_4b": 4.206, "qwen35_9b": 8.954,
    "lfm2_1b": 1.170, "granite4_micro": 3.191, "falcon_h1_1b": 1.555, "deepseek_v2_lite": 15.706,
}  # fmt: skip


def together():
    """List commands that together name every option of every group."""
    groups = ["model", "dataset", "measure", "logger", "paths", "engine", "runner", "debug"]
    groups += ["server", "scale", "verifier"]
    options = {group: option_names(group) for group in groups}
    options["model"].remove("local")  # names no weights: see the tests of models of one's own
    pairs, methods = option_names("pair"), option_names("method")
    method_of = {p: m for p in pairs for m in methods if p.startswith(f"{m}_")}
    others = iter([method for method in methods if method not in method_of.values()])
    options["server"] = [None] * len(options["runner"]) + options["server"]
    options["pair"] = pairs
    options["method"] = [method_of.get(pair) or next(others, None) for pair in pairs] + [*others]
    rows = []
    for row in itertools.zip_longest(*options.values()):
        chosen = {group: name for group, name in zip(options, row, strict=True) if name}
        # A lossy verifier judges samples.
        lossy = chosen.get("verifier") == "typical"
        if "server" in chosen:
            chosen["runner"] = "serve"
        rows.append(chosen | {"generation": "sampling" if lossy else "greedy"})
    return rows


@pytest.mark.parametrize("chosen", together(), ids=lambda row: "-".join(row.values()))
def test_every_yaml_composes_and_is_valid(chosen):
    cfg = compose([f"{group}={name}" for group, name in chosen.items()])
    check_values(cfg)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for group in chosen.keys() - {*GLOBAL_GROUPS, "paths"}:
        # Records carry the name, and pair files are found by it.
        # Several choices may be one runner with other keys.
        name = chosen[group]
        assert cfg[group].name == (name.partition("_")[0] if group == "runner" else name)
    name, hub = cfg.dataset.name, cfg.dataset.hub
    if hub is not None:
        assert hub.id.count("/") == 1 and hub.revision and hub.split, "not pinned"
    if name not in ("demo", "jsonl", "speed"):  # the last is resolved by its authors' script
        assert cfg.dataset.file.endswith(".jsonl")
        assert cfg.dataset.fetch == f"python scripts/fetch_data.py {name}"


PAPER_SCALE = sorted(path.stem for path in (CONF_DIR / "experiment/paper").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER_SCALE)
def test_every_experiment_composes_in_the_paper_s_size(name):
    small, paper = composed(f"experiment={name}"), compose([f"experiment={name}", "scale=paper"])
    check_values(paper)
    assert paper.generation.max_new_tokens >= 512
    assert paper.generation.max_new_tokens > small.generation.max_new_tokens
    assert paper.dataset.limit is None or paper.dataset.limit >= 50
    check_instantiates(paper.method)
    for entry in paper.compare:
        check_instantiates(compose_entry(paper, entry).method)


CARD_TABLE = ["experiment=card_table1", "scale=paper"]
CARD_FIGURE = ["experiment=card_figure5", "scale=paper"]
MEANT = [
    # What no override changes, and what overrides are stronger than.
    ([], {"method.name": "cacheback", "model.name": "smollm2_135m", "dataset.name": "demo",
          "compare": [], "baseline": True, "model.embedded": True, "generation.temperature": 0}),
    (["scale=paper"], {"dataset.limit": None, "generation.max_new_tokens": 1024}),
    (["method.total_draft_len=33"], {"method.total_draft_len": 33}),
    (["pair=none"], {"method.total_draft_len": 96}),
    (["method=pld", "method.num_tokens=${seed}", "seed=7"], {"method.num_tokens": 7}),
    # Cacheback's yaml has the paper's budget, and its pair file for the model another.
    (["model=vicuna7b"], {"method.total_draft_len": 96, "method.chaining_reserved": 16,
                          "method.merge": False}),
    # CARD samples GSM8K and MBPP alone, and caches for each draft model as its authors do.
    *(([*CARD_TABLE, f"dataset={name}"], {"dataset.limit": limit})
      for name, limit in (("gsm8k", 100), ("mgsm", None), ("mtbench", None))),
    ([*CARD_TABLE, "dataset=gsm8k", "dataset.limit=7"], {"dataset.limit": 7}),
    *(([*CARD_FIGURE, f"dataset={name}"], {"dataset.limit": limit, "dataset.prompt_form": "card"})
      for name, limit in (("humaneval", None), ("mbpp", 100))),
    *(([*CARD_FIGURE, f"model={model}"], {"method.k": k, "method.r": r, "pair.draft.id": draft})
      for model, draft, k, r in (
          ("llama3_70b", "meta-llama/Llama-3.2-1B-Instruct", 100, 7),
          ("llama2_70b", "meta-llama/Llama-2-7b-chat-hf", 50, 5),
          ("qwen25_72b", "Qwen/Qwen2.5-7B-Instruct", 50, 5))),
    # Papers of bfloat16 are run in it.
    ([*CARD_TABLE, "model=llama2_70b"], {"model.dtype": "bfloat16"}),
    (["experiment=ngrammys_table1", "scale=paper", "model=vicuna13b"], {"model.dtype": "bfloat16"}),
    # N-Grammys' figures share recordings; figure 1 has the paper's whole grid.
    *(([f"experiment=ngrammys_figure{n}"], {"dataset.limit": 12, "dataset.sample": "stratified"})
      for n in (2, 3, 4, 5)),
    (["experiment=ngrammys_figure2", "scale=paper"],
     {"dataset.limit": 50, "dataset.sample": "head"}),
    (["experiment=ngrammys_figure1", "scale=paper"],
     {"runner.batch_k": [*range(1, 33)], "runner.batch_w": [*range(16)],
      "runner.batch_contexts": [25, 100, 500]}),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "values"), MEANT, ids=lambda value: " ".join(value) or "bare")
def test_a_command_means_what_papers_and_pages_say(typed, values):
    cfg = composed(*typed)
    check_values(cfg)
    assert {key: OmegaConf.select(cfg, key) for key in values} == values
    # The methods beside CARD draft with the same model.
    if "pair.draft.id" in values:
        ids = {compose_entry(cfg, entry).pair.draft.id for entry in cfg.compare}
        assert ids == {cfg.pair.draft.id}


SPEC_BENCHS_LOOKAHEAD = {
    "ngram": 5, "window": 7, "guesses": 7, "pool_from_prompt": False, "lost_bonus": True,
    "state_scope": "turn",
}  # fmt: skip
SPEC_BENCHS_SPS = {"gamma": 5, "schedule": "heuristic", "confidence": 0.0, "state_scope": "turn"}


@pytest.mark.parametrize(
    ("typed", "method", "knobs"),
    [
        ([*CARD_TABLE, "model=llama2_70b"], "pearl", {"gamma": 5}),
        ([*CARD_TABLE, "model=llama3_70b"], "pearl", {"gamma": 4}),
        (["experiment=cacheback_figure3"], "lookahead", SPEC_BENCHS_LOOKAHEAD),
        (["experiment=token_recycling_table1"], "lookahead", SPEC_BENCHS_LOOKAHEAD),
        (["experiment=token_recycling_table1_mbpp"], "lookahead", SPEC_BENCHS_LOOKAHEAD),
        (["experiment=draft_models"], "sps", SPEC_BENCHS_SPS),
    ],
)
def test_rivals_of_a_paper_run_with_their_authors_settings(typed, method, knobs):
    cfg = composed(*typed)
    (entry,) = (e for e in cfg.compare if (e if isinstance(e, str) else e.method) == method)
    node = with_parts(OmegaConf.to_container(compose_entry(cfg, entry).method, resolve=True))
    assert node | knobs == node


def test_experiments_that_belong_together_ask_the_same_questions():
    figures = [composed(f"experiment=ngrammys_figure{n}") for n in (2, 3, 4, 5)]
    table, row = (composed(f"experiment=token_recycling_table1{part}") for part in ("", "_shuffle"))
    assert row.dataset.sample == table.dataset.sample == "stratified"
    for cfg, other in ((row, table), *((figure, figures[0]) for figure in figures)):
        assert (cfg.dataset.limit, cfg.generation) == (other.dataset.limit, other.generation)


@pytest.mark.parametrize("budgets", ["tuned", "published"])
def test_a_part_that_is_typed_is_not_mixed_with_the_tuned_one(budgets):
    """As ``conf/method/adaptive.yaml`` says that it is typed."""
    part = {"method": "sps", "gamma": 20}
    cfg = compose(
        ["method=adaptive", f"budgets={budgets}", "method.drafter={method: sps, gamma: 20}"]
    )
    assert to_config(cfg).method["drafter"] == part
    entry = compose_entry(compose([f"budgets={budgets}"]), {"method": "adaptive", "drafter": part})
    assert to_config(entry).method["drafter"] == part
    # Without a name the knobs are those of the part that is there.
    fewer = compose_entry(compose([]), {"method": "sam_eagle2", "auxiliary": {"total": 4}})
    assert (
        to_config(fewer).method["auxiliary"] | {"method": "eagle2", "depth": 0, "total": 4}
        == (to_config(fewer).method["auxiliary"])
    )


def test_an_entry_may_refer_to_a_knob_of_the_run_s_method_that_its_own_lacks():
    cfg = compose(["experiment=ssd_store_size", "method.buffer_tokens=512"])
    assert to_config(compose_entry(cfg, cfg.compare[0])).method["store_tokens"] == 512


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAPER_SCALE if name.startswith("card_")])
def test_card_s_experiments_run_every_pair_that_the_paper_s_rows_are_of(name):
    paper = yaml.safe_load((CONF_DIR / f"experiment/paper/{name}.yaml").read_text())
    swept = paper["hydra"]["sweeper"]["params"]["model"].split(",")
    drafts, methods = {}, set()
    for model in swept:
        cfg = compose([f"experiment={name}", "scale=paper", f"model={model}"])
        drafts[model] = Path(cfg.pair.draft.id).name
        methods |= {"ar", cfg.method.name}
        methods |= {compose_entry(cfg, entry).method.name for entry in cfg.compare}
    claims = [
        claim
        for claim in load_claims()
        if f"{claim.paper}_{claim.exhibit}" == name and claim.method in methods
    ]
    for claim in claims:
        assert claim.model in swept, claim.source
        if "draft" in claim.terms:
            assert drafts[claim.model] == claim.terms["draft"], claim.source


def scopes(*typed):
    """Return the state scope of each label of a run."""
    return {e.label: e.method["state_scope"] for e in resolve_entries(composed(*typed))}


OTHERS = (
    "compare=[pld,lookahead,ssd,suffix_decoding,"
    "{method: cacheback, label: own, state_scope: prompt}]"
)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        # The run's scope holds for all but SSD, which has its own.
        (
            ["method=ssd", "state_scope=turn", "compare=[lookahead]"],
            {"ar": "turn", "ssd": "run", "lookahead": "turn"},
        ),
        (["method=ssd", "method.state_scope=prompt"], {"ssd": "prompt"}),
        (
            ["method=cacheback", "state_scope=paper", OTHERS],
            {"ar": "prompt", "cacheback": "turn", "pld": "prompt", "lookahead": "turn",
             "ssd": "run", "suffix_decoding": "run", "own": "prompt"},
        ),
        (
            ["method=lookahead", "compare=[{method: token_recycling, state_scope: paper}]"],
            {"ar": "prompt", "lookahead": "prompt", "token_recycling": "run"},
        ),
        (
            ["method=token_recycling", "method.state_scope=turn", "state_scope=paper"],
            {"token_recycling": "turn"},
        ),
        (["experiment=cacheback_figure3"], {"cacheback": "turn", "lookahead": "turn"}),
        (["experiment=token_recycling_table1"], {"token_recycling": "run"}),
    ],
)  # fmt: skip
def test_a_method_keeps_state_as_long_as_typed_or_as_its_paper(typed, expected):
    actual = scopes(*typed)
    assert actual | expected == actual


def test_parts_keep_what_they_learnt_as_long_as_the_whole():
    (whole,) = (
        e.method
        for e in resolve_entries(compose(["method=union", "state_scope=run"]))
        if e.label == "union"
    )
    assert {part["state_scope"] for part in whole["drafters"]} == {"run"}
    part_with_scope = "method.drafters=[sam,{method: token_recycling, state_scope: turn}]"
    with pytest.raises(ConfigurationError, match=r"as long as the whole.*method\.state_scope"):
        resolve_entries(compose(["method=union", part_with_scope]))


def test_composing_imports_nothing_heavy_and_the_run_key_is_stable_over_processes():
    code = (
        "import json, sys\n"
        "from specbench.config.entries import compose_entry\n"
        "from specbench.config.compose import compose\n"
        "from specbench.config.run_key import run_key\n"
        "from specbench.config.validate import check_values\n"
        "import specbench.models.loading, specbench.data.cases, specbench.data.chat_templates\n"
        "cfg = compose(['model=vicuna7b', 'compare=[pld]'])\n"
        "check_values(cfg); compose_entry(cfg, 'pld')\n"
        "heavy = ('torch', 'transformers', 'datasets', 'pandas')\n"
        "print(json.dumps([run_key(cfg), *(name for name in heavy if name in sys.modules)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    key = run_key(compose(["model=vicuna7b", "compare=[pld]"]))
    assert len(f"{int(key, 16):08x}") == len(key) == 8
    assert json.loads(done.stdout) == [key]


def tuned(method: str, knob: str) -> int:
    """The draft length that the bundled model's pair file gives."""
    return OmegaConf.load(CONF_DIR / f"pair/{method}_smollm2_135m.yaml").method[knob]


TUNED = tuned("eagle2", "total"), tuned("cacheback", "total_draft_len"), 9
BUDGETS = [
    "method=eagle2",
    "compare=[cacheback,{method: cacheback,label: mine,table: dynamic,total_draft_len: 9},"
    "random_drafts,{method: random_drafts,label: same,n_nodes: 16},ngrammys,sps]",
]


@pytest.mark.parametrize(
    ("typed", "rows", "drafts", "kinds"),
    [
        # Rows of eagle2, cacheback and mine; and whether there is a draft model.
        ([], TUNED, True, ["tuned", "tuned", "typed"]),
        (["budgets=published"], (60, 96, 9), True, ["published", "published", "typed"]),
        (
            ["budgets=published", "method.total=8"],
            (8, 96, 9),
            True,
            ["typed", "published", "typed"],
        ),
        (
            ["budgets=published", "pair=draft_smollm2_135m"],
            *((60, 96, 9), True, ["published", "published", "typed"]),
        ),
        (["pair=none"], (60, 96, 9), False, ["published", "published", "typed"]),
        (
            ["pair=none", "budgets=published"],
            *((60, 96, 9), False, ["published", "published", "typed"]),
        ),
    ],
    ids=str,
)
def test_one_key_chooses_the_budgets_of_all_labels(typed, rows, drafts, kinds):
    entries = {entry.label: entry for entry in resolve_entries(compose([*BUDGETS, *typed]))}
    eagle2, cacheback, mine = (entries[name] for name in ("eagle2", "cacheback", "mine"))
    assert (
        eagle2.method["total"], cacheback.method["total_draft_len"], mine.method["total_draft_len"]
    ) == rows  # fmt: skip
    # None is tuned for two, whose value that is the yaml's own is nothing typed.
    expected = [None, *kinds, *["published"] * 2, *[kinds[1]] * 2]
    assert [e.budget for e in entries.values()] == expected
    # The pair's draft model and heads stay, and what its file says beside a budget.
    assert ("eagle" in eagle2.heads) == (entries["sps"].draft.path is not None) == drafts
    assert entries["ngrammys"].method["bos"] is drafts


@pytest.mark.parametrize("experiment", ["specbench_board", "eagle3_table1"])
def test_tables_of_heads_run_their_published_trees_whatever_the_pair_says(experiment):
    by_name = {method.name: method for method in methods_of(experiment)}
    assert by_name["eagle2"].total == by_name["eagle3"].total == 60
    assert by_name["eagle2"].top_k == by_name["eagle3"].top_k == 10
    assert {by_name[name].levels for name in ("medusa", "hydra", "eagle")} == {None}
    assert {by_name[name].tree for name in ("medusa", "hydra")} == {"medusa_63"}


def test_the_run_of_all_methods_has_all():
    named = driver.named_in_readme()
    names = [method.name for method in methods_of("all_methods")]
    assert sorted(names) == sorted(named - {"ar", "oracle", "random_drafts"})


def test_pair_is_own_else_draft_else_nothing(tmp_path, monkeypatch):
    conf = tmp_path / "conf"
    shutil.copytree(CONF_DIR, conf)
    pair = conf / "pair"
    header = "# @package _global_\npair:\n"
    (pair / "draft_vicuna7b.yaml").write_text(header + "  draft:\n    id: shared\n")
    own_file = "  draft:\n    id: own\nmethod:\n  num_tokens: 4\n"
    (pair / "pld_vicuna7b.yaml").write_text(header + own_file)
    monkeypatch.setattr(paths, "CONF_DIR", conf)

    specific = compose(["method=pld", "model=vicuna7b"])
    assert specific.pair.draft.id == "own"
    assert specific.method.num_tokens == 4
    shared = compose(["method=ar", "model=vicuna7b"])
    assert shared.pair.draft.id == "shared"
    typed = compose(["method=ar", "model=vicuna7b", "pair.draft.id=mine"])
    assert typed.pair.draft.id == "mine"
    assert compose(["method=ar", "model=mistral7b"]).pair.draft.id is None
    assert pair_name("pld", "mistral7b") == "pld_mistral7b"
    # The choice follows a model set by an experiment, too.
    (conf / "experiment/x.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: vicuna7b\n  - override /method: ar\n"
    )
    assert compose(["experiment=x"]).pair.draft.id == "shared"
    assert compose_entry(shared, "pld").method.num_tokens == 4
    assert compose_entry(specific, "ar").method.name == "ar"


@pytest.mark.parametrize("typed", ["pair=draft_smollm2_135", "+pair=nosuch", "local=nosuch"])
def test_a_file_of_an_optional_group_that_was_typed_must_exist(typed):
    with pytest.raises(ConfigurationError, match=r"unknown (pair|local)"):
        compose([typed])


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["model.id=/weights/Tuned-7B/"], "Tuned-7B"),
        (["model=vicuna7b", "model.id=lmsys/vicuna-7b-v1.5"], "vicuna-7b-v1.5"),
        (["model=vicuna7b", "model.path='~/my weights'"], "my_weights"),
        (["model=local", "model.path=./a/../tuned"], "tuned"),
        # Not even a folder of a paper's name is known to hold the paper's model.
        (["model=vicuna7b", "model.id=/weights/vicuna7b"], "weights_vicuna7b"),
        (["model=local", "model.path=/vicuna7b"], "own_vicuna7b"),
        (["model=local", "model.path=/"], "root"),
        (["model=local", "model.path='~nobody/x'"], "x"),
        (["model=vicuna7b", "model.id=lmsys/vicuna-7b-v1.3"], "vicuna7b"),
    ],
)
def test_other_weights_are_another_model_with_a_name_of_its_own(typed, name):
    cfg = compose(["method=pld", *typed])
    check_values(cfg)
    assert cfg.model.name == name
    assert not cfg.model.embedded
    worn = composed(*(word for word in typed if not word.startswith(("model.id", "model.path"))))
    if worn.model.name != "local":
        assert (cfg.model.template, cfg.model.dtype) == (worn.model.template, worn.model.dtype)


@pytest.mark.parametrize(
    "weights", [["model.id=/weights/tuned"], ["model=local", "model.path=/weights/tuned"]], ids=str
)
def test_other_weights_take_no_pair_of_the_model_whose_name_they_wore(weights):
    cfg = compose([*weights, "compare=[ngrammys, card]"])
    assert cfg.method == composed("pair=none").method
    assert cfg.pair.draft.path is None
    rows, card = (compose_entry(cfg, entry) for entry in cfg.compare)
    assert (rows.method.bos, card.method.k, card.pair.draft.path) == (False, 100, None)
    typed = compose([*weights, "pair=draft_smollm2_135m", "method.merge=true", "compare=[card]"])
    assert typed.pair.draft.path == "assets/draft_smollm2_135m"
    assert typed.method.merge is True
    entry = compose_entry(typed, "card")
    assert (entry.method.k, entry.pair.draft.path) == (100, "assets/draft_smollm2_135m")


def test_a_folder_is_one_model_however_it_is_named():
    """Run keys of folders that were named by id hold."""
    by_path = compose(["model=mistral7b", "model.path=/weights/tuned"])
    assert run_key(by_path) == run_key(compose(["model=mistral7b", "model.id=/weights/tuned"]))


def test_an_entry_starts_from_its_own_yaml_and_pair_and_sets_label_and_knobs():
    mapping = "{method: cacheback, table: dynamic, label: no_frozen}"
    cfg = compose(["method=pld", "method.num_tokens=5", f"compare=[cacheback,{mapping}]"])
    plain, labelled = (compose_entry(cfg, entry) for entry in cfg.compare)
    assert plain.method == composed().method
    knobs = {"label": "no_frozen", "table": "dynamic"}
    assert labelled.method == OmegaConf.merge(plain.method, knobs)
    assert cfg.method.name == "pld"
    # Everything else is the run's own.
    assert run_identity(plain)["generation"] == run_identity(cfg)["generation"]


PLACES = ("output_dir=/x", "data_dir=/x", "cache_dir=/x", "paths.root=/x", "fresh=true",
          "resume=force", "shard=0/2", "dataset.special_tokens=parse",
          "batch.budget=global")  # fmt: skip
MOVING = ("seed=1", "method.total_draft_len=20", "method.label=x", "compare=[pld]", "repeats=2",
          "dataset.limit=3", "model.dtype=float64", "generation.max_new_tokens=7",
          "baseline=false", "budgets=published", "dataset.special_tokens=text",
          "engine.weights=stored", "batch.size=2")  # fmt: skip


def test_run_key_changes_with_what_may_move_a_number_alone():
    keys = [run_key(compose(typed)) for typed in ([], PLACES, *([word] for word in MOVING))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1


# One of each family always; building the others, up to 72 billion parameters, takes their time.
FAMILIES = {"vicuna7b", "llama3_8b", "mistral7b", "phi3_mini", "qwen25_7b", "qwen3_8b"}


@pytest.mark.parametrize(
    "name",
    quick_first([name for name in option_names("model") if name != "local"], FAMILIES),
)
def test_shape_config_builds_the_published_architecture(name):
    model = compose([f"model={name}"]).model
    numbers = OmegaConf.to_container(model.shape_config)
    kind = numbers.pop("model_type")
    config = AutoConfig.for_model(kind, **numbers)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    count = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    assert count == pytest.approx(PARAMETERS[name], rel=1e-3)
    # Every number arrives: none is a misspelt key that transformers keeps and nobody reads.
    theta, scaling = numbers.pop("rope_theta"), numbers.pop("rope_scaling", {})
    valid = {
        "head_dim",
        *AutoConfig.for_model(kind).to_dict(),
    }  # which Falcon-H1 reads if it is there
    assert set(numbers) <= valid
    assert config.rope_parameters["rope_theta"] == theta
    assert scaling.items() <= config.rope_parameters.items()
    assert model.dtype in DTYPES
    assert model.context_length <= config.max_position_embeddings
    assert model.source
    if name == "phi3_mini":
        assert config.sliding_window == 2047


def needed_by(experiment):
    """List the keys of methods that the file's own command names."""
    lines = (CONF_DIR / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    return [word for word in lines[1].split() if word.startswith("method.")]


@pytest.mark.parametrize("name", option_names("experiment"))
def test_experiment_begins_with_its_command_and_is_valid(name):
    lines = (CONF_DIR / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# python run.py experiment={name}")
    cfg = composed(f"experiment={name}", *needed_by(name))
    check_values(cfg)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    papers = ("cacheback", "token_recycling", "card_table", "card_figure", "ngrammys_t", "ssd")
    if name.startswith(papers):  # tuned settings and scopes suit this machine
        assert cfg.budgets == "published"
        assert cfg.state_scope == "paper" or name.startswith("cacheback")
    check_instantiates(cfg.method)


@pytest.mark.slow
@pytest.mark.parametrize("name", option_names("experiment"))
def test_the_entries_of_an_experiment_are_valid_and_have_labels_of_their_own(name):
    methods = methods_of(name)
    for method in methods:
        check_instantiates(method)
    labels = [method.label or method.name for method in methods]
    assert len(set(labels)) == len(labels)


def check_instantiates(method: DictConfig) -> None:
    """Instantiate a method: knobs that it refuses would end an experiment."""
    knobs = OmegaConf.to_container(method, resolve=True)
    taken = with_parts({k: v for k, v in knobs.items() if k != "label"})
    assert isinstance(hydra.utils.instantiate(taken, _convert_="all"), Drafter)


def methods_of(experiment):
    cfg = composed(f"experiment={experiment}", *needed_by(experiment))
    return [cfg.method, *(compose_entry(cfg, entry).method for entry in cfg.compare)]


def test_experiments_cover_their_whole_grids():
    methods = methods_of("cacheback_budget")
    budgets = {
        (m.total_draft_len, m.chaining_reserved, m.merge)
        for m in methods
        if m.name == "cacheback" and m.budget_counts == "fixed"
    }
    reserved = {4: 0, 8: 1, 16: 2, 32: 5, 64: 10, 96: 16}
    assert budgets == {(t, c, merge) for t, c in reserved.items() for merge in (False, True)}
    assert {m.num_tokens for m in methods if m.name == "pld"} == {1, 2, 4, 8, 16, 32}
    rows = methods_of("cacheback_table1")
    assert {m.label: m.table for m in rows} == {
        "dual": "dual", "no_frozen": "dynamic", "only_frozen": "frozen",
    }  # fmt: skip
    assert {(m.total_draft_len, m.chaining_reserved, m.merge) for m in rows} == {(96, 16, False)}
    compared = composed("experiment=token_recycling_figure3").compare
    assert {entry.depth for entry in compared if "depth" in entry} == {3, 4, 5, 6, 7, 8}
    # No other grid is called the whole one.
    assert "batch_k=[" not in (CONF_DIR / "runner/cost.yaml").read_text()


def test_local_file_sets_this_machines_places(tmp_path, monkeypatch):
    shutil.copytree(CONF_DIR, tmp_path / "conf")
    (tmp_path / "conf/local/default.yaml").write_text(
        "# @package _global_\ndata_dir: /data\npaths: {results: /scratch}\n"
    )
    monkeypatch.setattr(paths, "CONF_DIR", tmp_path / "conf")
    cfg = compose()
    assert (cfg.data_dir, cfg.paths.results) == ("/data", "/scratch")
    assert compose(["data_dir=/other"]).data_dir == "/other"
