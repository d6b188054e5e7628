"""A draft model is found, checked against the target's tokenizer, and placed."""

import json
import logging
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.numpy import save_file

from runners.job import Job
from runners.launch.dispatch import resolve_entries
from runners.measure.method_runs import build_method_runs
from specbench.config.compose import compose, to_config
from specbench.config.entries import compose_entry
from specbench.config.schema import DraftConfig, draft_weights
from specbench.config.validate import check_values
from specbench.errors import ConfigurationError, NeedsNotMet, WeightsNotFound
from specbench.models import loading
from specbench.models.draft import loading as draft_loading
from specbench.models.target import Target
from specbench.paths import ASSETS, CONF_DIR
from tests.conftest import tiny_model
from tests.tiny_checkpoint import VOCAB, save_checkpoint, tiny_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    save_checkpoint(folder)
    return folder


@pytest.fixture
def load(tmp_path):
    """Loads the draft of some overrides for a tiny target with the tiny tokenizer."""
    target = Target(tiny_model("llama", vocab_size=VOCAB), max_len=64)

    def loaded(*overrides):
        base = ["method=sps", "pair=none", f"cache_dir={tmp_path}", "model.dtype=float64"]
        cfg = to_config(compose([*base, "model.device=cpu", *overrides]))
        return draft_loading.load_draft_model(
            cfg.pair.draft, cfg.model, target, tiny_tokenizer(), max_len=64, max_nodes=4
        )

    return loaded


def build(*overrides):
    """What a run does before anything is loaded."""
    cfg = compose(["method=sps", *overrides])
    return build_method_runs(Job(to_config(cfg), (), {}, "", Path(), resolve_entries(cfg), ()))


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of the checkpoint, to be changed."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def test_a_local_checkpoint(load, checkpoint):
    draft, described = load(f"pair.draft.path={checkpoint}")
    text = np.array([5, 6, 7])
    draft.begin(text)
    with torch.inference_mode():
        expected = draft.network.double()(input_ids=torch.from_numpy(text)[None]).logits[0, -1]
    torch.testing.assert_close(draft.catch_up(text), expected)
    assert draft.context_length == 512
    assert (described.id, described.vocab_size) == (str(checkpoint), VOCAB)
    assert described.weights_hash and described.dtype == "float64"
    assert described.parameters == sum(p.numel() for p in draft.network.parameters())


