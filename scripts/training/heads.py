"""The heads: EAGLE (1 and 2), EAGLE-3, Medusa-1, Hydra++ and DFlash, in their published formats.

Heads learn the target's distribution (soft cross-entropy, by steps); EAGLE its next state too.
Texts are packed one after the other. The head's own inference code reads them through
``UnrolledCache``, which replaces its KV cache and lets gradients through. Where a linear map
can guess the next feature, a head starts as the best such map (least squares), and the rest of it
at zero: on few texts that is most of what it will know.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from scripts.training.texts import Mix, Texts, ids_by_frequency, take_evenly
from scripts.training.trainer import Recipe
from specbench.kernels.attention import AttentionPlan
from specbench.models.checkpoints import int8
from specbench.models.draft.loading import ID_MAP_FILE, read_id_map
from specbench.models.heads import dflash, hydra_heads
from specbench.models.heads.decoder import TrainedHead, rotated
from specbench.models.heads.dflash import BlockHead
from specbench.models.heads.eagle import EagleHead
from specbench.models.heads.eagle3 import Eagle3Head, read_config
from specbench.models.heads.layer_shape import LayerShape, read_shape
from specbench.models.heads.medusa import MedusaHeads
from specbench.models.heads.row_cache import RowCache, Rows
from specbench.models.hidden_states import Embeddings
from specbench.models.loading import LoadedModel
from specbench.paths import ASSETS
from specbench.storage import jsonl

FOLDER = ASSETS / "heads_smollm2_135m"
LAYERS = (2, 19, 27)  # states that EAGLE-3 and DFlash read
MIX = Mix(texts=8, asked=32, read=31, batch=96, layers=(*LAYERS, -1))
HEADS = 4  # of Medusa and Hydra
HYDRA_BLOCKS = 4
BLOCK, BLOCK_LAYERS = 8, 2  # rows and layers of DFlash
_MASK_ID = 3  # a special token that no text has
_CHOICES = 8  # of the target's likeliest next tokens: what a head is taught to say
_DECAY = 0.8  # of a later step's loss, as EAGLE-3 has it
_NOISE = 0.1  # on EAGLE-1's features, of their standard deviation; uniform
_SAMPLE = 160  # texts that a linear start is fitted on
_LAYER = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "vocab_size", "hidden_act", "max_position_embeddings", "rope_theta"),
)
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
# Of each step the rows that guess, and what the LM head reads of them
Guesses = list[tuple[torch.Tensor, torch.Tensor]]
File = tuple[Mapping[str, torch.Tensor], dict[str, Any]]  # tensors and config.json, as published


# Rates far above the papers' 3e-5 … 1e-4, which are for widths of 4096 and more. EAGLE's paper
# learns one step, from true states alone; three are what a chain drafts with.
RECIPES = {
    "eagle": Recipe(name="eagle"),
    "medusa": Recipe(name="medusa", steps=HEADS),
    "eagle3": Recipe(name="eagle3", layers=LAYERS, vocab=4096, vocab_in_training=16384),
    "hydra": Recipe(name="hydra", steps=HEADS, lr=5e-4),
    "dflash": Recipe(name="dflash", layers=LAYERS, steps=BLOCK - 1),
}


class Batch:
    """Some texts, packed.

    Args:
        states: which of those that the texts have.
        prompt_share: share of a prompt's positions that are learned too, drawn.
        chain_share: share of the rows that are asked for more than one guess, drawn likewise.

    Attributes:
        tokens: ``[n]``.
        states: ``[n, layers, hidden]`` float32 of the target, the last one after its final norm.
        positions: ``[n]`` position of each token in its text.
        last: ``[n]`` row of the last token of its text.
        ids: ``[n, _CHOICES]`` the target's likeliest next tokens.
        probs: ``[n, _CHOICES]`` float32; rows sum to one.
        learned: ``[n]`` bool, whether the next token is learned.
        continues: ``[n]`` bool, whether guesses after the first are learned too.
        logits: ``[n, vocab]`` the target's, where all of its distribution is learned, not the
            likeliest tokens alone; ``ids`` is then the first choice, ``probs`` empty.
    """

    logits: torch.Tensor | None = None

    def __init__(
        self,
        texts: Texts,
        states: slice,
        device: torch.device,
        *,
        prompt_share: float = 0.0,
        chain_share: float = 1.0,
        draw: torch.Generator | None = None,
    ) -> None:
        lengths = torch.tensor([len(text) for text in texts])
        last = torch.repeat_interleave(lengths.cumsum(0) - 1, lengths)
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        # The last token of a prompt predicts the answer's first.
        learned = torch.cat([torch.arange(len(text)) >= text.prompt - 1 for text in texts])
        if prompt_share:
            learned |= torch.rand(len(positions), generator=draw) < prompt_share
        learned &= torch.arange(len(positions)) < last  # after an answer the target was not run
        continues = torch.ones(len(positions), dtype=torch.bool)
        if chain_share < 1:
            continues = torch.rand(len(positions), generator=draw) < chain_share
        probs = torch.cat([text.top_logprobs[:, :_CHOICES] for text in texts]).float().exp()
        self.tokens = torch.cat([text.tokens for text in texts]).long().to(device)
        self.states = torch.cat([text.states[:, states] for text in texts]).to(device).float()
        self.positions, self.last = positions.to(device), last.to(device)
        self.ids = torch.cat([text.top_ids[:, :_CHOICES] for text in texts]).long().to(device)
        self.probs = (probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)).to(device)
        self.learned, self.continues = learned.to(device), continues.to(device)
        self.rows = torch.arange(len(positions), device=device)

    def __len__(self) -> int:
        return len(self.tokens)

    def ahead(self, by: int) -> torch.Tensor:
        """Give ``[n]`` the row ``by`` tokens later, at most the text's last one."""
        return torch.minimum(self.rows + by, self.last)

    def rows_for(self, step: int) -> torch.Tensor:
        """List rows whose guesses up to this step (offset ``step + 2``) are all learned."""
        usable = self.rows + 1 + step <= self.last
        for i in range(step + 1):
            usable &= self.learned[self.ahead(1 + i)]
        return (usable & self.continues if step else usable).nonzero()[:, 0]


