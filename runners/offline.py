"""The runner of the main job: all labels over all cases, on our engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runners.job import Runner
from runners.session.live import run_live

if TYPE_CHECKING:
    from runners.job import Job


class Offline(Runner):
    """``runner=offline``."""

    def run(self, job: Job) -> int:
        """Measure what is missing in the job's folder."""
        from runners.session.session import load_session  # torch, in the child alone

        return run_live(job, load_session)
