"""The file of claims follows its own rules, and a claim stands beside its own settings only."""

import copy
import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from analysis.runs.claims import CLAIMS_FILE, claims_not_run, find_claim, load_claims
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.manifest import DraftInfo, LabelInfo, ModelInfo
from tests.analysis.folders import RECORDS, claim

ROOT = Path(__file__).resolve().parents[2]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other takes a second
FILE = yaml.load(CLAIMS_FILE.read_text(encoding="utf-8"), LOADER)
COUNTING = FILE["counting"]["default"]
# A table of rows of cells.
EAGLE2 = [exhibit["exhibit"] for exhibit in FILE["exhibits"]].index("eagle2_table1")
REST = {"paper": "token_recycling", "method": "rest"}  # whose store is of a corpus
# Methods of this project, run here or in a later version.
METHODS = {path.stem for path in (ROOT / "conf" / "method").glob("[a-z]*.yaml")}
# Models that the papers have and this project has no configuration of.
_FOREIGN = (
    r"all|unspecified.*|llama_7b|llama33_70b|deepseek_llama_8b|mixtral_8x7b"
    r"|gemma4_26b_a4b|qwen36_35b_a3b"
)


@pytest.fixture(scope="module")
def run() -> Run:
    return load_runs([RECORDS])[0]


def as_set(run: Run, label: str, **knobs) -> Run:
    """The run with a label's settings changed."""
    info = run.manifest.labels.get(label, LabelInfo())
    info = info.model_copy(update={"knobs": {**info.knobs, **knobs}})
    labels = {**run.manifest.labels, label: info}
    return dataclasses.replace(run, manifest=run.manifest.model_copy(update={"labels": labels}))


