"""The runner of the main job: all labels over all cases, on our engine."""

from __future__ import annotations

from runners.job import Job
from runners.runner import Runner
from runners.session.live import run_live


class Offline(Runner):
    """``runner=offline``."""

    def run(self, job: Job) -> int:
        from runners.session.session import load_session  # torch, in the child alone

        return run_live(job, load_session)
