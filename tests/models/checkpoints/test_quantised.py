"""Quantised files: what is read is what they stand for, and what cannot be read is refused."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch.testing._internal.two_tensor import TwoTensor

from specbench.config.compose import compose
from specbench.errors import ConfigurationError, WeightsNotFound
from specbench.kernels.weight_forms import is_quantised, stored_bytes
from specbench.models import loading
from specbench.models.checkpoints import quantised
from specbench.models.checkpoints.weights import sample_weights
from specbench.models.target import Target
from specbench.system.bandwidth import streamed_bytes
from tests.conftest import tiny_model
from tests.models.test_architectures import build, equal_of
from tests.models.test_self_check import check
from tests.tiny_checkpoint import save_checkpoint, tiny_tokenizer

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
        quantised.settle(model, network, torch.float32, "fp8")


class Packed(torch.nn.Module):
    """A product with bytes and a scale a row, as packages of quantised layers have them."""

    def __init__(self, linear, together=False):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        codes = (linear.weight / scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)
        self.together = together  # activations are rounded with one scale for all rows of a pass

    def forward(self, x):
        if self.together:
            step = x.abs().max() / 7
            x = (x / step).round() * step
        return x @ (self.weight * self.scale).T


PARTS = ("gate_proj", "up_proj", "down_proj")


def packed_model(network=None, **options):
    model = (network or tiny_model("llama")).requires_grad_(False)
    for layer in model.model.layers:
        for part in PARTS:
            setattr(layer.mlp, part, Packed(getattr(layer.mlp, part), **options))
    return model


def lent(network, **settings):
    model = compose(["model=local", "model.id=lent"]).model
    model.update(settings)
    return loading.in_memory(model, network, tiny_tokenizer())


def test_packed_layers_run_as_they_are_where_they_are_allowed():
    with pytest.raises(ConfigurationError, match=r"quantised \(packed\).*model\.allow_packed=true"):
        lent(packed_model())
    loaded = lent(packed_model(), allow_packed=True)
    assert "passes in one call and CUDA graphs are off" in loaded.notes[0]
    target = Target(loaded.model, max_len=90, packed_bytes=10**9)
    assert target.packed_weights["pass"] == "its weights are quantised"
    assert equal_of(packed_model(build("Llama", torch.float64))) == 6


def test_a_packed_head_is_refused_since_drafters_read_it():
    model = packed_model()
    model.lm_head = Packed(model.lm_head)
    with pytest.raises(ConfigurationError, match="its LM head is packed"):
        lent(model, allow_packed=True)


def test_activations_that_are_rounded_together_are_refused():
    with pytest.raises(ConfigurationError, match="products depend on the other rows of a pass"):
        check(packed_model(together=True))


def test_bytes_and_fingerprint_are_of_what_is_stored():
    plain, model = tiny_model("llama"), packed_model()
    linears = [getattr(layer.mlp, part) for layer in plain.model.layers for part in PARTS]
    saved = sum(7 * linear.weight.numel() - 8 * linear.out_features for linear in linears)
    kept = sum(buffer.nbytes for buffer in plain.buffers())
    assert streamed_bytes(model) == streamed_bytes(plain) + kept - saved
    before = sample_weights(model)
    assert np.array_equal(before, sample_weights(packed_model()))
    codes, scale = model.model.layers[1].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.scale
    for tensor in (codes, scale):
        tensor[0, 0] += 1
        assert not np.array_equal(before, sample_weights(model))
        tensor[0, 0] -= 1


def test_a_tensor_that_wraps_others_has_their_bytes_and_values():
    linear = torch.nn.Linear(2, 3, bias=False)
    pair = TwoTensor(torch.ones(3, 2), torch.zeros(3, 2))
    linear.weight = torch.nn.Parameter(pair, requires_grad=False)
    assert is_quantised(linear)
    assert stored_bytes(linear) == 2 * 3 * 2 * 4
    assert sorted(set(sample_weights(linear))) == [0, 1]
