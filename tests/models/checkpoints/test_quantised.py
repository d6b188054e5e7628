"""Quantised files: what is read is what they stand for, and what cannot be read is refused."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from specbench.config.compose import compose
from specbench.errors import ConfigurationError, WeightsNotFound
from specbench.models import loading
from specbench.models.checkpoints import quantised
from tests.tiny_checkpoint import save_checkpoint

IDS = torch.tensor([[1, 5, 9, 14, 3]])
FILE = "toy.gguf"
BLOCK = 128  # of FP8


def load(folder, *overrides):
    name = f"model.path={folder}"
    cache = f"cache_dir={folder}/cache"
    cfg = compose([cache, "model=local", "model.device=cpu", name, *overrides])
    loading.model_files_present(cfg)
    return loading.load_model(cfg)


def check_same(loaded, twin):
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS).logits, twin(IDS).logits)


def write_gguf(folder):
    """Write a Llama whose products are in three kinds of blocks; returns what they stand for."""
    twin = save_checkpoint(folder, hidden_size=256, intermediate_size=256)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (folder / name).unlink()
    writer, config = gguf.GGUFWriter(folder / FILE, "llama"), twin.config
    for add, value in (
        (writer.add_context_length, 512), (writer.add_embedding_length, 256),
        (writer.add_block_count, 2), (writer.add_feed_forward_length, 256),
        (writer.add_head_count, 4), (writer.add_head_count_kv, 2), (writer.add_vocab_size, 300),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps), (writer.add_eos_token_id, 2),
        (writer.add_rope_freq_base, 10000.0),
    ):  # fmt: skip
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    random = np.random.default_rng(0)
    heads = {"q_proj": 4, "k_proj": 2}  # whose rows lie in pairs there, half a head apart here
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            module = name.removesuffix(".weight")
            part, stored = module.split(".")[-1], f"{names.get_name(module)}.weight"
            if weight.dim() == 1:
                writer.add_tensor(stored, weight.numpy())
                continue
            if part == "down_proj":  # a kind that gguf reads and does not write
                kind, blocks = Kind.Q6_K, random.integers(0, 256, (len(weight), 210), np.uint8)
                blocks[:, -2:] = np.full((len(weight), 1), 1e-4, np.float16).view(np.uint8)
            else:
                kind = Kind.Q4_0 if part in heads else Kind.Q8_0
                blocks = gguf.quants.quantize(weight.numpy(), kind)
            writer.add_tensor(stored, blocks, raw_dtype=kind)
            values = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            if part in heads:
                pairs = values.unflatten(0, (heads[part], -1, 2))
                values = pairs.transpose(1, 2).reshape(weight.shape)
            weight.copy_(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return twin


def write_fp8(folder):
    """Write a Llama in FP8 whose other weights are bfloat16; returns what they stand for."""
    twin = save_checkpoint(folder, hidden_size=BLOCK, intermediate_size=2 * BLOCK)
    tensors = load_file(folder / "model.safetensors")
    for name, values in list(tensors.items()):
        if not name.endswith("proj.weight"):
            tensors[name] = values.bfloat16()
            twin.get_parameter(name).data = tensors[name].float()
            continue
        tiles = (-(-size // BLOCK) for size in values.shape)
        blocks = values.unflatten(0, (next(tiles), -1)).unflatten(2, (next(tiles), -1))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        rounded = (blocks / scales).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = rounded.reshape_as(values), scales[:, 0, :, 0]
        twin.get_parameter(name).data = (rounded.float() * scales).reshape_as(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_method(folder, "fp8", weight_block_size=[BLOCK, BLOCK], activation_scheme="dynamic")
    return twin


def set_method(folder, method, **settings):
    path = folder / "config.json"
    quantised_by = {"quantization_config": {"quant_method": method, **settings}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantised_by))


def test_a_gguf_file_is_read_as_what_its_blocks_stand_for(tmp_path):
    twin = write_gguf(tmp_path)
    loaded = load(tmp_path, f"model.gguf_file={FILE}")
    check_same(loaded, twin)
    assert loaded.eos_ids == {2} and loaded.tokenizer.eos_token_id == 2
    short = load(tmp_path, f"model.gguf_file={FILE}", "model.dtype=bfloat16")
    assert short.weights_hash == loaded.weights_hash and short.dtype == "bfloat16"
    assert "a file in gguf and were dequantised to float32" in loaded.notes[0]


def test_a_gguf_file_that_is_not_there_is_named(tmp_path):
    save_checkpoint(tmp_path)
    with pytest.raises(WeightsNotFound, match=r"model\.gguf_file=toy\.gguf is no file in .*Type"):
        load(tmp_path, f"model.gguf_file={FILE}")


def test_fp8_is_read_in_the_dtype_that_was_typed(tmp_path):
    twin = write_fp8(tmp_path)
    loaded = load(tmp_path)
    check_same(loaded, twin)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert "fp8 and were dequantised to float32: a pass reads" in loaded.notes[0]
    halves = load(tmp_path, "model.dtype=bfloat16").model
    assert {weight.dtype for weight in halves.parameters()} == {torch.bfloat16}


def test_a_method_that_cannot_be_undone_is_refused_by_name(tmp_path):
    save_checkpoint(tmp_path)
    set_method(tmp_path, "gptq", bits=4)
    with pytest.raises(ConfigurationError, match=r"quantised \(gptq\), and no engine here"):
        load(tmp_path)


def test_a_weight_that_stayed_packed_is_refused(tmp_path):
    network = save_checkpoint(tmp_path).requires_grad_(False)
    head = network.lm_head
    head.weight.data = head.weight.data.to(torch.float8_e4m3fn)
    model = compose(["model=local", f"model.path={tmp_path}"]).model
    with pytest.raises(ConfigurationError, match=r"quantised \(fp8\)"):
        quantised.make_plain(model, network, "fp8", torch.float32)
