"""What the labels of a run share, where one of them runs on an engine of its own."""

import numpy as np
import pytest
import torch

from analysis import tables
from methods.pld import PromptLookup
from runners.measure import device_lock, session
from runners.measure.live import with_eager_baseline
from runners.measure.method_runs import build_method_runs
from runners.measure.session import load_session
from scripts import spec_bench
from specbench.decoding.structs import Needs
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.graph_target import GraphTarget, StaticPass
from specbench.results import records
from specbench.storage import jsonl
from specbench.system import environment
from tests.analysis.folders import edit_manifest
from tests.small_run import interrupted_after, run_here, warning_texts
from tests.tiny_checkpoint import save_checkpoint


def test_the_eager_baselines_buffers_grow_and_empty_with_the_others(small, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "no_graphs", lambda model: None)  # its code runs on a CPU too
    seen = {}

    def prepare(_work, job):
        seen["runs"] = build_method_runs(job)
        seen["session"] = load_session(job, seen["runs"])
        return 0

    compare = "compare=[{method: ar, eager: true, label: slow}]"
    extra = ["engine=graph", "measure.exclusive=false", compare]
    run_here([*small, *extra, f"output_dir={tmp_path}/run"], launch=prepare)
    live_session = seen["session"]
    plain = next(run.drafter for run in seen["runs"] if run.drafter.needs.eager)
    assert isinstance(live_session._target, GraphTarget)
    prompt = np.arange(250) % 30 + 3
    assert live_session._eager_target.cache.max_len == 256
    result = live_session.decode(prompt, plain, seed=0, max_new_tokens=4)
    assert live_session._eager_target.cache.max_len == 512
    assert result.output_ids == live_session.plain(prompt, 4).tolist()

    for target in (live_session._target, live_session._eager_target):
        target.cache.storage[:] = torch.nan
    live_session.recover(RuntimeError(), "a turn", "nothing")
    for target in (live_session._target, live_session._eager_target):
        assert not target.cache.storage.any()


@pytest.mark.parametrize("generation", ["greedy", "sampling"])
def test_a_model_that_ignores_our_masks_measures_nothing(small, tmp_path, generation):
    """Under sampling no audit would tell."""
    save_checkpoint(tmp_path / "model", "stablelm")
    model = [f"model.path={tmp_path}/model", "model.template=plain", f"generation={generation}"]
    with pytest.raises(ConfigurationError, match=r"model\.path=.*StableLmAttention") as caught:
        run_here([*small, *model, "measure.exclusive=false", f"output_dir={tmp_path}/run"])
    assert caught.value.exit_code == 2
    assert (tmp_path / "run" / records.CASES).read_text() == ""


def test_hidden_states_that_the_model_lacks_are_refused_before_a_case(small, tmp_path, monkeypatch):
    needs = Needs(tokens_only=False, hidden_layers=(2, 40))
    monkeypatch.setattr(PromptLookup, "needs", property(lambda _: needs))
    with pytest.raises(ConfigurationError, match=r"^method=pld asks for .* 40, and") as caught:
        run_here([*small, "method=pld", "measure.exclusive=false", f"output_dir={tmp_path}/run"])
    assert caught.value.exit_code == 2
    assert (tmp_path / "run" / records.CASES).read_text() == ""


def test_the_manifest_holds_the_self_checks(small, tmp_path):
    extra = ["method=sps", "pair=random_draft", "measure.exclusive=false", "dataset.limit=1"]
    assert run_here([*small, *extra, f"output_dir={tmp_path}/run"]) == 0
    model = jsonl.read_json(tmp_path / "run" / records.MANIFEST)["model"]
    for check in (model["self_check"], model["drafts"]["sps"]["self_check"]):
        assert max(check["difference"].values()) <= check["tolerance"] < 1e-4


def test_the_exact_estimator_is_spec_bench_s_on_the_export(small, tmp_path, monkeypatch):
    """Their ``speed.py`` in three lines, with the model's own tokenizer."""
    loaded = []
    real = loading.load_tokenizer
    monkeypatch.setattr(loading, "load_tokenizer", lambda *a: loaded.append(real(*a)) or loaded[-1])
    run_here([*small, "method=pld", "estimator=specbench_exact", f"output_dir={tmp_path}/run"])
    assert spec_bench.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    ar, pld = (jsonl.read_jsonl(path)[0] for path in sorted((tmp_path / "out").iterdir()))
    ar, pld = ([line["choices"][0] for line in lines] for lines in (ar, pld))
    tokens = [sum(len(loaded[0](text).input_ids) - 1 for text in answer["turns"]) for answer in ar]
    assert min(tokens) <= 0, "an answer without text, which they average in"
    plain = np.mean([n / sum(answer["wall_time"]) for n, answer in zip(tokens, ar, strict=True)])
    speed = np.mean([sum(answer["new_tokens"]) / sum(answer["wall_time"]) for answer in pld])
    rows = jsonl.read_json(tmp_path / "run" / records.SUMMARY)["rows"]
    row = next(r for r in rows if (r["label"], r["task"]) == ("pld", "overall"))
    assert row["speedup"] == pytest.approx(speed / plain, rel=1e-12)


@pytest.fixture
def on_graphs(monkeypatch):
    """Pretend a GPU for the choice of an engine; passes run uncaptured on the CPU."""
    monkeypatch.setattr(session, "no_graphs", lambda model: None)
    monkeypatch.setattr(device_lock, "names", lambda *_: ["GPU-1"])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(GraphTarget, "captures", True)
    monkeypatch.setattr(StaticPass, "capture", lambda step, pool: None)


