"""Runs with batch.size above 1: groups, records, resuming, refusals; outputs are batch 1's."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib import pyplot as plt

from analysis import tables
from analysis.figures import figures_of
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import tokens_per_s
from analysis.runs.load import load_runs
from runners.job import label_order
from runners.measure.session import Session
from specbench.data.cases import Case
from specbench.decoding.batch import BatchEngine
from specbench.errors import ConfigurationError
from specbench.results import records
from specbench.results.manifest import RunManifest
from specbench.results.records import CaseRecord, read_records
from specbench.storage import jsonl
from tests.runners.toy import make_job
from tests.small_run import interrupted_after, run_here

TYPED = ("pair=random_draft", "compare=[sps]", "measure.exclusive=false")


def outputs(folder):
    turns, _ = read_records(folder)
    return {r.key: (r.output_ids, r.committed_per_step) for r in turns}


def test_a_run_in_groups_is_the_run_alone_whether_interrupted_or_not(small, tmp_path, capsys):
    alone, group = tmp_path / "alone", tmp_path / "group"
    assert run_here([*small, *TYPED, f"output_dir={alone}"]) == 0
    overrides = [*small, *TYPED, "batch.size=2", f"output_dir={group}"]
    with interrupted_after(1):
        run_here(overrides)
    assert run_here(overrides) == 0
    assert outputs(group) == outputs(alone)
    done, _ = read_records(group)
    for record in done:
        assert record.lossless.verdict == "equal"
        assert record.batch is not None and record.batch.size == 2
        assert CaseRecord.from_json(record.to_json()) == record
    by_group: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for record in done:
        by_group.setdefault((record.unit, record.turn), set()).add((record.label, record.case_id))
    # Five questions, of which two have a second turn, in three groups, for three labels.
    assert sorted(len(members) for (_, turn), members in by_group.items() if not turn) == [3, 6, 6]
    summary = jsonl.read_json(group / records.SUMMARY)
    assert [row["task"] for row in summary["rows"]] == ["overall"] * 3
    assert summary["rows"][0]["n_cases"] == 5
    assert [row["equal"] for row in summary["batched"]] == [7, 7, 7]
    assert "BATCH 2" in summary["conditions"]["sequences at once"]
    runs = load_runs([tmp_path])
    comparisons = make_comparisons(runs)
    assert len(comparisons) == 2, "runs of another batch stand in another table"
    ((name, figure),) = figures_of(runs)
    assert name == "load" and figure.title.startswith("Batch size: drafting is")
    lines = [line.get_xdata() for line in figure.axes[0].get_lines()]
    assert [1.0, 2.0] in [list(line) for line in lines]
    plt.close("all")
    capsys.readouterr()
    assert tables.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "batch of 2: " in printed, "tables tell the loads apart"
    per_user = tokens_per_s(r for r in done if r.label == "pld")
    assert per_user.value == pytest.approx(
        sum(r.n_new - 1 for r in done if r.label == "pld")
        / sum(r.decode_s for r in done if r.label == "pld")
    )
    assert per_user.interval is not None, "three groups"
    assert all(record.batch.model_passes > 0 for record in done if record.label == "sps")
    rows = {row["label"]: row for row in summary["batched"]}
    assert rows["ar"]["useless_rows"] == 0 < rows["sps"]["useless_rows"] < 1
    manifest = RunManifest.read(group)
    for record in done:
        batch = record.batch
        order = label_order(tuple(manifest.labels), manifest.seed, batch.group, record.repeat)
        assert record.position == order.index(record.label)
        siblings = [
            r for r in done if (r.unit, r.turn, r.label) == (record.unit, record.turn, record.label)
        ]
        steps_s = max(r.decode_s - r.drafter_setup_s for r in siblings)
        assert (batch.model_s > 0) == (record.label == "sps")
        assert batch.pass_s > 0 and batch.pass_s + batch.model_s < steps_s


@pytest.mark.slow  # over a second
def test_a_group_that_was_cut_off_within_its_last_write_is_measured_again_whole(small, tmp_path):
    folder = tmp_path / "run"
    overrides = [*small, "batch.size=2", "dataset.limit=4", f"output_dir={folder}"]
    with interrupted_after(1):
        run_here(overrides)
    lines = (folder / records.CASES).read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["case_id"]
    remaining = [line for line in lines if json.loads(line)["case_id"] != last]
    assert remaining, "another case of the group"
    (folder / records.CASES).write_text("".join(remaining))
    assert run_here(overrides) == 0
    times: dict[tuple[str, int, str], set[tuple[float, int]]] = {}
    for r in read_records(folder)[0]:
        times.setdefault((r.unit, r.turn, r.label), set()).add((r.batch.pass_s, r.batch.at_once))
    assert all(len(values) == 1 for values in times.values())


def test_a_fault_of_lock_step_alone_is_found_in_each_label(small, tmp_path, monkeypatch):
    """``ar`` in lock-step has it, too: outputs are held against decoding alone."""
    inner, folder = BatchEngine.decode, tmp_path / "run"

    def faulty(self, *args, **options):
        result = inner(self, *args, **options)
        for turn in result.turns:
            turn.output_ids[-1] = 3 + (turn.output_ids[-1] == 3)
        return result

    monkeypatch.setattr(BatchEngine, "decode", faulty)
    assert run_here([*small, "batch.size=2", "dataset.limit=2", f"output_dir={folder}"]) == 1
    turns = read_records(folder)[0]
    assert {r.lossless.verdict for r in turns if r.label == "ar"} == {"bug"}
    assert {r.lossless.verdict for r in turns} == {"bug"}


def test_a_text_for_which_there_is_no_memory_fails_alone(small, tmp_path, monkeypatch):
    inner, folder = Session.make_room, tmp_path / "run"

    def limited(self, tokens):
        if tokens > longest + 8:
            raise ConfigurationError("batch.size=2: Type batch.size=1")
        inner(self, tokens)

    overrides = [*small, "batch.size=2", "dataset.limit=4", "generation.max_new_tokens=8"]
    assert run_here([*overrides, f"output_dir={tmp_path / 'whole'}"]) == 0
    whole = {r.key: r for r in read_records(tmp_path / "whole")[0]}
    longest = max(r.n_prompt for r in whole.values() if not r.turn)
    monkeypatch.setattr(Session, "make_room", limited)
    assert run_here([*overrides, f"output_dir={folder}"]) == 1
    turns, errors = read_records(folder)[0], (folder / records.ERRORS).read_text()
    failed = {r.key for r in turns if r.status == "failed"}
    assert failed == {key for key, r in whole.items() if r.n_prompt > longest}
    assert all(r.output_ids == whole[r.key].output_ids for r in turns if r.key not in failed)
    assert failed and "Type batch.size=1" in errors
    summary = jsonl.read_json(folder / records.SUMMARY)
    units = {r.unit for r in turns if r.status == "failed"}
    dropped = {r.case_id for r in turns if r.unit in units}
    for row in summary["rows"]:
        assert (row["n_cases"], row["n_dropped"]) == (4 - len(dropped), len(dropped))


@pytest.mark.slow  # over a second
def test_what_cannot_be_decoded_beside_others_is_left_out_or_refused(small, tmp_path):
    folder = tmp_path / "run"
    compare = "compare=[pearl,{method: pld, label: kept, state_scope: run}]"
    overrides = [*small, "pair=random_draft", compare, "batch.size=2", "dataset.limit=2"]
    assert run_here([*overrides, "measure.exclusive=false", f"output_dir={folder}"]) == 1
    reason = RunManifest.read(folder).left_out
    assert "drafts while the target reads" in reason["pearl"] and "batch.size=1" in reason["pearl"]
    assert "state_scope=prompt" in reason["kept"]
    with pytest.raises(ConfigurationError, match=r"no method of this run.*policy=marginal"):
        run_here([*small, "batch.size=2", "batch.budget=global", f"output_dir={tmp_path / 'b'}"])
    with pytest.raises(ConfigurationError, match=r"runner=cost.*batch\.size=1"):
        run_here([*small, "runner=cost", "batch.size=2"])


@pytest.mark.parametrize(
    ("n", "size", "sizes"), [(24, 8, [8] * 3), (11, 4, [4, 4, 3]), (3, 8, [3])]
)
def test_groups_are_alike_in_length_and_the_same_in_each_repeat(n, size, sizes, tmp_path):
    cases = tuple(Case(f"{i}", "qa", "qa", ("x" * (1 + 7 * i % n),)) for i in range(n))
    job = make_job(tmp_path, ("ar",), cases)
    job = replace(job, config=replace(job.config, repeats=2))
    groups = job.groups(size)
    first, second = groups[: len(sizes)], groups[len(sizes) :]
    ids = [[block.case.case_id for block in group] for group in first]
    assert [len(group) for group in ids] == sizes
    assert ids == [[block.case.case_id for block in group] for group in second]
    assert sorted(case for group in ids for case in group) == sorted(case.case_id for case in cases)
    whole = [group for group in first if len(group) == size]
    lengths = [sorted(len(block.case.turns[0]) for block in group) for group in whole]
    for group_lengths, other in pairwise(lengths):
        assert all(abs(a - b) <= n / size + 1 for a, b in zip(group_lengths, other, strict=True))
