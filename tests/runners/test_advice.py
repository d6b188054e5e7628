"""`run.py advise` on the tiny model: its choice, its files, going on, and what it refuses."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest

from runners.advice import answer, command
from runners.advice.answer import Advice, Option, Speed
from runners.advice.budget import Budget
from runners.launch import dispatch
from runners.search import jobs
from runners.session import live
from specbench.errors import ConfigurationError
from specbench.storage.hashes import file_sha256
from specbench.system import bandwidth
from tests.small_run import in_process

PROMPTS = [
    "tell me a story", "why is the water blue", "count from seven to one", "which ship is red",
    "the name of the ship is here", "which page is this", "the quay and the keel",
]  # fmt: skip
GRID = {
    "contexts": [32, 200], "tree_rows": [1, 8, 32], "batch_contexts": [32], "batch_k": [1, 8],
    "batch_w": [1, 12],
}  # fmt: skip


@pytest.fixture(scope="module")
def quick():
    """Runs in this process, a small grid, no picture; garbage is left to the tests."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "run_in_child", in_process)
        patch.setattr(live, "collector_at_rest", nullcontext)
        patch.setattr(jobs, "GRID", GRID)
        patch.setattr(command, "run_analysis", lambda *_: 1)  # in a process of its own
        patch.setitem(bandwidth.COPY_BYTES, "cpu", 1 << 16)
        yield patch


@pytest.fixture(scope="module")
def words(small, tmp_path_factory):
    """What is typed behind ``advise``."""
    file = tmp_path_factory.mktemp("prompts") / "mine.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    kept = [word for word in small if not word.startswith(("method", "dataset"))]
    return [*kept, f"prompts={file}", "methods=[pld,jacobi,sps]"]


@pytest.fixture(scope="module")
def advice(quick, words, tmp_path_factory):
    """Advice found once, and its folder."""
    folder = tmp_path_factory.mktemp("advice") / "found"
    quick.setattr("runners.advice.steps.SETTINGS", (1, 4))
    return command.give(command.read([*words, f"output_dir={folder}"])), folder


def test_it_chooses_confirms_and_says_what_to_paste(advice, words):
    found, folder = advice
    by_method = {option.method: option for option in found.options}
    assert set(by_method) == {"pld", "jacobi"}
    assert (by_method["pld"].way, by_method["jacobi"].way) == (answer.REPLAYED, answer.LIVE)
    assert by_method["pld"].tried == 4
    assert by_method["pld"].predicted.prompts == 3
    assert by_method["jacobi"].predicted is None
    # The first two by the prompts for choosing, on the prompts that nothing was chosen by.
    first = sorted(found.options, key=lambda o: o.score, reverse=True)[:2]
    assert {o.method for o in found.options if o.measured} == {o.method for o in first}
    assert (found.choosing, found.confirming) == (4, 3)
    assert all(o.measured.prompts == 3 and o.joint for o in first)
    assert "pair=random_draft" in found.not_run["sps"]
    option = found.best or found.candidate
    assert found.command.startswith(f"python run.py method={option.method} ")
    for word in ("model=local", "dataset=jsonl", "generation.max_new_tokens=16"):
        assert word in found.command
    assert found.sentence.endswith(".")
    page = (folder / answer.PAGE).read_text()
    assert found.sentence in page
    assert found.command in page
    assert json.loads((folder / answer.FILE).read_text())["sentence"] == found.sentence
    choosing = (folder / "recorded-7.jsonl").read_text()
    assert sorted(json.loads(line)["turns"][0] for line in choosing.splitlines()) == sorted(PROMPTS)


def test_what_is_done_is_not_done_again(advice, words, quick):
    found, folder = advice
    names = {"cases.jsonl", "surface.json"}
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name in names}
    assert len(before) in (3, 4)  # recorded, confirmed, tried live, confirmed with it
    again = command.give(command.read([*words, f"output_dir={folder}"]))
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name in names} == before
    assert again.to_json() == found.to_json()
    with pytest.raises(ConfigurationError, match="other limits"):
        typed = [*words, f"output_dir={folder}", "generation.max_new_tokens=9"]
        command.give(command.read([w for w in typed if w != "generation.max_new_tokens=16"]))


def test_nothing_is_advised_where_plain_decoding_has_wrong_outputs(advice, words, quick):
    _, folder = advice
    kept = {path: path.read_text() for path in folder.glob("confirmed*/summary.json")}
    for path, text in kept.items():
        summary = json.loads(text)
        summary["against_best"]["ar"] = {"verdict": "wrong outputs", "p": None}
        path.write_text(json.dumps(summary))
    try:
        found = command.give(command.read([*words, f"output_dir={folder}"]))
    finally:
        for path, text in kept.items():
            path.write_text(text)
    measured = [option for option in found.options if option.measured]
    assert measured and not any(option.exact for option in measured)
    assert found.best is None


