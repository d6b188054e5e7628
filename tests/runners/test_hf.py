"""runner=hf: transformers' own loops beside ours, by the same rules and into the same files."""

import shutil
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file

from runners.hf import TransformersSession
from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.models.draft import loading as draft_loading
from specbench.models.draft.loading import ID_MAP_FILE
from specbench.results import records
from specbench.storage import jsonl
from tests.small_run import run_here


@pytest.fixture
def execute(small, tmp_path):
    return partial(run_here, [*small, "runner=hf", f"output_dir={tmp_path}/run"])


def done(tmp_path):
    return records.read_records(tmp_path / "run")[0]


@pytest.mark.slow  # over a second
def test_the_peers_run_beside_the_method_and_are_audited(execute, tmp_path):
    chosen = ("pair=random_draft", "dataset.limit=3", "generation.max_new_tokens=24")
    assert execute(*chosen) == 0
    turns = done(tmp_path)
    labels = ["ar", "pld", "hf_generate", "hf_assisted", "hf_prompt_lookup"]
    assert sorted({r.label for r in turns}) == sorted(labels)
    assert {r.status for r in turns} == {"ok"}
    assert {r.lossless.verdict for r in turns} == {"equal"}
    plain = {(r.case_id, r.turn): r for r in turns if r.label == "ar"}
    for record in turns:
        reference = plain[record.case_id, record.turn]
        assert record.output_ids == reference.output_ids
        assert record.finish_reason == reference.finish_reason
        assert sum(record.committed_per_step) == record.n_new - 1
        if record.label == "hf_generate":
            assert record.method == "hf:generate"
            assert list(record.committed_per_step) == [1] * (record.n_new - 1)
            assert record.n_drafted == 0
        if record.label.startswith("hf_"):
            assert 0 < record.prefill_s < record.wall_s
            assert 0 < record.drafter_setup_s < record.decode_s
    assisted = [r for r in turns if r.label == "hf_assisted"]
    assert all(r.drafter["draft_forwards"] > 0 for r in assisted)
    assert sum(r.n_drafted for r in assisted) > 0
    lookup = [r for r in turns if r.label == "hf_prompt_lookup"]
    assert sum(r.n_target_passes for r in lookup) < sum(r.n_new - 1 for r in lookup)
    rows = jsonl.read_json(tmp_path / "run" / records.SUMMARY)["rows"]
    assert all(row["speedup"] is not None for row in rows if row["task"] == "overall")
    assert execute(*chosen) == 0  # nothing is left


@pytest.mark.slow  # over a second
def test_the_assistants_passes_are_counted_as_ours(execute, tmp_path):
    """Each draft token costs a pass, in both; a turn's first came from the prompt's pass."""
    chosen = ("method=sps", "method.gamma=3", "pair=random_draft", "generation.max_new_tokens=24")
    knobs = ("runner.hf.loops=[assisted]", "runner.hf.num_assistant_tokens=3")
    assert execute(*chosen, *knobs, "runner.hf.confidence=0", "dataset.limit=3") == 0
    turns = [r for r in done(tmp_path) if r.label in ("sps", "hf_assisted")]
    steps = {
        label: {r.key[:3]: r.committed_per_step for r in turns if r.label == label}
        for label in ("sps", "hf_assisted")
    }
    assert steps["sps"] == steps["hf_assisted"]
    for record in turns:
        counts = record.drafter
        # Theirs drafts before the prompt's pass too.
        drafted = record.n_drafted + counts.get("drafted_with_prompt", 0)
        assert drafted > 0
        assert counts["draft_forwards"] == drafted - 1
        # A pass behind a verified draft reads two rows at most: nowhere is the prompt among them.
        passes = counts["draft_forwards"] + record.n_target_passes
        assert counts["draft_forwards"] <= counts["draft_tokens"] <= passes


@pytest.mark.slow  # over a second
def test_where_no_draft_can_assist_the_loop_is_left_out_and_says_why(
    execute, checkpoint, tmp_path, caplog
):
    folder = shutil.copytree(checkpoint, tmp_path / "reduced")
    save_file({"ids": np.arange(5)}, folder / ID_MAP_FILE)
    chosen = (f"pair.draft.path={folder}", "method=ar", "dataset.limit=1")
    assert execute(*chosen) == 0
    assert {r.label for r in done(tmp_path)} == {"ar", "hf_generate", "hf_prompt_lookup"}
    assert f"hf_assisted is left out: the draft {folder}" in caplog.text
    assert "pair=random_draft" in caplog.text
    with pytest.raises(NeedsNotMet, match=r"names assisted, but .* vocabulary of its own"):
        execute(*chosen, "runner.hf.loops=[assisted]", "fresh=true")
    assert execute("pair=none", "dataset.limit=1", "method=ar", "fresh=true") == 0
    assert {r.label for r in done(tmp_path)} == {"ar", "hf_generate", "hf_prompt_lookup"}
    assert "hf_assisted is left out: no draft model is named" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pair=none", "runner.hf.loops=[assisted]"], "pair=random_draft"),
        (["runner.hf.loops=[assistd]"], "Did you mean 'assisted'"),
        (["runner.hf.schedule=heuristc"], "Did you mean 'heuristic'"),
        (
            ["runner.hf.num_assistant_tokens=0"],
            "`runner.hf.num_assistant_tokens` must be at least 1",
        ),
        (["generation.temperature=1"], "generation.temperature=0"),
        (["compare=[{method: pld, label: hf_generate}]"], "'hf_generate' is taken"),
    ],
)
def test_bad_input_is_refused(execute, tmp_path, overrides, message):
    with pytest.raises(ConfigurationError) as refusal:
        execute(*overrides)
    assert message in str(refusal.value)
    assert not (tmp_path / "run" / records.CASES).exists()


@pytest.mark.slow  # over a second
def test_the_heuristic_schedule_starts_afresh_in_every_turn(execute, tmp_path, monkeypatch):
    """It writes its last value into the assistant's configuration, where the next turn reads it."""
    starts = []
    options = TransformersSession._options

    def noted(session, loop):
        chosen = options(session, loop)
        if loop == "assisted":
            config = chosen["assistant_model"].generation_config
            starts.append(config.num_assistant_tokens)
        return chosen

    monkeypatch.setattr(TransformersSession, "_options", noted)
    knobs = ["method=ar", "runner.hf.loops=[assisted]", "runner.hf.schedule=heuristic"]
    assert execute("pair=random_draft", "runner.hf.num_assistant_tokens=3", *knobs) == 0
    assert len(starts) > 5 and set(starts) == {3}


def test_a_draft_of_another_size_is_refused(execute, monkeypatch):
    make_network = draft_loading._random_network
    monkeypatch.setattr(
        draft_loading,
        "_random_network",
        lambda random, node, vocab, device: make_network(random, node, vocab + 3, device),
    )
    with pytest.raises(NeedsNotMet, match="transformers refuses"):
        execute("pair=random_draft")
