"""From a configuration to results. In Python: ``from runners import compare``, docs/python.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.comparison import compare, load_model

__all__ = ["compare", "load_model"]


def __getattr__(name: str) -> Any:
    """The two above, imported when they are asked for: `run.py` must start without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runners import comparison

    return getattr(comparison, name)
