"""What a model takes is compared with what there is before anything is fetched or loaded."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from specbench.config.compose import compose, to_config
from specbench.errors import ConfigurationError
from specbench.models import memory
from specbench.models.checkpoints import weights

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Sets what is free, in GiB, and asks for a model on ``cuda:0`` or the CPU."""

    def ask(*typed_words, gpus=(80,), host=500, disk=500, fetched=True, device="cuda:0"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda d: (gpus[d if isinstance(d, int) else d.index] * GIB, 0),
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: 0)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host * GIB))
        monkeypatch.setattr(
            memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk * GIB)
        )
        monkeypatch.setattr(weights, "at_hand", lambda model: fetched)
        memory.check_room(to_config(compose([*typed_words])), torch.device(device))

    return ask


@pytest.mark.parametrize(
    ("overrides", "free", "refused"),
    [
        ("model=vicuna7b", {"gpus": [23.5]}, None),
        ("model=vicuna7b", {"gpus": [15.6]}, r"takes about 16\.8 GiB .* GPU.* 15\.6 GiB are free"),
        ("model=vicuna7b runner=hf", {"gpus": [23.5]}, r"takes about 29\.4 GiB"),
        ("model=llama2_70b", {"gpus": [79, 79]}, None),
        ("model=llama2_70b", {"gpus": [79]}, r"takes about 1\d\d\.\d GiB .* engine=eager"),
        ("model=llama2_70b", {"gpus": [47, 47]}, r"of 2 GPUs, and 94\.0 GiB are free"),
        ("model=vicuna7b", {"host": 8}, r"float16 takes about 12\.6 GiB of this machine's memory"),
        ("model=llama2_70b", {"gpus": [79, 79], "host": 8}, None),  # layer by layer
        (
            "model=vicuna7b",
            {"disk": 9, "fetched": False},
            r"about 12\.6 GiB in .* 9\.0 GiB",
        ),
        ("model=vicuna7b", {"disk": 9}, None),
        ("model=vicuna7b", {"device": "cpu", "host": 8, "gpus": []}, r"13\.6 GiB .* 8\.0 GiB"),
        ("model=smollm2_135m", {"device": "cpu", "host": 2, "gpus": []}, None),
    ],
)
def test_what_a_model_takes_and_there_is(machine, overrides, free, refused):
    if refused is None:
        machine(*overrides.split(), **free)
        return
    with pytest.raises(ConfigurationError, match=refused) as error:
        machine(*overrides.split(), **free)
    assert "type" in str(error.value).lower()


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt_oss_20b", 20.9), ("qwen3_next_80b", 79.7), ("qwen3_8b", 8.2)]
)
def test_the_experts_of_a_mixture_are_counted(name, billions):
    shape = compose([f"model={name}"]).model.shape_config
    assert memory._parameters(shape) / 1e9 == pytest.approx(billions, rel=0.02)


def test_latents_take_less_than_the_keys_and_values_of_all_heads():
    model = compose(["model=deepseek_v2_lite"]).model
    assert memory._text_bytes(model) == 27 * (512 + 64) * 2 * 4096
