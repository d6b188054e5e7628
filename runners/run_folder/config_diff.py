"""What differs between two nested mappings, for messages that refuse to mix two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()
_SHOWN = 12


def config_diff(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One indented line per dotted key whose values differ, at most a dozen; lists are leaves."""
    old, new = dict(_flatten(then, prefix)), dict(_flatten(now, prefix))
    lines = [
        f"  {key}: there {_show(old, key)}, here {_show(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"  and {more} more"] if more > 0 else lines


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _show(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
