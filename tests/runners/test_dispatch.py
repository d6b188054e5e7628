"""Whole runs of a tiny model, in this process: files, resume, refusals, failing cases."""

import json
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from analysis.publish import group_of
from analysis.runs.load import load_runs
from runners.job import Entry
from runners.measure.method_runs import as_needs_not_met
from specbench.config import compose
from specbench.config.run_key import run_key
from specbench.errors import ConfigurationError, NeedsNotMet, OutputRefused
from specbench.kernels import panel_kernels, prefetch
from specbench.results import records
from specbench.results.records import Lossless
from specbench.storage import jsonl
from specbench.system import environment
from tests.conftest import quick_first
from tests.small_run import interrupted_after, run_here, without_times


def no_work(work, job):
    raise AssertionError("nothing was to be measured")


@pytest.fixture
def execute(small):
    return partial(run_here, small)


def lines(folder, name=records.CASES):
    return jsonl.read_jsonl(folder / name)[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "when their process starts"),  # which is this one
        (["runner=replay"], "runner=replay.*Leave it out"),
        (["runner=serve", "server=llamacpp"], "runner=serve.*Leave it out"),
    ],
)
def test_threads_are_pinned_where_this_project_computes_and_starts_the_process(
    execute, tmp_path, monkeypatch, args, message
):
    monkeypatch.delenv("OMP_PLACES", raising=False)
    with pytest.raises(ConfigurationError, match=f"measure.pin=true.*{message}"):
        execute(f"output_dir={tmp_path}/run", "measure.pin=true", *args)


def test_a_run_leaves_every_file_of_the_contract(execute, tmp_path, capsys):
    out = tmp_path / "run"
    entries = "compare=[{method: pld, num_tokens: 2, label: short},oracle]"
    assert execute(f"output_dir={out}", entries) == 0
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    names -= {"changes.diff"}  # of whoever has edited the code
    assert names == {
        "manifest.json",
        "cases.jsonl",
        "errors.jsonl",
        "dialogue.jsonl",
        "steps.parquet",
        "summary.json",
        "repeat.md",
        "DONE",
    }
    assert "python run.py " in (out / "repeat.md").read_text()
    done = records.read_records(out)[0]
    assert Counter((r.label, r.method) for r in done) == {
        ("ar", "ar"): 7,
        ("pld", "pld"): 7,
        ("short", "pld"): 7,
        ("oracle", "oracle"): 7,
    }
    assert {r.task for r in done} == {"mt_bench", "qa", "rag"}
    assert {r.lossless.verdict for r in done} == {"equal"}
    assert all(set(r.committed_per_step) <= {1} for r in done if r.label == "ar")
    assert all(r.wall_s == r.prefill_s + r.decode_s > 0 for r in done)
    assert {r.run_key for r in done} == {jsonl.read_json(out / "manifest.json")["run_key"]}
    steps = pq.read_table(out / "steps.parquet").to_pylist()
    assert len(steps) == sum(r.n_target_passes for r in done)
    rows = {(r["task"], r["label"]): r for r in jsonl.read_json(out / "summary.json")["rows"]}
    assert rows["overall", "ar"]["mat"] == 1.0
    assert rows["overall", "oracle"]["mat"] > rows["overall", "pld"]["mat"] >= 1.0
    assert rows["overall", "pld"]["n_cases"] == 5
    manifest = jsonl.read_json(out / "manifest.json")
    assert (manifest["status"], manifest["exit_code"]) == ("complete", 0)
    assert manifest["model"]["weights_hash"]
    assert manifest["model"]["dtype"] == "float64"
    assert manifest["labels"]["pld"]["state_scope"] == "prompt"
    assert manifest["config"]["generation"]["max_new_tokens"] == 16
    assert {"hardware", "versions", "git", "prompt_set_hash", "seed"} <= manifest.keys()
    printed = capsys.readouterr().out
    assert "speedup" in printed  # the rows are those of summary.json
    assert f"python -m analysis.report {out}" in printed


