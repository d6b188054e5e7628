"""A file of arrays is mapped as it was written, or refused with a reason."""

from collections import namedtuple

import numpy as np
import pytest

from specbench.errors import ArtifactError
from specbench.storage.arrays import ArrayTable, open_array_file, read_header, write_array_file

Columns = namedtuple("Columns", "keys counts pairs shares")


class Toy(ArrayTable):
    kind = "toy_table"
    version = 1
    layout = Columns


@pytest.fixture
def file(tmp_path):
    keys, pairs = np.arange(40, dtype=np.int32), np.arange(30, dtype=np.int32).reshape(15, 2)
    table = Toy(Columns(keys, np.array([7, 8, 9]), pairs, np.linspace(0, 1, 9)))
    table.write(tmp_path / "table.bin", tokenizer_hash="mine", header={})
    return tmp_path / "table.bin"


def test_another_tokenizer_is_refused_naming_both(file):
    with pytest.raises(ArtifactError, match=r"(?s)'mine'.*'theirs'"):
        Toy.open(file, "theirs")
    assert Toy.open(file).arrays.counts.tolist() == [7, 8, 9]


def test_another_version_or_kind_is_refused_naming_both(file):
    with pytest.raises(ArtifactError, match=r"(?s)version 1,.*version 2"):
        open_array_file(file, kind="toy_table", version=2, tokenizer_hash=None)
    with pytest.raises(ArtifactError, match=r"(?s)'toy_table'.*'suffix_array'"):
        open_array_file(file, kind="suffix_array", version=1, tokenizer_hash=None)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused(file, share):
    raw = file.read_bytes()
    file.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(ArtifactError):
        Toy.open(file)


def test_any_damaged_byte_is_noticed(file):
    raw = file.read_bytes()
    header, arrays = open_array_file(file, kind="toy_table", version=1, tokenizer_hash=None)
    start = len(raw) - header["data_bytes"]
    offsets = [3, 9, 17, 40]
    for section in header["sections"].values():
        offsets += [start + section["offset"], start + section["offset"] + 3]
    assert len(arrays) == 4
    for offset in offsets:
        file.write_bytes(raw[:offset] + bytes([raw[offset] ^ 0x41]) + raw[offset + 1 :])
        with pytest.raises(ArtifactError):
            Toy.open(file)


def test_a_foreign_or_missing_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a table, but long enough to hold a header\n")
    for name in ("notes.txt", "nothing.bin"):
        with pytest.raises(ArtifactError, match=name):
            read_header(tmp_path / name)


def test_empty_and_multidimensional_arrays_survive(tmp_path):
    arrays = {"none": np.empty((0, 3), np.int32), "cube": np.arange(24).reshape(2, 3, 4)}
    path = tmp_path / "a.bin"
    write_array_file(path, kind="k", version=1, tokenizer_hash="h", arrays=arrays, header={"x": 1})
    header, read = open_array_file(path, kind="k", version=1, tokenizer_hash="h")
    assert header["x"] == 1
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
