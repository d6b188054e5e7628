"""The shipped draft as a file of llama.cpp's."""

import gguf
import numpy as np
import pytest

from scripts.draft_model import gguf_file
from specbench.models.checkpoints.bundled import find_gguf
from specbench.models.draft.loading import read_id_map


def test_rotation_pairs_neighbors_instead_of_halves():
    """Two heads of four rows: row i turns with row i + 2 there, and with i + 1 in llama.cpp."""
    rows = np.arange(8).reshape(8, 1)
    assert gguf_file._interleaved(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_known_token_keeps_its_row_and_no_other_can_be_drafted(tmp_path):
    assert gguf_file.main([str(tmp_path / "draft.gguf")]) == 0
    reader = gguf.GGUFReader(tmp_path / "draft.gguf")
    tensors = {t.name: t.data for t in reader.tensors}
    ids = read_id_map(gguf_file.DRAFT)
    known = ids[ids >= 0]
    size = len(gguf.GGUFReader(find_gguf(*gguf_file.TARGET)).fields["tokenizer.ggml.tokens"].data)
    assert len(tensors["token_embd.weight"]) == len(tensors["output.weight"]) == size
    assert np.array_equal(tensors["token_embd.weight"][known], tensors["output.weight"][known])
    unknown = np.setdiff1d(np.arange(size), known)
    assert not tensors["output.weight"][unknown].any()
    assert len(np.unique(tensors["token_embd.weight"][unknown], axis=0)) == 1
