"""Make the inputs of a replay first if an experiment requests it: recorded outputs, a surface.

``runner.traces=record`` and ``runner.surface=measure`` (both: ``runner=replay_predicted``) make an
experiment of replays a single command. Both results go below ``runner.recordings``, where the jobs
of a sweep, and other experiments with the same prompts, find them.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from runners.run_folder import folder
from specbench.config import compose
from specbench.config.entries import compose_entry
from specbench.config.run_key import run_key
from specbench.config.schema import ORDERS
from specbench.paths import file_name
from specbench.results.manifest import BASELINE


def jobs(cfg: DictConfig) -> list[tuple[str, DictConfig, Path]]:
    """List the ``runner`` keys whose files are made first, each with its job and folder."""
    first = []
    if cfg.runner.name == "replay" and cfg.runner.traces == "record":
        first.append(("traces", recording(cfg)))
    if cfg.runner.name == "replay" and cfg.runner.surface == "measure":
        first.append(("surface", measurement(cfg)))
    return [(key, job, _job_folder(cfg, job)) for key, job in first]


def _job_folder(cfg: DictConfig, job: DictConfig) -> Path:
    """Return the folder of the same job if it is complete, by hand or otherwise, or a new one."""
    key = run_key(job)
    for path in sorted(Path(cfg.paths.results).glob(f"*/*-{key}")):
        if folder.is_complete(path):
            return path
    return Path(cfg.runner.recordings) / f"{file_name(cfg.model.name)}_{job.runner.name}-{key}"


def recording(cfg: DictConfig) -> DictConfig:
    """Configure the run of plain decoding on a configuration's prompts."""
    job = compose_entry(cfg, BASELINE)
    job.runner = compose.compose(["runner=offline"]).runner
    plain = {"compare": [], "state_scope": "prompt", "repeats": 1, "shard": None, "fresh": False}
    # Its times do not count, and a replay that keeps state from case to case needs this order.
    for key, value in {**plain, "dataset.order": ORDERS[1]}.items():
        OmegaConf.update(job, key, value)
    job.engine.eager_baseline = False  # a replay uses only the surface's times
    return job


def measurement(cfg: DictConfig) -> DictConfig:
    """Configure the run that times the passes of a configuration's model."""
    job = compose.compose([f"method={BASELINE}", "runner=cost"])
    for key in ("model", "engine", "paths", "cache_dir"):
        job[key] = cfg[key]
    return job
