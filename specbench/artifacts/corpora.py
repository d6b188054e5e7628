"""The texts that tables and datastores are made from: files, the hub, what earlier runs recorded.

``specbench.artifacts.documentation`` has the texts that are installed on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from specbench.arrays import Array
from specbench.artifacts.kept_ids import KeptIds
from specbench.artifacts.progress import Progress, silent
from specbench.errors import ArtifactError, ConfigurationError, unknown_name
from specbench.results.records import CASES, MANIFEST, read_records
from specbench.storage.jsonl import read_json

# Texts tokenized at once: enough for the tokenizer's threads, little enough to stay small.
_BATCH = 512


class Corpus:
    """Documents as token ids, read lazily and once.

    Args:
        facts: what a file's header says of the corpus; JSON-ready, with its ``name``.
        documents: the ids of each document, ``[n]`` int32.
        sha256: gives the hash of the documents read so far.
        max_tokens: stop after the document that brings so many.
        progress: called after every document.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        documents: Iterable[Array],
        sha256: Callable[[], str],
        *,
        max_tokens: int | None = None,
        progress: Progress = silent,
    ) -> None:
        self.facts = dict(facts)
        self._documents = documents
        self._sha256 = sha256
        self._max_tokens = max_tokens
        self._progress = progress

    @classmethod
    def of_texts(
        cls,
        facts: Mapping[str, Any],
        texts: Iterable[str],
        tokenizer: Any,
        kept: KeptIds | None = None,
        **limits: Any,
    ) -> Self:
        """Texts, each without special tokens; the hash is the texts'.

        ``kept`` has the ids that an earlier start made of them, and gets the others.
        """
        digest = hashlib.sha256()

        def documents() -> Iterator[Array]:
            stream = iter(texts)
            while batch := list(islice(stream, _BATCH)):
                if kept is None:
                    encoded = tokenizer(batch, add_special_tokens=False)["input_ids"]
                else:
                    encoded = kept.ids(batch, tokenizer)
                for text, ids in zip(batch, encoded, strict=True):
                    digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
                    yield np.asarray(ids, dtype=np.int32)

        return cls(facts, documents(), digest.hexdigest, **limits)

    @classmethod
    def of_ids(
        cls, facts: Mapping[str, Any], documents: Iterable[Iterable[int] | Array], **limits: Any
    ) -> Self:
        """Token ids; the hash is theirs."""
        digest = hashlib.sha256()

        def hashed() -> Iterator[Array]:
            for ids in documents:
                digest.update(np.asarray([len(document := [*ids]), *document], "<i8").tobytes())
                yield np.asarray(document, dtype=np.int32)

        return cls(facts, hashed(), digest.hexdigest, **limits)

    @classmethod
    def recorded(cls, runs: Iterable[Path], tokenizer_hash: str, **limits: Any) -> Self:
        """Prompt and answer of every turn of some runs; see `recorded_turns`.

        Runs that share a turn give it once: what was measured more often is not more frequent.
        """
        runs = list(runs)

        def documents() -> Iterator[Array]:
            seen: set[bytes] = set()
            for run in runs:
                for turn in recorded_turns(run, tokenizer_hash):
                    document = np.concatenate(turn)
                    if document.tobytes() not in seen:
                        seen.add(document.tobytes())
                        yield document

        return cls.of_ids(
            {"name": "outputs", "runs": [run.name for run in runs]}, documents(), **limits
        )

    def __iter__(self) -> Iterator[Array]:
        n_tokens = 0
        for ids in self._documents:
            yield ids
            n_tokens += len(ids)
            self._progress("adding tokens", n_tokens, self._max_tokens or 0)
            if self._max_tokens is not None and n_tokens >= self._max_tokens:
                return

    def described(self) -> dict[str, Any]:
        """The facts, and the hash of what was read."""
        return {**self.facts, "sha256": self._sha256()}


def sample_documents(texts: Iterable[str], share: float, seed: int) -> Iterator[str]:
    """Each text with probability ``share``, drawn from ``seed``."""
    random = np.random.default_rng(seed)
    return (text for text in texts if share >= 1.0 or random.random() < share)


# A file without blank lines is cut into pieces of so many characters.
PIECE = 1 << 20


def file_texts(paths: Iterable[Path], progress: Progress = silent) -> Iterator[str]:
    """What blank lines separate in UTF-8 files, at most about `PIECE` characters each.

    Args:
        paths: the files.
        progress: called with the characters read and the files' bytes.

    Raises:
        ConfigurationError: a file cannot be read or is not UTF-8 text.
    """
    paths = list(paths)
    total = sum(path.stat().st_size for path in paths if path.is_file())
    done = 0
    for path in paths:
        lines: list[str] = []
        size = 0
        try:
            with path.open(encoding="utf-8-sig") as handle:
                for line in handle:
                    blank = not line.strip()
                    if lines and (blank or size > PIECE):
                        done += size
                        progress("reading texts", done, total)
                        yield "".join(lines)
                        lines, size = [], 0
                    if not blank:
                        lines.append(line)
                        size += len(line)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the text {path}: {error}") from error
        if lines:
            yield "".join(lines)


@dataclass(frozen=True, slots=True)
class HubCorpus:
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
    """Documents of a corpus in `HUB`, streamed; every message of a dialogue is one.

    ``revision`` is the data set's; None takes the newest.

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
            yield from row_texts(row[source.column], source.message)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot stream {source.id} from the hub: {error}. Check the network and "
            "HF_HUB_OFFLINE, or name local texts instead."
        ) from error


def row_texts(value: Any, message: str | None) -> Iterator[str]:
    """The texts in one column of one row; see `HubCorpus`."""
    parts: list[Any] = [value] if isinstance(value, str) else value
    for part in parts:
        yield part if message is None else part[message]


# -- ids ------------------------------------------------------------------------------------------


def recorded_turns(path: Path, tokenizer_hash: str | None) -> Iterator[tuple[Array, Array]]:
    """Prompt and answer of every turn of a run.

    Labels and repeats of a turn are one text, so only the first that did not fail is taken: what
    was measured more often is not more frequent.

    Args:
        path: a ``cases.jsonl``, or the run folder it lies in.
        tokenizer_hash: what the ids must belong to; None takes any. It is compared with the
            manifest beside the file, where there is one.

    Raises:
        ArtifactError: there is no such file, or it belongs to another tokenizer.
        RecordError: a line is not a valid record.
    """
    path = path / CASES if path.is_dir() else path
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}; name the cases.jsonl of an earlier run.")
    manifest = path.with_name(MANIFEST)
    if tokenizer_hash is not None and manifest.is_file():
        found = (read_json(manifest).get("model") or {}).get("tokenizer_hash")
        if found is not None and found != tokenizer_hash:
            raise ArtifactError(
                f"{path} was recorded with tokenizer hash {found!r}, but this run needs tokenizer "
                f"hash {tokenizer_hash!r}; name a run of this model."
            )
    records, _ = read_records(path)
    seen: set[tuple[str, int]] = set()
    for record in records:
        if record.status == "failed" or (record.case_id, record.turn) in seen:
            continue
        seen.add((record.case_id, record.turn))
        yield (
            np.asarray(record.prompt_ids, dtype=np.int32),
            np.asarray(record.output_ids, dtype=np.int32),
        )
