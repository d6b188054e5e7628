"""What a step launches, sends and waits for, counted on a pretended GPU.

    python -m tests.gpu_rules.steps [--out docs/measurements/gpu_steps.json]

Kernels within a graph are one launch, its replay, so neither the depth nor the width of a model
counts. The floor is one wait a step: whoever asks what was accepted waits for the pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from methods.cacheback import Cacheback
from methods.eagle import Eagle, Eagle2, Eagle3
from methods.hydra_heads import Hydra
from methods.medusa import Medusa
from methods.opt_tree import OptTree
from methods.sps import Sps
from methods.token_recycling import TokenRecycling
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.structs import DraftContext
from specbench.decoding.verify import GreedyVerifier
from specbench.models.draft.model import DraftModel
from specbench.system.clock import CpuClock
from specbench.system.environment import code_sha256
from tests.conftest import VOCAB
from tests.gpu_rules.decoders import FUSED, PROMPT, heads, model
from tests.gpu_rules.memory import World
from tests.gpu_rules.pretended import pretended_cuda

COLUMNS = ("waits", "replays", "launches", "copies up", "copies down")
# With the sizes of their papers.
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
LONGEST = 160  # text
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


def steps_of(world: World, name: str, folder: Path, tokens: int = 60) -> dict[str, float]:
    """Means over the steps of one text of ``tokens`` new ones."""
    drafter = METHODS[name]()
    needs = drafter.needs
    sizes: dict[str, Any] = {"max_len": LONGEST, "max_nodes": max(needs.max_nodes, 1)}
    target = FUSED(model(), **sizes)
    given: dict[str, Any] = {}
    if needs.heads:
        given["heads"] = heads(folder)
    if needs.draft_model:
        nodes = needs.draft_nodes or needs.max_nodes
        fixed = FUSED(model(seed=1), max_len=LONGEST + nodes, max_nodes=nodes, drafts=True)
        given["draft_model"] = DraftModel(fixed, target_vocab=VOCAB, max_nodes=nodes)
    drafter.setup(DraftContext(VOCAB, frozenset(), max_len=LONGEST, target=target, **given))
    if layers := drafter.needs.hidden_layers:
        target.expect(layers)
    clock = _Steps(world)
    engine = Engine(target, GreedyVerifier(), eos_ids=frozenset(), clock=lambda: clock)
    engine.decode(PROMPT, drafter, max_new_tokens=tokens)
    first, last = clock.seen[_FIRST], clock.seen[-1]
    steps = len(clock.seen) - 1 - _FIRST
    return {column: (last[column] - first[column]) / steps for column in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--out", type=Path, help="a JSON file, for a page's table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.methods:
            with pretended_cuda() as world:
                counted = steps_of(world, name, Path(folder))
            found[name] = {column: round(counted[column], 1) for column in COLUMNS}
    rows = [[name, *map(str, counts.values())] for name, counts in found.items()]
    print(pd.DataFrame(rows, columns=["method", *COLUMNS]).to_string(index=False))
    if options.out:
        noted = {"code": code_sha256(), **found}
        options.out.write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