class UnrolledCache:
    """The verbs of a head's ``RowCache`` over a batch: all rows, then steps of some of them.

    A row sees the rows before it as they were in step 0, and its own guesses of the later steps:
    what a chain drafted after it would see. Step i of a row at position j is at position j + i.
    """

    def __init__(self, batch: Batch, shape: LayerShape) -> None:
        self._positions, self._shape = batch.positions, shape
        same_text = batch.last[:, None] == batch.last
        self._seen = same_text & (batch.rows <= batch.rows[:, None])
        self._guessed = batch.rows[:0]  # the row of each key after the keys of step 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def committed_rows(self, n: int) -> Rows:
        return self._rows(self._positions, self._seen)

    def node_rows(self, parents: torch.Tensor) -> Rows:
        """Add the next step of the batch's rows ``parents``."""
        self._guessed = torch.cat([self._guessed, parents])
        is_same_row = parents[:, None] == self._guessed
        positions = self._positions[parents] + len(self._keys)
        return self._rows(positions, torch.cat([self._seen[parents], is_same_row], dim=1))

    def keep(self, rows: Rows) -> None:
        """Do nothing: all keys stay."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys.append(key)
        self._values.append(value)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)

    def _rows(self, positions: torch.Tensor, seen: torch.Tensor) -> Rows:
        frequencies, factor = self._shape.inverse_frequencies()
        angles = torch.outer(positions.double(), frequencies.to(positions.device)).repeat(1, 2)
        mask = torch.zeros(seen.shape, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(torch.float32).min)
        return Rows(
            cache=self,  # type: ignore[arg-type]
            cos=(angles.cos() * factor).float(),
            sin=(angles.sin() * factor).float(),
            plan=AttentionPlan(mask=mask[None, None]),
            nodes=None,
        )


class BlockCache(UnrolledCache):
    """Context rows of a batch, and the blocks that DFlash drafts behind some of them."""

    def __init__(self, batch: Batch, head: BlockHead, states: torch.Tensor) -> None:
        super().__init__(batch, head.shape)
        rows = self.committed_rows(len(batch))
        parts = head._context(states).permute(1, 2, 3, 0, 4)
        self._context = [(rotated(keys, rows)[None], values[None]) for keys, values in parts]

    def block_rows(self, last: torch.Tensor) -> Rows:
        """Plan a pass of a block behind each of the batch's rows ``last``."""
        rows = last.repeat_interleave(BLOCK)
        positions = self._positions[rows] + 1 + torch.arange(len(rows), device=rows.device) % BLOCK
        same_block = rows[:, None] == rows
        return self._rows(positions, torch.cat([self._seen[rows], same_block], dim=1))

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._context[layer]
        return torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)