def test_random_weights_need_no_checkpoint(load):
    draft, described = load("pair=random_draft", "pair.draft.random.layers=2")
    assert draft.vocab_size == draft.target_vocab == VOCAB
    assert described.id == "random"
    again, _ = load("pair=random_draft", "pair.draft.random.layers=2")
    other, _ = load("pair=random_draft", "pair.draft.random.layers=2", "pair.draft.random.seed=1")
    text = np.array([5, 6, 7])
    for model in (draft, again, other):
        model.begin(text)
    assert torch.equal(draft.catch_up(text), again.catch_up(text))
    assert not torch.equal(draft.catch_up(text), other.catch_up(text))


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(load, folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    names = {i: token for token, i in vocab.items()}
    vocab[names[40]], vocab[names[90]] = 90, 40
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(NeedsNotMet, match=r"id 40 is .* there and .* here") as refused:
        load(f"pair.draft.path={folder}")
    assert repr(names[40]) in str(refused.value) and "pair=random_draft" in str(refused.value)
    assert "pair.draft.vocabulary=intersection" in str(refused.value)
    drafter, _ = load(f"pair.draft.path={folder}", "pair.draft.vocabulary=intersection")
    id_map = torch.tensor([39, 40, 90])
    assert drafter.to_target_ids(id_map).tolist() == [39, 90, 40]


def test_a_folder_without_a_tokenizer_says_whose_it_uses(load, folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(NeedsNotMet, match="tokenizer_hash"):
        load(f"pair.draft.path={folder}")
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["tokenizer_hash"] = loading.tokenizer_hash(tiny_tokenizer())
    file.write_text(json.dumps(content), encoding="utf-8")
    load(f"pair.draft.path={folder}")
    for broken in ("{", "[]"):
        file.write_text(broken, encoding="utf-8")
        with pytest.raises(WeightsNotFound, match=r"config\.json cannot be read") as damaged:
            load(f"pair.draft.path={folder}")
        assert damaged.value.exit_code == 2


def test_a_reduced_vocabulary_is_read_from_its_file(load, folder):
    ids = np.arange(VOCAB)[::-1].copy()
    save_file({"ids": ids}, folder / draft_loading.ID_MAP_FILE)
    draft, _ = load(f"pair.draft.path={folder}")
    assert draft.to_target_ids(torch.tensor([0, 2])).tolist() == [VOCAB - 1, VOCAB - 3]
    for damaged in (ids + 0.5, ids[None], np.array([-1, 3, 3]), np.ones(2, dtype=np.complex64)):
        save_file({"ids": damaged}, folder / draft_loading.ID_MAP_FILE)
        with pytest.raises(ConfigurationError, match="no list of the target's ids"):
            draft_loading.read_id_map(folder)
    (folder / draft_loading.ID_MAP_FILE).write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="damaged"):
        load(f"pair.draft.path={folder}")


def test_a_draft_whose_layers_keep_a_state_is_refused(load, tmp_path):
    save_checkpoint(tmp_path, "lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ConfigurationError, match=r"keep a state cannot .* Name another one, or"):
        load(f"pair.draft.path={tmp_path}")


def test_a_device_that_is_not_there_is_shared_and_said_so(load, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with caplog.at_level(logging.WARNING):
        draft, described = load("pair=random_draft", "pair.draft.device=cuda:1")
    assert described.device == "cpu"
    assert "pair.draft.device=cuda:1 is not there" in caplog.text
    assert {"devices": 1, "devices_asked": 2}.items() <= draft.report().items()
    draft, _ = load("pair=random_draft", "pair.draft.device=cpu")
    assert {"devices": 1, "devices_asked": 1}.items() <= draft.report().items()
    for name in ("gpu7", "mps", "auto"):
        with pytest.raises(ConfigurationError, match=rf"pair\.draft\.device.*cpu.*{name}"):
            check_values(compose(["pair=random_draft", f"pair.draft.device={name}"]))


@pytest.mark.parametrize(
    ("requested", "there", "expected"),
    [
        (None, 3, ("cuda:0", 2)),
        ("cuda", 3, ("cuda:0", 2)),
        ("cuda:2", 3, ("cuda:2", 3)),
        ("cuda:1", 3, ("cuda:1", 2)),
        ("cuda:2", 2, ("cuda:0", 3)),  # shared, and three were requested
    ],
)
def test_a_target_spread_over_devices_counts_them_all(requested, there, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    target = types.SimpleNamespace(device=gpus[0], devices=frozenset(gpus))
    device, n_devices = draft_loading._placed(requested or "cuda:0", requested, target)
    assert (str(device), n_devices) == expected


def test_a_missing_draft_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(NeedsNotMet, match=r"pair=random_draft") as refused:
        build("pair=none")
    assert "pair=sps_smollm2_135m, pair.draft.path=FOLDER" in str(refused.value)
    with pytest.raises(NeedsNotMet) as nowhere:
        build("model=mistral7b")
    assert "Type pair.draft.path=FOLDER, pair.draft.id=HUB_ID" in str(nowhere.value)
    assert "Type pair.draft.path=FOLDER" in str(nowhere.value)  # no file that is not there
    with pytest.raises(NeedsNotMet, match=r"pair\.draft\.path=.*no such folder") as missing:
        build(f"pair.draft.path={tmp_path / 'none'}")
    assert "pair.draft.path=FOLDER" in str(missing.value)
    with pytest.raises(NeedsNotMet, match=r"no weights for pair\.draft\.id=org/none"):
        build("pair=none", "pair.draft.id=org/none")
    build("pair=random_draft")


def test_the_runs_draft_holds_for_all_its_entries(tmp_path):
    cfg = compose(["method=sps", "pair=random_draft", "pair.draft.random.layers=3"])
    assert compose_entry(cfg, "opt_tree").pair.draft.random.layers == 3
    budget = compose_entry(cfg, "cacheback")
    pair_file = OmegaConf.load(CONF_DIR / "pair/cacheback_smollm2_135m.yaml")
    assert budget.method.total_draft_len == pair_file.method.total_draft_len
    cfg = compose(["method=cacheback", "pair=none", f"pair.draft.path={tmp_path}"])
    assert compose_entry(cfg, "sps").pair.draft.path == str(tmp_path)


def test_a_path_is_found_below_the_project_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = to_config(compose([])).model
    assert draft_weights(DraftConfig(path="assets"), model).id == str(ASSETS)
    (tmp_path / "assets").mkdir()
    assert draft_weights(DraftConfig(path="assets"), model).id == str(tmp_path / "assets")
