"""Replay of trained heads: the live run's steps from recorded hidden states, without the model."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from methods.medusa import Medusa
from runners.search import Candidate, Entries, Replays
from specbench.config import compose
from specbench.errors import ArtifactError, ConfigurationError, NeedsNotMet
from specbench.models import loading
from specbench.models.heads import eagle3
from specbench.models.heads.layer_shape import read_shape
from specbench.replay import states
from specbench.replay.cost_surface import CostSurface
from specbench.replay.traces import load_traces
from specbench.results import records
from specbench.storage import jsonl
from tests.models.heads import tiny_heads
from tests.runners.test_replay import steps, surface  # noqa: F401 (a fixture)
from tests.small_run import run_here, warning_texts

LAYERS = "[0, 1, 1]"
METHODS = {
    "medusa": "levels: [12, 16, 6, 2]",
    "hydra": "levels: [12, 16, 6, 2]",
    "eagle": "levels: [12, 16, 6, 2]",
    "eagle2": "total: 40, depth: 3, top_k: 12",
    "eagle3": f"total: 40, depth: 3, top_k: 12, layer_ids: {LAYERS}",
    "dflash": "tree: dynamic",
    "sam_eagle2": "len_threshold: 3, auxiliary: {method: eagle2, total: 30, depth: 2, top_k: 12}",
    "union": "drafters: [pld, {method: medusa, tree: dynamic}, hydra], max_nodes: 60",
}
COMPARE = "compare=[{}]".format(
    ", ".join(f"{{method: {name}, {knobs}}}" for name, knobs in METHODS.items())
)


@pytest.fixture(scope="module")
def with_heads(small, checkpoint, tmp_path_factory):
    """Return the overrides of a run of the tiny model with a random head of each kind."""
    config = json.loads((checkpoint / "config.json").read_text())
    folders = tiny_heads.save_each(
        tmp_path_factory.mktemp("heads"),
        config["vocab_size"],
        read_shape(config, "the target"),
    )
    return [*small, *(f"++pair.heads.{name}={path}" for name, path in folders.items())]


@pytest.fixture(scope="module")
def live(with_heads, tmp_path_factory):
    """Run every head live, with hidden states recorded along plain decoding."""
    out = tmp_path_factory.mktemp("live") / "run"
    overrides = ["record=states", f"record_layers={LAYERS}", "dataset.limit=3"]
    overrides += ["generation.max_new_tokens=32"]
    assert run_here([*with_heads, *overrides, COMPARE, f"output_dir={out}"]) == 0
    return out


@pytest.fixture
def again(with_heads, live, tmp_path):
    """Replay the live run; returns the folder."""
    recorded = ("dataset", "generation", "model.d", "model.context_length")
    plain = [text for text in with_heads if not text.startswith(recorded)]

    def run(*overrides, traces=live, out="replay"):
        base = [*plain, "runner=replay", f"runner.traces={traces}", f"output_dir={tmp_path / out}"]
        assert run_here(base, "strict=true", *overrides, launch=None) == 0
        return tmp_path / out

    return run


def test_steps_of_heads_are_the_live_runs(live, again, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)  # no network is loaded
    out = again(COMPARE)
    expected = steps(live)
    assert {key[3] for key in expected} == {"ar", "pld", *METHODS}
    assert steps(out) == expected
    for name in METHODS:
        taken = [s for key, (s, *_) in expected.items() if key[3] == name for s in s]
        assert sum(taken) - len(taken) > 3, f"{name}: nothing was compared"
    summary = jsonl.read_json(out / records.SUMMARY)
    assert any("EXACT UP TO ROUNDING" in note for note in warning_texts(summary))
    kinds = {r.label: r.drafter.get("replay") for r in records.read_records(out)[0]}
    assert kinds == {"ar": None, "pld": None} | dict.fromkeys(METHODS, "exact up to rounding")
    manifest = jsonl.read_json(out / records.MANIFEST)
    assert manifest["model"]["artefacts"]["eagle2"]["head eagle"]["sha256"]


@pytest.mark.slow  # over a second
def test_another_tree_is_replayed_from_the_same_states(live, with_heads, again, tmp_path):
    tree = "compare=[{method: eagle2, total: 6, depth: 1, top_k: 3}]"
    fresh = tmp_path / "fresh"
    overrides = ["generation.max_new_tokens=32", "dataset.limit=3", tree, f"output_dir={fresh}"]
    assert run_here([*with_heads, *overrides]) == 0
    assert steps(again(tree)) == steps(fresh)


def test_with_a_surface_each_draft_is_made_in_its_step(live, again, surface, monkeypatch):  # noqa: F811
    """Predicted times contain the head's own."""
    monkeypatch.setattr(Medusa, "foresee", None)
    out = again("compare=[{method: medusa, levels: [12, 16, 6, 2]}]", f"runner.surface={surface}")
    expected = steps(live)
    assert {key: expected[key] for key in steps(out)} == steps(out)
    assert all(r.decode_s > 0 for r in records.read_records(out)[0] if r.n_target_passes)


