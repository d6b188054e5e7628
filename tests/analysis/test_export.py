"""Acceptance for other programs: the schemas, the identity, and runs that cannot be exported."""

import json
from dataclasses import replace

import pytest

from analysis import export
from analysis.runs.estimates import mat
from analysis.runs.load import load_runs
from specbench.errors import ResultsError
from specbench.results.formats import aiperf
from specbench.results.formats.spec_bench import Source, from_answer
from specbench.results.formats.speculation_profile import SpeculationProfile, profile_of
from specbench.results.lines import StepTrace, write_steps
from specbench.results.records import CASES, MANIFEST, STEPS
from specbench.storage import jsonl
from tests.analysis.folders import vouch
from tests.small_run import case_record

# By case: category, and by step what was committed and how deep the draft went.
STEPS_OF = {
    "a": ("qa", [(3, 3), (1, 2), (1, 0)]),
    "b": ("qa", [(4, 3), (2, 3)]),
    "c": ("math", [(1, 3), (1, 3)]),
}
CONFIG = {
    "model": {"name": "m", "template": "auto", "template_kwargs": {"enable_thinking": False}},
    "generation": {"temperature": 0.0, "top_p": 1, "max_new_tokens": 16},
}


def record(case, label, **changes):
    category, steps = STEPS_OF[case]
    committed = [n for n, _ in steps] if label == "pld" else [1] * sum(n for n, _ in steps)
    drafted = sum(d for _, d in steps) if label == "pld" else 0
    return case_record(
        case, label, 1 + sum(committed), category=category, committed_per_step=committed,
        n_drafted=drafted, stream_index=list(STEPS_OF).index(case), **changes,
    )  # fmt: skip


def trace(turn):
    depth = [d for _, d in STEPS_OF[turn.case_id][1]]
    depth = depth if turn.label == "pld" else [0] * len(turn.committed_per_step)
    committed = turn.committed_per_step
    return StepTrace(**turn.turn_id, drafted=depth, depth=depth, committed=committed)


def write(folder, **changes):
    folder.mkdir()
    records = [record(case, label, **changes) for case in STEPS_OF for label in ("ar", "pld")]
    jsonl.rewrite_jsonl(folder / CASES, (r.to_json() for r in records))
    knobs = {"max_ngram": 3, "table": "/home/someone/tables/t.json"}
    labels = {"ar": {}, "pld": {"method": "pld", "budget": "tuned", "knobs": knobs}}
    model = {"id": "/home/someone/org/m", "dtype": "float32", "template_sha": "f00"}
    manifest = {"labels": labels, "baseline": "ar", "config": CONFIG, "model": model}
    jsonl.write_json(folder / MANIFEST, {"schema_version": 2, **manifest})
    write_steps(folder / STEPS, map(trace, records))
    vouch(folder)
    return folder


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run")


def exported(run, to, out, *more):
    return export.main([str(run), "--to", to, "-o", str(out), *more])


def test_a_profile_by_hand(run, tmp_path, capsys):
    path = tmp_path / "new" / "profile.json"
    assert exported(run, "speculation_profile", path) == 0
    found = SpeculationProfile.read(path)
    # Seven steps committed 3, 1, 1, 4, 2, 1, 1: three accepted a token, two two, one three.
    assert found.marginal_accept_rates == pytest.approx([3 / 7, 2 / 7, 1 / 7])
    assert found.conditional_accept_rates == pytest.approx([3 / 7, 2 / 3, 1 / 2])
    assert found.mean_accept_length == pytest.approx(13 / 7)
    assert found.mean_accept_length_per_request == pytest.approx((5 / 3 + 3 + 1) / 3)
    assert found.acceptance_length_histogram == {1: 4, 2: 1, 3: 1, 4: 1}
    (loaded,) = load_runs([run])
    own = [r for r in loaded.records if r.label == "pld"]
    assert found.mean_accept_length == pytest.approx(mat(own).value), "MAT of our tables"
    assert found.per_category.keys() == {"math", "qa"}
    assert found.per_category["math"].marginal_accept_rates == [0, 0, 0]
    assert found.per_category["qa"].mean_accept_length == pytest.approx(11 / 5)
    said = found.measurement_conditions
    # Six steps had a draft; of the two that accepted two tokens both drafted a third.
    assert (said["num_steps"], said["steps_with_a_draft"]) == (7, 6)
    assert said["accept_rates_where_drafted"] == pytest.approx([3 / 6, 2 / 3, 1 / 2])
    assert (said["template"], said["thinking"], said["budget"]) == ("auto", False, "tuned")
    assert said["sampling"] == {"temperature": 0.0, "top_p": 1, "top_k": None}
    assert "someone" not in path.read_text(), "no folder of this machine"
    assert found.target_model["id"] == "org/m"
    assert "1.857" in capsys.readouterr().out