class TestFile:
    def test_names_are_ours(self):
        claims = load_claims()
        assert {c.method for c in claims} <= METHODS
        models = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
        assert all(re.fullmatch(_FOREIGN, c.model) for c in claims if c.model not in models)
        rows = [c.model_dump_json(exclude={"source"}) for c in claims]
        assert len(rows) == len(set(rows)), "no row is there twice"

    def test_numbers_are_plausible(self):
        limits = {"speedup": (0.9, 7), "mat": (1, 8), "tokens_per_s": (5, 400)}
        limits |= {"hit_rate": (0, 1), "batch_speedup": (0.7, 3.1), "mat_gain": (0, 1)}
        for one in load_claims():
            for metric, (low, high) in limits.items():
                for task, value in one.values.get(metric, {}).items():
                    assert low <= value <= high, (one.paper, one.exhibit, metric, task)

    def test_the_tables_are_whole(self):
        """Numbers of each exhibit, counted in the sources."""
        counted = {
            ("cacheback", "table1"): 9, ("token_recycling", "table1"): 171,
            ("token_recycling", "table1_mbpp"): 45, ("ngrammys", "table1"): 46,
            ("card", "table1"): 96, ("card", "table3"): 9,
            ("spec_bench", "leaderboard_3090"): 80, ("spec_bench", "leaderboard_a100"): 248,
            ("eagle", "eagle1"): 13, ("eagle", "eagle2_table1"): 92,
            ("eagle", "eagle3_table1"): 238, ("eagle", "eagle3_table2"): 6,
        }  # fmt: skip
        numbers = Counter()
        for one in load_claims():
            numbers[one.paper, one.exhibit] += sum(map(len, one.values.values()))
        assert {place: numbers[place] for place in counted} == counted

    def test_a_board_s_whole_lies_among_its_tasks(self):
        boards = [c for c in load_claims() if len(c.values.get("speedup", ())) > 6]
        assert len(boards) > 60
        for one in boards:
            tasks = [v for task, v in one.values["speedup"].items() if task != "overall"]
            assert min(tasks) <= one.value("speedup") <= max(tasks), one
            # Each task has as many questions, of speeds that differ: nearly the tasks' mean.
            assert one.value("speedup") == pytest.approx(sum(tasks) / 6, abs=0.09), one

    def test_a_printed_mean_is_that_of_its_row(self):
        """Three means of EAGLE-3's table are not, by up to a tenth."""
        off = []
        for exhibit in FILE["exhibits"]:
            for row in exhibit["claims"] if "mean" in exhibit.get("columns", ()) else ():
                *cells, mean = row["cells"].split()
                if "-" not in cells:
                    printed = float(mean.split("/")[0])
                    speedups = [float(cell.split("/")[0]) for cell in cells]
                    off.append(abs(sum(speedups) / len(speedups) - printed))
        assert len(off) > 20
        assert sum(difference > 0.0051 for difference in off) == 3
        assert max(off) < 0.1

    def test_ratios_agree_with_the_speeds_they_come_from(self):
        """Where a table gives both, tokens/s over ar's must be the speedup, to rounding."""
        by_place = {}
        for one in load_claims():
            if one.setting is None and one.value("tokens_per_s") and one.value("speedup"):
                place = (one.paper, one.exhibit, one.dataset, one.model, one.temperature)
                by_place.setdefault(place, {})[one.method] = one
        tables = [methods for methods in by_place.values() if "ar" in methods]
        assert sum(map(len, tables)) > 60
        for methods in tables:
            for one in methods.values():
                ratio = one.value("tokens_per_s") / methods["ar"].value("tokens_per_s")
                # CARD's table 1 is off by up to 0.04 in a few cells of its own.
                assert ratio == pytest.approx(one.value("speedup"), abs=0.05), one

    @pytest.mark.parametrize(
        ("exhibit", "row", "change", "message"),
        [
            (0, 1, {"speedupp": 1.0}, "cacheback, table1, claim 2: speedupp: Extra"),
            (0, 1, {"qualifier": "maybe"}, "claim 2: qualifier: Input should be 'up to'"),
            (0, 1, {"over": "pld"}, "claim 2: .*`over` goes with"),
            (0, 1, {"speedup": "fast"}, "claim 2: values.speedup.overall: Input should be a"),
            (0, 1, {"model": "m"}, "claim 2: 'm' is not described"),
            (EAGLE2, 0, {"cells": "1.82/2.36 1.99/2.61"}, "eagle2_table1: zip"),
            (3, None, {"hardware": "abacus"}, "'abacus' is not described"),
            (3, None, {"unheard_of": 1}, "claim 1: unheard_of: Extra inputs are not permitted"),
            (1, None, {"counting": COUNTING | {"speed": "wall"}}, "claim 1: counting.speed"),
        ],
    )
    def test_a_mistake_is_refused_with_its_place(self, tmp_path, exhibit, row, change, message):
        file = copy.deepcopy(FILE)
        table = file["exhibits"][exhibit]
        (table if row is None else table["claims"][row]).update(change)
        path = tmp_path / "claims.yaml"
        path.write_text(json.dumps(file))  # which is YAML, too
        with pytest.raises(ResultsError, match=message):
            load_claims(path)


