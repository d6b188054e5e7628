"""Builds REST's datastore: by default from installed documentation, else from any corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from methods.rest.datastore import CHUNK, DatastoreWriter
from specbench.arrays import Array
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
from specbench.artifacts.progress import Progress, silent
from specbench.errors import ArtifactError
from specbench.models import loading

STEM = "datastore"
# Raised when the same text gives another datastore: every machine then builds again.
BUILDER_VERSION = 1


def build(
    tokenizer: Any,
    path: Path,
    progress: Progress = silent,
    *,
    store_tokens: int | None = None,
    corpus: Corpus | None = None,
    chunk: int = CHUNK,
) -> None:
    """Write the datastore of a corpus; None takes installed documentation, or a part of it."""
    if corpus is None:
        corpus = documentation(tokenizer, path.parent.parent, progress, store_tokens)
    build_datastore(
        corpus,
        path,
        tokenizer_hash=loading.tokenizer_hash(tokenizer),
        corpus=corpus.facts,  # without the hash, which may be a larger text's
        vocab_size=len(tokenizer),
        chunk=chunk,
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
    progress: Progress = silent,
) -> None:
    """Write a datastore of documents.

    Args:
        documents: token ids below ``vocab_size``; read lazily.
        path: a folder of its size, ``path`` with ``.parts``, lies beside it from then on. A killed
            build goes on from it; whoever calls removes it.
        corpus: JSON-ready facts about the documents, for the header.
        chunk: tokens sorted at once; bounds the memory.

    Raises:
        ArtifactError: there is no document, or an id is outside the vocabulary.
    """
    digest = hashlib.sha256()
    with DatastoreWriter(path.with_name(f"{path.name}.parts"), chunk=chunk) as writer:
        for ids in documents:
            document = np.asarray(ids, dtype=np.int32)
            if len(document) and (document.min() < 0 or document.max() >= vocab_size):
                raise ArtifactError(
                    f"document {writer.n_documents} holds ids outside the vocabulary of "
                    f"{vocab_size}: it belongs to another model."
                )
            digest.update(document.tobytes() + b"\0")
            writer.add(document)
        if not writer.n_documents:
            raise ArtifactError("the corpus has no text. Name texts that are not empty.")
        progress("sorting the last chunk", 0, 0)
        header = {
            "builder_version": BUILDER_VERSION,
            "corpus": {**corpus, "ids_sha256": digest.hexdigest()},
            "chunk": chunk,
        }
        writer.write(path, tokenizer_hash=tokenizer_hash, header=header)
