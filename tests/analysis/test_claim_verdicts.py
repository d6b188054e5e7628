"""Verdicts follow the stated rule, on numbers counted as the claim's source counts them."""

import dataclasses

import pytest

from analysis.runs.claims import Counting, compare, judge
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import Run, load_runs
from specbench.results.estimate import Estimate
from specbench.results.manifest import LabelInfo, ModelInfo
from specbench.results.statistics.summary import summarize
from tests.analysis.folders import RECORDS, claim

EXACT = Counting(speed="specbench_exact", baseline="eager", mat_counts_prompt=["pld"])
GRAPH = Counting(speed="end_to_end", baseline="graph", mat_counts_prompt=())


CLAIMED = {"speedup": 1.80, "mat": 2.40}
ALONE = {"mat": Estimate(2.40), "speedup": Estimate(1.80)}  # without intervals
WIDE = {"mat": Estimate(4.13, (0.94, 18.15))}


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
        # Without an interval nothing is known, however near the value is.
        *((claimed, ALONE, "cannot tell") for claimed in (CLAIMED, {"mat": 2.9})),
        # A wide interval agrees with nothing, and still refuses what lies far outside.
        *(({"mat": mat}, WIDE, "cannot tell") for mat in (2.42, 4.13, 18.0)),
        ({"mat": 40.0}, WIDE, "disagrees"),
        (CLAIMED, {"mat": Estimate(None), "speedup": Estimate(None)}, "not compared"),
        (CLAIMED, {"speedup": Estimate(None)}, "MAT agrees"),
        (CLAIMED, {"speedup": Estimate(1.50, (1.23, 1.83))}, "MAT agrees, speed cannot tell"),
    ],
)
def test_by_the_stated_rule(claimed, row, verdict):
    """Measured: MAT 2.40 in [2.3, 2.5], speedup 1.80 in [1.7, 1.9]."""
    measured = {"mat": Estimate(2.40, (2.3, 2.5)), "speedup": Estimate(1.80, (1.7, 1.9)), **row}
    assert compare(stating(**claimed), "overall", **measured) == verdict


def stating(**values):
    return claim(method="pld", values={name: {"overall": value} for name, value in values.items()})


@pytest.fixture(scope="module")
def run() -> Run:
    (found,) = load_runs([RECORDS])
    kept = [r for r in found.records if r.case_id != "90"]  # one failed
    kept = [r.replace(status="ok") for r in kept]
    return dataclasses.replace(found, records=kept)


def on_gpu(run: Run, engine: str = "eager", gpu: str = "NVIDIA GeForce RTX 4090", **more) -> Run:
    """The run as if measured on a GPU whose passes that engine ran."""
    model = ModelInfo(device="cuda", passes={"engine": engine})
    manifest = run.manifest.model_copy(
        update=dict(model=model, hardware={"gpus": [{"name": gpu}]}, **more)
    )
    return dataclasses.replace(run, manifest=manifest)


def with_eager(run: Run) -> Run:
    """With plain decoding launched kernel by kernel beside, which takes half as long again."""
    eager = [
        r.replace(label="ar_eager", wall_s=1.5 * r.wall_s, decode_s=1.5 * r.decode_s)
        for r in run.records
        if r.label == "ar"
    ]
    labels = {**run.manifest.labels, "ar_eager": LabelInfo(method="ar", knobs={"eager": True})}
    manifest = run.manifest.model_copy(update={"labels": labels})
    return dataclasses.replace(run, records=[*run.records, *eager], manifest=manifest)


def row_of(run: Run, label: str):
    rows = summarize(run.records, run.labels, "ar", n_resamples=50)
    return next(r for r in rows if (r["label"], r["task"]) == (label, "overall"))


def judged(run: Run, one):
    return judge(run, one, row_of(run, "pld"))


def end_to_end(run: Run, label: str) -> float:
    own = [r for r in run.records if r.label == label]
    return sum(r.n_new for r in own) / sum(r.wall_s for r in own)