def test_a_finished_run_s_recording_is_used(advice, words, quick, tmp_path):
    _, folder = advice
    run = shutil.copytree(folder / "recorded-7", tmp_path / "run")
    typed = [w for w in words if w.startswith(("paths", "cache_dir", "measure"))]
    # Typed as in a script: its words are in the manifest of a run that somebody typed.
    manifest = json.loads((run / "manifest.json").read_text())
    kept = [w for w in words if not w.startswith(("prompts", "methods"))]
    manifest["overrides"] = [*kept, "dataset=jsonl", f"dataset.path={folder / 'recorded-7.jsonl'}"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "DONE").write_text(file_sha256(run / "manifest.json"))
    request = command.read([*typed, f"run={run}", "methods=pld", f"output_dir={tmp_path / 'out'}"])
    again = command.give(request)
    assert not [*tmp_path.glob("recorded*")]
    assert [option.method for option in again.options] == ["pld"]
    assert "dataset=jsonl" in again.command


def test_minutes_that_are_over_leave_predictions_and_say_so(advice, words, quick):
    """All was replayed before; nothing that is run is begun."""
    _, folder = advice
    for path in folder.glob("confirmed-*"):
        path.rename(path.with_name("gone" + path.name))
    for path in folder.glob("live-*"):
        path.rename(path.with_name("gone" + path.name))
    found = command.give(command.read([*words, f"output_dir={folder}", "minutes=0.001"]))
    assert found.sentence.startswith("Nothing is confirmed yet")
    assert "PREDICTED" in found.sentence
    assert "confirm the first choice live" in found.more
    assert "minutes=" in found.not_run["jacobi"]


def test_nothing_can_be_tried_in_no_time(advice, quick, words, tmp_path):
    _, folder = advice
    kept = shutil.ignore_patterns("replayed-*", "*live-*", "*confirmed-*")
    shutil.copytree(folder, tmp_path / "out", ignore=kept)
    short = [*words, "minutes=0.001", f"output_dir={tmp_path / 'out'}"]
    found = command.give(command.read(short))
    assert found.sentence.startswith("Nothing can be said yet")
    assert found.command == ""
    assert "the minutes ended" in found.not_run["pld"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["prompts=a.txt", "dataset=gsm8k"], "prompts and dataset both name prompts"),
        (["prompts=a.txt", "minutes=soon"], "minutes=10"),
        (["pld"], "KEY=VALUE"),
        (["method=pld", "prompts=a.txt"], "Leave it out"),
        (["run=/nowhere"], "finished run"),
        (["prompts=/nowhere.txt"], r"^prompts=/nowhere\.txt is not a file"),
        (["dataset=demo", "minuts=3"], "Did you mean 'minutes'"),
        (["dataset=demo", "promts=a.txt"], "Did you mean 'prompts'"),
        (["dataset=demo", "dataset.limit=4"], "at least 6 prompts"),
        (["dataset=demo", "methods=pdl"], "Did you mean 'pld'"),
        (["dataset=demo", "generation=sampling"], "generation=greedy"),
    ],
)
def test_what_cannot_be_asked_says_what_to_type(typed, said, small, tmp_path):
    model = [word for word in small if word.startswith(("model", "cache"))]
    with pytest.raises(ConfigurationError, match=said):
        command.give(command.read([*model, *typed, f"output_dir={tmp_path}"]))


# -- the answer ------------------------------------------------------------------------------------


def option(method="pld", low=1.2, high=1.6, value=1.4, **changes):
    made = Option(
        method, {"num_tokens": 4}, answer.REPLAYED, 1.4, 8, 40,
        predicted=Speed(1.45, (1.3, 1.62), 6), measured=Speed(value, (low, high), 6),
        joint=(low, high),
    )  # fmt: skip
    return replace(made, **changes)


def told(*options):
    return Advice("m", "mine.txt", 10, 6, 6, list(options), {}, "")


def test_the_sentence_names_the_faster_of_those_shown_to_pay():
    found = told(option(), option("sam", 1.3, 1.7, 1.5))
    assert found.best.method == "sam"
    assert "1.30 to 1.70 times" in found.sentence
    assert "predicted: 1.30 to 1.62" in found.sentence


def test_an_interval_that_holds_1_pays_nothing_whatever_was_predicted():
    found = told(option(low=0.97, high=1.6), option("sam", 0.8, 0.95, 0.9, score=1.3))
    assert found.best is None
    assert found.sentence.startswith(answer.NOTHING_PAYS)
    assert "1.40 [0.97, 1.60]" in found.sentence
    assert answer.prompts_for(found.options[0]) > 6
    assert answer.prompts_for(found.options[1]) is None


def test_outputs_that_differ_are_never_advised():
    found = told(option(exact=False), option("sam", low=0.9))
    assert found.best is None
    assert found.candidate.method == "sam"


def test_predicted_and_measured_have_columns_of_their_own():
    frame = told(option(measured=None, joint=None)).table()
    assert str(frame["PREDICTED speedup [95 %]"][0]) == "1.45 [1.30, 1.62]"
    assert str(frame["measured speedup [95 %]"][0]) == "–"


def test_more_minutes_use_more_prompts_up_to_those_there_are():
    def prompts(minutes, available=100):
        return Budget(minutes, clock=lambda: 0.0).prompts(available, turn_s=2.0)

    assert prompts(0.1) == 6
    assert 6 < prompts(5) < prompts(10) <= 48
    assert prompts(1000) == 48
    assert prompts(1000, available=9) == 9
