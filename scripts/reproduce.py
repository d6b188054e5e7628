"""Reproduce every table and figure of the papers: run what is missing, then draw.

    python scripts/reproduce.py data_dir=DIR                          all (make tables)
    python scripts/reproduce.py cacheback_table1 data_dir=DIR         one artifact
    python scripts/reproduce.py cacheback_table1 scale=paper          in the paper's size
    python scripts/reproduce.py scale=paper --dry-run                 jobs and memory, estimated
    python scripts/reproduce.py --list                                their names

What has an equals sign goes to run.py as it is. A second call goes on where the first one stopped.
Without a folder of data files (data_dir, or conf/local/default.yaml) the shipped demo prompts stand
in for every data set, and the captions say so.
"""

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis import figures, tables
from analysis.papers import REPRODUCTIONS
from analysis.runs.cli import parser_of, reporting_errors
from specbench.config.compose import compose
from specbench.errors import unknown_name
from specbench.models import memory
from specbench.paths import CONF_DIR, PROJECT
from specbench.results.fitted_table import FittedTable
from specbench.results.records import DONE

_STAND_IN = ("dataset=demo", "dataset.sample=stratified")
# Its cost surface is what the experiments with predicted times (runner.surface=measure) need too;
# where they find it, they do not measure it again.
_SURFACE = "ngrammys_figure1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and draw; returns the highest exit code of the runs."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("words", nargs="*", metavar="NAME|KEY=VALUE", help="artifacts, and overrides for run.py")
    add("--results", type=Path, default=Path("results"), help="where runs go (default: results)")
    add("-o", "--output", type=Path, metavar="DIR", help="default: RESULTS/artifacts")
    add("--list", action="store_true", help="name the artifacts and stop")
    add("--dry-run", action="store_true", help="print jobs and memory, and stop")
    options = parser.parse_intermixed_args(arguments)  # words may stand on both sides
    if options.list:
        for artifact in REPRODUCTIONS:
            print(f"{artifact.name:28} {artifact.title}")
        return 0
    return reporting_errors(lambda: run_and_draw(options))


def run_and_draw(options: argparse.Namespace) -> int:
    overrides = [word for word in options.words if "=" in word]
    typed = [word for word in options.words if "=" not in word]
    names = _experiments(typed, measured="scale=paper" in overrides)
    overrides += _stand_in(overrides)
    if options.dry_run:
        return _show_estimates(names, overrides, options)
    rows, codes = [], []
    for name in names:
        command = [
            sys.executable, str(PROJECT / "run.py"), f"experiment={name}",
            f"paths.results={options.results}", *overrides,
        ]  # fmt: skip
        print(f"\n=== {' '.join(command[1:])}", flush=True)
        start = time.monotonic()
        codes.append(subprocess.run(command, check=False).returncode)
        rows.append((name, str(codes[-1]), f"{(time.monotonic() - start) / 60:.1f}"))
    frame = pd.DataFrame(rows, columns=["experiment", "exit code", "minutes"])
    Console(width=80).print(FittedTable(frame, "experiments"))
    folders = [str(options.results / name) for name in names if (options.results / name).is_dir()]
    if folders:
        arguments = [*folders, "-o", str(options.output or options.results / "artifacts")]
        codes += [tables.main(arguments), figures.main(arguments)]
    return max(codes)


def _show_estimates(
    names: Sequence[str], overrides: Sequence[str], options: argparse.Namespace
) -> int:
    rows, largest, left = [], 0.0, 0
    for name in names:
        jobs = _jobs([f"experiment={name}", *overrides])
        done = len(list((options.results / name).rglob(DONE)))
        models = ", ".join(dict.fromkeys(str(job.model.name) for job in jobs))
        gib = max(memory.run_bytes(job) for job in jobs) / 2**30
        rows.append((name, models, f"{min(done, len(jobs))} of {len(jobs)}", f"{gib:.0f}"))
        largest, left = max(largest, gib), left + len(jobs) - done
    rows.append(("all", "", f"{max(left, 0)} to do", f"{largest:.0f}"))
    heads = ["experiment", "model", "jobs done", "GiB"]
    Console(width=100).print(FittedTable(pd.DataFrame(rows, columns=heads), "estimates"))
    print(
        "GiB are estimated from the configuration (specbench/models/memory.py). Nothing was run. A "
        "call without --dry-run goes on with what is not done."
    )
    return 0


def _jobs(typed: Sequence[str]) -> list[DictConfig]:
    """Compose the jobs that ``run.py`` would have with these overrides.

    A knob of a method changes neither model nor memory, so such jobs are composed once.
    """
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        hydra = hydra_compose("config", list(typed), return_hydra_config=True).hydra
    if hydra.mode != RunMode.MULTIRUN:
        return [compose(typed)]
    chosen = {word.partition("=")[0] for word in typed}
    swept = [f"{k}={v}" for k, v in (hydra.sweeper.params or {}).items() if k not in chosen]
    overrides = OverridesParser.create().parse_overrides(swept)
    composed = functools.cache(lambda *job_overrides: compose([*typed, *job_overrides]))
    return [
        composed(*(word for word in job if not word.startswith("method.")))
        for batch in BasicSweeper.split_arguments(overrides, None)
        for job in batch
    ]


def _experiments(requested: Sequence[str], measured: bool) -> list[str]:
    """List the artifacts' experiments; if all is ``measured``, each grid is run once."""
    by_name = {artifact.name: artifact for artifact in REPRODUCTIONS}
    for name in requested:
        if name not in by_name:
            raise unknown_name("artifact", name, by_name)
    chosen = [by_name[name] for name in requested] or REPRODUCTIONS
    if measured:
        run = {name for artifact in chosen for name in artifact.experiments}
        chosen = [a for a in chosen if not (a.instead and run.issuperset(a.instead))]
    names = dict.fromkeys(name for artifact in chosen for name in artifact.experiments)
    return sorted(names, key=lambda name: name != _SURFACE)  # the others stay in their order


def _stand_in(overrides: Sequence[str]) -> list[str]:
    typed = {override.partition("=")[0] for override in overrides}
    # In the paper's size, what is not in a folder comes from the hub.
    if (
        typed & {"data_dir", "dataset"}
        or "scale=paper" in overrides
        or compose().data_dir is not None
    ):
        return []
    sys.stderr.write(
        "no data_dir: the shipped demo prompts stand in for every data set. For the real ones type "
        "data_dir=FOLDER (scripts/fetch_data.py fills one).\n"
    )
    return list(_STAND_IN)


if __name__ == "__main__":
    sys.exit(main())
