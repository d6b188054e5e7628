"""What the values of a configuration may be, as types that pydantic checks."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator
from pydantic_core import CoreSchema, core_schema

# Marks a field that says where files lie or how a run is started, and can move no number.
ASIDE = "aside"


class OneOf:
    """One of a few values. OmegaConf takes no ``Literal``."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.values))


def device_name(name: str) -> str:
    """Return a device's name; passes are written for the CPU and CUDA.

    Raises:
        ValueError: it is another one; what it must be.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d?))?", name):
        raise ValueError("auto, cpu, cuda or cuda:N")
    return name


def _draft_device(name: str) -> str:
    if name == "auto":
        raise ValueError("cpu, cuda, cuda:N or null for the target's")
    return device_name(name)


Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Gt(0), Le(1)]
Device = Annotated[str, AfterValidator(device_name)]
DraftDevice = Annotated[str, AfterValidator(_draft_device)]
Text = Annotated[str, MinLen(1)]
Place = Annotated[Text, ASIDE]


class Group:
    """A group of keys, others than which are refused."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
