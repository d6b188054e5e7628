"""Claims: the file follows its rules, rows show claims of their settings, and are compared."""

import copy
import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from analysis.runs.claims import (
    CLAIMS_FILE,
    CountingRule,
    check_claim,
    claims_not_run,
    compare,
    find_claim,
    load_claims,
)
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.cells import NumberCell
from specbench.results.manifest import DraftInfo, LabelInfo, ModelInfo
from specbench.results.statistics.summary import summarize
from tests.analysis.folders import RECORDS, claim

ROOT = Path(__file__).resolve().parents[2]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other takes a second
FILE = yaml.load(CLAIMS_FILE.read_text(encoding="utf-8"), LOADER)
# A table of rows of cells.
EAGLE2 = [exhibit["exhibit"] for exhibit in FILE["exhibits"]].index("eagle2_table1")
# Methods of this project, run here or in a later version.
METHODS = {path.stem for path in (ROOT / "conf" / "method").glob("[a-z]*.yaml")}
# Models that the papers have and this project has no configuration of.
_FOREIGN = (
    r"all|unspecified.*|llama_7b|llama33_70b|deepseek_llama_8b|mixtral_8x7b"
    r"|gemma4_26b_a4b|qwen36_35b_a3b"
)
EXACT = CountingRule(speed="specbench_exact", baseline="eager", mat_counts_prompt=["pld"])
GRAPH = CountingRule(speed="end_to_end", baseline="graph", mat_counts_prompt=())


@pytest.fixture(scope="module")
def run() -> Run:
    return load_runs([RECORDS])[0]


def with_manifest(run: Run, **changes) -> Run:
    return dataclasses.replace(run, manifest=run.manifest.model_copy(update=changes))


class TestFile:
    def test_names_are_ours_and_no_row_is_there_twice(self):
        claims = load_claims()
        assert {c.method for c in claims} <= METHODS
        models = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
        assert all(re.fullmatch(_FOREIGN, c.model) for c in claims if c.model not in models)
        rows = [c.model_dump_json(exclude={"source"}) for c in claims]
        assert len(rows) == len(set(rows))

    def test_the_tables_are_whole(self):
        """Compare with the numbers of each exhibit, counted in the sources."""
        counted = {
            ("cacheback", "table1"): 9, ("token_recycling", "table1"): 171,
            ("token_recycling", "table1_mbpp"): 45, ("ngrammys", "table1"): 46,
            ("card", "table1"): 96, ("card", "table3"): 9,
            ("spec_bench", "leaderboard_3090"): 80, ("spec_bench", "leaderboard_a100"): 248,
            ("eagle", "eagle1"): 13, ("eagle", "eagle2_table1"): 92,
            ("eagle", "eagle3_table1"): 238, ("eagle", "eagle3_table2"): 6,
        }  # fmt: skip
        numbers = Counter()
        for c in load_claims():
            numbers[c.paper, c.exhibit] += sum(map(len, c.values.values()))
        assert {exhibit: numbers[exhibit] for exhibit in counted} == counted

    def test_a_board_s_whole_is_nearly_the_mean_of_its_tasks(self):
        boards = [c for c in load_claims() if len(c.values.get("speedup", ())) > 6]
        assert len(boards) > 60
        for c in boards:
            tasks = [v for task, v in c.values["speedup"].items() if task != "overall"]
            # Each task has as many questions, of speeds that differ.
            assert c.value("speedup") == pytest.approx(sum(tasks) / 6, abs=0.09), c

    def test_ratios_agree_with_the_speeds_they_come_from(self):
        """If a table gives both, tokens/s over ar's must be the speedup, up to rounding."""
        by_exhibit = {}
        for c in load_claims():
            if c.setting is None and c.value("tokens_per_s") and c.value("speedup"):
                exhibit = (c.paper, c.exhibit, c.dataset, c.model, c.temperature)
                by_exhibit.setdefault(exhibit, {})[c.method] = c
        tables = [methods for methods in by_exhibit.values() if "ar" in methods]
        assert sum(map(len, tables)) > 60
        for methods in tables:
            for c in methods.values():
                ratio = c.value("tokens_per_s") / methods["ar"].value("tokens_per_s")
                # CARD's table 1 is off by up to 0.04 in a few cells of its own.
                assert ratio == pytest.approx(c.value("speedup"), abs=0.05), c

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
            (1, None, {"counting": {"speed": "wall"}}, "claim 1: counting.speed"),
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


def matching_claim(run: Run, *claims, label="cacheback", method="cacheback"):
    return find_claim(run, label, method, claims or load_claims())


