"""The folder of a trained draft model: weights, vocabulary, how it was made, and its card."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specbench.models.checkpoints import int8
from specbench.models.draft.loading import ID_MAP_FILE
from specbench.paths import ASSETS
from specbench.storage import jsonl

DRAFT_FOLDER = ASSETS / "draft_smollm2_135m"
FACTS = "training.json"
CARD = """# Draft model for SmolLM2-135M-Instruct

Made by `python -m scripts.draft_model.train` (docs/draft_model.md): a plain `LlamaForCausalLM`, its
matrices kept as bytes with a scale a row (`specbench/models/checkpoints/int8.py`), cut out of the
target and trained on the target's answers to this project's own prompts, none from a benchmark.
`id_map.safetensors` holds the target's id of each of its ids; its first row stands for every id
left out. There is no tokenizer: it is the target's.

| | |
|---|---|
{rows}
{scores}
Licence: Apache-2.0, as the weights it derives from (HuggingFaceTB/SmolLM2-135M-Instruct). This page
is written by the script from `training.json`, whose row on prompts was added by hand.
"""


def write_draft(
    draft: PreTrainedModel, ids: torch.Tensor, folder: Path, made_for: str, facts: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft.config.tokenizer_hash = made_for
    int8.save(draft, folder)
    save_file({"ids": ids}, folder / ID_MAP_FILE)
    (folder / FACTS).unlink(missing_ok=True)
    write_card(folder, facts)


def read_draft(folder: Path) -> PreTrainedModel:
    """The draft as it was written, rounding included."""
    draft = int8.load(folder, dtype=torch.float32, attention="sdpa")
    draft.eval()
    return draft


def write_card(folder: Path, facts: dict[str, Any], card: str = CARD) -> None:
    """Add facts to those of a draft or head, and write its card anew from all of them."""
    path = folder / FACTS
    known = (jsonl.read_json(path) if path.is_file() else {}) | facts
    jsonl.write_json(path, known)
    rows, scores = [], []
    for name, value in known.items():
        title = name.replace("_", " ")
        if isinstance(value, dict):
            scores += [f"\n{title}:\n", *(f"- {key}: {score}" for key, score in value.items())]
        else:
            row = ", ".join(map(str, value)) if isinstance(value, list) else value
            rows.append(f"| {title} | {row} |")
    text = card.format(rows="\n".join(rows), scores="".join(f"{line}\n" for line in scores))
    (folder / "README.md").write_text(text, encoding="utf-8")
