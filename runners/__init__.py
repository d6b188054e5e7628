"""From a configuration to results. In Python: ``from runners import compare, advise``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.advice import advise
    from runners.comparison import compare, load_model

__all__ = ["advise", "compare", "load_model"]


def __getattr__(name: str) -> Any:
    """Import the three above at first use: `run.py` must start without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "advice" if name == "advise" else "comparison"
    return getattr(import_module(f"runners.{module}"), name)