def as_set(run: Run, label: str, **knobs) -> Run:
    """Change a label's settings in the run."""
    info = run.manifest.labels.get(label, LabelInfo())
    info = info.model_copy(update={"knobs": {**info.knobs, **knobs}})
    return with_manifest(run, labels={**run.manifest.labels, label: info})


class TestFindClaim:
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
        run = with_manifest(run, model=ModelInfo(parameters=10_000_000_000))
        worse, better = claim(**worse), claim(**better)
        assert matching_claim(run, worse, better) == better
        assert matching_claim(run, worse) == worse

    @pytest.mark.parametrize(
        ("label", "method", "knobs", "mat"),
        [
            ("no_frozen", "cacheback", {}, 1.96),
            ("token_recycling",) * 2 + ({"state_scope": "run", "learn_prompt": False}, 2.70),
            ("token_recycling",) * 2 + ({"state_scope": "turn", "learn_prompt": False}, 2.347),
            ("token_recycling",) * 2 + ({"state_scope": "run", "learn_prompt": True}, 2.83),
            ("token_recycling",) * 2 + ({"learn_prompt": True, "levels": [7, 20, 21, 8, 4]}, None),
            ("cacheback",) * 2 + ({"state_scope": "turn", "budget_counts": "paper"}, 2.42),
            ("cacheback",) * 2 + ({"state_scope": "prompt"}, 2.42),
            ("cacheback",) * 2 + ({"state_scope": "run"}, None),
            ("cacheback",) * 2 + ({"merge": True}, None),
            ("lookahead",) * 2 + ({"ngram": 5, "window": 7, "guesses": 7}, 1.64),
            ("lookahead",) * 2 + ({"ngram": 5, "lost_bonus": False}, None),
            ("rest",) * 2 + ({"matches": "first", "choices": 64}, 1.84),
            ("rest",) * 2 + ({"matches": "even", "choices": 64}, None),
            ("sam",) * 2 + ({"automata": "both", "max_predicts": 40}, 2.30),
            ("sam",) * 2 + ({"automata": "dynamic", "max_predicts": 6}, None),
        ],
    )
    def test_other_settings_than_the_source_s_have_no_claim(self, run, label, method, knobs, mat):
        match = matching_claim(as_set(run, label, **knobs), label=label, method=method)
        assert (match and match.value("mat")) == mat

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
        """Try claims with some of these knobs, with this name only, and without the part."""
        run = as_set(run, "sam", auxiliary=auxiliary)
        part = {"name": "token_recycling", "tree": "sam_60"}
        claims = [
            claim(method="sam", knobs={"auxiliary": part}, usual={"auxiliary": None}),
            claim(method="sam", knobs={"auxiliary": "token_recycling"}),
            claim(method="sam", usual={"auxiliary": None}),
        ]
        matches = [matching_claim(run, c, label="sam", method="sam") is c for c in claims]
        assert tuple(matches) == shown

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
        model = run.manifest.model.model_copy(
            update={"drafts": drafts, "artefacts": {"cacheback": table}}
        )
        written = {"template": "plain", "template_kwargs": {"enable_thinking": False}}
        config = {**run.manifest.config, "generation": {"max_new_tokens": 64}}
        config["model"] = {**config["model"], **written}
        run = with_manifest(run, model=model, config=config)
        judged, other = claim(terms=terms), claim(terms=terms, model="vicuna13b")
        assert matching_claim(run, judged, other) == (judged if shown else None), "no other model's"
        assert matching_claim(run, other) == other, "for orientation"

    @pytest.mark.parametrize(
        ("change", "shown"),
        [
            # Settings that the run did not record are assumed; the claim's knobs come first.
            ({"usual": {"unheard_of": 1, "leader_len": 1}}, True),
            ({"usual": {"leader_len": 2}, "knobs": {"leader_len": 1}}, True),
            ({"usual": {"leader_len": 2}}, False),
            ({"knobs": {"table": "frozen"}}, False),
            ({"knobs": {"unheard_of": 1}}, False),
            ({"dataset": "gsm8k"}, False),
            ({"method": "pld"}, False),
            ({"temperature": 1.0}, False),
            ({"setting": "shuffle"}, False),
            ({"over": "pld", "values": {"gain": {"overall": 0.3}}}, False),
            ({"model": "all"}, False),
            ({"values": {"draft_nodes": {"overall": 80.0}}}, False),
        ],
    )
    def test_what_does_not_apply_is_not_shown(self, run, change, shown):
        assert (matching_claim(run, claim(**change)) is not None) == shown

    def test_methods_that_were_not_run(self, run):
        by_method = {c.method: c for c in claims_not_run(run, {"ar", "pld"}, load_claims())}
        assert [*by_method] == sorted(by_method)
        assert {"token_recycling", "rest", "medusa", "eagle2"} <= by_method.keys()
        assert not {"ar", "pld"} & by_method.keys()
        assert {c.model for c in by_method.values()} == {"vicuna7b"}
        assert by_method["token_recycling"].own, "the method's own paper is preferred"


