"""The draft model: some of the target's layers and its most frequent ids, distilled.

A plain ``LlamaForCausalLM``. ``id_map.safetensors`` has the target's id of each of its ids; the row
of -1 is fed for every token left out. It learns the target's distribution (KL) and its first choice
(cross-entropy).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.training.texts import Mix, Texts, ids_by_frequency
from scripts.training.trainer import Recipe
from specbench.models import loading
from specbench.models.checkpoints import int8
from specbench.models.draft.loading import ID_MAP_FILE, TOKENIZER_KEY
from specbench.paths import ASSETS

FOLDER = ASSETS / "draft_smollm2_135m"
MIX = Mix(texts=48, batch=48)


# Of the target's thirty. Layer 16 has the head that looks at the token before, 17 and 18 those that
# find what followed the same token earlier; together they copy, which a draft needs most.
RECIPE = Recipe(
    name="draft",
    epochs=2,
    betas=(0.9, 0.98),
    weight_decay=0.01,
    batch_tokens=1024,
    average=0.0,
    clip=1.0,
    steps=1,
    prompt_share=0.1,
    layers=(0, 1, 16, 17, 18, 29),
    vocab=18000,
)


RECIPES = {RECIPE.name: RECIPE}


class TrainableDraft:
    """The draft in training.

    Args:
        texts: whose most frequent ids it knows.
        recipe: its ``prompt_share`` is the weight of what follows a prompt's tokens.
    """

    def __init__(
        self, recipe: Recipe, loaded: loading.LoadedModel, texts: Texts, learnt: Texts
    ) -> None:
        self.recipe = recipe
        assert loaded.tokenizer is not None
        self._made_for = loading.tokenizer_hash(loaded.tokenizer)
        keep = torch.tensor(sorted(loaded.eos_ids | set(loaded.tokenizer.all_special_ids)))
        order = ids_by_frequency(texts, loaded.model.config.vocab_size)
        order = torch.cat([keep, order[~torch.isin(order, keep)]])[: recipe.vocab - 1]
        # -1 replaces every id left out.
        self.ids = torch.cat([torch.tensor([-1]), order.sort().values])
        self.module = cut_down(loaded.model, self.ids, recipe.layers)
        # The target's embeddings are good as they are.
        self.module.model.embed_tokens.weight.requires_grad_(False)
        self.parameters = sum(p.numel() for p in self.module.parameters())
        self._draft_ids = torch.zeros(loaded.model.config.vocab_size, dtype=torch.long)
        self._draft_ids[self.ids[1:]] = torch.arange(1, len(self.ids))

    def loss(self, chosen: Texts, draw: torch.Generator) -> torch.Tensor:
        """Average KL and cross-entropy over the positions where the draft has the token."""
        device, pad = self.module.device, torch.nn.utils.rnn.pad_sequence
        # Padding is on the right, where no causal position sees it.
        rows = pad([self._draft_ids[text.tokens.long()] for text in chosen], batch_first=True)
        positions = [torch.arange(len(t)) + i * rows.shape[1] for i, t in enumerate(chosen)]
        top = self._draft_ids[torch.cat([text.top_ids for text in chosen]).long()]
        probs = torch.cat([text.top_logprobs for text in chosen]).float().exp() * (top > 0)
        mass = probs.sum(-1)
        # The last position of a prompt predicts the answer's first token.
        answered = torch.cat([torch.arange(len(t)) >= t.prompt - 1 for t in chosen])
        learnable = mass > 0
        weight = torch.where(answered, 1.0, self.recipe.prompt_share)[learnable].to(device)
        top, probs = top[learnable].to(device), (probs / mass.clamp(min=1e-9)[:, None])[learnable]
        probs = probs.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = self.module.model(input_ids=rows.to(device), use_cache=False)
            rows = torch.cat(positions)[learnable].to(device)
            states = hidden.last_hidden_state.flatten(0, 1)[rows]
            logprobs = self.module.lm_head(states).float().log_softmax(-1).gather(1, top)
            kl = (torch.special.xlogy(probs, probs) - probs * logprobs).sum(-1)
            ce = -logprobs[:, 0] * (top[:, 0] > 0)
            loss: torch.Tensor = (weight * (kl + 0.5 * ce)).sum() / weight.sum()
        return loss

    def save(self, folder: Path) -> Path:
        """Write it; returns the file of its weights."""
        setattr(self.module.config, TOKENIZER_KEY, self._made_for)
        int8.save(self.module, folder)
        save_file({"ids": self.ids}, folder / ID_MAP_FILE)
        return folder / int8.FILE


def cut_down(target: Any, ids: torch.Tensor, layers: tuple[int, ...]) -> Any:
    """Make a Llama of some of the target's layers and embedding rows, tied, in float32.

    ``ids`` are the target's of each of its own; the first one's row, of -1, is the others' mean.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    # Ids of the target's special tokens mean others here; who needs them asks the target.
    sizes = target.config.to_dict() | {
        "vocab_size": len(ids),
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": True,
        **dict.fromkeys(("layer_types", "bos_token_id", "eos_token_id", "pad_token_id")),
    }
    draft: Any = LlamaForCausalLM(LlamaConfig(**sizes)).to(target.device, target.dtype)
    with torch.no_grad():
        rows = target.model.embed_tokens.weight[ids.clamp(min=0).to(target.device)]
        rows[0] = rows[1:].mean(0)
        draft.model.embed_tokens.weight.copy_(rows)
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
        for layer, number in zip(draft.model.layers, layers, strict=True):
            layer.load_state_dict(target.model.layers[number].state_dict())
    return draft.float().train().requires_grad_(True)