def test_a_tree_that_the_head_is_too_short_for_is_refused_before_a_run(live, with_heads, surface):  # noqa: F811
    overrides = [word for word in with_heads if not word.startswith("method=")]
    search = Replays(
        Entries(compose.compose(["method=ar", *overrides])),
        load_traces(live),
        CostSurface.read(surface),
        live / "tried.jsonl",
    )
    trees = [Candidate("medusa", {"levels": levels}) for levels in ([2, 1], [1] * 30)]
    other = Candidate("sps", {"gamma": 2})  # it needs the model, which only a run has
    search.refuse_unfit([*trees, other])
    assert [candidate.refused for candidate in (trees[0], other)] == ["", ""]
    assert "each level needs a head" in trees[1].refused


def test_states_are_those_of_the_text(live, checkpoint):
    """All tokens but the last, in the model's own type, the last state after the final norm."""
    from transformers import AutoModelForCausalLM

    traces = load_traces(live)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    assert traces.hidden_states == (2, frozenset((0, 1, 2)))
    for turns in traces.cases().values():
        for turn in turns:
            text = np.concatenate([turn.prompt_ids, turn.output_ids])[:-1]
            recorded = states.read_states(
                turn.states, turn.prompt_ids, turn.output_ids, torch.float64, torch.device("cpu")
            )
            with torch.inference_mode():
                outputs = model(torch.from_numpy(text)[None], output_hidden_states=True)
            for layer, rows in recorded.items():
                expected = outputs.hidden_states[layer][0]
                torch.testing.assert_close(rows, expected, atol=1e-9, rtol=0)


