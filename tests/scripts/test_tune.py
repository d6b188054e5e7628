"""Tuning on a made-up trace and surface: the budget, the splits, and what is reported."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from scripts import tune
from specbench.config.compose import compose, option_names
from specbench.config.knobs import check_method
from specbench.errors import ConfigurationError
from specbench.paths import CONF_DIR
from specbench.replay.cost_surface import CostSurface, Grid
from specbench.replay.traces import RecordedTurn, Traces, load_traces, write_pack

VOCAB = 60


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    """Twelve texts of recurring phrases of five tokens: drafts of more than four are cut short."""
    rng = np.random.default_rng(0)
    turns: dict = {}
    for i in range(12):
        phrases = rng.integers(0, VOCAB, (6, 5))
        text = phrases[rng.integers(0, 6, 40)].reshape(-1)
        turns["ar", str(i), 0] = RecordedTurn(
            label="ar", method="ar", task="qa" if i < 8 else "rag", category="qa", case_id=str(i),
            turn=0, stream_index=i, seed=i, prompt_ids=text[:100], output_ids=text[100:160],
        )  # fmt: skip
    model = {
        "eos_ids": [], "context_length": 4096, "vocab_size": VOCAB, "tokenizer_hash": "none",
    }  # fmt: skip
    config = {
        "model": {"name": "smollm2_135m"}, "dataset": {"name": "toys"},
        "generation": {"max_new_tokens": 60, "temperature": 0.0}, "seed": 0,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("pack") / "pack.jsonl"
    write_pack(Traces(path, model, config, "k", "h", turns, ()), path)
    return path


@pytest.fixture(scope="module")
def surface(tmp_path_factory) -> Path:
    """Four rows ride along for free, every further one costs as much as a pass."""
    rows, contexts = (1, 5, 6, 65), (1, 500)
    seconds = np.array([1.0, 1.0, 2.0, 61.0])
    tree = np.repeat(np.repeat(seconds[:, None, None], 2, axis=1), 2, axis=2)
    found = CostSurface(
        model={"name": "smollm2_135m"},
        machine={"hardware": {"cpu": "a CPU", "gpus": []}},
        prefill=Grid({"context": contexts}, np.ones((2, 1))),
        tree=Grid({"rows": rows, "context": contexts}, tree),
    )
    path = tmp_path_factory.mktemp("surface") / "surface.json"
    found.write(path)
    return path


def test_the_tuned_setting_is_the_one_that_the_surface_pays_for(pack, surface, tmp_path, capsys):
    out = tmp_path / "report.json"
    arguments = [str(pack), str(surface), "pld", "suffix_decoding", "--trials", "8"]
    assert tune.main([*arguments, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["method"] for row in report["rows"]] == ["pld", "suffix_decoding"]
    assert {row["trials"] for row in report["rows"]} == {8}
    assert report["cases"] == {"development": 6, "held-out": 6}
    for row in report["rows"]:
        default, tuned, best = (row[name] for name in (tune.DEFAULT, tune.TUNED, tune.HINDSIGHT))
        assert default["knobs"] == {}
        assert tuned["development"] >= default["development"]
        assert best["held-out"] >= max(default["held-out"], tuned["held-out"])
    pld = report["rows"][0]
    # The default drafts ten tokens, of which six are paid for and most of them are rejected.
    assert pld[tune.DEFAULT]["held-out"] < 1 < pld[tune.TUNED]["held-out"]
    assert pld[tune.TUNED]["knobs"]["num_tokens"] <= 4
    shown = capsys.readouterr().out
    assert "PREDICTED" in shown
    assert "best in hindsight" in shown
    # Fixed seeds: the same choices. (Drafting is timed, so speeds differ in later digits.)
    again = tmp_path / "again.json"
    assert tune.main([*arguments, "--out", str(again)]) == 0
    first, second = (json.loads(path.read_text())["rows"] for path in (out, again))
    assert [row[tune.TUNED]["knobs"] for row in first] == [
        row[tune.TUNED]["knobs"] for row in second
    ]


def test_the_splits_are_disjoint_complete_and_even_over_tasks(pack):
    traces = load_traces(pack)
    parts = tune.split(traces, 0.5, seed=1)
    ids = {name: {turn.case_id for turn in turns} for name, turns in parts.items()}
    assert ids["development"] | ids["held-out"] == set(traces.cases())
    assert not ids["development"] & ids["held-out"]
    tasks = [turn.task for turn in parts["development"]]
    assert (tasks.count("qa"), tasks.count("rag")) == (4, 2)
    assert tune.split(traces, 0.5, seed=1)["held-out"] == parts["held-out"]
    with pytest.raises(ConfigurationError, match="cannot be split"):
        tune.split(traces, 0.01, seed=1)


def test_settings_that_contradict_themselves_use_up_budget_and_are_counted(pack, surface):
    scorer = tune.Scorer(load_traces(pack), CostSurface.read(surface), 0.5, 0)
    space = {"max_ngram": [1], "min_ngram": [3], "num_tokens": [3, 4]}
    row = tune.tune(scorer, "pld", space, 3, 0)
    assert row["refused"] == 3
    assert row[tune.TUNED]["knobs"] == {}


def yaml_of(method):
    return (CONF_DIR / "method" / f"{method}.yaml").read_text(encoding="utf-8")


def test_every_space_names_knobs_and_values_of_its_method():
    methods = [name for name in option_names("method") if "\nsearch:" in yaml_of(name)]
    assert {"pld", "cacheback", "ngrammys", "sam", "suffix_decoding", "rest"} <= set(methods)
    for method, space in tune.load_spaces(methods).items():
        cfg = compose([f"method={method}", "pair=none"])
        node = OmegaConf.to_container(cfg.method, resolve=True)
        for key, values in space.items():
            ends = values if isinstance(values, list) else [values["from"], values["to"]]
            for value in ends:
                check_method({**node, key: value})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pdl"], "Did you mean 'pld'"),
        (["oracle"], "search space"),
        (["pld", "--trials", "0"], "at least 1"),
        (["pld", "--share", "1"], "between 0 and 1"),
    ],
)
def test_bad_arguments_are_refused(pack, surface, arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        tune.main([str(pack), str(surface), *arguments])