class TrainableHead(ABC):
    """A head in training; each family defines its start, its guesses and its file.

    Args:
        sample: batches that a linear start is fitted on, with all states; None: from ``learnt``.
        begin: folder of the family's head from which the training goes on.

    Attributes:
        lm_head: ``[ids, hidden]`` that it predicts ids with; the target's, of all ids.
        lm_head_ids: ``[ids]`` the target's id of each row; None where it has all.
        head_ids: ``[vocab]`` the row in it of each of the target's ids; -1 where it has none.
    """

    module: nn.Module
    states = slice(-1, None)  # of a text that it reads
    left_out = 0  # parameters that its file leaves out
    feature_loss = False  # whether its first guess should be the target's next state itself
    file_name = "model.safetensors"
    decay = _DECAY
    lm_head_ids: torch.Tensor | None = None

    def __init__(
        self,
        recipe: Recipe,
        loaded: LoadedModel,
        texts: Texts,
        learnt: Texts,
        *,
        sample: Sequence[Batch] | None = None,
        begin: Path | None = None,
    ) -> None:
        self.recipe, self.device = recipe, loaded.model.device
        self.ends = Embeddings.from_model(loaded.model)
        self.target = loaded.model.config.to_dict()
        self.lm_head = self.ends.lm_head
        self.head_ids = torch.arange(len(self.lm_head), device=self.device)
        self.common = ids_by_frequency(texts, len(self.lm_head))
        self.sample = sample or [self._packed(group) for group in sample_of(learnt)]
        listed = None if begin is None else read_id_map(begin)
        vocab = self.common[: recipe.vocab].sort().values
        self.vocab = vocab if listed is None else torch.from_numpy(listed)
        self.start()
        if begin is not None:
            self.restore(begin)
        self.module.to(self.device)
        self.parameters = sum(p.numel() for p in self.module.parameters()) - self.left_out

    @abstractmethod
    def start(self) -> None:
        """Make ``module``, untrained."""

    @abstractmethod
    def guess(self, batch: Batch, steps: int, noise: torch.Generator) -> Guesses: ...

    @abstractmethod
    def file(self) -> File: ...

    def lm_head_of(self, step: int) -> torch.Tensor:
        """Give the LM head ``[ids, hidden]`` of guesses of a step."""
        return self.lm_head

    def _packed(self, texts: Texts, **shares: Any) -> Batch:
        return Batch(texts, self.states, self.device, **shares)

    def _limit(self, ids: torch.Tensor) -> None:
        """Guess these of the target's ids alone."""
        self.lm_head, self.lm_head_ids = self.ends.lm_head[ids], ids
        self.head_ids = torch.full_like(self.head_ids, -1)
        self.head_ids[ids] = torch.arange(len(ids), device=self.device)

    def loss(self, chosen: Texts, draw: torch.Generator) -> torch.Tensor:
        recipe = self.recipe
        shares = {"prompt_share": recipe.prompt_share, "chain_share": recipe.chain_share}
        return self.loss_of(self._packed(chosen, **shares, draw=draw), draw)

    def loss_of(self, batch: Batch, draw: torch.Generator) -> torch.Tensor:
        """Cross-entropy to the target's distribution, summed over a row's guesses.

        Without the target's logits a softmax over all ids would cost several times as much as the
        head itself: it goes over what the target may say somewhere in the batch, frequent ids, and
        drawn ones.
        """
        recipe, head_ids = self.recipe, self.head_ids[batch.ids]
        if batch.logits is None:
            drawn = torch.randint(len(self.common), (recipe.drawn,), generator=draw)
            others = torch.cat([self.common[: recipe.candidates], drawn]).to(self.device)
            ids = torch.cat([head_ids[batch.learned].flatten(), self.head_ids[others]]).unique()
            softmax_ids = ids[ids >= 0]
            columns = torch.full((len(self.lm_head) + 1,), -1, device=self.device)  # last: unknown
            columns[softmax_ids] = torch.arange(len(softmax_ids), device=self.device)
            weights = self.lm_head[softmax_ids]
        total = torch.zeros((), device=self.device)
        for step, (rows, states) in enumerate(self.guess(batch, recipe.steps, draw)):
            learnable = head_ids[rows + 1 + step, 0] >= 0
            rows, states = rows[learnable], states[learnable]
            if not len(rows):
                continue
            ahead = rows + 1 + step
            if batch.logits is None:
                ids = columns[head_ids[ahead]]
                probs = batch.probs[ahead] * (ids >= 0)
                logprobs = (states @ weights.T).log_softmax(-1).gather(1, ids.clamp(min=0))
                loss = -(probs / probs.sum(-1, keepdim=True) * logprobs).sum(-1).mean()
            else:
                taught = batch.logits[ahead].float()
                taught = taught if self.lm_head_ids is None else taught[:, self.lm_head_ids]
                logits = (states @ self.lm_head_of(step).T).float()
                loss = nn.functional.cross_entropy(logits, taught.softmax(-1))
            total = total + self.decay**step * loss
            if self.feature_loss and step == 0:
                truth, spread = batch.states[rows + 1, -1], batch.states[:, -1].std()
                total = total + nn.functional.smooth_l1_loss(states / spread, truth / spread)
        return total

    def restore(self, folder: Path) -> None:
        """Go on from the head that `save` wrote into ``folder``."""
        file = folder / self.file_name
        stored = int8.restored(load_file(file), file)
        trained = {name for name, weight in self.module.named_parameters() if weight.requires_grad}
        # Medusa's shared format lacks LM heads: its heads' own stay the target's rows.
        self.module.load_state_dict({k: stored[k] for k in trained & stored.keys()}, strict=False)

    def save(self, folder: Path) -> Path:
        """Write the published format, and the ids where it has some; returns the weights' file."""
        if self.recipe.vocab:  # others of the target's heads use them, too
            save_file({"ids": self.vocab.to(torch.int32)}, folder / ID_MAP_FILE)
        tensors, config = self.file()
        jsonl.write_json(folder / "config.json", config)
        with jsonl.replacing(folder / self.file_name) as partial:
            save_file(int8.rounded(tensors), partial)
        return folder / self.file_name

    def layer(self) -> dict[str, Any]:
        """Select the keys of the target's config.json that describe one of its layers."""
        flat = self.target | (self.target.get("rope_parameters") or {})
        return {"model_type": "llama"} | {k: flat[k] for k in _LAYER if flat.get(k) is not None}

    def joined_pairs(self) -> Pairs:
        """Pair the states of some layers with the next state, for a linear start."""
        for batch in self.sample:
            # The first token's states are thousands of times as large as all others.
            rows = batch.rows_for(0)
            rows = rows[batch.positions[rows] > 0]
            yield batch.states[rows, :-1].flatten(1), batch.states[rows + 1, -1]

    def length(self) -> float:
        """Compute the mean root mean square of the target's states."""
        roots = [batch.states[:, -1].pow(2).mean(-1).sqrt() for batch in self.sample]
        return float(torch.cat(roots).mean())