class TestFindClaim:
    @pytest.mark.parametrize(("label", "mat"), [("cacheback", 2.42), ("no_frozen", 1.96)])
    def test_knobs_choose_among_a_method_s_rows(self, run, label, mat):
        assert find_claim(run, label, "cacheback", load_claims()).value("mat") == mat

    @pytest.mark.parametrize(
        ("worse", "better"),
        [
            ({"model": "vicuna13b", "own": True}, {}),  # the same model before all else
            ({}, {"own": True}),  # the method's own paper before another's
            ({"own": True}, {"knobs": {"table": "dual"}}),  # but settings that are named before it
            ({"values": {"tokens_per_s": {"overall": 100.0}}, "own": True}, {}),
            ({"model": "vicuna33b", "size": 33.0}, {"model": "vicuna13b", "size": 13.0}),
            ({"model": "m", "size": 4.0}, {"model": "vicuna13b", "size": 13.0}),
            ({}, {"setting": "cacheback"}),  # that of the very label
        ],
    )
    def test_of_several_the_best_is_shown_and_the_other_where_it_is_alone(self, run, worse, better):
        model = ModelInfo(parameters=10_000_000_000)
        manifest = run.manifest.model_copy(update={"model": model})
        run = dataclasses.replace(run, manifest=manifest)
        worse, better = claim(**worse), claim(**better)
        assert find_claim(run, "cacheback", "cacheback", [worse, better]) == better
        assert find_claim(run, "cacheback", "cacheback", [worse]) == worse

    @pytest.mark.parametrize(
        "change",
        [
            {"usual": {"unheard_of": 1, "leader_len": 1}},
            {"usual": {"leader_len": 2}, "knobs": {"leader_len": 1}},  # a claim's own come first
        ],
    )
    def test_usual_settings_that_the_run_does_not_know_are_taken_for_granted(self, run, change):
        assert find_claim(run, "cacheback", "cacheback", [claim(**change)]) is not None

    @pytest.mark.parametrize(
        ("method", "knobs", "mat"),
        [
            ("token_recycling", {"state_scope": "run", "learn_prompt": False}, 2.70),
            ("token_recycling", {"state_scope": "turn", "learn_prompt": False}, 2.347),
            ("token_recycling", {"state_scope": "run", "learn_prompt": True, "levels": None}, 2.83),
            ("token_recycling", {"learn_prompt": True, "levels": [7, 20, 21, 8, 4]}, None),
            ("cacheback", {"state_scope": "turn", "merge": False, "budget_counts": "paper"}, 2.42),
            ("cacheback", {"state_scope": "prompt"}, 2.42),
            ("cacheback", {"state_scope": "run"}, None),
            ("cacheback", {"merge": True}, None),
            ("lookahead", {"ngram": 5, "window": 7, "guesses": 7}, 1.64),
            ("lookahead", {"ngram": 5, "window": 7, "guesses": 7, "lost_bonus": False}, None),
            ("rest", {"matches": "first", "choices": 64}, 1.84),
            ("rest", {"matches": "even", "choices": 64}, None),
            ("sps", {"gamma": 5, "schedule": "heuristic"}, 2.28),
            ("sam", {"automata": "both", "max_predicts": 40}, 2.30),
            ("sam", {"automata": "dynamic", "max_predicts": 6}, None),
        ],
    )
    def test_other_settings_than_the_source_s_have_no_claim(self, run, method, knobs, mat):
        found = find_claim(as_set(run, method, **knobs), method, method, load_claims())
        assert (found and found.value("mat")) == mat

    @pytest.mark.parametrize(
        ("auxiliary", "shown"),
        [
            (None, (False, False, True)),
            ({"name": "token_recycling", "tree": "sam_60", "k": 8}, (True, True, False)),
            ({"name": "token_recycling", "tree": "template", "k": 8}, (False, True, False)),
            ({"name": "pld"}, (False, False, False)),
        ],
    )
    def test_a_method_within_a_method_is_matched_by_its_name_and_knobs(self, run, auxiliary, shown):
        """Claims with a part of these knobs, with a part of this name, and with none."""
        run = as_set(run, "sam", auxiliary=auxiliary)
        part = {"name": "token_recycling", "tree": "sam_60"}
        claims = [
            claim(method="sam", knobs={"auxiliary": part}, usual={"auxiliary": None}),
            claim(method="sam", knobs={"auxiliary": "token_recycling"}),
            claim(method="sam", usual={"auxiliary": None}),
        ]
        found = [find_claim(run, "sam", "sam", [one]) is one for one in claims]
        assert tuple(found) == shown

    @pytest.mark.parametrize(
        ("shown", "terms"),
        [
            (True, {"dtype": "float16", "prompt_form": "of which the run knows nothing"}),
            (False, {"dtype": "bfloat16"}),
            (True, {"dtype": ["bfloat16", "float16"], "max_new_tokens": 64}),
            (False, {"max_new_tokens": 1024}),
            (True, {"draft": "vicuna-68m", "corpus": "openwebtext"}),
            (False, {"draft": "vicuna-160m"}),
            (False, {"corpus": "ultrachat"}),
            (True, {"questions": [str(i) for i in range(81, 200)]}),
            (False, {"questions": [str(i) for i in range(82, 200)]}),
            (True, {"template": "plain", "thinking": False}),
            (False, {"template": "vicuna_v1.1"}),
            (False, {"thinking": True}),
        ],
    )
    def test_a_claim_about_the_same_model_must_be_on_the_run_s_terms(self, run, terms, shown):
        table = {"table": {"header": {"corpus": {"name": "openwebtext"}}}}
        drafts = {"cacheback": DraftInfo(id="double7/vicuna-68m")}
        info = run.manifest.model.model_copy(
            update={"drafts": drafts, "artefacts": {"cacheback": table}}
        )
        written = {"template": "plain", "template_kwargs": {"enable_thinking": False}}
        config = {
            **run.manifest.config,
            "generation": {"max_new_tokens": 64},
            "model": {**run.manifest.config.get("model", {}), **written},
        }
        manifest = run.manifest.model_copy(update={"model": info, "config": config})
        run = dataclasses.replace(run, manifest=manifest)
        judged, other = claim(terms=terms), claim(terms=terms, model="vicuna13b")
        found = find_claim(run, "cacheback", "cacheback", [judged, other])
        assert found == (judged if shown else None), "no other model's in its place"
        assert find_claim(run, "cacheback", "cacheback", [other]) == other, "for orientation"

    @pytest.mark.parametrize(
        ("place", "terms"),
        [
            (
                {"paper": "card", "exhibit": "figure6_logs", "dataset": "gsm8k"},
                {
                    "dtype": "bfloat16", "max_new_tokens": 512, "prompt_form": "card",
                    "questions": ["11", "12", "13", "14", "15"], "draft": "Llama-3.2-1B-Instruct",
                },
            ),
            ({**REST, "dataset": "specbench"}, {"corpus": "ultrachat"}),
            ({**REST, "dataset": "mbpp"}, {"corpus": "stack_python"}),
        ],
    )  # fmt: skip
    def test_the_ledger_says_what_a_source_s_numbers_were_made_with(self, place, terms):
        found = [c.terms for c in load_claims() if place.items() <= c.model_dump().items()]
        assert found and all(terms.items() <= one.items() for one in found)

    @pytest.mark.parametrize(
        "change",
        [
            {"dataset": "gsm8k"},
            {"method": "pld"},
            {"temperature": 1.0},
            {"knobs": {"table": "frozen"}},
            {"knobs": {"unheard_of": 1}},
            {"usual": {"leader_len": 2}},
            {"setting": "shuffle"},
            {"over": "pld", "values": {"gain": {"overall": 0.3}}},
            {"model": "all"},
            {"values": {"draft_nodes": {"overall": 80.0}}},
        ],
    )
    def test_what_does_not_apply_is_not_shown(self, run, change):
        assert find_claim(run, "cacheback", "cacheback", [claim(**change)]) is None

    def test_methods_that_were_not_run(self, run):
        found = claims_not_run(run, {"ar", "cacheback", "pld"}, load_claims())
        by_method = {c.method: c for c in found}
        assert [*by_method] == sorted(by_method)
        assert {"token_recycling", "rest", "medusa", "eagle2"} <= by_method.keys()
        assert not {"ar", "cacheback", "pld"} & by_method.keys()
        assert {c.model for c in found} == {"vicuna7b"}
        assert by_method["token_recycling"].own, "the method's own paper is preferred"
