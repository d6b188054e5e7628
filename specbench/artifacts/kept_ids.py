"""Ids of a corpus that is being tokenized, kept until the file made of them is whole.

Tokenizing takes most of a build's time. A killed build leaves the batches it has done. The next one
reads the texts again, takes the ids of each batch whose texts are the same, and tokenizes what
follows.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from specbench.arrays import Array

_HEAD = struct.Struct("<32sqq")  # SHA-256 of tokenizer and texts, documents, tokens

log = logging.getLogger(__name__)


class KeptIds:
    """A file of batches, which grows; a context manager that closes it.

    Args:
        path: the file; who builds removes it when the build is done.
        tokenizer_hash: batches of another tokenizer are not taken.
    """

    def __init__(self, path: Path, tokenizer_hash: str) -> None:
        self._path = path
        self._tokenizer = tokenizer_hash.encode()
        self._file: BinaryIO | None = None
        self._n_taken = 0
        self._taking = path.is_file()

    def __enter__(self) -> KeptIds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def ids(self, texts: list[str], tokenizer: Any) -> list[Array]:
        """The ids of each text, without special tokens: kept ones, or new ones that are kept."""
        digest = hashlib.sha256(self._tokenizer)
        for text in texts:
            digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
        sha256 = digest.digest()
        if self._file is None:
            # The first batch and not before: arguments that are refused leave no file.
            self._file = self._path.open("r+b" if self._taking else "w+b")
        kept = self._take(self._file, sha256) if self._taking else None
        if kept is not None:
            return kept
        documents = [
            np.asarray(ids, dtype=np.int32)
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        lengths = np.array([len(ids) for ids in documents], dtype="<i8")
        head = _HEAD.pack(sha256, len(documents), int(lengths.sum()))
        body = b"".join(ids.astype("<i4").tobytes() for ids in documents)
        self._file.write(head + lengths.tobytes() + body)
        self._file.flush()
        return documents

    def _take(self, file: BinaryIO, sha256: bytes) -> list[Array] | None:
        """The next kept batch; without one of these texts, what follows in the file goes."""
        begin = file.tell()
        head = file.read(_HEAD.size)
        if len(head) == _HEAD.size:
            kept, n_documents, n_tokens = _HEAD.unpack(head)
            if kept == sha256:
                data = file.read(8 * n_documents + 4 * n_tokens)
                if len(data) == 8 * n_documents + 4 * n_tokens:
                    self._n_taken += n_tokens
                    ends = np.cumsum(np.frombuffer(data, "<i8", n_documents))
                    ids = np.frombuffer(data, "<i4", offset=8 * n_documents).astype(np.int32)
                    return np.split(ids, ends[:-1])
        self._taking = False
        file.seek(begin)
        file.truncate()
        if self._n_taken:
            log.warning("going on after %s tokens of an earlier start", f"{self._n_taken:,}")
        return None
