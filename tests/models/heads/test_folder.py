"""Where trained heads are looked for, and what is said of one that is not there."""

import pytest

from specbench.config.compose import compose, to_config
from specbench.config.run_key import run_key
from specbench.config.schema import ModelConfig
from specbench.errors import NeedsNotMet, WeightsNotFound
from specbench.models.heads import folder
from tests.models.heads import tiny_heads

MODEL = ModelConfig(name="vicuna7b")


@pytest.fixture
def home(tmp_path):
    tiny_heads.save(tmp_path / "own", *tiny_heads.eagle(), "pytorch_model.bin")
    return tmp_path


def test_a_folder_is_found_by_its_path_and_by_its_name(home, monkeypatch):
    head = home / "own"
    assert folder.find(str(head), {}, MODEL) == head
    assert folder.find("eagle", {"eagle": str(head)}, MODEL) == head
    assert folder.weight_file(head) == head / "pytorch_model.bin"
    monkeypatch.setattr(folder, "PROJECT", home)
    assert folder.find("eagle", {"eagle": "own"}, MODEL) == head


@pytest.mark.parametrize(
    ("name", "heads", "error", "message"),
    [
        ("eagle", {}, NeedsNotMet, "names a head 'eagle' for model=vicuna7b.*method.head="),
        ("./none", {}, WeightsNotFound, "method.head=.*none has no trained head.*FOLDER"),
        ("eagle", {"eagle": "assets/none/eagle"}, WeightsNotFound,
         "pair.heads.eagle=.*assets/none/eagle.*scripts.training heads"),
        ("eagle", {"eagle": "someone/EAGLE"}, WeightsNotFound, "hf download someone/EAGLE"),
        ("some one/EAGLE", {}, WeightsNotFound, "not a valid hub id"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_there_is_refused_with_what_to_type(name, heads, error, message):
    with pytest.raises(error, match=message):
        folder.find(name, heads, MODEL)


@pytest.mark.parametrize("model", ["vicuna13b", "smollm2_135m"])
def test_models_with_a_head_of_each_kind(model):
    heads = to_config(compose(["method=pld", f"model={model}"])).pair.heads
    assert set(heads) == {"medusa", "hydra", "eagle", "eagle3"}
    shipped = model == "smollm2_135m"
    assert all(location.startswith("assets/") == shipped for location in heads.values())


def test_only_methods_that_read_a_head_have_it_in_their_key():
    def moved(*args):
        return run_key(compose([*args, "pair.heads.eagle=other/EAGLE"])) != run_key(compose(args))

    assert not moved("method=medusa")
    assert moved("method=pld", "compare=[sam_eagle2]")
    assert moved("method=union", "method.drafters=[pld,{method: eagle}]")


@pytest.mark.parametrize("overrides", ["method=medusa method.tree={}",
                                   "method=pld compare=[{{method:medusa,tree:{}}}]"])  # fmt: skip
def test_a_tree_in_a_file_is_in_the_key_by_what_it_holds(tmp_path, overrides):
    file = tmp_path / "tree.json"
    keys = []
    for text in ("[[0]]", "[[0], [1]]", "[[0]]"):
        file.write_text(text, encoding="utf-8")
        keys.append(run_key(compose(overrides.format(file).split())))
    assert keys[0] == keys[2] != keys[1]
