"""Builds REST's datastore for the bundled model, and tokenises the texts of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from methods.rest.datastore import CHUNK, DatastoreWriter
from specbench.arrays import Array
from specbench.artifacts.documentation import tokenized_documentation
from specbench.artifacts.resolve import Progress
from specbench.errors import ArtifactError
from specbench.models import loading

STEM = "datastore"
# Raised when the same text gives another datastore: every machine then builds again.
BUILDER_VERSION = 1

# Texts tokenised at once.
_BATCH = 512


def encode_texts(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each text, without special tokens; texts are read lazily."""
    stream = iter(texts)
    while batch := list(islice(stream, _BATCH)):
        yield from tokenizer(batch, add_special_tokens=False)["input_ids"]


def build_default(
    tokenizer: Any, out_path: Path, progress: Progress | None, store_tokens: int | None = None
) -> None:
    """The bundled model's datastore, from the prose of installed documentation or a part of it."""
    documents = tokenized_documentation(tokenizer, out_path.parent.parent, progress)
    text = dict(documents.header["corpus"])
    del text["sha256"]  # of the whole, of which this may be a part
    build_datastore(
        documents,
        out_path,
        tokenizer_hash=loading.tokenizer_hash(tokenizer),
        corpus=text,
        vocab_size=len(tokenizer),
        max_tokens=store_tokens,
        progress=progress,
    )


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
        documents: token ids below ``vocab_size``; read lazily.
        path: temporary files of its size lie beside it meanwhile.
        corpus: JSON-ready facts about the documents, for the header.
        chunk: tokens sorted at once; bounds the memory.
        max_tokens: stop after about so many.

    Raises:
        ArtifactError: there is no document, or an id is outside the vocabulary.
    """
    digest = hashlib.sha256()
    with DatastoreWriter(path.parent, chunk=chunk) as writer:
        for ids in documents:
            document = np.asarray(ids, dtype=np.int32)
            if len(document) and (document.min() < 0 or document.max() >= vocab_size):
                raise ArtifactError(
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
            raise ArtifactError("the corpus has no text. Name texts that are not empty.")
        if progress is not None:
            progress("sorting the last chunk", 0, 0)
        header = {
            "builder_version": BUILDER_VERSION,
            "corpus": {**corpus, "ids_sha256": digest.hexdigest()},
            "chunk": chunk,
        }
        writer.write(path, tokenizer_hash=tokenizer_hash, header=header)
