"""REST's datastore: texts of a corpus with their suffix arrays, in one memory-mapped file.

The corpus is cut into chunks, each with a suffix array of its own, so that sorting needs memory for
one chunk only; a look-up searches every chunk. Documents end with separators; only one longer
than a chunk is cut. Token ids are 32 bits wide, for any vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specbench.arrays import Array
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
from specbench.draft_structures.suffix_array import SEPARATOR, build_suffix_array
from specbench.errors import ArtifactError
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
    """Collects documents and writes the file; a context manager that removes its parts.

    Args:
        folder: for the file's parts, best on the file's disk: they take as much.
        chunk: tokens sorted at once; bounds the memory.

    Attributes:
        n_documents: documents added.
        n_tokens: their tokens.
    """

    def __init__(self, folder: Path, *, chunk: int = CHUNK) -> None:
        self.n_documents = 0
        self.n_tokens = 0
        self._chunk = chunk
        self._folder = tempfile.TemporaryDirectory(prefix="datastore-", dir=folder)
        self._tokens = Path(self._folder.name) / "tokens"
        self._suffixes = Path(self._folder.name) / "suffixes"
        self._offsets = [0]
        self._pending: list[Array] = []
        self._n_pending = 0

    def __enter__(self) -> DatastoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

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
                self._sort()
            self._pending += [piece, np.array([SEPARATOR], dtype=np.int32)]
            self._n_pending += len(piece) + 1

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Sort what is left and write the file; there must be a document."""
        self._sort()
        tokens, suffixes = (np.memmap(p, np.int32, "r") for p in (self._tokens, self._suffixes))
        counts = {"n_documents": self.n_documents, "n_tokens": self.n_tokens}
        store = Datastore(DatastoreArrays(tokens, suffixes, np.array(self._offsets, np.int64)))
        store.write(path, tokenizer_hash=tokenizer_hash, header={**header, **counts})

    def _sort(self) -> None:
        tokens = np.concatenate(self._pending)
        self._pending, self._n_pending = [], 0
        for path, array in ((self._tokens, tokens), (self._suffixes, build_suffix_array(tokens))):
            with path.open("ab") as part:
                part.write(array.data)
        self._offsets.append(self._offsets[-1] + len(tokens))


STEM = "datastore"
# Raised when the same text gives another datastore: every machine then builds again.
BUILDER_VERSION = 1


def build(
    tokenizer: Any,
    path: Path,
    *,
    store_tokens: int | None = None,
    corpus: Corpus | None = None,
    chunk: int = CHUNK,
) -> None:
    """Write the datastore of a corpus; None takes installed documentation, or a part of it.

    Args:
        path: the file; a temporary folder of its size is made next to it.
        chunk: tokens sorted at once; bounds the memory.

    Raises:
        ArtifactError: there is no document, or an id is outside the tokenizer's vocabulary.
    """
    from specbench.models import loading

    if corpus is None:
        corpus = documentation(tokenizer, path.parent.parent, store_tokens)
    with DatastoreWriter(path.parent, chunk=chunk) as writer:
        for ids in corpus:
            if len(ids) and (ids.min() < 0 or ids.max() >= len(tokenizer)):
                raise ArtifactError(
                    f"document {writer.n_documents} holds ids outside the vocabulary of "
                    f"{len(tokenizer)}: it belongs to another model."
                )
            writer.add(ids)
        if not writer.n_documents:
            raise ArtifactError("the corpus has no text. Name texts that are not empty.")
        header = {
            "builder_version": BUILDER_VERSION,
            "corpus": corpus.described(),
            "chunk": chunk,
        }
        writer.write(path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)