def test_a_record_per_request(run, tmp_path):
    path = tmp_path / "requests.jsonl"
    assert exported(run, "aiperf", path, "--label", "pld") == 0
    first = aiperf.read(path)[0]
    assert first.acceptance_histogram == {0: 2, 2: 1}
    assert (first.num_draft_tokens, first.num_accepted_draft_tokens) == (5, 2)
    assert (first.mean_acceptance_length, first.completion_tokens) == (pytest.approx(5 / 3), 6)
    assert (first.per_step_accepted, first.per_step_drafted) == ([2, 0, 0], [3, 2, 0])
    assert first.specbench["case_id"] == "a"
    lines = path.read_text().splitlines()
    spoilt = json.loads(lines[0]) | {"num_spec_steps": 4}
    path.write_text(json.dumps(spoilt) + "\n")
    with pytest.raises(jsonl.RecordError, match="num_spec_steps"):
        aiperf.read(path)


@pytest.mark.parametrize(("changes", "said"), [
    ({"per_step_accepted": [1, 1, 0]}, "per_step_accepted"),
    ({"per_step_drafted": [3, 2]}, "per_step_drafted"), ({"num_draft_tokens": 6}, "drafted"),
    ({"mean_acceptance_length": 2.0}, "1 . the sum"), ({"num_draft_tokens": 1}, "is above"),
])  # fmt: skip
def test_a_request_s_counts_must_agree(run, changes, said):
    (loaded,) = load_runs([run])
    made = export.acceptance_records(loaded, "pld")
    assert (
        sum(r.completion_tokens - 1 for r in made) / sum(r.num_spec_steps for r in made) == 13 / 7
    )
    aiperf.AcceptanceRecord.model_validate(made[0].model_dump())
    with pytest.raises(ValueError, match=said):
        aiperf.AcceptanceRecord.model_validate(made[0].model_dump() | changes)


def test_tokens_of_a_request_are_its_steps_and_accepted_ones(run):
    (loaded,) = load_runs([run])
    records = [replace(r, n_new=r.n_new + 1) for r in loaded.records]
    with pytest.raises(
        ResultsError, match=r"case a, turn 0: 7 new tokens are not .* 3 steps and 2"
    ):
        export.acceptance_records(replace(loaded, records=records), "pld")


def test_answers_hold_the_steps(run, tmp_path):
    assert exported(run, "spec_bench", tmp_path / "out", "--label", "pld") == 0
    (path,) = (tmp_path / "out").iterdir()
    lines, _ = jsonl.read_jsonl(path)
    source = Source("pld", "pld", "m", "d", "k")
    back = [turn for line in lines for turn in from_answer(line, source, 0)]
    steps = {case: [n for n, _ in steps] for case, (_, steps) in STEPS_OF.items()}
    assert {turn.case_id: turn.committed_per_step for turn in back} == steps
    said = lines[0]["specbench"]
    assert (said["template"], said["thinking"], said["budget"]) == ("auto", False, "tuned")
    assert said["sampling"] == {"temperature": 0.0, "top_p": 1, "top_k": None}
    assert "someone" not in path.read_text(), "no folder of this machine"


