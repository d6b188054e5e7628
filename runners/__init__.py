"""From a configuration to results. In Python: ``from runners import compare, advise``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.advice.in_memory import advise
    from runners.comparison import compare, load_model

__all__ = ["advise", "compare", "load_model"]


def __getattr__(name: str) -> Any:
    """The three above, imported when they are asked for: `run.py` must start without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "advise":
        from runners.advice import in_memory

        return in_memory.advise
    from runners import comparison

    return getattr(comparison, name)
