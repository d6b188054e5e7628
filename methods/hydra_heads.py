"""Hydra: Medusa's heads made to depend on each other, by reading the tokens drafted above.

Paper: "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", COLM 2024, arXiv 2402.05109.
Reference code studied: zankner/Hydra 3f39fbd (``hydra_model.py``, ``prefix_mlp_head.py``);
    Spec-Bench fd2c1cd.
Heads: ``specbench.models.heads.hydra_heads``: Hydra++, whose prefix layer reads the states of all
    committed tokens, and plain Hydra, which reads the last one.
A step: the prefix layer reads the rows committed since. Head d then guesses below the nodes of
    depth d (0 is the root) from the prefix, the root's embedding and those of the tokens on the
    node's path; nodes without children are not read. The tree is Medusa's, filled by parent.
Where ours differs, and why:
    - The reference accepts at a temperature what is likely enough. Here the output is plain
      sampling's; ``verifier=typical`` (lossy, and labelled so) is that rule but for what
      ``specbench.decoding.verify.typical`` says.
    - The first draft comes after the prompt's pass, as for every method here.
State kept: none beyond the prefix layer's cache and unread states, for a turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.config.schema import Text
from specbench.decoding.device import to_device
from specbench.decoding.protocols import ModelWork, alone
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree
from specbench.index.head_tree import FixedTreeDrafter
from specbench.index.static_tree import require_heads
from specbench.models.heads import hydra_heads
from specbench.models.heads.checkpoint import ends_of
from specbench.models.heads.head_graphs import HeadGraphs, on_fixed_rows


@dataclass(kw_only=True, eq=False)
class Hydra(FixedTreeDrafter):
    """Hydra and Hydra++: Medusa's heads, each reading the tokens drafted before it."""

    name: str = "hydra"
    head: Text = "hydra"

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        assert context.target is not None
        target, folder = context.target, context.heads[self.head]
        ends, ids = ends_of(target, self.vocabulary)
        self._check_ranks(ids, context.vocab_size)

        def load() -> hydra_heads.HydraHeads:
            return hydra_heads.load(
                folder, ends, target.config, dtype=target.dtype, device=target.device
            )

        self._heads = self._twin(context, load, self.vocabulary)
        self._ids = None if len(self._heads.hydra_lm_head) else ids
        require_heads(self._tree, len(self._heads.hydra_mlp), folder)

        self._dtype, self._width = target.dtype, target.embeddings.embedding.shape[1]
        self._graphs: HeadGraphs | None = None

    @torch.inference_mode()
    def begin(self, state: DecodeState) -> None:
        if room := self._room(state):
            rows = len(self._plan) + 1  # the root's, and a path of its own
            self._heads.reserve(room + rows)
            if self._graph_tokens:
                self._capture(rows)
        if self._heads.layers:
            self._heads.cache.truncate(0)
        alone(self._catch_up(state))

    def _capture(self, rows: int) -> None:
        reads = bool(self._heads.layers)
        if self._graphs is not None:
            self._graphs.release()
        self._graphs = HeadGraphs(
            lambda prefix, asked, _: alone(
                self._guessed(prefix, asked[1:].view(1, 1), len(self._plan))
            ),
            size=self._width,
            device=self._device,
            dtype=self._dtype,
            read=self._read if reads else None,
            width=self._width,
            rows=rows if reads else 0,
        )
        self._graphs.capture(self._heads.cache.rows if reads else 0)

    def _read(self, numbers: torch.Tensor, states: torch.Tensor, keys: int) -> torch.Tensor:
        with on_fixed_rows(self._heads, numbers[:1], keys):
            prefixes = alone(self._heads.catching_up(numbers[2:], states))
        return prefixes.index_select(0, numbers[1:2] - 1)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        levels = min(len(self._plan), state.remaining - 1)
        if levels < 1:
            return DraftTree.empty()
        read_so = yield from self._catch_up(state)
        tokens = None
        if self._graphs is not None:
            length = self._heads.cache.length if self._heads.layers else 0
            tokens = self._graphs.draft(length, self._prefix, state.root)
        self._launched += tokens is None or not read_so
        if tokens is None:
            root = to_device(torch.tensor([[state.root]]), self._device)
            tokens = yield from self._guessed(self._prefix, root, levels)
        return self._filled(tokens[: sum(self._tree.level_sizes[:levels])])

    def _guessed(
        self, prefix: torch.Tensor, paths: torch.Tensor, levels: int
    ) -> ModelWork[torch.Tensor]:
        """``[n]`` the tree's tokens, below a root ``[1, 1]``."""
        tokens = []
        for level, (above, ranks, inner) in enumerate(self._plan[:levels]):
            logits = yield from self._heads.guessing(prefix, paths)
            best = logits.topk(self._n_ranks[level], dim=-1).indices
            chosen = best[above, ranks]
            tokens.append(chosen if self._ids is None else self._ids[chosen])
            paths = torch.cat([paths[above[inner]], tokens[-1][inner, None]], dim=1)
        return torch.cat(tokens)

    def _catch_up(self, state: DecodeState) -> ModelWork[bool]:
        """Read what is unread; whether that was nothing, or done without launching it."""
        states = self._unread()
        if states is None:
            return True
        if not self._heads.layers:
            self._prefix = states[-1:]
            return True
        cache = self._heads.cache
        after = state.buffer[cache.length + 1 : cache.length + 1 + len(states)]
        if self._graphs is not None and self._graphs.read(cache.length, states, after):
            cache.read(len(states))
            self._prefix = self._graphs.feature
            return True
        ids = to_device(after.copy(), self._device)
        self._prefix = (yield from self._heads.catching_up(ids, states))[-1:]
        return False