# --- verdicts -------------------------------------------------------------------------------------

CLAIMED = {"speedup": 1.80, "mat": 2.40}
ALONE = {"mat": NumberCell(2.40), "speedup": NumberCell(1.80)}  # without intervals
WIDE = {"mat": NumberCell(4.13, (0.94, 18.15))}


@pytest.mark.parametrize(
    ("claimed", "row", "verdict"),
    [
        (CLAIMED, {}, "agrees"),
        ({"speedup": 2.5, "mat": 2.40}, {}, "MAT agrees, speed disagrees"),
        ({"speedup": 1.80, "mat": 2.9}, {}, "MAT disagrees, speed agrees"),
        ({"speedup": 2.5, "mat": 2.9}, {}, "disagrees"),
        # The margins are those stated, at both ends of the interval and on both sides.
        *(({"mat": mat}, {}, "agrees") for mat in (2.3 * 1.049, 2.5 / 1.049)),
        *(
            ({"mat": mat}, {}, "cannot tell")
            for mat in (2.3 * 1.051, 2.5 / 1.051, 2.5 * 1.049, 2.3 / 1.049)
        ),
        *(({"mat": mat}, {}, "disagrees") for mat in (2.5 * 1.051, 2.3 / 1.051)),
        ({"speedup": 1.7 * 1.099}, {}, "agrees"),
        ({"speedup": 1.7 * 1.101}, {}, "cannot tell"),
        ({"speedup": 1.9 * 1.101}, {}, "disagrees"),
        # Without an interval there is no verdict, however near the value is.
        *((claimed, ALONE, "cannot tell") for claimed in (CLAIMED, {"mat": 2.9})),
        # A wide interval agrees with no claim, but rejects claims far outside.
        *(({"mat": mat}, WIDE, "cannot tell") for mat in (2.42, 4.13, 18.0)),
        ({"mat": 40.0}, WIDE, "disagrees"),
        (CLAIMED, {"mat": NumberCell(None), "speedup": NumberCell(None)}, "not compared"),
        (CLAIMED, {"speedup": NumberCell(None)}, "MAT agrees"),
        (CLAIMED, {"speedup": NumberCell(1.50, (1.23, 1.83))}, "MAT agrees, speed cannot tell"),
    ],
)
def test_a_verdict_follows_the_stated_rule(claimed, row, verdict):
    """Measured: MAT 2.40 in [2.3, 2.5], speedup 1.80 in [1.7, 1.9]."""
    measured = {"mat": NumberCell(2.40, (2.3, 2.5)), "speedup": NumberCell(1.80, (1.7, 1.9)), **row}
    assert compare(stating(**claimed), "overall", **measured) == verdict


def stating(counting=None, **values):
    values = {name: {"overall": value} for name, value in values.items()}
    more = {"counting": counting} if counting else {}
    return claim(method="pld", values=values, **more)


@pytest.fixture(scope="module")
def whole(run) -> Run:
    """Return the run without its failures."""
    records = [r.replace(status="ok") for r in run.records if r.case_id != "90"]
    return dataclasses.replace(run, records=records)


def on_gpu(run: Run, engine: str = "eager", gpu: str = "NVIDIA GeForce RTX 4090", **more) -> Run:
    """Return the run as if measured on a GPU with that engine."""
    model = ModelInfo(device="cuda", passes={"engine": engine})
    return with_manifest(run, model=model, hardware={"gpus": [{"name": gpu}]}, **more)


def row_of(run: Run, label: str):
    rows = summarize(run.records, run.labels, "ar", n_resamples=50)
    return next(r for r in rows if (r["label"], r["task"]) == (label, "overall"))


def judged(run: Run, stated):
    return check_claim(run, stated, row_of(run, "pld"))


def per_second(run: Run, label: str, tokens="n_new") -> float:
    turns = [r for r in run.records if r.label == label]
    return sum(getattr(r, tokens) for r in turns) / sum(r.wall_s for r in turns)


