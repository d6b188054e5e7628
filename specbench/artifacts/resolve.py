"""Finds files that a method needs besides the model, or builds them for the bundled model.

A file the user named is taken as it is. The default place is the cache folder, under a name made
from the builder's stem and version, its parameters and the tokenizer's hash, and the weights' where
the file is made by running the model. For the bundled model a missing one is built there once; for
another model the message says what to type.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from specbench.decoding.structs import Artifact
from specbench.errors import ArtifactError, ConfigurationError, NeedsNotMet
from specbench.models import loading
from specbench.results.manifest import ArtifactInfo
from specbench.storage.arrays import read_header
from specbench.storage.hashes import file_sha256
from specbench.storage.jsonl import replacing

# The bundled model's files take minutes; a longer wait is for a hung process.
_LOCK_TIMEOUT_S = 1800.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedTokenizer:
    """A tokenizer that is known by its hash and loaded only where something must be built."""

    sha: str
    load: Callable[[], Any]


def resolve(
    artifacts: Iterable[Artifact],
    *,
    tokenizer: Any,
    bundled: bool,
    cache_dir: str | Path,
    model_key: str | None = None,
    model_name: str = "MODEL",
) -> dict[str, Path]:
    """Find the file of each artifact by its name; build what is missing and may be built.

    Args:
        tokenizer: a transformers tokenizer, or a `NamedTokenizer`; files belong to one.
        bundled: whether the run's model is the bundled one, whose files are built on first use.
        cache_dir: default files lie in its folder ``artefacts``.
        model_key: of the run's model (`weights.model_key`), for artifacts that are ``per_model``.
        model_name: what to type for the run's model in a command that builds a file.

    Raises:
        NeedsNotMet: a file is missing; the message has the command that builds it.
    """
    files: dict[str, Path] = {}
    for artifact in artifacts:
        if artifact.path is not None:
            path = Path(artifact.path)
            if not path.is_file():
                raise NeedsNotMet(
                    f"there is no file {path} for {artifact.name}. Name an existing one, leave "
                    f"{artifact.name}=null for the default, or type: {artifact.command}"
                )
        else:
            path = default_path(
                artifact, tokenizer=tokenizer, cache_dir=cache_dir, model_key=model_key
            )
            if not path.is_file() and not bundled:
                owner = "model" if artifact.per_model else "model's tokenizer"
                raise NeedsNotMet(
                    f"{artifact.name} has not been built for this {owner} (looked: {path}). "
                    f"Type: {artifact.command_for(model_name)}"
                )
            if not path.is_file():
                _build(artifact, path, tokenizer)
        files[artifact.name] = path
    return files


def default_path(
    artifact: Artifact, *, tokenizer: Any, cache_dir: str | Path, model_key: str | None = None
) -> Path:
    """Return the path of an artifact if the user names no file."""
    module = _builder_module(artifact)
    named = isinstance(tokenizer, NamedTokenizer)
    identity = {
        "tokenizer": tokenizer.sha if named else loading.tokenizer_hash(tokenizer),
        "version": module.BUILDER_VERSION,
        "params": dict(artifact.params),
    }
    if artifact.per_model:
        if model_key is None:
            raise ValueError(f"{artifact.name} belongs to one model: model_key must name it")
        identity["model"] = model_key
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cache_dir) / "artefacts" / f"{module.STEM}-{key}.bin"


def describe(path: Path) -> ArtifactInfo:
    """Describe a file for a run's manifest."""
    facts = ArtifactInfo(path=str(path), bytes=path.stat().st_size, sha256=file_sha256(path))
    with suppress(ArtifactError):
        header = read_header(path)
        del header["sections"]
        facts["header"] = header
    return facts


@contextmanager
def build_lock(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock for building a file; its folder is created.

    Raises:
        ConfigurationError: another process is building it still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(f"{path}.lock").acquire(timeout=wait_s)
    except filelock.Timeout:
        raise ConfigurationError(
            f"another process is building {path}. Wait for it, or stop it."
        ) from None
    with lock:
        try:
            yield
        finally:
            Path(f"{path}.lock").unlink(missing_ok=True)


def _build(artifact: Artifact, path: Path, tokenizer: Any) -> None:
    if isinstance(tokenizer, NamedTokenizer):
        loaded = tokenizer.load()
        if loading.tokenizer_hash(loaded) != tokenizer.sha:
            raise NeedsNotMet(
                f"a file must be built for a tokenizer with hash {tokenizer.sha[:16]}, but the "
                "model's tokenizer here is another one. Copy the file from the machine that "
                "recorded the outputs, and name it in the method's knob."
            )
        tokenizer = loaded
    build = getattr(_builder_module(artifact), artifact.builder.partition(":")[2])
    with build_lock(path, _LOCK_TIMEOUT_S):
        if path.is_file():  # another process has built it meanwhile
            return
        log.warning("building %s, once, into %s", artifact.name, path)
        with replacing(path) as partial:
            build(tokenizer, partial, **artifact.params)


def _builder_module(artifact: Artifact) -> Any:
    return importlib.import_module(artifact.builder.partition(":")[0])
