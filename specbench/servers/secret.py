"""A key that a server was sent, hidden in all that the server says.

A server may write it into anything: a refusal, an event, an answer's text, its own name. What it
says passes here before it becomes a record, a line of ``errors.jsonl`` or of the terminal.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any
from urllib.parse import quote

HIDDEN = "…"
_SHORTEST = 6  # shorter ones (EMPTY, none, x) are no secrets, and are words of answers
# What documentation of servers says to type where no key is asked for.
_PLACEHOLDERS = (
    *("sk-no-key-required", "no-key-required", "not-needed", "not-required", "lm-studio", "ollama"),
    *("password", "dummy", "dummy-key", "token-abc123", "api-key", "your-api-key"),
)
_PART = 8  # characters: a shorter part of a key is of no use to anybody


class Secret:
    """What must not be shown.

    It is hidden as it is, percent-encoded, escaped as in JSON, Python or HTML, in base64 or
    hexadecimal, in capitals or small letters, and where parts of it stand alone, from eight
    characters on. In an answer's text only the whole key is hidden: a part of one may be a word.
    """

    def __init__(self, key: str) -> None:
        spelt = (
            *(key, quote(key, safe=""), json.dumps(key)[1:-1], repr(key)[1:-1]),
            *(b64encode(key.encode()).decode(), key.encode().hex()),
            *("".join(f"\\u{ord(c):04x}" for c in key), "".join(f"&#{ord(c)};" for c in key)),
            "".join(f"%{byte:02X}" for byte in key.encode()),
        )
        secret = len(key) >= _SHORTEST and key.lower() not in _PLACEHOLDERS
        self._spelt = {w for s in spelt for w in (s, s.upper(), s.lower())} if secret else set()
        self._parts = {
            way[i : i + _PART] for way in self._spelt for i in range(max(1, len(way) - _PART + 1))
        }

    def hide(self, text: str) -> str:
        """The text without the key and its parts."""
        return _without(self._parts, text)

    def hide_in_answer(self, text: str) -> str:
        """An answer's text without the whole key."""
        return _without(self._spelt, text)

    def hide_in(self, value: Any) -> Any:
        """A value of JSON without the key in any of its texts and names."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self.hide(str(name)): self.hide_in(node) for name, node in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide_in(node) for node in value]
        return value

    def hide_in_error(self, error: BaseException) -> None:
        """Take the key out of an error's message, and out of the errors that it came from."""
        seen: list[BaseException] = []
        todo: list[BaseException | None] = [error]
        while todo:
            one = todo.pop()
            if one is None or one in seen:
                continue
            seen.append(one)
            one.args = tuple(self.hide_in(list(one.args)))
            todo += [one.__cause__, one.__context__]


def _without(parts: Iterable[str], text: str) -> str:
    covered = bytearray(len(text))
    for part in parts:
        at = text.find(part)
        while at >= 0:
            covered[at : at + len(part)] = b"\1" * len(part)
            at = text.find(part, at + 1)
    if not any(covered):
        return text
    return "".join(
        HIDDEN if hidden else "".join(c for c, _ in run)
        for hidden, run in groupby(zip(text, covered, strict=True), key=lambda one: one[1])
    )