class TestEqualTerms:
    def test_speed_is_judged_end_to_end_over_eager_plain_decoding(self, run):
        both = with_eager(on_gpu(run, "graph"))
        ratio = end_to_end(run, "pld") / (end_to_end(run, "ar") / 1.5)
        found = judged(both, stating(speedup=ratio))
        assert found.speedup.value == pytest.approx(ratio)
        # What it is over the graphs, which a table shows, is no counterpart of the claim.
        assert judged(both, stating(speedup=ratio / 1.5)).verdict == "disagrees"
        assert abs(found.speedup.value / row_of(run, "pld")["speedup"] - 1) > 0.2

    def test_an_eager_run_s_ar_is_the_eager_one(self, run):
        found = judged(on_gpu(run), stating(speedup=1.5))
        assert found.speedup.value == pytest.approx(end_to_end(run, "pld") / end_to_end(run, "ar"))

    def test_where_graphs_alone_were_run_the_verdict_says_what_to_run(self, run):
        graphs = on_gpu(run, "graph")
        found = judged(graphs, stating(mat=1.65, speedup=1.5))
        assert found.verdict == "MAT cannot tell; for speed run with engine.eager_baseline=true"
        assert judged(graphs, stating(speedup=1.5)).verdict.startswith("not compared; for speed")
        compiled = stating(speedup=1.5).model_copy(update={"counting": GRAPH})
        assert judged(on_gpu(run), compiled).verdict.endswith("for speed run with engine=graph")

    def test_spec_bench_s_formula_where_the_source_used_it(self, run):
        one = stating(speedup=1.5).model_copy(update={"counting": EXACT})
        found = judged(on_gpu(run), one)
        assert found.verdict.startswith("not compared; for speed run again")
        records = [r.replace(n_retokenized=r.n_new - 2) for r in run.records]

        def speeds(label, tokens):
            for case in {r.case_id for r in records}:
                own = [r for r in records if (r.label, r.case_id) == (label, case)]
                yield sum(getattr(r, tokens) for r in own) / sum(r.wall_s for r in own)

        found = judged(on_gpu(dataclasses.replace(run, records=records)), one)
        ratio = sum(speeds("pld", "n_new")) / sum(speeds("ar", "n_retokenized"))
        assert found.speedup.value == pytest.approx(ratio)

    def test_mat_counts_the_prompt_s_pass_where_the_source_does(self, run):
        own = [r for r in run.records if r.label == "pld"]
        theirs = sum(r.n_new for r in own) / sum(r.n_target_passes + 1 for r in own)
        one = stating(mat=theirs)
        assert judged(run, one).mat.value > theirs
        counted = judged(run, one.model_copy(update={"counting": EXACT}))
        assert counted.mat.value == pytest.approx(theirs)
        assert counted.mat.interval[0] < theirs < counted.mat.interval[1]

    @pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", None])
    def test_speed_is_not_compared_across_hardware(self, run, gpu):
        found = judged(on_gpu(run, gpu=gpu) if gpu else run, stating(mat=1.65, speedup=1.5))
        assert (found.verdict, found.speedup.value) == ("MAT cannot tell", None)
        two = stating(mat=1.65, speedup=1.5).model_copy(update={"gpu_count": 2})
        assert judged(on_gpu(run), two).verdict == "MAT cannot tell", "too few are other hardware"

    def test_predicted_speed_and_that_of_clocked_phases_reproduce_nothing(self, run):
        one = stating(mat=1.65, speedup=1.0)
        predicted = [r.replace(timing="predicted") for r in run.records]
        phased = {**run.manifest.config, "measure": {"phases": True}}
        for other in (
            on_gpu(dataclasses.replace(run, records=predicted)),
            on_gpu(run, config=phased),
        ):
            assert judged(other, one).verdict == "MAT cannot tell"

    def test_nothing_to_compare(self, run):
        assert judged(run, claim(model="smollm2_135m")).verdict == "other model"
        assert judged(on_gpu(run), claim(qualifier="up to")).verdict == "not compared"

    def test_the_note_below_a_table_says_how_it_was_counted_and_what_that_gave(self, run):
        one = stating(mat=1.75, speedup=1.5).model_copy(update={"counting": EXACT})
        (comparison,) = make_comparisons([run], claims=[one])
        (entry,) = [entry for entry in comparison.entries if entry.claim]
        note = entry.note("pld")
        assert "speed by Spec-Bench's speed.py over eager plain decoding" in note
        assert f"Counted so here: MAT {judged(run, one).mat}." in note
