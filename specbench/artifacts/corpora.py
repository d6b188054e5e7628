"""The texts that tables and datastores are made from: files, the hub, recordings of runs.

``specbench.artifacts.documentation`` has the texts that are installed on every machine.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from specbench.arrays import Array
from specbench.errors import ArtifactError, ConfigurationError, unknown_name
from specbench.results.records import CASES, MANIFEST, CaseRecord, read_records
from specbench.storage.jsonl import read_json

# Texts tokenized at once: enough for the tokenizer's threads, little enough to stay small.
_BATCH = 512
# A file without blank lines is cut into pieces of so many characters.
PIECE = 1 << 20


class Corpus:
    """Documents as token ids, read lazily and once; a bar counts their tokens.

    Args:
        facts: description for a file's header; JSON-ready, with the corpus's ``name``.
        documents: the ids of each.
        max_tokens: stop after the document that reaches this many.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        documents: Iterable[Sequence[int] | Array],
        max_tokens: int | None = None,
    ) -> None:
        self._facts, self._documents, self._max_tokens = facts, documents, max_tokens
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Array]:
        n_tokens = 0
        with progress_bar("reading texts", " tokens", self._max_tokens) as bar:
            for ids in self._documents:
                document = np.asarray(ids, dtype=np.int32)
                self._digest.update(len(document).to_bytes(8, "little") + document.tobytes())
                yield document
                n_tokens += len(document)
                bar.update(len(document))
                if self._max_tokens is not None and n_tokens >= self._max_tokens:
                    return

    def described(self) -> dict[str, Any]:
        return {**self._facts, "sha256": self._digest.hexdigest()}


def progress_bar(
    about: str, unit: str, total: int | None = None, items: Iterable[Any] | None = None
) -> Any:
    """Make a bar for work that may take hours; in a log it is a line every half minute."""
    every = 0.5 if sys.stderr.isatty() else 30.0
    options = {"desc": about, "unit": unit, "total": total, "unit_scale": True}
    return tqdm(items, mininterval=every, delay=every, **options)


def tokenized(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Tokenize texts, each without special tokens."""
    stream = iter(texts)
    while batch := list(islice(stream, _BATCH)):
        yield from tokenizer(batch, add_special_tokens=False)["input_ids"]


def sample_documents(texts: Iterable[str], share: float, seed: int) -> Iterator[str]:
    """Sample texts, each with probability ``share``, drawn from ``seed``."""
    random = np.random.default_rng(seed)
    return (text for text in texts if share >= 1.0 or random.random() < share)


def file_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Read the paragraphs of UTF-8 files, at most about `PIECE` characters each.

    Raises:
        ConfigurationError: a file cannot be read or is not UTF-8 text.
    """
    for path in paths:
        lines: list[str] = []
        size = 0
        try:
            with path.open(encoding="utf-8-sig") as handle:
                for line in handle:
                    blank = not line.strip()
                    if lines and (blank or size > PIECE):
                        yield "".join(lines)
                        lines, size = [], 0
                    if not blank:
                        lines.append(line)
                        size += len(line)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the text {path}: {error}") from error
        if lines:
            yield "".join(lines)


class HubCorpus(NamedTuple):
    """A data set on the hub.

    Attributes:
        id: of the data set.
        column: where a row's text is: a string, a list of strings, or a list of messages.
        message: key of a message's text, where messages are mappings.
        folder: part of the data set, where it has several.
    """

    id: str
    column: str
    message: str | None = None
    folder: str | None = None


# The first three are REST's, by its authors' names for the datastores; then what Cacheback's paper
# names, and what its scripts take.
HUB = {
    "sharegpt": HubCorpus("Aeala/ShareGPT_Vicuna_unfiltered", "conversations", "value"),
    "ultrachat": HubCorpus("stingning/ultrachat", "data"),
    "stack_python": HubCorpus("bigcode/the-stack-dedup", "content", folder="data/python"),
    "openwebtext": HubCorpus("Skylion007/openwebtext", "text"),
    "alpaca": HubCorpus("tatsu-lab/alpaca", "text"),
}


def hub_texts(name: str, revision: str | None) -> Iterator[str]:
    """Stream the documents of a corpus in `HUB`; every message of a dialogue is one.

    Raises:
        ConfigurationError: an unknown name, or the hub cannot be read.
    """
    if name not in HUB:
        raise unknown_name("corpus", name, HUB)
    from datasets import load_dataset

    source = HUB[name]
    part = {"data_dir": source.folder} if source.folder else {}
    try:
        rows = load_dataset(source.id, split="train", streaming=True, revision=revision, **part)
        for row in rows:
            value = row[source.column]
            parts: list[Any] = [value] if isinstance(value, str) else value
            yield from (part[source.message] if source.message else part for part in parts)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot stream {source.id} from the hub: {error}. Check the network and "
            "HF_HUB_OFFLINE, or name local texts instead."
        ) from error


def recorded_documents(runs: Iterable[Path], tokenizer_hash: str) -> Iterator[Array]:
    """Yield prompt with output of every turn of some runs, see `recorded_turns`; each once."""
    turns = (turn for run in runs for turn in recorded_turns(run, tokenizer_hash))
    documents = map(np.concatenate, turns)
    return iter({document.tobytes(): document for document in documents}.values())


def recorded_turns(path: Path, tokenizer_hash: str | None) -> Iterator[tuple[Array, Array]]:
    """Yield prompt and output of every turn of a run, of the first label that did not fail.

    ``path``: a ``cases.jsonl``, or the run folder it lies in. The ``tokenizer_hash`` is compared
    with the manifest in the same folder, where there is one; None takes any.

    Raises:
        ArtifactError: there is no such file, or it belongs to another tokenizer.
        RecordError: a line is not a valid record.
    """
    path = path / CASES if path.is_dir() else path
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}; name the cases.jsonl of an earlier run.")
    manifest = path.with_name(MANIFEST)
    if tokenizer_hash is not None and manifest.is_file():
        recorded_with = (read_json(manifest).get("model") or {}).get("tokenizer_hash")
        if recorded_with not in (None, tokenizer_hash):
            raise ArtifactError(
                f"{path} was recorded with tokenizer hash {recorded_with!r}, but this run needs "
                f"tokenizer hash {tokenizer_hash!r}; name a run of this model."
            )
    records, _ = read_records(path)
    turns: dict[tuple[str, int], CaseRecord] = {}
    for record in records:
        if record.status != "failed":
            turns.setdefault((record.case_id, record.turn), record)
    for record in turns.values():
        yield (
            np.asarray(record.prompt_ids, dtype=np.int32),
            np.asarray(record.output_ids, dtype=np.int32),
        )