class TrainableEagle(TrainableHead):
    """Starts as the best linear guess of the next state from embedding and state."""

    feature_loss = True
    module: EagleHead

    def start(self) -> None:
        shape = read_shape(self.layer(), "the target", qkv_bias_alone=True)
        self.module = EagleHead(self.ends, shape)

        def pairs() -> Pairs:
            for batch in self.sample:
                rows, features = batch.rows_for(0), batch.states[:, -1]
                tokens = self.ends.embedding[batch.tokens[rows + 1]]
                yield torch.cat([tokens, features[rows]], dim=1), features[rows + 1]

        first: Any = self.module.layers[0]
        _fit_linear(self.module.fc, pairs())
        _set_to_zero(first.self_attn.o_proj, first.mlp.down_proj)

    def guess(self, batch: Batch, steps: int, noise: torch.Generator) -> Guesses:
        features = batch.states[:, -1]
        drawn = torch.rand(features.shape, generator=noise, device=noise.device)
        drawn = drawn.to(self.device) * 2 - 1
        features = features + _NOISE * float(features.std()) * drawn
        return _unroll(self.module, batch, features, steps)

    def file(self) -> File:
        named = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True}
        return self.module.state_dict(), self.layer() | named


class TrainableEagle3(TrainableHead):
    """Starts as the best linear guess of the next state from the states of some layers.

    Its LM head has the target's rows of the most frequent ids, left as they are. Its file says
    fewer than it learns with: where the likeliest id is kept, the guess stays.
    """

    states = slice(None)
    module: Eagle3Head

    def start(self) -> None:
        recipe = self.recipe
        self.ids = self.common[: recipe.vocab_in_training].sort().values.to(self.device)
        self.module = Eagle3Head(self.ends, read_config(self._config(self.ids), frozenset(), ""))
        self.module.target_ids = self.ids
        _fit_linear(self.module.fc, self.joined_pairs())
        with torch.no_grad():
            self.module.lm_head.weight.copy_(self.ends.lm_head[self.ids])
            self.module.lm_head.weight.requires_grad_(False)
            self.module.norm.weight.fill_(self.length())
        first: Any = self.module.layers[0]
        _set_to_zero(first.self_attn.o_proj, first.mlp.down_proj)
        self._limit(self.ids)
        self.left_out = (len(self.ids) - recipe.vocab) * self.lm_head.shape[1]

    def _config(self, ids: torch.Tensor) -> dict[str, Any]:
        layers = list(self.recipe.layers)
        return self.layer() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": len(ids),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
        }

    def guess(self, batch: Batch, steps: int, noise: torch.Generator) -> Guesses:
        joined = batch.states[:, :-1].flatten(1)
        unrolled = _unroll(self.module, batch, joined, steps)
        return [(rows, self.module.norm(out)) for rows, out in unrolled]

    def file(self) -> File:
        tensors, ids = self.module.state_dict(), self.vocab
        tensors["lm_head.weight"] = self.ends.lm_head[ids.to(self.device)]
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(len(self.common), dtype=torch.bool).index_fill(0, ids, True)
        return tensors, self._config(ids)


