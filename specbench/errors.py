"""The errors a user can meet, each with the exit code it leads to.

Every message says what was wrong and what to type next. Nothing here imports another module, so
errors can be raised and caught anywhere, with or without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecBenchError(Exception):
    """Base of the errors this project raises on purpose. ``exit_code`` is the process's."""

    exit_code = 1


class ConfigurationError(SpecBenchError):
    """Bad configuration or input: an unknown key, value, file or name. Exit code 2."""

    exit_code = 2


class NeedsNotMet(ConfigurationError):
    """A method needs something (weights, a table, a datastore) that this run does not have."""


class WeightsNotFound(ConfigurationError):
    """The weights of a model are neither in the local cache nor reachable."""


class DatasetError(ConfigurationError):
    """A data set is missing, or a line of it is malformed (file, line number and reason)."""


class ArtifactError(ConfigurationError):
    """A table, datastore or automaton is corrupt or was built for something else."""


class ResultsError(ConfigurationError):
    """Results cannot be shown: none are there, or what was named does not fit together."""


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


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The entry of ``valid`` closest to ``name``, or None where nothing is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown_name(what: str, name: str, valid: Iterable[str]) -> ConfigurationError:
    """A ConfigurationError for a name that does not exist, with the nearest one that does."""
    options = sorted(valid)
    close = nearest(name, options)
    hint = f" Did you mean {close!r}?" if close else ""
    return ConfigurationError(f"unknown {what} {name!r}.{hint} Valid: {', '.join(options)}.")


def message_line(error: BaseException) -> str:
    """The first line of an error's message that says something, else an empty one."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def first_line(error: BaseException) -> str:
    """``Type: message`` of any error, of the message its first line."""
    return ": ".join(filter(None, (type(error).__name__, message_line(error))))
