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

FILE, WIDE = "toy.gguf", 256  # of a K-quant's block
PARTS = ("gate_proj", "up_proj", "down_proj")


def load(folder, *overrides, equal=None):
    cfg = compose([f"cache_dir={folder}/cache", "model=local", f"model.path={folder}", *overrides])
    loading.model_files_present(cfg)
    loaded = loading.load_model(cfg)
    if equal is not None:
        ids = torch.tensor([[1, 5, 9, 14, 3]])
        with torch.inference_mode():
            assert torch.equal(loaded.model(ids).logits, equal(ids).logits)
    return loaded


def write_gguf(folder):
    """Write a Llama whose products are in three kinds of blocks; returns what they stand for."""
    twin = save_checkpoint(folder, hidden_size=WIDE, intermediate_size=WIDE).requires_grad_(False)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    writer, random = gguf.GGUFWriter(folder / FILE, "llama"), np.random.default_rng(0)
    sizes = {
        "context_length": 512, "embedding_length": WIDE, "block_count": 2, "vocab_size": 300,
        "feed_forward_length": WIDE, "head_count": 4, "head_count_kv": 2, "eos_token_id": 2,
        "layer_norm_rms_eps": twin.config.rms_norm_eps, "rope_freq_base": 10000.0,
    }  # fmt: skip
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    heads = {"q_proj": 4, "k_proj": 2}  # whose rows lie in pairs there, half a head apart here
    for name, weight in twin.named_parameters():
        module = name.removesuffix(".weight")
        stored, part = f"{names.get_name(module)}.weight", module.split(".")[-1]
        if weight.dim() == 1:
            writer.add_tensor(stored, weight.numpy())
            continue
        kind = Kind.Q4_0 if part in heads else Kind.Q8_0
        if part == "down_proj":  # a kind that gguf reads and does not write
            kind, blocks = Kind.Q6_K, random.integers(0, 256, (len(weight), 210), np.uint8)
            blocks[:, -2:] = np.full((len(weight), 1), 1e-4, np.float16).view(np.uint8)
        else:
            blocks = gguf.quants.quantize(weight.numpy(), kind)
        writer.add_tensor(stored, blocks, raw_dtype=kind)
        values = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        pairs = values.unflatten(0, (heads.get(part, 1), -1, 2))
        weight.copy_(pairs.transpose(1, 2).reshape(weight.shape) if part in heads else values)
    for write in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{write}")()
    writer.close()
    return twin


def write_fp8(folder):
    """Write a Llama in FP8 whose other weights are bfloat16; returns what they stand for."""
    twin = save_checkpoint(folder, hidden_size=128, intermediate_size=128)  # a block a matrix
    tensors = load_file(folder / "model.safetensors")
    for name, values in list(tensors.items()):
        scale = torch.ones(1, 1)
        if name.endswith("proj.weight"):
            tensors[f"{name}_scale_inv"] = scale = values.abs().amax((0, 1), keepdim=True) / 448
        kind = torch.float8_e4m3fn if name.endswith("proj.weight") else torch.bfloat16
        tensors[name] = (values / scale).to(kind) if values.dim() > 1 else values.to(kind)
        twin.get_parameter(name).data = (tensors[name].float() * scale).view_as(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_method(folder, "fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    return twin


def set_method(folder, method, **settings):
    path = folder / "config.json"
    by = {"quantization_config": {"quant_method": method, **settings}}
    path.write_text(json.dumps(json.loads(path.read_text()) | by))


def test_a_gguf_file_is_read_as_what_its_blocks_stand_for(tmp_path):
    loaded = load(tmp_path, f"model.gguf_file={FILE}", equal=write_gguf(tmp_path))
    assert loaded.eos_ids == {2} and loaded.tokenizer.eos_token_id == 2
    assert "a file in gguf and were dequantised to float32" in loaded.notes[0]
    short = load(tmp_path, f"model.gguf_file={FILE}", "model.dtype=bfloat16")
    assert short.weights_hash == loaded.weights_hash and short.dtype == "bfloat16"
    with pytest.raises(WeightsNotFound, match=r"model\.gguf_file=b is no file in .*Type"):
        load(tmp_path, "model.gguf_file=b")


def test_fp8_is_read_in_the_dtype_that_was_typed(tmp_path):
    loaded = load(tmp_path, equal=write_fp8(tmp_path))
    assert "fp8 and were dequantised to float32: a pass reads" in loaded.notes[0]
    halves = load(tmp_path, "model.dtype=bfloat16")
    for dtype, model in ((torch.float32, loaded.model), (torch.bfloat16, halves.model)):
        assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_what_cannot_be_undone_or_stayed_packed_is_refused_by_name(tmp_path):
    network = save_checkpoint(tmp_path).requires_grad_(False)
    set_method(tmp_path, "gptq", bits=4)
    with pytest.raises(ConfigurationError, match=r"quantised \(gptq\), and no engine here"):
        load(tmp_path)
    network.lm_head.weight.data = network.lm_head.weight.data.to(torch.float8_e4m3fn)
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
    loaded.model.lm_head = Packed(loaded.model.lm_head)
    with pytest.raises(ConfigurationError, match="its LM head is packed"):
        lent(loaded.model, allow_packed=True)


def test_activations_that_are_rounded_together_are_refused():
    with pytest.raises(ConfigurationError, match="products depend on the other rows of a pass"):
        check(packed_model(together=True))


def test_bytes_and_fingerprint_are_of_what_is_stored():
    plain, model = tiny_model("llama"), packed_model()
    linears = [getattr(layer.mlp, part) for layer in plain.model.layers for part in PARTS]
    saved = sum(7 * linear.weight.numel() - 8 * linear.out_features for linear in linears)
    more = sum(buffer.nbytes for buffer in plain.buffers())
    assert streamed_bytes(model) == streamed_bytes(plain) + more - saved
    before = sample_weights(model)
    assert np.array_equal(before, sample_weights(packed_model()))
    product = model.model.layers[0].mlp.up_proj
    for tensor in (product.weight, product.scale):
        tensor[0, 0] += 1
        assert not np.array_equal(before, sample_weights(model))
        tensor[0, 0] -= 1
    # A subclass that wraps two tensors, as torchao's do.
    pair = TwoTensor(torch.ones(3, 2), torch.zeros(3, 2))
    product.weight = torch.nn.Parameter(pair, requires_grad=False)
    del product.scale
    assert is_quantised(product) and stored_bytes(product) == 2 * 3 * 2 * 4
    assert sorted(set(sample_weights(product))) == [0, 1]
