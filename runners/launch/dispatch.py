"""From a composed configuration to a finished folder: checks, the child process, exit codes."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runners.job import Entry, Job, refuse_duplicate_labels
from runners.launch import add_methods, prerequisites, publish, signals, sweep
from runners.launch.child_process import run_in_child
from runners.run_folder import folder
from runners.run_folder.manifest import check_questions
from runners.runner import Runner
from specbench.config import compose
from specbench.config.compose import with_custom_model
from specbench.config.entries import budget_of, compose_entry, with_parts
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.run_key import key_of, run_identity
from specbench.config.schema import RUNNERS, PairConfig, RunConfig, VerifierConfig
from specbench.config.validate import check_values
from specbench.errors import (
    ConfigurationError,
    SpecBenchError,
    first_line,
    message_line,
    replace_unprintable,
    unknown_name,
)
from specbench.paths import file_name
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.records import CASES, SURFACE
from specbench.system import environment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invocation:
    """Hydra's own facts about a job; in a ``multirun`` ``output_dir`` is the jobs' root."""

    overrides: tuple[str, ...] = ()
    multirun: bool = False
    experiment: str | None = None


def run_application(main: Callable[[], Any]) -> int:
    """Call a ``hydra.main`` function and return the process's exit code.

    No user error ends in a traceback: composition errors of Hydra and OmegaConf are translated
    like ours. ``HYDRA_FULL_ERROR=1`` shows the traceback all the same.
    """
    replace_unprintable()
    verbose = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints and exits by itself, with 1
    code = 0
    try:
        with signals.raise_on_signal():
            try:
                main()
            except Exception as error:
                code, _ = _report(error, verbose)
            outcomes = sweep.outcomes(whole=not code)
            sweep.finish(outcomes)
            code = max(code, publish.publish(outcomes))
    except signals.Stopped as stop:
        signals.print_stopped(stop.signum)
        return 128 + stop.signum
    finally:
        sweep.remove_outcomes()
    return max([code, *(int(job["code"]) for job in outcomes)])


def run_job(cfg: DictConfig) -> int:
    """Run one job of Hydra's; errors are reported here so that a sweep goes on.

    Raises:
        SystemExit: the run was asked to stop.
    """
    hydra = HydraConfig.get()
    # As typed: an interpolation in them is resolved later, in its own node.
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    experiment = hydra.runtime.choices.get("experiment")
    invocation = Invocation(
        overrides=tuple(overrides),
        multirun=hydra.mode == RunMode.MULTIRUN,
        experiment=None if experiment in (None, "null") else str(experiment),
    )
    path, message, logger = None, "", None
    try:
        logger = _logger(cfg)
        code, path = execute(with_custom_model(cfg, invocation.overrides), invocation)
    except Exception as error:
        code, message = _report(error)
    sweep.save_outcome(code, invocation.overrides, path, message, logger)
    return code


def _logger(cfg: DictConfig) -> Any:
    return OmegaConf.to_container(cfg.logger, resolve=True) if cfg.logger else None


def execute(cfg: DictConfig, invocation: Invocation) -> tuple[int, Path]:
    """Run the cheap checks, measure what is missing, print the table.

    Returns:
        0, or 1 where a case failed or an output is not what plain decoding gives; the folder.

    Raises:
        ConfigurationError: bad configuration or input.
        SpecBenchError: the run could not go to its end.
    """
    if cfg.add:
        overrides = add_methods.whole_command(cfg, invocation.overrides)
        if len(overrides) > len(invocation.overrides):
            cfg, invocation = compose.compose(overrides), replace(invocation, overrides=overrides)
    if cfg.runner.name not in RUNNERS:
        raise unknown_name("runner", str(cfg.runner.name), RUNNERS)
    module = importlib.import_module(f"runners.{cfg.runner.name}")
    runner: Runner = getattr(module, cfg.runner.name.capitalize())()
    check_values(cfg)
    publish.check(cfg.logger)
    for key, first, path in prerequisites.jobs(cfg):
        first.output_dir, cfg = str(path), cfg.copy()
        cfg.runner[key] = str(path / SURFACE if key == "surface" else path)
        if not folder.is_complete(path):
            log.info("first, for runner.%s: %s", key, path)
            if execute(first, Invocation())[0]:
                raise SpecBenchError(f"{path} failed, which this run was to read.")
    cfg = runner.resolve_config(cfg, invocation.overrides)
    job = resolve(cfg, runner, invocation)
    if cfg.add:
        later = Invocation(invocation.overrides, multirun=True)  # a folder below the run's
        exit_code, path = execute(add_methods.job_of(cfg, job.folder), later)
        add_methods.show_added(job.folder)
        return exit_code, path
    if folder.is_complete(job.folder):
        return _show_again(job, runner), job.folder
    job = replace(job, cases=runner.load_cases(job.config))
    if job.cases and job.shard[0] >= len(job.cases):
        raise ConfigurationError(
            f"shard={job.config.shard} holds no case: there are {len(job.cases)}. Type at most "
            f"shard=0/{len(job.cases)}."
        )
    folder.make_folder(job.folder)
    if runner.in_child:
        variables = environment.pinned_threads() if job.config.measure.pin else {}
        exit_code = run_in_child(runner.run, job, variables)
    else:
        exit_code = runner.run(job)
    if folder.is_complete(job.folder):
        runner.show(job.folder, brief=job.swept)
        if invocation.experiment and not job.swept and (job.folder / CASES).exists():
            sweep.run_analysis("tables", job.folder)  # with the paper's claims
    return exit_code, job.folder


def resolve(cfg: DictConfig, runner: Runner, invocation: Invocation) -> Job:
    """Make the job that a checked configuration describes, with its folder but no cases yet.

    Raises:
        ConfigurationError: an unknown method or knob, or two entries with one label.
        OutputRefused: the folder is another run's; no ``cache_dir`` can be made.
    """
    entries = runner.entries(cfg)
    if entries is None:
        entries = resolve_entries(cfg)
    optional = () if cfg.strict else entries[len(entries) - len(cfg.compare) :]
    # Shards of one run share its key, so that their records can be put together.
    identity = run_identity(cfg)
    key, with_shard = key_of(identity), {**identity, "shard": cfg.shard}
    config = compose.to_config(cfg)
    path = _output_folder(config, invocation, key)
    folder.make_folder(Path(config.cache_dir), "cache_dir")
    if cfg.fresh:
        path = folder.fresh_folder(path)
    folder.check_owner(path, key, with_shard)
    i, n = map(int, (config.shard or "0/1").split("/"))
    return Job(
        config=config,
        overrides=invocation.overrides,
        identity=with_shard,
        run_key=key,
        folder=path,
        entries=entries,
        cases=(),
        shard=(i, n),
        swept=invocation.multirun,
        optional=frozenset(entry.label for entry in optional),
    )


def resolve_entries(cfg: DictConfig) -> tuple[Entry, ...]:
    """List the baseline (unless switched off or chosen itself), the method and ``compare``.

    Raises:
        ConfigurationError: an unknown method or knob, or two entries with one label.
    """
    entries = [entry_of(cfg)]
    if cfg.baseline and entries[0].label != BASELINE:
        entries.insert(0, entry_of(compose_entry(cfg, BASELINE)))
    entries += [entry_of(compose_entry(cfg, extra)) for extra in cfg.compare]
    refuse_duplicate_labels(entries, "'compare=[{method: METHOD, label: LABEL_2}]'")
    return tuple(entries)


def entry_of(cfg: DictConfig) -> Entry:
    """Make an entry of the ``method``, ``pair`` and ``verifier`` nodes of a configuration."""
    node: Any = OmegaConf.to_container(cfg.method, resolve=True, throw_on_missing=True)
    method = {"state_scope": cfg.state_scope, **node}
    label = str(method.pop("label", None) or method["name"])
    pair, verifier = OmegaConf.to_object(cfg.pair), OmegaConf.to_object(cfg.verifier)
    assert isinstance(pair, PairConfig)
    assert isinstance(verifier, VerifierConfig)
    budget = None if method["name"] == BASELINE else budget_of(cfg)
    return Entry(label, with_parts(method), pair, budget, verifier)


def _show_again(job: Job, runner: Runner) -> int:
    """Show a finished run again, unless its prompts or files have changed."""
    manifest = RunManifest.read(job.folder)
    cases = runner.local_cases(job.config)
    if cases is not None:
        check_questions(manifest, job.config, cases, job.folder)
    manifest.check_files(job.folder)
    runner.show(job.folder, brief=job.swept)
    add_methods.show_added(job.folder)
    log.info("%s is complete: nothing was measured (fresh=true measures again)", job.folder)
    # The files are unchanged, so the exit code holds, too.
    return int(manifest.exit_code or 0)


def _output_folder(config: RunConfig, invocation: Invocation, run_key: str) -> Path:
    method = config.method
    label = file_name(str(method.get("label") or method["name"]))
    name = f"{label}-{run_key[:8]}"
    if config.shard is not None:
        name += "-shard" + config.shard.replace("/", "of")
    if config.output_dir is None:
        return Path(config.paths.results) / (invocation.experiment or "runs") / name
    root = Path(config.output_dir)
    return root / name if invocation.multirun else root


def _report(error: Exception, verbose: bool = False) -> tuple[int, str]:
    """Tell the user what went wrong; returns the exit code and one line of it."""
    translated: Exception | None = error
    if isinstance(error, OSError) and error.filename is not None:
        translated = folder.unwritable(error.filename, error)
    elif not isinstance(error, SpecBenchError):
        translated = translate_hydra_error(error)
    if verbose or translated is None:
        traceback.print_exception(error)
    if not isinstance(translated, SpecBenchError):
        return 1, first_line(error)
    sys.stderr.write(f"error: {translated}\n")
    first, last = message_line(translated), str(translated).strip().rpartition("\n")[2].strip()
    return translated.exit_code, f"{first} {last}" if first.endswith(":") else first
