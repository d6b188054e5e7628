"""The runner of the main job: all labels over all cases, on our engine."""

from __future__ import annotations

from runners.job import Job
from runners.measure.live import run_live
from runners.runner import Runner


class Offline(Runner):
    """``runner=offline``."""

    def run(self, job: Job) -> int:
        from runners.measure.session import load_session  # torch, in the child alone

        return run_live(job, load_session)
