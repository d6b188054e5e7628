"""The manifest of a run folder, and whether a run may be resumed where it is now."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from runners.run_folder.config_diff import config_diff
from specbench.data import cases
from specbench.errors import OutputRefused
from specbench.results import records
from specbench.system import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runners.job import Job
    from runners.session.method_runs import MethodRun

log = logging.getLogger(__name__)


def begin(
    job: Job, contenders: Sequence[MethodRun], surroundings: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of a new run; the model's part is added when it is loaded.

    Args:
        job: what is run.
        contenders: what runs.
        surroundings: hardware, versions and git state, as :mod:`specbench.system.environment` gives
            them.
    """
    return {
        "schema_version": records.SCHEMA_VERSION,
        "folder_id": secrets.token_hex(8),  # the run key is that of every machine's same command
        "run_key": job.run_key,
        "status": "running",
        "exit_code": None,
        "config": job.config,
        "identity": job.identity,
        "overrides": list(job.overrides),
        "labels": {
            c.label: {
                "method": c.entry.name,
                "method_version": c.drafter.version,
                "state_scope": c.scope,
                "knobs": dict(c.entry.method),
                "pair": c.entry.pair,
            }
            for c in contenders
        },
        "baseline": job.baseline,
        "seed": job.config["seed"],
        "n_cases": len(job.cases),
        "prompt_set_hash": cases.prompt_set_hash(job.cases),
        **surroundings,
        "forced_resume": False,
        "starts": [],
    }


def add_start(manifest: dict[str, Any], n_done: int, n_redone: int) -> None:
    """Note that a process began (or went on) measuring."""
    manifest["status"] = "running"
    manifest["starts"].append(
        {
            "at": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "records_found": n_done,
            "blocks_redone": n_redone,
        }
    )


def close(manifest: dict[str, Any], status: str, exit_code: int | None) -> None:
    """Note how the process ended: ``complete``, ``interrupted`` or ``failed``."""
    manifest.update(status=status, exit_code=exit_code, ended_at=_now())


def check_resume(old: Mapping[str, Any], surroundings: Mapping[str, Any], force: bool) -> bool:
    """Whether hardware, versions or code differ from those of the run to be resumed.

    Raises:
        OutputRefused: they differ and ``force`` is not set; names what differs.
    """
    differing = config_diff(environment.fingerprint(old), environment.fingerprint(surroundings))
    if not differing:
        return False
    if not force:
        raise OutputRefused(
            "this run was begun under other conditions:\n"
            + "\n".join(differing)
            + "\nMeasure anew with fresh=true, or go on with resume=force, which marks the records."
        )
    log.warning("resume=force: going on although these differ:\n%s", "\n".join(differing))
    return True


def check_subject(old: Mapping[str, Any], job: Job, model: Mapping[str, Any]) -> None:
    """Refuse to go on with other questions, weights or prompts under the same names.

    Raises:
        OutputRefused: names what differs; there is no forcing this.
    """
    subject = _subject(model)
    now = {"prompt_set_hash": cases.prompt_set_hash(job.cases), "model": subject}
    then: dict[str, Any] = {"prompt_set_hash": old["prompt_set_hash"]}
    # A run that was killed before its model was loaded has nothing to say about it.
    then["model"] = _subject(old["model"]) if "model" in old else subject
    differing = config_diff(then, now)
    if differing:
        raise OutputRefused(
            "the files behind this run have changed since it was begun:\n"
            + "\n".join(differing)
            + "\nMeasure anew with fresh=true."
        )


_SUBJECT = (
    "id",
    "revision",
    "weights_hash",
    "dtype",
    "device",
    "context_length",
    "tokenizer_hash",
    "template_sha",
)


def _subject(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is about, of the manifest's part about the model."""
    drafts = {
        label: {key: draft[key] for key in _DRAFT_SUBJECT}
        for label, draft in model.get("drafts", {}).items()
    }
    return {key: model[key] for key in _SUBJECT} | {"drafts": drafts}


_DRAFT_SUBJECT = ("id", "revision", "weights_hash", "dtype", "device", "vocab_size")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