def test_a_complete_folder_is_printed_and_nothing_is_measured(execute, tmp_path, capsys):
    out = tmp_path / "run"
    assert execute(f"output_dir={out}") == 0
    first = (out / records.CASES).read_bytes()
    capsys.readouterr()
    assert execute(f"output_dir={out}", launch=no_work) == 0
    assert "speedup" in capsys.readouterr().out
    assert (out / records.CASES).read_bytes() == first
    assert execute(f"output_dir={out}", "fresh=true", "dataset.limit=1") == 0
    assert (tmp_path / "run-2" / records.DONE).exists()


@pytest.mark.slow  # over a second
def test_folders_are_named_by_experiment_label_and_key(execute, tmp_path, small):
    key = run_key(compose.compose([*small, "dataset.limit=1"]))[:8]
    root = f"paths.results={tmp_path}"
    execute(root, "dataset.limit=1")
    execute(root, "dataset.limit=1", experiment="table9")
    execute(root, "dataset.limit=1", f"output_dir={tmp_path}/sweep", multirun=True)
    execute(root, "dataset.limit=1", f"output_dir={tmp_path}/own")
    done = [path.parent for path in tmp_path.rglob(records.DONE)]
    by_path = {str(path.relative_to(tmp_path)): group_of(load_runs([path])[0]) for path in done}
    assert set(by_path) == {f"runs/pld-{key}", f"table9/pld-{key}", f"sweep/pld-{key}", "own"}
    groups = (by_path[f"runs/pld-{key}"], by_path[f"sweep/pld-{key}"], by_path["own"])
    assert groups == (f"pld-{key}", "sweep", "own"), "of W&B: of a sweep its folder"


