"""Token ids that earlier runs recorded: every dialogue turn's prompt and answer, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from specbench.arrays import Array
from specbench.errors import ArtifactError
from specbench.results.records import CASES, MANIFEST, read_records
from specbench.storage.jsonl import read_json


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
        RecordError: a line is no valid record.
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
