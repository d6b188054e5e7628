"""The state of a GPU check, which its parts read and write."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from specbench.decoding.device import seconds, synchronize


class Progress:
    """What was measured, what was not and why, and how much time is left.

    Args:
        args: the command line.

    Attributes:
        results: by part.
        missing: parts that failed and what no time was left for, with the reason.
        left_out: what cannot be measured on this machine at all, with the reason.
        surfaces: files of the cost surfaces.
        kept_s: seconds that the part that is running must leave to later ones.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.started = time.monotonic()
        self.kept_s = 0.0
        self.results: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.surfaces: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until the limit, without those kept for later parts."""
        return float(self.args.minutes * 60 - (time.monotonic() - self.started) - self.kept_s)

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> list[float]:
        """Seconds of each call of ``work``, the device synchronised; a first one warms up."""
        return [seconds(work, self.device) for _ in range(repeats + 1)][1:]

    def wait(self) -> None:
        synchronize(self.device)