class TrainableMedusa(TrainableHead):
    """Starts as the state itself; the heads share the target's LM head (the second format).

    Where the recipe has a ``vocab``, each head has an LM head of its own over the most frequent
    ids, which starts as the target's rows (the first format, with a list of ids beside it).
    """

    file_name = "medusa_lm_head.safetensors"
    module: MedusaHeads

    def start(self) -> None:
        ids = self.vocab.to(self.device) if self.recipe.vocab else None
        self.module = MedusaHeads(self.ends, n_heads=HEADS, own_lm_heads=ids is not None, ids=ids)
        _set_to_zero(*(head[0] for head in self.module.heads))
        if ids is not None:
            self._limit(ids)
            for head in self.module.heads:
                head[-1].load_state_dict({"weight": self.lm_head})

    def lm_head_of(self, step: int) -> torch.Tensor:
        head: Any = self.module.heads[step][-1]
        return head.weight if self.recipe.vocab else self.lm_head

    def guess(self, batch: Batch, steps: int, noise: torch.Generator) -> Guesses:
        states = self.module.states(batch.states[:, -1])[:steps]
        rows = [batch.rows_for(step) for step in range(len(states))]
        return [(r, x[r]) for r, x in zip(rows, states, strict=True)]

    def file(self) -> File:
        config = {"version": "2", "medusa_num_heads": HEADS, "medusa_num_layers": 1}
        return self.module.state_dict(), config


