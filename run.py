"""Compare speculative-decoding methods: ``python run.py method=cacheback model=smollm2_135m``.

``python run.py advise prompts=FILE`` finds the method for your prompts (docs/advise.md).
``python run.py --help`` lists the choices, ``--list methods`` (models, datasets, experiments) says
what they are; docs/metrics.md explains the numbers. Exit codes: 0 all done and lossless; 1 a case
failed or an output differs from plain decoding; 2 bad configuration or input. A multirun (``-m``)
runs all its jobs and exits with the highest code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runners.launch import signals

if __name__ == "__main__":
    signals.exit_on_signal()  # what is imported next takes a second

import hydra

from runners.launch import dispatch, listing
from specbench.config import removed

if TYPE_CHECKING:
    from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> int:
    """Run one job; what it returns is also what a sweeper sees."""
    return dispatch.run_job(cfg)


def advised() -> bool:
    """Give advice, if ``advise`` is what was typed; whether it was."""
    if sys.argv[1:2] != ["advise"]:
        return False
    from runners import advice  # loads torch

    advice.main(sys.argv[2:])
    return True


def answered() -> None:
    """Do what was typed: a list, advice or a run."""
    removed.refuse_removed("run.py", sys.argv[1:])
    removed.refuse_overrides(sys.argv[1:])
    if not (listing.print_list_if_requested(sys.argv[1:]) or advised()):
        main()


if __name__ == "__main__":
    code = dispatch.run_application(answered)
    if code > 128:  # stopped: a second signal must not change the code
        signals.block_signals()
    sys.exit(code)
