"""The manifest of a run folder, and the checks before a run is resumed."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from runners.job import Job
from specbench.arrays import IntArray
from specbench.config.schema import RunConfig
from specbench.data import cases
from specbench.data.cases import Case
from specbench.errors import OutputRefused
from specbench.results.manifest import LabelInfo, ModelInfo, RunManifest, Start
from specbench.results.records import CaseRecord
from specbench.system import environment
from specbench.system.hardware import Machine

log = logging.getLogger(__name__)

_SHOWN = 12  # lines of what differs
# Fields of the job alone, which a resumed run overwrites.
JOB_FIELDS = ("config", "identity", "labels", "baseline", "seed", "n_cases")


def begin(job: Job, labels: dict[str, LabelInfo], machine: Machine) -> RunManifest:
    """Make the manifest of a new run; the model's part is added when it is loaded."""
    return RunManifest(
        folder_id=secrets.token_hex(8),  # the run key is the same on every machine
        run_key=job.run_key,
        status="running",
        config=asdict(job.config),
        identity=dict(job.identity),
        overrides=list(job.overrides),
        swept=job.swept or None,
        labels=labels,
        baseline=job.baseline,
        seed=job.config.seed,
        n_cases=len(job.cases),
        prompt_set_hash=cases.prompt_set_hash(job.cases),
        **machine,
    )


def add_start(manifest: RunManifest, n_done: int, n_redone: int) -> None:
    """Note that a process began (or went on) measuring."""
    manifest.status = "running"
    manifest.starts.append(
        Start(
            at=_now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            records_found=n_done,
            blocks_redone=n_redone,
        )
    )


def close(manifest: RunManifest, status: str, exit_code: int | None) -> None:
    """Note how the process ended: ``complete``, ``interrupted`` or ``failed``."""
    manifest.status, manifest.exit_code, manifest.ended_at = status, exit_code, _now()


def check_resume(old: RunManifest, machine: Machine, force: bool) -> bool:
    """Return whether hardware, versions or code differ from the run to be resumed.

    Raises:
        OutputRefused: they differ and ``force`` is not set; names what differs.
    """
    keys = ("hardware", "versions", "git", "code", "cuda_settings")
    earlier = cast(Machine, {key: getattr(old, key) for key in keys})
    then, now = environment.fingerprint(earlier), environment.fingerprint(machine)
    if old.code:  # an edit that was not committed
        then["code"], now["code"] = old.code, machine["code"]
    return _forced(then, {key: value for key, value in now.items() if key in then}, force)


def check_passes(old: RunManifest, model: ModelInfo, force: bool) -> bool:
    """Return whether target passes run on other threads or CPU kernels than in the resumed run.

    Raises:
        OutputRefused: they do and ``force`` is not set; names what differs.
    """
    then, now = (
        {"threads": info.threads, "pass": (info.packed or {}).get("pass")}
        for info in (old.model or model, model)
    )
    return _forced(then, now, force)


def _forced(then: Mapping[str, Any], now: Mapping[str, Any], force: bool) -> bool:
    """Return whether conditions differ, which ``force`` allows."""
    differing = "\n".join(config_diff(then, now))
    if differing and not force:
        raise OutputRefused(
            f"this run was begun under other conditions:\n{differing}\nGo on under those, or "
            "measure again with fresh=true, or type resume=force, which marks the records."
        )
    if differing:
        log.warning("resume=force: going on although these differ:\n%s", differing)
    return bool(differing)


def check_questions(old: RunManifest, config: RunConfig, now: Iterable[Case], path: Path) -> None:
    """Refuse a folder, ``path``, whose prompts have changed under the same name.

    Raises:
        OutputRefused: names the questions; there is no forcing this.
    """
    digest = cases.prompt_set_hash(now)
    if digest != old.prompt_set_hash:
        where = f" in data_dir={config.data_dir}" if config.data_dir else ""
        file = config.dataset.path or f"dataset={config.dataset.name}{where}"
        raise OutputRefused(
            f"{file} has changed since {path} was begun:\n"
            f"  prompt_set_hash: there {old.prompt_set_hash!r}, here {digest!r}\n"
            "Restore the questions, or type fresh=true to measure into a new folder."
        )


def check_subject(old: RunManifest, model: ModelInfo) -> None:
    """Refuse to go on with other weights or prompts under the same names.

    Raises:
        OutputRefused: names what differs; there is no forcing this.
    """
    # A run that was killed before its model was loaded has no model info.
    differing = "\n".join(config_diff(_subject(old.model or model), _subject(model)))
    if differing:
        raise OutputRefused(
            f"the files of this run's model have changed since it was begun:\n{differing}\n"
            "Measure again with fresh=true."
        )


def check_prompts(job: Job, done: Iterable[CaseRecord], prompts: Sequence[IntArray]) -> None:
    """Refuse to go on if a case's prompt is rendered differently than in the run's records.

    Args:
        prompts: ``[n_prompt]`` ids of the first turns of ``job.cases``, as rendered now.

    Raises:
        OutputRefused: names the case; there is no forcing this.
    """
    now = dict(zip((case.case_id for case in job.cases), prompts, strict=True))
    for record in done:
        if record.turn == 0 and record.prompt_ids not in ([], now[record.case_id].tolist()):
            raise OutputRefused(
                f"the prompt of case {record.case_id} is not what it was when {job.folder} was "
                "begun: the chat template reads something that changes, such as the date. Fix "
                "that by model.template_kwargs, and measure again with fresh=true."
            )


_WEIGHTS = ("id", "revision", "weights_hash", "dtype", "device")
_SUBJECT = (*_WEIGHTS, "weights", "context_length", "tokenizer_hash", "template_sha")


def _subject(model: ModelInfo) -> dict[str, Any]:
    drafts = {
        label: {key: getattr(draft, key) for key in (*_WEIGHTS, "vocab_size")}
        for label, draft in model.drafts.items()
    }
    return {"model": {**{key: getattr(model, key) for key in _SUBJECT}, "drafts": drafts}}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def config_diff(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the dotted keys that differ, one indented line each, at most 12; lists are leaves."""
    old, new = dict(_flatten(then)), dict(_flatten(now))
    lines = [
        f"  {key}: there {_show(old, key)}, here {_show(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"  and {more} more"] if more > 0 else lines


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _show(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