@pytest.mark.slow  # over a second
def test_shards_have_folders_of_their_own_and_one_key(execute, tmp_path):
    for i in range(2):
        assert execute(f"paths.results={tmp_path}", f"shard={i}/2") == 0
    folders = sorted(path.parent for path in tmp_path.rglob(records.DONE))
    assert [path.name.partition("-shard")[2] for path in folders] == ["0of2", "1of2"]
    parts = [records.read_records(folder)[0] for folder in folders]
    assert sorted(len({r.case_id for r in part}) for part in parts) == [2, 3]
    assert len({r.run_key for part in parts for r in part}) == 1
    assert not {r.case_id for r in parts[0]} & {r.case_id for r in parts[1]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compare=[pld]"], "label 'pld' occurs 2 times"),
        (["compare=[ar]"], "label 'ar' occurs 2 times"),
        (["method.num_tokens=-1"], "`method.num_tokens` must be"),
        (["shard=4/4"], "`shard` must be i/n"),
        (["shard=99998/99999"], "shard=99998/99999 holds no case: there are 5"),
        (["method.num_tokens=1000000"], "drafts of up to 1000000 nodes"),
        (["shard=0/2", "method.state_scope=run"], "shard=0/2 cannot be combined"),
        (["generation.temperature=0.7", "verifier=greedy"], "Type verifier=rejection"),
        (["verifier=typical"], "or verifier=auto"),
        (["verifier=typical", "generation.temperature=1", "verifier.delta=0"], "`verifier.delta`"),
        (["verifier.name=rejektion"], "Did you mean 'rejection'"),
        (["compare=[{method: sam, verifier: match}]"], "Type generation=sampling batch.size=1"),
        (
            ["generation.temperature=1", "compare=[{method: sam, verifier: blokc}]"],
            "Did you mean 'block'",
        ),
        (["generation.temperature=1", "method=oracle"], "method=oracle works only greedily"),
        (["dataset.path=/no/such/file"], "/no/such/file"),
        (["model.path=/no/such/model"], "model.path=/no/such/model: there is no such folder"),
        (["model.id=/no/such/model"], "both name weights"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(execute, tmp_path, overrides, message):
    with pytest.raises(ConfigurationError) as refusal:
        execute(f"output_dir={tmp_path}/run", *overrides)
    assert message in str(refusal.value)
    assert refusal.value.exit_code == 2
    assert not (tmp_path / "run" / records.CASES).exists()


@pytest.mark.parametrize("allocate", [np.empty, torch.empty, bytearray])
def test_what_a_method_cannot_allocate_is_a_matter_of_its_knobs(allocate):
    entry = Entry("mine", {"name": "pld"})
    refusal = pytest.raises(NeedsNotMet, match=r"method=pld \(label 'mine'\) does not fit")
    with refusal, as_needs_not_met(entry):
        allocate(10**15)
    with pytest.raises(RuntimeError, match="boom"), as_needs_not_met(entry):
        raise RuntimeError("boom")


@pytest.mark.slow  # over a second
def test_the_baseline_may_be_the_method_or_be_left_out(execute, tmp_path):
    assert execute(f"output_dir={tmp_path}/ar", "dataset.limit=1", "method=ar") == 0
    assert {r.label for r in records.read_records(tmp_path / "ar")[0]} == {"ar"}
    assert execute(f"output_dir={tmp_path}/pld", "baseline=false") == 0
    done = records.read_records(tmp_path / "pld")[0]
    assert {(r.label, r.lossless.verdict) for r in done} == {("pld", "not_audited")}
    assert len(lines(tmp_path / "pld", records.DIALOGUE)) == 2


@pytest.mark.slow  # over a second
def test_at_a_temperature_outputs_of_a_seed_repeat_plain_sampling(execute, tmp_path, capsys):
    """float64, and drafts that were not drawn: nothing but rounding could tell the labels apart."""
    drafters = "compare=[lookahead,jacobi,token_recycling,{method: cacheback, table: dynamic}]"
    sampling = ["generation=sampling", "generation.max_new_tokens=24", "generation.top_p=0.95"]
    assert execute(f"output_dir={tmp_path}", drafters, *sampling) == 0
    done = records.read_records(tmp_path)[0]
    assert {r.verifier for r in done} == {"rejection"}
    assert {r.lossless.verdict for r in done} == {"not_audited"}
    outputs = {}
    for record in done:
        outputs.setdefault((record.case_id, record.turn), []).append(record.output_ids)
    assert all(len(same) == 6 and same.count(same[0]) == 6 for same in outputs.values())
    assert len({tuple(same[0]) for same in outputs.values()}) > 5
    conditions = jsonl.read_json(tmp_path / records.SUMMARY)["conditions"]
    assert conditions["sampling"].startswith("temperature 1, top_p=0.95; verifier rejection")


def test_typical_acceptance_is_called_lossy_wherever_it_shows(execute, tmp_path, capsys):
    chosen = ["verifier=typical", "generation.temperature=0.7", "dataset.limit=2"]
    assert execute(f"output_dir={tmp_path}", *chosen) == 0
    done = records.read_records(tmp_path)[0]
    assert {r.verifier for r in done} == {"typical"} and all(r.lossy for r in done)
    assert {r.lossless.verdict for r in done} == {"not_audited"}
    rows = jsonl.read_json(tmp_path / records.SUMMARY)["rows"]
    assert all(row["lossless"]["lossy"] == sum(row["lossless"].values()) > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "LOSSY" in printed and "3 lossy" in printed


def test_a_prompt_longer_than_the_context_fails_and_the_run_goes_on(
    execute, tmp_path, questions, capsys
):
    long = {"question_id": 9, "category": "qa", "turns": ["why " * 300]}
    path = tmp_path / "questions.jsonl"
    path.write_text(questions.read_text() + json.dumps(long) + "\n")
    assert execute(f"output_dir={tmp_path}/run", f"dataset.path={path}") == 1
    failed = [r for r in records.read_records(tmp_path / "run")[0] if r.status == "failed"]
    assert {r.case_id for r in failed} == {"9"}
    assert all(r.n_prompt > 256 and r.prompt_ids == [] for r in failed), "its length tells enough"
    assert {line["type"] for line in lines(tmp_path / "run", records.ERRORS)} == {"prompt_too_long"}
    assert "1 of 6 cases are dropped" in " ".join(capsys.readouterr().out.split())
    assert execute(f"output_dir={tmp_path}/run", f"dataset.path={path}", launch=no_work) == 1


def test_an_output_that_is_not_plain_decodings_fails_the_run(
    execute, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "runners.measure.session.audit_output",
        lambda *a, **k: Lossless(verdict="bug", first_diff=3, gap=2.5),
    )
    assert execute(f"output_dir={tmp_path}", "dataset.limit=2") == 1
    row = jsonl.read_json(tmp_path / records.SUMMARY)["rows"][-1]
    assert row["lossless"]["bug"] > 0
    assert "BUG" in capsys.readouterr().out


def comparable(folder):
    timeless = map(without_times, lines(folder))
    return sorted(timeless, key=lambda line: json.dumps(line, sort_keys=True))


@pytest.mark.parametrize("scope", quick_first(["prompt", "run"], ["prompt"]))
def test_a_run_resumed_in_the_middle_equals_one_that_was_not_disturbed(execute, tmp_path, scope):
    args = ["method=cacheback", "method.table=dynamic", f"method.state_scope={scope}", "repeats=2"]
    args += ["method.total_draft_len=8", "method.chaining_reserved=1"]
    args += ["method.leader_capacity=64", "method.follower_capacity=8"]
    assert execute(f"output_dir={tmp_path}/whole", *args) == 0
    with interrupted_after(7):
        execute(f"output_dir={tmp_path}/parts", *args)
    manifest = jsonl.read_json(tmp_path / "parts" / records.MANIFEST)
    assert manifest["status"] == "interrupted"
    assert execute(f"output_dir={tmp_path}/parts", *args) == 0
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    whole, parts = (
        jsonl.read_json(tmp_path / name / records.MANIFEST) for name in ("whole", "parts")
    )
    assert [start["records_found"] for start in parts["starts"]] == [0, 20]
    assert parts["run_key"] == whole["run_key"]
    # A folder's id is its own, and stays when it is resumed.
    assert parts["folder_id"] == manifest["folder_id"] != whole["folder_id"]


def test_a_resumed_run_asks_for_panels_as_far_ahead_as_its_first_start(
    execute, tmp_path, monkeypatch
):
    if not panel_kernels.available():
        pytest.skip("torch has another OpenMP library")
    monkeypatch.setattr(prefetch, "_measured", set())
    command = [f"output_dir={tmp_path}", "model.dtype=float32"]
    before = panel_kernels.distances(panel_kernels.FLOAT32)
    with interrupted_after(3):
        execute(*command)
    path = tmp_path / records.MANIFEST
    manifest = jsonl.read_json(path)
    assert manifest["model"]["packed"]["ahead"] == {
        "float32": {str(r): d for r, d in before.items()}
    }
    # As if the first start had found another machine's timings than this process would.
    chosen = {"float32": {str(rows): 64 * rows for rows in before}}
    manifest["model"]["packed"]["ahead"] = chosen
    path.write_text(json.dumps(manifest))
    try:
        assert execute(*command) == 0
        assert panel_kernels.distances(panel_kernels.FLOAT32) == {r: 64 * r for r in before}
    finally:
        for rows, distance in before.items():
            panel_kernels.set_distance(panel_kernels.FLOAT32, rows, distance)
    assert jsonl.read_json(path)["model"]["packed"]["ahead"] == chosen


@pytest.mark.slow  # over a second
def test_a_repeated_sweep_does_only_the_missing_jobs(execute, tmp_path):
    """Three jobs: one complete, one half done, one not begun."""
    launched = []

    def counting(work, job):
        launched.append(job.config.method["num_tokens"])
        return work(job)

    def sweep(values):
        for value in values:
            override = f"method.num_tokens={value}"
            out = f"output_dir={tmp_path}/sweep"
            assert execute(out, override, launch=counting, multirun=True) == 0

    sweep([1])
    with interrupted_after(2):
        sweep([2])
    (complete,) = [path.parent for path in (tmp_path / "sweep").rglob(records.DONE)]
    stamp = (complete / records.CASES).stat().st_mtime_ns
    launched.clear()
    sweep([1, 2, 3])
    assert launched == [2, 3]
    assert (complete / records.CASES).stat().st_mtime_ns == stamp
    manifests = [jsonl.read_json(p) for p in (tmp_path / "sweep").rglob(records.MANIFEST)]
    starts = {
        m["config"]["method"]["num_tokens"]: [s["records_found"] for s in m["starts"]]
        for m in manifests
    }
    assert starts == {1: [0], 2: [0, 6], 3: [0]}


@pytest.mark.slow  # over a second
def test_resuming_on_another_machine_must_be_forced_and_marks_the_records(
    execute, tmp_path, monkeypatch
):
    out = f"output_dir={tmp_path}"
    with interrupted_after(2):
        execute(out)
    describe = environment.describe
    moved = {"cpu": "another one"}
    monkeypatch.setattr(
        environment, "describe", lambda: (d := describe()) | {"hardware": d["hardware"] | moved}
    )
    with pytest.raises(OutputRefused, match=r"cpu: there .*, here 'another one'"):
        execute(out)
    assert execute(out, "resume=force") == 0
    forced = {r.case_id: r.forced_resume for r in records.read_records(tmp_path)[0]}
    assert Counter(forced.values()) == {False: 2, True: 3}


@pytest.mark.parametrize("path", ["/proc/nope", "/dev/null/cache"])
def test_a_cache_that_cannot_be_made_is_refused_before_weights_load(execute, tmp_path, path):
    with pytest.raises(OutputRefused, match=f"cache_dir={path} cannot be used"):
        execute(f"output_dir={tmp_path}", f"cache_dir={path}")


def test_a_method_of_compare_that_cannot_run_is_left_out_with_its_reason(
    execute, tmp_path, checkpoint, capsys
):
    """N-Grammys lacks its table, SpS its draft model: the others are measured all the same."""
    args = (f"output_dir={tmp_path}", "compare=[ngrammys,sps,token_recycling]", "dataset.limit=2")
    assert execute(*args) == 1, "as for cases that fail"
    assert {r.label for r in records.read_records(tmp_path)[0]} == {"ar", "pld", "token_recycling"}
    printed = " ".join(capsys.readouterr().out.split())
    assert "LEFT OUT: ngrammys. " in printed
    assert f"build_artifact.py bigram_table --model {checkpoint}" in printed
    assert "LEFT OUT: sps. method=sps needs a draft model" in printed
    assert execute(*args, launch=no_work) == 1, "a finished run is printed again"
    capsys.readouterr()


def test_strict_ends_a_comparison_whose_method_cannot_run(execute, tmp_path):
    with pytest.raises(NeedsNotMet, match="needs a draft model"):
        execute(f"output_dir={tmp_path}", "compare=[sps]", "strict=true")
    with pytest.raises(NeedsNotMet, match="needs a draft model"):
        execute(f"output_dir={tmp_path}/main", "method=sps", "compare=[pld]")


def test_a_run_that_left_a_method_out_resumes_without_it(execute, tmp_path):
    args = (f"output_dir={tmp_path}", "compare=[sps]")
    with interrupted_after(2):
        execute(*args)
    assert execute(*args) == 1
    assert Counter(r.label for r in records.read_records(tmp_path)[0]) == {"ar": 7, "pld": 7}


@pytest.mark.slow  # over a second
def test_a_method_is_added_to_a_finished_run_and_its_ar_is_compared(execute, tmp_path, capfd):
    capsys = capfd  # the whole table is another process's
    out = f"output_dir={tmp_path}"
    with pytest.raises(ConfigurationError, match=r"is not one\. Type output_dir=FOLDER of one"):
        execute(out, "add=[cacheback]")
    assert execute(out) == 0
    first = (tmp_path / records.CASES).read_bytes()
    with pytest.raises(ConfigurationError, match=r"has the label 'pld' already.*label: pld_2"):
        execute(out, "add=[pld]")
    capsys.readouterr()
    assert execute(out, "add=[{method: pld, num_tokens: 2, label: short}]") == 0
    printed = capsys.readouterr().out
    assert "/added/short-" in printed and f" over ar in {tmp_path}: " in printed
    assert {"ar", "pld", "short"} <= {line.split()[0] for line in printed.splitlines() if line}
    (folder,) = (tmp_path / "added").iterdir()
    assert {r.label for r in records.read_records(folder)[0]} == {"ar", "short"}
    assert (tmp_path / records.CASES).read_bytes() == first, "the run itself is left as it was"
    assert execute(out, launch=no_work) == 0
    printed = capsys.readouterr().out
    assert "adding" not in printed and "added later" in printed and "short" in printed


def test_methods_are_added_to_a_run_that_is_named_by_its_folder_alone(small, tmp_path):
    """Also where it was typed with other limits, seeds and entries than the defaults."""
    out = f"output_dir={tmp_path}"
    assert run_here([], *small, out, "compare=[token_recycling]", "dataset.limit=3", "seed=5") == 0
    assert run_here([], "add=[{method: pld, num_tokens: 2, label: short}]", out) == 0
    (folder,) = (tmp_path / "added").iterdir()
    turns = records.read_records(folder)[0]
    assert {r.label for r in turns} == {"ar", "short"} and len({r.case_id for r in turns}) == 3
    with pytest.raises(OutputRefused, match="seed: there 5, here 6"):
        run_here([], "add=[sam]", out, "seed=6")


def _with_template(checkpoint, folder, template):
    """Copy the checkpoint and give its tokenizer another chat template."""
    shutil.copytree(checkpoint, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return f"model.path={folder}"


# Of the tokenizer's words, one by chance: as a clock, but quicker.
_CHANGING = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% for _ in range(9) %}{{ ['ship', 'book', 'red', 'blue'] | random }} {% endfor %}"
)


def test_a_template_that_changes_writes_one_prompt_for_all_labels_and_refuses_a_resume(
    execute, checkpoint, tmp_path
):
    model = _with_template(checkpoint, tmp_path / "model", _CHANGING)
    args = (model, f"output_dir={tmp_path}/run", "compare=[oracle]", "repeats=2")
    with interrupted_after(7):
        execute(*args)
    prompts = {}
    for record in records.read_records(tmp_path / "run")[0]:
        prompts.setdefault((record.repeat, record.case_id, record.turn), set()).add(
            tuple(record.prompt_ids)
        )
    assert {len(variants) for variants in prompts.values()} == {1}
    with pytest.raises(OutputRefused, match="the prompt of case 81 is not what it was"):
        execute(*args)
    assert execute(*args, "fresh=true") == 0, "no pair differs"


@pytest.mark.parametrize("special", quick_first([False, True], [True]))
def test_the_next_turn_quotes_an_answer_without_its_reasoning(
    execute, checkpoint, tmp_path, special
):
    template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant ship"
    )
    model = _with_template(checkpoint, tmp_path / "model", template)

    def turns(model, name):
        args = (model, f"output_dir={tmp_path}/{name}", "dataset.limit=1", "baseline=false")
        execute(*args, "method=ar")
        return records.read_records(tmp_path / name)[0]

    first, second = turns(model, "as_it_is")
    written = [token for token in first.output_ids if token != 2]
    end = next(t for t in written[1:] if written.count(t) == 1 and t not in first.prompt_ids)
    answer = written[written.index(end) + 1 :]
    # The same ids with other words: the prompt opens a part that one of its tokens closes.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tags = {"ship": "<think>", tokenizer.convert_ids_to_tokens(end): "</think>"}
    thinking = shutil.copytree(tmp_path / "model", tmp_path / "thinking")
    for file in thinking.glob("*token*"):
        for word, tag in tags.items():
            file.write_text(file.read_text().replace(f'"{word}"', f'"{tag}"'))
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    tokenizer.chat_template = template.replace("ship", "<think>")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(tags.values())})
    tokenizer.save_pretrained(thinking)
    thought, behind = turns(f"model.path={thinking}", "thinking")
    assert thought.output_ids == first.output_ids, "counts keep what was thought"
    assert behind.n_prompt == second.n_prompt - len(written) + len(answer)
    assert behind.prompt_ids.count(end) == second.prompt_ids.count(end) - 1