class TrainableHydra(TrainableHead):
    """Starts as the best linear guesses of the states ahead from state and drafted tokens."""

    file_name = "hydra_lm_head.safetensors"
    module: hydra_heads.HydraHeads

    def start(self) -> None:
        self.shape = read_shape(self.target, "the target")
        self.module = hydra_heads.HydraHeads(
            self.ends, n_heads=HEADS, n_blocks=HYDRA_BLOCKS, prefix=self.shape, own_lm_heads=False
        )

        def pairs(step: int) -> Pairs:
            for batch in self.sample:
                rows, features = batch.rows_for(step), batch.states[:, -1]
                tokens = self.ends.embedding[self._paths(batch, rows, step)].flatten(1)
                yield torch.cat([features[rows], tokens], dim=1), features[rows + 1 + step]

        prefix: Any = self.module.prefix_embeding_layer
        _set_to_zero(prefix.layers[0].self_attn.o_proj, prefix.layers[0].mlp.down_proj)
        # The norm after the layer gives states back as they are, but for their length.
        nn.init.constant_(prefix.norm.weight, self.length())
        for step, head in enumerate(cast(Any, self.module.hydra_mlp)):
            _fit_linear(head[1].res_connection, pairs(step))
            _set_to_zero(head[1].linear, head[3])

    def _paths(self, batch: Batch, rows: torch.Tensor, step: int) -> torch.Tensor:
        ahead = [batch.tokens[batch.ahead(1 + i)][rows] for i in range(step + 1)]
        return torch.stack(ahead, dim=1)

    def guess(self, batch: Batch, steps: int, noise: torch.Generator) -> Guesses:
        prefix: Any = self.module.prefix_embeding_layer
        rows = UnrolledCache(batch, self.shape).committed_rows(len(batch))
        read = prefix.norm(prefix.layers[0](batch.states[:, -1], rows))
        step_rows = [batch.rows_for(step) for step in range(min(steps, HEADS))]
        paths = [self._paths(batch, r, i) for i, r in enumerate(step_rows)]
        pairs = zip(step_rows, paths, strict=True)
        return [(r, self.module.states(read[r], path)) for r, path in pairs]

    def file(self) -> File:
        state = self.module.state_dict()
        config = {
            "hydra_num_heads": HEADS,
            "hydra_num_layers": HYDRA_BLOCKS,
            "hydra_head_arch": "prefix-mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
        }
        return {key: weight.clone() for key, weight in state.items()}, config


