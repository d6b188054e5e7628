"""`run.py advise` on the tiny model: its choice, its files, going on, and what it refuses."""

import json
import math
import shlex
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
from rich.console import Console

from runners import advice as module
from runners import search
from runners.advice import PLAIN, UNCONFIRMED, UNDECIDED, UNTRIED, USE, Advice, Option, Speed
from runners.launch import dispatch
from runners.measure import live
from specbench.errors import ConfigurationError
from specbench.storage.hashes import file_sha256
from tests.small_run import six_rounds

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
    """Run in this process, on a small grid, with garbage collection left on."""

    with six_rounds(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "run_in_child", lambda work, job, _: work(job))
        patch.setattr(live, "gc_paused", nullcontext)
        patch.setattr(search, "GRID", GRID)
        yield patch


@pytest.fixture(scope="module")
def arguments(small, tmp_path_factory):
    """Return the arguments of ``advise``."""
    file = tmp_path_factory.mktemp("prompts") / "mine.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    shared = [word for word in small if not word.startswith(("method", "dataset"))]
    return [*shared, f"prompts={file}", "methods=[pld,jacobi,sps]"]


@pytest.fixture(scope="module")
def advice(quick, arguments, tmp_path_factory):
    """Advice found once, and its folder."""
    folder = tmp_path_factory.mktemp("advice") / "found"
    quick.setattr("runners.advice.SETTINGS", (1, 4))
    return module.give(module.read([*arguments, f"output_dir={folder}"])), folder


def test_it_chooses_confirms_and_says_what_to_paste(advice):
    result, folder = advice
    by_method = {option.method: option for option in result.options}
    assert set(by_method) == {"pld", "jacobi"}
    (trials,) = folder.glob("replayed-*")
    settings = {line["method"]: set() for line in map(json.loads, trials.open())}
    for line in map(json.loads, trials.open()):
        settings[line["method"]].add(json.dumps(line["knobs"], sort_keys=True))
    assert {method: len(knobs) for method, knobs in settings.items()} == {"pld": 4}
    assert by_method["pld"].predicted.prompts == 3
    assert by_method["jacobi"].predicted is None
    assert (result.choosing, result.confirming) == (4, 3)  # all prompts that there are
    assert all(o.measured.prompts == 3 and o.measured.interval for o in result.options)
    assert "pair=random_draft" in result.not_run["sps"]
    assert (folder / module.PAGE).read_text() == f"{result}\n"
    assert result.command in str(result)
    assert json.loads((folder / module.FILE).read_text())["sentence"] == result.lines[0]
    (recorded,) = folder.glob("recorded-*-7.jsonl")
    choosing = recorded.read_text()
    assert sorted(json.loads(line)["turns"][0] for line in choosing.splitlines()) == sorted(PROMPTS)


def test_what_is_done_is_not_done_again(advice, arguments):
    result, folder = advice
    names = {"cases.jsonl", "surface.json"}
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name in names}
    assert len(before) == 3  # recorded, tried live, confirmed
    again = module.give(module.read([*arguments, f"output_dir={folder}"]))
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name in names} == before
    assert again.to_json() == result.to_json()


def test_nothing_is_advised_where_plain_decoding_has_wrong_outputs(advice, arguments, quick):
    _, folder = advice
    summaries = {path: path.read_text() for path in folder.glob("confirmed*/summary.json")}
    for path, text in summaries.items():
        summary = json.loads(text)
        summary["against_best"]["ar"] = {"verdict": "wrong outputs", "p": None}
        path.write_text(json.dumps(summary))
    try:
        result = module.give(module.read([*arguments, f"output_dir={folder}"]))
    finally:
        for path, text in summaries.items():
            path.write_text(text)
    measured = [option for option in result.options if option.measured]
    assert measured and not any(option.exact for option in measured)
    assert result.best is None


def test_a_finished_run_s_recording_is_used(advice, arguments, quick, tmp_path):
    _, folder = advice
    (recorded,) = (path for path in folder.glob("recorded-*-7") if path.is_dir())
    run = shutil.copytree(recorded, tmp_path / "run")
    typed = [w for w in arguments if w.startswith(("paths", "cache_dir", "measure"))]
    # Typed as in a script: its words are in the manifest of a run that somebody typed.
    manifest = json.loads((run / "manifest.json").read_text())
    overrides = [w for w in arguments if not w.startswith(("prompts", "methods"))]
    manifest["overrides"] = [*overrides, "dataset=jsonl", f"dataset.path={recorded}.jsonl"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "DONE").write_text(file_sha256(run / "manifest.json"))
    request = module.read([*typed, f"run={run}", "methods=pld", f"output_dir={tmp_path / 'out'}"])
    assert "dataset=jsonl" in request.overrides
    again = module.give(request)
    assert not [*tmp_path.glob("recorded*")]
    assert [option.method for option in again.options] == ["pld"]


