"""Plain greedy answers of a run that no measured label gives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specbench.arrays import IntArray
from specbench.results.lines import answer_line
from specbench.storage import jsonl


class BaselineCache:
    """Plain greedy answers that no measured run gives: computed once, untimed, kept on disk.

    Needed as the first turn's answer in a dialogue where no greedy baseline runs, and as the
    reference of a method that asks for one before the baseline has run.

    Args:
        path: the file; a line cut off by a crash is dropped.
        decode: the plain greedy output ``[n_new]`` of a prompt.
    """

    def __init__(self, path: Path, decode: Callable[[IntArray], IntArray]) -> None:
        self._known = {
            (line["case_id"], line["turn"], line["prompt_sha"]): line["output_ids"]
            for line in jsonl.mend_jsonl(path, answer_line)
        }
        self._path = path
        self._decode = decode

    def get(self, case_id: str, turn: int, prompt: IntArray) -> IntArray:
        """The plain greedy output for a prompt of a case's turn.

        Raises:
            CaseFailed: the prompt cannot be decoded.
            DiskError: the answer cannot be kept.
        """
        sha = hashlib.sha256(np.ascontiguousarray(prompt, dtype="<i8").tobytes()).hexdigest()
        key = (case_id, turn, sha)
        if key not in self._known:
            output = [int(token) for token in self._decode(prompt)]
            line = {"case_id": case_id, "turn": turn, "prompt_sha": sha, "output_ids": output}
            jsonl.append_jsonl(self._path, [line])
            self._known[key] = output
        return np.asarray(self._known[key], dtype=np.int64)