class TrainableDFlash(TrainableHead):
    """Context rows start as the best linear guess of the next state; layers add nothing yet.

    Blocks begin behind half of the rows that learn more than one guess. Later guesses weigh less,
    as published.
    """

    states = slice(None)
    decay = math.exp(-1 / 4)
    module: BlockHead

    def start(self) -> None:
        config = self._config()
        read = dflash.read_config(config, "the recipe", self.target["num_hidden_layers"])
        self.module = BlockHead(self.ends, read_shape(config, "the target"), read)
        _fit_linear(self.module.fc, self.joined_pairs())
        nn.init.constant_(self.module.norm.weight, self.length())
        for layer in cast(Any, self.module.layers):
            _set_to_zero(layer.self_attn.o_proj, layer.mlp.down_proj)

    def _config(self) -> dict[str, Any]:
        ids = [layer - 1 for layer in self.recipe.layers]
        return self.layer() | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "head_dim": self.target["hidden_size"] // self.target["num_attention_heads"],
            "num_hidden_layers": BLOCK_LAYERS,
            "num_target_layers": self.target["num_hidden_layers"],
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": _MASK_ID, "target_layer_ids": ids},
        }

    def guess(self, batch: Batch, steps: int, noise: torch.Generator) -> Guesses:
        last = batch.rows_for(0)
        last = last[batch.continues[last]][::2]
        if not len(last):
            return []
        ids = torch.full((len(last), BLOCK), _MASK_ID, device=self.device)
        ids[:, 0] = batch.tokens[last + 1]
        head, joined = self.module, batch.states[:, :-1].flatten(1)
        rows = BlockCache(batch, head, joined).block_rows(last)
        out = head.step(ids.flatten(), self.ends.embedding[ids.flatten()], rows)
        out = out.view(len(last), BLOCK, -1)
        usable = [torch.isin(last, batch.rows_for(step)) for step in range(steps)]
        return [(last[rows], out[rows, 1 + step]) for step, rows in enumerate(usable)]

    def file(self) -> File:
        return self.module.state_dict(), self._config()


FAMILIES: dict[str, type[TrainableHead]] = {
    "eagle": TrainableEagle,
    "medusa": TrainableMedusa,
    "eagle3": TrainableEagle3,
    "hydra": TrainableHydra,
    "dflash": TrainableDFlash,
}


def sample_of(learnt: Texts) -> list[Texts]:
    """Choose the texts that linear starts are fitted on, eight at a time."""
    some = take_evenly(learnt, _SAMPLE)
    return [some[at : at + 8] for at in range(0, len(some), 8)]


@torch.no_grad()
def _fit_linear(linear: nn.Linear, pairs: Pairs) -> None:
    """Make a layer the best linear guess (least squares) of the pairs' second from their first."""
    gram: Any = 0.0
    cross: Any = 0.0
    for x, y in pairs:
        x = torch.cat([x, torch.ones(len(x), 1, device=x.device)], dim=1)
        gram, cross = gram + x.T @ x, cross + x.T @ y
    ridge = 1e-2 * gram.diagonal() + 1e-6
    solution = torch.linalg.solve(gram + torch.diag(ridge), cross).T
    linear.weight.copy_(solution[:, :-1])
    if linear.bias is not None:
        linear.bias.copy_(solution[:, -1])


@torch.no_grad()
def _set_to_zero(*modules: nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)


def _unroll(head: TrainedHead, batch: Batch, states: torch.Tensor, steps: int) -> Guesses:
    """Guess features with a head, step after step."""
    head.cache = cast(RowCache, UnrolledCache(batch, head.shape))
    rows = batch.rows_for(0)
    out = head.catch_up(batch.tokens[batch.ahead(1)], states)[rows]
    guesses = [(rows, out)]
    for step in range(1, steps):
        before, rows = rows, batch.rows_for(step)
        if not len(rows):  # all texts are too short
            break
        above = out[torch.searchsorted(before, rows)]
        out = head.extend(batch.tokens[rows + 1 + step], above, rows)
        guesses.append((rows, out))
    del head.cache
    return guesses
