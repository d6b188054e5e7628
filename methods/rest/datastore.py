"""REST's datastore: texts of a corpus with their suffix arrays, in one memory-mapped file.

The corpus is cut into chunks, each with a suffix array of its own, so that sorting needs memory for
one chunk only; a look-up asks every chunk. Documents are kept apart by separators and cut only
where one is longer than a chunk. Token ids are 32 bits wide, for any vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specbench.arrays import Array
from specbench.index.suffix_array import SEPARATOR, build_suffix_array
from specbench.storage.arrays import ArrayTable

# Tokens sorted at once: about 1 GB of memory at four bytes an id and the sorter's own arrays.
CHUNK = 1 << 25


class DatastoreArrays(NamedTuple):
    """The content of a datastore.

    Attributes:
        tokens: ``[n]`` int32, the chunks one after the other.
        suffixes: ``[n]`` int32, their suffix arrays; positions within the chunk.
        offsets: ``[chunks + 1]`` int64 where each chunk begins.
    """

    tokens: Array
    suffixes: Array
    offsets: Array


class Datastore(ArrayTable[DatastoreArrays]):
    """One datastore, read-only."""

    kind = "datastore"
    version = 1
    layout = DatastoreArrays


class DatastoreWriter:
    """Collects documents and writes the file; a context manager that closes its parts.

    Args:
        folder: for the file's parts, best on the file's disk: they take as much. A chunk that is
            there from a killed build is not sorted again. Whoever calls removes the folder.
        chunk: tokens sorted at once; bounds the memory.

    Attributes:
        n_documents: documents added.
        n_tokens: their tokens.
    """

    def __init__(self, folder: Path, *, chunk: int = CHUNK) -> None:
        self.n_documents = 0
        self.n_tokens = 0
        self._chunk = chunk
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._parts = {name: folder / name for name in ("tokens", "suffixes")}
        # What is there stays; a missing file is made.
        self._handles = {
            name: os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
            for name, path in self._parts.items()
        }
        self._offsets = [0]
        self._pending: list[Array] = []
        self._n_pending = 0

    def __enter__(self) -> DatastoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles.values():
            handle.close()

    def add(self, ids: Sequence[int] | Array) -> None:
        """Add one document; an empty one is left out."""
        document = np.asarray(ids, dtype=np.int32)
        if not len(document):
            return
        self.n_documents += 1
        self.n_tokens += len(document)
        room = self._chunk - 1
        for begin in range(0, len(document), room):
            piece = document[begin : begin + room]
            if self._n_pending + len(piece) + 1 > self._chunk:
                self._flush()
            self._pending += [piece, np.array([SEPARATOR], dtype=np.int32)]
            self._n_pending += len(piece) + 1

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Sort what is left and write the file."""
        self._flush()
        arrays = {name: self._mapped(part) for name, part in self._parts.items()}
        counts = {"n_documents": self.n_documents, "n_tokens": self.n_tokens}
        store = Datastore(DatastoreArrays(**arrays, offsets=np.array(self._offsets, np.int64)))
        store.write(path, tokenizer_hash=tokenizer_hash, header={**header, **counts})

    def _mapped(self, part: Path) -> Array:
        # An empty file cannot be mapped.
        size = self._offsets[-1]
        return np.memmap(part, np.int32, "r", shape=size) if size else np.empty(0, np.int32)

    def _flush(self) -> None:
        if not self._n_pending:
            return
        tokens = np.concatenate(self._pending)
        self._pending, self._n_pending = [], 0
        begin, end = self._offsets[-1], self._offsets[-1] + len(tokens)
        if not self._is_kept(tokens, begin):
            for name, handle in self._handles.items():
                handle.truncate(begin * tokens.itemsize)
                handle.seek(begin * tokens.itemsize)
                handle.write((tokens if name == "tokens" else build_suffix_array(tokens)).data)
                handle.flush()
        self._offsets.append(end)

    def _is_kept(self, tokens: Array, begin: int) -> bool:
        """Whether an earlier start has left a chunk, sorted, at its place."""
        end = (begin + len(tokens)) * tokens.itemsize
        handle = self._handles["tokens"]
        handle.seek(begin * tokens.itemsize)
        return self._parts["suffixes"].stat().st_size >= end and (
            handle.read(tokens.nbytes) == tokens.tobytes()
        )