def overrides(small, folder, *extra):
    return [
        *small, "method=pld", "engine=graph", "measure.exclusive=false", *extra,
        f"output_dir={folder}",
    ]  # fmt: skip


def run(small, folder, *extra):
    assert run_here(overrides(small, folder, *extra)) == 0
    return list(jsonl.read_json(folder / records.MANIFEST)["labels"])


@pytest.fixture
def without_cache(monkeypatch):
    """Pretend a machine whose caches are smaller than a tiny model."""
    monkeypatch.setattr(environment, "cache_bytes", lambda: None)


@pytest.mark.usefixtures("without_cache")
def test_where_passes_are_graphs_a_run_has_both_baselines(small, tmp_path, on_graphs, capsys):
    assert run(small, tmp_path / "run") == ["ar", "pld", "ar_eager"]
    summary = jsonl.read_json(tmp_path / "run" / records.SUMMARY)
    assert summary["pairs"] == []
    rows = {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}
    for row in rows.values():
        assert row["speedup_graph"] == row["speedup"]
        assert row["speedup_eager"] > 0
        assert row["lossless"]["bug"] == 0
    assert rows["ar_eager"]["speedup_eager"] == rows["ar"]["speedup_graph"] == 1
    assert rows["pld"]["bandwidth_share"] == rows["ar"]["bandwidth_share"] > 0
    assert rows["ar_eager"]["bandwidth_share"] / rows["ar"]["bandwidth_share"] == pytest.approx(
        rows["ar_eager"]["tokens_per_s"] / rows["ar"]["tokens_per_s"]
    )
    assert "ar_eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "labels"),
    [
        (["model.device=cpu"], ["ar", "pld"]),
        (["engine.eager_baseline=false"], ["ar", "pld"]),
        (["engine=eager"], ["ar", "pld"]),
        (["baseline=false"], ["pld"]),
        (["measure=phases"], ["ar", "pld"]),
        (["compare=[{method: ar, eager: true, label: slow}]"], ["ar", "pld", "slow"]),
    ],
    ids=str,
)
def test_one_is_enough_where_it_was_asked_for_or_another_is_there(
    extra, labels, small, tmp_path, request
):
    if extra != ["model.device=cpu"]:
        request.getfixturevalue("on_graphs")
    actual = []

    def note(_work, job):
        actual.extend(with_eager_baseline(job).labels)
        return 0

    run_here(overrides(small, tmp_path / "run", *extra), launch=note)
    assert actual == labels


def test_the_manifest_tells_of_passes_that_ran_eagerly_in_mid_run(small, tmp_path, on_graphs):
    extra = ["method=random_drafts", "method.n_nodes=140", "method.shape=wide"]
    extra += ["engine.eager_baseline=false", "measure.warmup=0", "dataset.limit=2"]

    def passes() -> dict:
        return jsonl.read_json(tmp_path / "run" / records.MANIFEST)["model"]["passes"]

    run(small, tmp_path / "run", *extra)
    assert passes()["eager"] == {"141 rows": "more than 128 rows"}
    # Whoever reads its numbers reads of it, on the terminal and in a table.
    warning = "% of random_drafts's target passes ran without a CUDA graph"
    assert warning in " ".join(warning_texts(jsonl.read_json(tmp_path / "run" / records.SUMMARY)))
    assert tables.main([str(tmp_path / "run"), "-o", str(tmp_path / "tables")]) == 0
    written = "".join(p.read_text() for p in (tmp_path / "tables").rglob("*.md"))
    assert warning in written


def test_a_folder_keeps_the_labels_it_was_begun_with(small, tmp_path, on_graphs):
    folder = tmp_path / "run"
    run(small, folder, "dataset.limit=2", "engine.eager_baseline=false")
    (folder / records.DONE).unlink()
    lines = (folder / records.CASES).read_text().splitlines(keepends=True)
    (folder / records.CASES).write_text("".join(lines[: len(lines) // 2]))
    assert run(small, folder, "dataset.limit=2") == ["ar", "pld"]
    again = (folder / records.CASES).read_text()
    assert "ar_eager" not in again
    assert len(again.splitlines()) == len(lines)


@pytest.mark.slow  # over a second
@pytest.mark.usefixtures("without_cache")
def test_the_memory_s_fastest_read_is_that_of_all_the_run_s_starts(small, tmp_path):
    command = [*small, "dataset.limit=2", f"output_dir={tmp_path}"]
    with interrupted_after(1):
        run_here(command)
    first = jsonl.read_json(tmp_path / records.MANIFEST)["model"]
    assert first["read_bytes_per_s"] > 0
    edit_manifest(tmp_path, model=first | {"read_bytes_per_s": 1e18})
    assert run_here(command) == 0
    assert jsonl.read_json(tmp_path / records.MANIFEST)["model"]["read_bytes_per_s"] == 1e18
    conditions = jsonl.read_json(tmp_path / records.SUMMARY)["conditions"]
    assert "at 0% of this machine's read bandwidth (1000000000 GB/s)" in conditions["weights read"]
    codes = [w["code"] for w in jsonl.read_json(tmp_path / records.SUMMARY)["warnings"]]
    assert "SLOW_BASELINE" in codes