@pytest.mark.parametrize(("fault", "why"), [
    ("steps", "no single steps"), ("disk", "m-pld-float32"), ("reading", "Nothing was written"),
])  # fmt: skip
def test_labels_are_exported_all_or_none(run, tmp_path, capsys, monkeypatch, fault, why):
    (tmp_path / "out").mkdir()
    if fault == "steps":  # of the second label only totals are known
        lines = list(map(json.loads, (run / CASES).read_text().splitlines()))
        served = {"text": "t", "concurrency": 1, "batch": 0, "requests": 1, "counted": False}
        changed = {"engine": "llama.cpp", "served": served, "accepted_per_step": []}
        mine = [line | changed if line["label"] == "pld" else line for line in lines]
        jsonl.rewrite_jsonl(run / CASES, mine)
    elif fault == "disk":
        (tmp_path / "out" / "m-pld-float32-temp-0.0.jsonl").mkdir()
    else:
        read = export.from_answer
        monkeypatch.setattr(export, "from_answer", lambda *words: read(*words)[:-1])
    assert exported(run, "spec_bench", tmp_path / "out") == 2
    assert why in capsys.readouterr().err
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_a_profile_names_block_verification(run):
    (loaded,) = load_runs([run])
    for verifier, said in (("greedy", "longest_prefix"), ("block", "block")):
        records = [replace(record, verifier=verifier) for record in loaded.records]
        made = export.speculation_profile(replace(loaded, records=records), "pld")
        assert made.verification_method == said


@pytest.mark.parametrize("changes", [
    {"mean_accept_length": 1.9}, {"marginal_accept_rates": [0.4, 0.3, 0.1]},
    {"conditional_accept_rates": [0.5, 0.5, 0.5]}, {"schema_version": "2.0"},
    {"marginal_accept_rates": [float("nan")] * 3}, {"num_speculative_tokens": 2},
])  # fmt: skip
def test_a_violation_is_refused(run, changes):
    (loaded,) = load_runs([run])
    made = export.speculation_profile(loaded, "pld").model_dump()
    profile_of(made, "here")
    with pytest.raises(ResultsError, match=r"here: .*Nothing was written"):
        profile_of(made | changes, "here")


def test_steps_of_another_run_are_refused(run, tmp_path, capsys):
    (loaded,) = load_runs([run])
    spoilt = [trace(r) for r in loaded.records]
    spoilt[1].committed[:] = [1, 3, 1]
    write_steps(run / STEPS, spoilt)
    for to in ("speculation_profile", "aiperf"):
        assert exported(run, to, tmp_path / "out") == 2
        assert "disagree on what pld committed in case a" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "more", "why"), [
    ("speculation_profiles", (), "Did you mean 'speculation_profile'"),
    ("aiperf", ("--label", "pls"), "Did you mean 'pld'"),
    ("speculation_profile", ("--label", "ar"), "drafts nothing"),
    ("aiperf", ("--label", "ar"), "--label pld"),
])  # fmt: skip
def test_what_was_typed_wrong_is_said(run, tmp_path, capsys, to, more, why):
    assert exported(run, to, tmp_path / "out", *more) == 2
    assert why in capsys.readouterr().err


def test_runs_that_cannot_be_exported_say_why(run, tmp_path, capsys):
    out = tmp_path / "out"
    none = {"prefill_s": 0.0, "decode_s": 0.0, "wall_s": 0.0, "timing": "none"}
    untimed = write(tmp_path / "untimed", **none)
    assert exported(untimed, "spec_bench", out) == 2
    assert "replay without times" in capsys.readouterr().err
    assert exported(untimed, "speculation_profile", out) == 0, "acceptance needs no times"
    (run / STEPS).unlink()
    assert exported(run, "aiperf", out) == 2
    assert "has no steps.parquet" in capsys.readouterr().err
    served = {"text": "t", "concurrency": 1, "batch": 0, "requests": 1, "counted": False}
    path = run / CASES
    lines = [
        line | {"engine": "llama.cpp", "served": served, "accepted_per_step": []}
        for line in map(json.loads, path.read_text().splitlines())
    ]
    jsonl.rewrite_jsonl(path, lines)
    for to in ("speculation_profile", "aiperf", "spec_bench"):
        assert exported(run, to, out, "--label", "pld") == 2
        assert "no single steps" in capsys.readouterr().err
