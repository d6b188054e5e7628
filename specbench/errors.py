"""The errors a user can meet, each with the exit code it leads to.

Every message says what was wrong and what to type next. Nothing here imports another module, so
errors can be raised and caught anywhere, with or without torch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class SpecBenchError(Exception):
    """Base of the errors this project raises on purpose. ``exit_code`` is the process's."""

    exit_code = 1


class ConfigurationError(SpecBenchError):
    """Bad configuration or input: an unknown key, value, file or name. Exit code 2."""

    exit_code = 2


class NeedsNotMet(ConfigurationError):
    """A method needs something (weights, a table, a datastore) that this run does not have."""


class MethodCannotRun(NeedsNotMet):
    """One of a run's methods cannot work; a comparison may go on without it.

    Attributes:
        label: the method's in the run; the cause says the reason.
    """

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(reason)
        self.label = label


class WarmUpFailed(SpecBenchError):
    """Labels of a run failed before they were measured; the others may go on.

    Attributes:
        reasons: by label.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(" ".join(f"{label}: {reason}" for label, reason in reasons.items()))
        self.reasons = dict(reasons)


class WeightsNotFound(ConfigurationError):
    """The weights of a model are neither in the local cache nor reachable."""


class DatasetError(ConfigurationError):
    """A data set is missing, or a line of it is malformed (file, line number and reason)."""


class ArtifactError(ConfigurationError):
    """A table, datastore or automaton is corrupt or was built for something else."""


class ResultsError(ConfigurationError):
    """Results cannot be shown: there are none, or the named ones do not fit together."""


class OutputRefused(ConfigurationError):
    """The output folder belongs to another configuration, is locked, or cannot be written."""


class CaseFailed(SpecBenchError):
    """One case cannot be decoded; the run records it and goes on.

    Attributes:
        kind: short machine-readable name, e.g. ``prompt_too_long``, ``invalid_draft``,
            ``nan_logits``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class DeviceLost(SpecBenchError):
    """A GPU stopped responding, as after an illegal memory access: the process ends with the cause.

    Every later call to it fails too, without the first cause.
    """


def replace_unprintable() -> None:
    """Have standard output replace what its encoding lacks, so that no name ends a command."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the entry of ``valid`` closest to ``name``, or None where nothing is close."""
    lowered = {entry.lower(): entry for entry in valid}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return lowered[matches[0]] if matches else None


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> ConfigurationError:
    """Make the ConfigurationError for an unknown name, with the nearest valid one."""
    options = sorted(valid)
    close = nearest(name, options)
    hint = f" Did you mean {close!r}?" if close else ""
    return ConfigurationError(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(options)}.")


def message_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty; "" where all are."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def first_line(error: BaseException) -> str:
    """Return ``Type: message`` of any error, with the message's first line."""
    return ": ".join(filter(None, (type(error).__name__, message_line(error))))


# Pydantic's error types, as the end of "it must be …".
_MUST_BE = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dict_attributes_type": "an object",
    "model_type": "an object",
    "dataclass_type": "an object",
    "none_required": "null",
    "literal_error": "one of {expected}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "a text that is not empty",
    "value_error": "{error}",
}


def requirement_text(error: ValueError) -> str:
    """Format pydantic's requirement, e.g. ``a whole number or a list``; else the error's text."""
    return " or ".join(dict.fromkeys(map(_must_be, _details(error)))) or str(error)


def field_error(error: Exception) -> str:
    """Format a schema's error as field, value and requirement; of other errors the text."""
    details = _details(error)
    if not details:
        return str(error)
    first = details[0]
    name = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    if first["type"] == "missing":
        return f"no field {name.removeprefix('.')}"
    return (
        f"{name.removeprefix('.') or 'it'} is {first['input']!r:.60}, it must be {_must_be(first)}"
    )


def _must_be(detail: Any) -> str:
    template = _MUST_BE.get(detail["type"], "{error}")
    return template.format(**{"error": detail["msg"], **detail.get("ctx", {})})


def _details(error: Exception) -> Sequence[Any]:
    # Not imported: errors are raised where pydantic is not installed, too.
    return error.errors() if hasattr(error, "errors") else []
