"""The base of every ``runner=``: from a configuration to results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from runners.job import Entry, Job
from specbench.config.schema import RunConfig
from specbench.data import cases
from specbench.data.cases import Case
from specbench.errors import DatasetError
from specbench.models import loading
from specbench.results import console


class Runner:
    """A choice of the ``runner`` group, which turns a configuration into results.

    All of it raises a ConfigurationError that says what to type.

    Attributes:
        in_child: it loads a model, so that each job has a child process of its own.
    """

    in_child = True

    def resolve_config(self, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Fill in what the runner's own input decides."""
        return cfg

    def entries(self, cfg: DictConfig) -> tuple[Entry, ...] | None:
        """Return the entries to compare; None: the configuration's methods."""
        return None

    def load_cases(self, config: RunConfig) -> tuple[Case, ...]:
        """Load the prompts, after a check that the model is available."""
        loading.model_files_present(config)
        return tuple(cases.load_cases(config.dataset, config.data_dir))

    def local_cases(self, config: RunConfig) -> tuple[Case, ...] | None:
        """Load the current prompts if a local file holds them; the hub's are pinned."""
        try:
            file = cases.local_file(config.dataset, config.data_dir)
        except DatasetError:  # a finished run no longer needs its prompts
            return None
        return None if file is None else tuple(cases.load_cases(config.dataset, config.data_dir))

    def run(self, job: Job) -> int:
        """Measure what is missing in the job's folder.

        Returns:
            0, or 1 where a case failed or an output is not what plain decoding gives.
        """
        raise NotImplementedError

    def show(self, path: Path, *, brief: bool = False) -> None:
        """Print a finished folder's results; ``brief``: in one line, for a job of a sweep."""
        console.print_folder(path, brief=brief)