class TestEqualTerms:
    def test_speed_is_judged_end_to_end_over_eager_plain_decoding(self, whole):
        """Eager plain decoding takes 1.5 times as long; a speedup over graphs is not comparable."""
        eager = [
            r.replace(label="ar_eager", wall_s=1.5 * r.wall_s, decode_s=1.5 * r.decode_s)
            for r in whole.records
            if r.label == "ar"
        ]
        labels = {**whole.manifest.labels, "ar_eager": LabelInfo(method="ar")}
        labels["ar_eager"].knobs["eager"] = True
        both = dataclasses.replace(whole, records=[*whole.records, *eager])
        both = on_gpu(both, "graph", labels=labels)
        ratio = 1.5 * per_second(whole, "pld") / per_second(whole, "ar")
        result = judged(both, stating(speedup=ratio))
        assert result.speedup.value == pytest.approx(ratio)
        assert judged(both, stating(speedup=ratio / 1.5)).status == "disagrees"
        assert abs(result.speedup.value / row_of(whole, "pld")["speedup"] - 1) > 0.2
        # An eager run's ar is the eager one.
        assert judged(on_gpu(whole), stating(speedup=1.5)).speedup.value == pytest.approx(
            ratio / 1.5
        )

    def test_where_graphs_alone_were_run_the_verdict_says_what_to_run(self, whole):
        graphs = on_gpu(whole, "graph")
        verdict = judged(graphs, stating(mat=1.65, speedup=1.5)).status
        assert verdict == "MAT cannot tell; for speed run with engine.eager_baseline=true"
        assert judged(graphs, stating(speedup=1.5)).status.startswith("not compared; for speed")
        compiled = judged(on_gpu(whole), stating(GRAPH, speedup=1.5))
        assert compiled.status.endswith("for speed run with engine=graph")

    def test_spec_bench_s_formula_where_the_source_used_it(self, whole):
        stated = stating(EXACT, speedup=1.5)
        assert judged(on_gpu(whole), stated).status.startswith("not compared; for speed run again")
        records = [r.replace(n_retokenized=r.n_new - 2) for r in whole.records]

        def mean_speed(label, tokens):
            cases = {r.case_id: [] for r in records}
            for r in records:
                cases[r.case_id] += [r] if r.label == label else []
            return sum(
                sum(getattr(r, tokens) for r in turns) / sum(r.wall_s for r in turns)
                for turns in cases.values()
            )

        result = judged(on_gpu(dataclasses.replace(whole, records=records)), stated)
        ratio = mean_speed("pld", "n_new") / mean_speed("ar", "n_retokenized")
        assert result.speedup.value == pytest.approx(ratio)

    def test_mat_counts_the_prompt_s_pass_where_the_source_does_and_a_note_says_so(self, whole):
        turns = [r for r in whole.records if r.label == "pld"]
        theirs = sum(r.n_new for r in turns) / sum(r.n_target_passes + 1 for r in turns)
        assert judged(whole, stating(mat=theirs)).mat.value > theirs
        counted = judged(whole, stating(EXACT, mat=theirs))
        assert counted.mat.value == pytest.approx(theirs)
        assert counted.mat.interval[0] < theirs < counted.mat.interval[1]
        (comparison,) = make_comparisons([whole], claims=[stating(EXACT, mat=theirs)])
        (entry,) = [entry for entry in comparison.entries if entry.claim]
        note = entry.note("pld")
        assert "speed by Spec-Bench's speed.py over eager plain decoding" in note
        assert f"Counted the same way here: MAT {counted.mat}." in note

    def test_other_hardware_predictions_and_clocked_phases_reproduce_no_speed(self, whole):
        predicted = [r.replace(timing="predicted") for r in whole.records]
        phased = {**whole.manifest.config, "measure": {"phases": True}}
        stated = stating(mat=1.65, speedup=1.5)
        for other, other_claim in (
            (whole, stated),
            (on_gpu(whole, gpu="NVIDIA A100-SXM4-80GB"), stated),
            (on_gpu(whole), stated.model_copy(update={"gpu_count": 2})),  # too few
            (on_gpu(dataclasses.replace(whole, records=predicted)), stated),
            (on_gpu(whole, config=phased), stated),
        ):
            result = judged(other, other_claim)
            assert (result.status, result.speedup.value) == ("MAT cannot tell", None)

    def test_nothing_to_compare(self, whole):
        assert judged(whole, claim(model="smollm2_135m")).status == "other model"
        assert judged(on_gpu(whole), claim(qualifier="up to")).status == "not compared"
