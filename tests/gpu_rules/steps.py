"""What a step launches, sends and waits for, counted on a pretended GPU.

    python -m tests.gpu_rules.steps [--layers 32]

Launches depend on layers and not on widths, so the model is as deep as one of 7B and narrow.
Kernels within a graph are one launch, its replay. The floor is one wait a step: whoever asks what
was accepted waits for the pass.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from methods.cacheback import Cacheback
from methods.eagle import Eagle, Eagle2, Eagle3
from methods.hydra_heads import Hydra
from methods.medusa import Medusa
from methods.opt_tree import OptTree
from methods.sps import Sps
from methods.token_recycling import TokenRecycling
from scripts.bench import print_table
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import GreedyVerifier
from specbench.models.draft.model import DraftModel
from specbench.system.clock import CpuClock
from tests.conftest import VOCAB
from tests.gpu_rules.decoders import DEVICE, FUSED, PROMPT, heads, model
from tests.gpu_rules.memory import World
from tests.gpu_rules.pretended import pretended_cuda
from tests.tiny_checkpoint import TINY

COLUMNS = ("waits", "replays", "launches", "copies up", "copies down")
# With the sizes of their papers; the draft model has two layers.
METHODS: dict[str, Callable[[], Drafter]] = {
    "ar": lambda: Drafter(name="ar"),
    "cacheback": lambda: Cacheback(table="dynamic"),
    "token_recycling": TokenRecycling,
    "sps": Sps,
    "opt_tree": OptTree,
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle2": Eagle2,
    "eagle3": Eagle3,
}
_FIRST = 3  # steps that are not counted: what is made once is made there


class _Steps(CpuClock):
    """Reads the counts at the end of each step."""

    def __init__(self, world: World) -> None:
        super().__init__(False)
        self._world = world
        self.seen: list[Counter[str]] = []

    def step_done(self) -> None:
        super().step_done()
        self.seen.append(Counter(self._world.counts))


def steps_of(world: World, name: str, layers: int, folder: Path) -> dict[str, float]:
    """Means over the steps of one text."""
    drafter = METHODS[name]()
    needs = drafter.needs
    hidden = [needs.hidden_layers] if needs.hidden_layers else []
    sizes: dict[str, Any] = {"max_len": 160, "max_nodes": max(needs.max_nodes, 1)}
    with mock.patch.dict(TINY, num_hidden_layers=layers):
        target = FUSED(model(), hidden_layers=hidden, **sizes)
    given: dict[str, Any] = {}
    if needs.heads:
        given["heads"] = heads(folder)
    if needs.draft_model:
        nodes = needs.draft_nodes or needs.max_nodes
        fixed = FUSED(model(seed=1), max_len=160 + nodes, max_nodes=nodes, drafts=True)
        given["draft_model"] = DraftModel(fixed, target_vocab=VOCAB, max_nodes=nodes)
    drafter.setup(DraftContext(VOCAB, frozenset(), max_len=160, target=target, **given))
    clock = _Steps(world)
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset(), clock=lambda: clock)
    engine.decode(PROMPT, drafter, max_new_tokens=60)
    first, last = clock.seen[_FIRST], clock.seen[-1]
    steps = len(clock.seen) - 1 - _FIRST
    return {column: (last[column] - first[column]) / steps for column in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.methods:
            with pretended_cuda() as world:
                found = steps_of(world, name, options.layers, Path(folder))
            rows.append([name, *(f"{found[column]:.1f}" for column in COLUMNS)])
    title = f"a step on {DEVICE}, {options.layers} layers (a pretended GPU; outside graphs)"
    print_table(title, ["method", *COLUMNS], rows)


if __name__ == "__main__":
    main()