def test_what_is_recorded_suits_the_heads_that_are_at_hand(with_heads, tmp_path, caplog):
    """EAGLE-3's own layers are those of a model of 30; the one here says which it reads."""
    caplog.set_level("INFO")
    folder = tmp_path / "eagle3"
    shutil.copytree(next(t for t in with_heads if ".eagle3=" in t).partition("=")[2], folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    out = tmp_path / "run"
    overrides = ["method=ar", "record=states", "dataset.limit=1", f"output_dir={out}"]
    head_paths = [f"++pair.heads.eagle3={folder}", "++pair.heads.medusa=/nowhere/medusa"]
    assert run_here([*with_heads, *overrides, *head_paths]) == 0
    assert load_traces(out).hidden_states == (2, frozenset((0, 1, 2)))
    assert "recording the hidden states 0, 1, 2: 0.8 kB a token" in caplog.text
    assert "pair.heads.medusa is not here" in caplog.text


def test_a_run_looks_for_the_layers_that_a_head_was_trained_on(with_heads, tmp_path, monkeypatch):
    """With all states of an answer, whose own layers are then looked for."""
    calls = []

    def checked_ids(head, all_states, ids, layers):
        calls.append((len(all_states), {len(rows) for rows in all_states} == {len(ids)}, layers))

    monkeypatch.setattr(eagle3, "checked_ids", checked_ids)
    entry = "compare=[{method: eagle3, total: 6, depth: 1, top_k: 3, layer_ids: [0, 0, 0]}]"
    overrides = [entry, "dataset.limit=1", f"output_dir={tmp_path}/run"]
    assert run_here([*with_heads, *overrides]) == 0
    assert calls == [(3, True, (0, 0, 0))]
    done = records.read_records(tmp_path / "run")[0]
    assert {r.lossless.verdict for r in done} == {"equal"}


@pytest.mark.slow  # over a second
def test_what_was_not_recorded_is_refused(live, with_heads, again, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(live, plain)
    shutil.rmtree(plain / states.FOLDER)
    with pytest.raises(NeedsNotMet, match=r"holds none. Type: .* record=states") as refusal:
        again("compare=[eagle2]", traces=plain)
    assert refusal.value.exit_code == 2
    final = tmp_path / "final"
    overrides = ["record=states", "record_layers=[]", "dataset.limit=1", f"output_dir={final}"]
    assert run_here([*with_heads, *overrides]) == 0
    assert load_traces(final).hidden_states == (2, frozenset((2,)))
    override = "compare=[{method: eagle3, layer_ids: [0, 1, 1]}]"
    with pytest.raises(NeedsNotMet, match=r"states 0, 1, and .* holds 2. .*record_layers=\[0, 1\]"):
        again(override, traces=final, out="b")


def test_other_weights_are_refused(live, with_heads, again, checkpoint):
    file = checkpoint / "model.safetensors"
    before = file.read_bytes()
    tensors = {k: v + 1 if "embed" in k else v for k, v in load_file(file).items()}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(NeedsNotMet, match=r"other weights .* record=states"):
            again("compare=[eagle2]")
    finally:
        file.write_bytes(before)


def test_states_of_another_text_or_a_damaged_file_are_refused(live, again, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(live, other)
    first, second, *_ = sorted((other / states.FOLDER).iterdir())
    turn = next(iter(load_traces(other).cases().values()))[0]
    with pytest.raises(ArtifactError, match="another text"):
        states.read_states(
            second, turn.prompt_ids, turn.output_ids, torch.float64, torch.device("cpu")
        )
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        states.read_states(
            first, turn.prompt_ids, turn.output_ids, torch.float64, torch.device("cpu")
        )
    data[20] ^= 1
    first.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        again("compare=[eagle2]", traces=other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["record=stats"], "`record` must be .*'states'"),
        (["record_layers=[1]"], "needs record=states"),
        (["record=states", "record_layers=[7]"], "record_layers asks for the hidden states 7"),
        (["record=states", "baseline=false"], "baseline=true"),
    ],
)
def test_recordings_that_cannot_be_are_refused(with_heads, tmp_path, overrides, message):
    with pytest.raises(ConfigurationError, match=message) as refusal:
        run_here([*with_heads, *overrides, f"output_dir={tmp_path}/run", "dataset.limit=1"])
    assert refusal.value.exit_code == 2


def spans(counts):
    """Each step as the positions between which it committed."""
    ends = np.cumsum(counts)
    return set(zip((ends - counts).tolist(), ends.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_on_the_bundled_model_the_steps_are_the_live_runs_up_to_rounding(tmp_path):
    """In float32: passes of several rows round otherwise than those that were recorded."""
    trees = "{method: eagle,levels: [4,4,2]},{method: eagle2,total: 16,depth: 3,top_k: 4}"
    more = "{method: hydra,levels: [3,2,1]},{method: eagle3,total: 12,depth: 3,top_k: 3}"
    entries = ["method=medusa", "method.levels=[4,4,2]", f"compare=[{trees},{more}]"]
    entries += ["model.device=cpu"]
    overrides = [*entries, "dataset.limit=8", "generation.max_new_tokens=96", "record=states"]
    overrides += ["measure.warmup=0", "measure.reruns=0", "measure.exclusive=false"]
    live, out = tmp_path / "live", tmp_path / "replay"
    assert run_here([*overrides, f"output_dir={live}"]) == 0
    replay = ["runner=replay", f"runner.traces={live}", f"output_dir={out}"]
    assert run_here([*entries, *replay], launch=None) == 0
    live_steps, replayed = steps(live), steps(out)
    total = differing = 0
    for key, (counts, _, output, *_) in live_steps.items():
        # An output that a near tie led elsewhere is of another text.
        if key[3] != "ar" and output == replayed[key][2]:
            total += len(counts)
            differing += len(spans(counts) - spans(replayed[key][0]))
    print(f"{differing} of {total} steps differ")
    assert total >= 1000
    assert differing <= 0.02 * total
