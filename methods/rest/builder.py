"""Builds REST's datastore: by default from installed documentation, else from any corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from methods.rest.datastore import CHUNK, DatastoreWriter
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
from specbench.errors import ArtifactError
from specbench.models import loading

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
        path: a folder of its size lies beside it meanwhile.
        chunk: tokens sorted at once; bounds the memory.

    Raises:
        ArtifactError: there is no document, or an id is outside the tokenizer's vocabulary.
    """
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