@pytest.mark.parametrize("done", [True, False], ids=["all replayed before", "nothing tried before"])
def test_minutes_that_are_over_say_so_and_give_the_command_that_goes_on(
    advice, arguments, quick, tmp_path, done
):
    _, folder = advice
    gone = ["live-*", "confirmed-*"] if done else ["live-*", "confirmed-*", "replayed-*"]
    out = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns(*gone))
    result = module.give(module.read([*arguments, f"output_dir={out}", "minutes=0.001"]))
    assert result.decision == (UNCONFIRMED if done else UNTRIED)
    assert result.more
    assert "minutes=" in result.not_run["jacobi"]
    assert done or "the minutes ended" in result.not_run["pld"]
    overrides = shlex.split(result.command)
    assert overrides[:3] == ["python", "run.py", "advise"]
    request = module.read(overrides[3:])  # what is pasted is understood
    assert request.minutes > result.minutes
    assert request.prompts == module.read(arguments).prompts
    assert request.methods == (("pld",) if done else ("pld", "jacobi", "sps"))


@pytest.mark.parametrize(
    ("overrides", "message"),
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
def test_what_cannot_be_asked_says_what_to_type(overrides, message, small, tmp_path):
    model = [word for word in small if word.startswith(("model", "cache"))]
    with pytest.raises(ConfigurationError, match=message):
        module.give(module.read([*model, *overrides, f"output_dir={tmp_path}"]))


# -- the answer ------------------------------------------------------------------------------------


def option(method="pld", low=1.2, value=1.4, high=1.6, **changes):
    speeds = {"predicted": Speed(1.45, (1.3, 1.62), 6), "measured": Speed(value, (low, high), 6)}
    return replace(Option(method, {"num_tokens": 4}, 1.4), **speeds | changes)


def advice_on(*options):
    return Advice("m", "mine.txt", 10, 6, 6, list(options))


@pytest.mark.parametrize(
    ("options", "decision", "method"),
    [
        ([option(), option("sam", 1.3, 1.5, 1.7)], USE, "sam"),
        ([option(low=0.97), option("sam", 1.01, 1.1, 1.2)], USE, "sam"),
        ([option(exact=False), option("sam", 0.9)], UNDECIDED, "sam"),
        ([option(low=0.97), option("sam", 0.8, 0.9, 0.95, score=1.6)], UNDECIDED, "pld"),
        ([option("sam", 0.8, 0.9, 0.95), option("a", 0.7, 0.8, 0.9)], PLAIN, "sam"),
        ([option(measured=Speed(1.9, None, 2))], UNDECIDED, "pld"),
        ([option(measured=None), option("sam", measured=None, score=2)], UNCONFIRMED, "sam"),
        ([option(exact=False)], UNTRIED, None),
        ([], UNTRIED, None),
    ],
)
def test_the_decision_is_what_was_measured_shows(options, decision, method):
    result = advice_on(*options)
    assert result.decision == decision
    assert (result.option and result.option.method) == method
    assert result.best is (result.option if decision == USE else None)
    # A setting or a command to use is named where it is to be used, one to decide elsewhere.
    request = module.read(["prompts=mine.txt", "minutes=3", "methods=[pld,sam]"])
    overrides = shlex.split(module.command_of(result, request))
    if decision == USE:
        assert overrides[2:4] == [f"method={method}", "method.num_tokens=4"]
    elif decision == PLAIN:
        assert overrides[2] == "method=ar"
        assert "num_tokens" not in str(result).split("method ")[0]
    else:
        again = module.read(overrides[3:])
        assert again.minutes >= result.minutes
        assert method is None or method in again.methods


@pytest.mark.parametrize("low", [0.5, 0.8, 0.97])
@pytest.mark.parametrize("n", [3, 12, 40])
def test_so_many_prompts_would_show_the_speedup_that_was_measured(low, n):
    """An interval shrinks with the root of their number."""
    value, high = 1.2, 1.2**2 / low
    result = advice_on(option(measured=Speed(value, (low, high), n)))
    enough = result.option.prompts_to_decide
    half = math.log(high / low) / 2
    assert math.log(value) >= half * math.sqrt(n / enough) - 1e-9
    assert math.log(value) < half * math.sqrt(n / (enough - 1))
    result.command = "advise more"
    assert f"about {2 * enough} prompts" in str(result)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_decision_its_setting_and_the_command_come_first_at_any_width(width):
    names = ["pld", "suffix_else_head", "token_recycling", "union"]
    result = advice_on(*(option(name) for name in names))
    result.not_run = dict.fromkeys(["sps", "pearl", "ouroboros"], "no time. Type minutes=12")
    result.command = "python run.py method=pld method.num_tokens=4"
    terminal = Console(width=width, color_system=None)
    with terminal.capture() as printed:
        module.show(result, terminal)
    lines = [line for line in printed.get().splitlines() if line.strip()]
    assert lines[0] == result.lines[0]
    assert "num_tokens=4" in lines[1]
    assert lines[3].strip() == result.command
    assert sum("minutes=12" in line for line in lines) == 1
    if width >= 80:
        assert all(any(line.startswith(name) and "num_tokens=4" in line for line in lines)
                   for name in names)  # fmt: skip
