"""REST's datastore: texts of a corpus with their suffix arrays, in one memory-mapped file.

The corpus is cut into chunks, each with a suffix array of its own, so that sorting needs memory for
one chunk only; a look-up asks every chunk. Documents are kept apart by separators and cut only
where one is longer than a chunk. Token ids are 32 bits wide, for any vocabulary.
"""

from __future__ import annotations

import hashlib
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from specbench.errors import ArtefactError
from specbench.index.array_file import open_array_file, write_array_file
from specbench.index.suffix_array import SEPARATOR, build_suffix_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    Progress = Callable[[str, int, int], None]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

KIND = "datastore"
VERSION = 1
# The name of built files begins with the stem; raise the version when the same text gives another
# datastore, and every machine builds again.
STEM = "datastore"
BUILDER_VERSION = 1

# Tokens sorted at once: about 1 GB of memory at four bytes an id and the sorter's own arrays.
CHUNK = 1 << 25

# Texts tokenised at once.
_BATCH = 512


class Datastore(NamedTuple):
    """The content of a datastore.

    Attributes:
        tokens: ``[n]`` int32, the chunks one after the other.
        suffixes: ``[n]`` int32, their suffix arrays; positions within the chunk.
        offsets: ``[chunks + 1]`` int64 where each chunk begins.
    """

    tokens: Array
    suffixes: Array
    offsets: Array

    @staticmethod
    def open(path: Path, tokenizer_hash: str | None) -> Datastore:
        """Map a file.

        Args:
            path: the file.
            tokenizer_hash: what it must have been built for; None takes any.

        Raises:
            ArtefactError: wrong kind, version or tokenizer (both are named), or a damaged file.
        """
        _, arrays = open_array_file(path, kind=KIND, version=VERSION, tokenizer_hash=tokenizer_hash)
        return Datastore(arrays["tokens"], arrays["suffixes"], arrays["offsets"])


class DatastoreWriter:
    """Collects documents and writes the file; use it as a context manager (a temporary folder).

    Args:
        folder: where the temporary folder is made, best on the file's disk: it takes as much.
        chunk: tokens sorted at once; bounds the memory.

    Attributes:
        n_documents: documents added.
        n_tokens: their tokens.
    """

    def __init__(self, folder: Path, *, chunk: int = CHUNK) -> None:
        self.n_documents = 0
        self.n_tokens = 0
        self._chunk = chunk
        self._folder = tempfile.TemporaryDirectory(prefix="specbench-datastore-", dir=folder)
        root = Path(self._folder.name)
        self._parts = {"tokens": root / "tokens", "suffixes": root / "suffixes"}
        self._handles = {name: path.open("wb") for name, path in self._parts.items()}
        self._offsets = [0]
        self._pending: list[Array] = []
        self._n_pending = 0

    def __enter__(self) -> DatastoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles.values():
            handle.close()
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
                self._flush()
            self._pending += [piece, np.array([SEPARATOR], dtype=np.int32)]
            self._n_pending += len(piece) + 1

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Sort what is left and write the file; see `write_array_file`."""
        self._flush()
        for handle in self._handles.values():
            handle.flush()
        arrays = {name: self._mapped(part) for name, part in self._parts.items()}
        write_array_file(
            path,
            kind=KIND,
            version=VERSION,
            tokenizer_hash=tokenizer_hash,
            arrays={**arrays, "offsets": np.array(self._offsets, dtype=np.int64)},
            header={**header, "n_documents": self.n_documents, "n_tokens": self.n_tokens},
        )

    def _mapped(self, part: Path) -> Array:
        # An empty file cannot be mapped.
        return np.memmap(part, np.int32, "r") if self._offsets[-1] else np.empty(0, np.int32)

    def _flush(self) -> None:
        if not self._n_pending:
            return
        tokens = np.concatenate(self._pending)
        self._pending, self._n_pending = [], 0
        self._handles["tokens"].write(tokens.data)
        self._handles["suffixes"].write(build_suffix_array(tokens).data)
        self._offsets.append(self._offsets[-1] + len(tokens))


def encode_texts(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each text, without special tokens; texts are read lazily."""
    stream = iter(texts)
    while batch := list(islice(stream, _BATCH)):
        yield from tokenizer(batch, add_special_tokens=False)["input_ids"]


def build_datastore(
    documents: Iterable[Sequence[int] | Array],
    path: Path,
    *,
    tokenizer_hash: str,
    corpus: Mapping[str, Any],
    vocab_size: int,
    chunk: int = CHUNK,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a datastore of documents.

    Args:
        documents: token ids; read lazily.
        path: the file to write; temporary files of its size lie beside it meanwhile.
        tokenizer_hash: what the ids belong to.
        corpus: JSON-ready facts about the documents, for the header.
        vocab_size: ids must be below it.
        chunk: tokens sorted at once; bounds the memory.
        max_tokens: stop after about so many.
        progress: called with what is being done, and how much of how much (0 where unknown).

    Raises:
        ArtefactError: there is no document, or an id is outside the vocabulary.
    """
    digest = hashlib.sha256()
    with DatastoreWriter(path.parent, chunk=chunk) as writer:
        for ids in documents:
            document = np.asarray(ids, dtype=np.int32)
            if len(document) and (document.min() < 0 or document.max() >= vocab_size):
                raise ArtefactError(
                    f"document {writer.n_documents} holds ids outside the vocabulary of "
                    f"{vocab_size}: it belongs to another model."
                )
            digest.update(document.tobytes() + b"\0")
            writer.add(document)
            if progress is not None:
                progress("adding tokens", writer.n_tokens, max_tokens or 0)
            if max_tokens is not None and writer.n_tokens >= max_tokens:
                break
        if not writer.n_documents:
            raise ArtefactError("the corpus has no text; a datastore of nothing drafts nothing.")
        if progress is not None:
            progress("sorting the last chunk", 0, 0)
        header = {
            "builder_version": BUILDER_VERSION,
            "corpus": {**corpus, "ids_sha256": digest.hexdigest()},
            "chunk": chunk,
        }
        writer.write(path, tokenizer_hash=tokenizer_hash, header=header)


def build_default(tokenizer: Any, out_path: Path, progress: Progress | None) -> None:
    """The embedded model's datastore, from the prose of installed documentation.

    Args:
        tokenizer: a transformers tokenizer.
        out_path: the file to write.
        progress: see `build_datastore`.
    """
    from specbench.index.installed_text import documentation
    from specbench.models import tokenizer_hash

    texts, corpus = documentation(progress)
    build_datastore(
        encode_texts(texts, tokenizer),
        out_path,
        tokenizer_hash=tokenizer_hash(tokenizer),
        corpus=corpus,
        vocab_size=len(tokenizer),
        progress=progress,
    )
