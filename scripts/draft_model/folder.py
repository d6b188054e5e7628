"""The folders of trained draft models and heads: weights, how they were made, and a card."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specbench.models.checkpoints import int8
from specbench.models.draft.loading import ID_MAP_FILE
from specbench.paths import ASSETS
from specbench.storage import jsonl

# Name, tensors and config.json of a head in its published format.
HeadFile = tuple[str, dict[str, torch.Tensor], dict[str, Any]]

DRAFT_FOLDER = ASSETS / "draft_smollm2_135m"
HEADS_FOLDER = ASSETS / "heads_smollm2_135m"
HELD_STEPS = 4  # of the chain that a head drafts held-out texts with
FACTS = "training.json"
_DRAFT = """\
Made by `python -m scripts.draft_model.train` (docs/draft_model.md): a plain `LlamaForCausalLM`, its
matrices kept as bytes with a scale a row (`specbench/models/checkpoints/int8.py`), cut out of the
target and trained on the target's answers to this project's own prompts, none from a benchmark.
`id_map.safetensors` holds the target's id of each of its ids; its first row stands for every id
left out. There is no tokenizer: it is the target's."""
_HEAD = f"""\
Made by `python -m scripts.draft_model.train_heads` (docs/draft_model.md) in the published format
that `specbench/models/heads/` reads, its matrices kept as bytes with a scale a row
(`specbench/models/checkpoints/int8.py`). Trained on the mix below (prose, and the target's
answers), none of it from a benchmark. The curve is measured on held-out texts, answers and prose:
`top1` is the share of a chain's first, second, … guesses that are the target's own choice, of
those whose guesses before were right; `chain_mat` is the tokens a step of chains of {HELD_STEPS}.
Where the processor multiplies bfloat16, texts and states are those of the target in bfloat16.
Epoch 0 is the head before training."""
_TITLES = {
    "draft": "Draft model",
    "medusa": "Medusa-1 heads (shared LM head)",
    "hydra": "Hydra++ heads (shared LM head)",
    "eagle": "An EAGLE-1/2 head",
    "eagle3": "An EAGLE-3 head",
}
_CARD = """# {title} for SmolLM2-135M-Instruct

{about}

| | |
|---|---|
{rows}
{scores}
Licence: Apache-2.0, as the weights it derives from (HuggingFaceTB/SmolLM2-135M-Instruct). This page
is written by the script from `training.json`.
"""


def write_draft(
    draft: PreTrainedModel, ids: torch.Tensor, folder: Path, made_for: str, facts: dict[str, object]
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


def write_head(folder: Path, file: HeadFile, facts: dict[str, object]) -> None:
    """The head in its published format, and its card."""
    name, tensors, config = file
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write_json(folder / "config.json", config)
    with jsonl.replacing(folder / name) as partial:
        save_file(int8.rounded(tensors), partial)
    (folder / FACTS).unlink(missing_ok=True)
    write_card(folder, facts | {"sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()})


def write_card(folder: Path, facts: dict[str, object]) -> None:
    """Add facts to a draft's or head's, and write its card anew from all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FACTS
    facts = (jsonl.read_json(path) if path.is_file() else {}) | facts
    jsonl.write_json(path, facts)
    rows, scores = [], []
    for key, value in facts.items():
        title = key.replace("_", " ")
        if isinstance(value, dict):
            scores += [f"\n{title}:\n", *(f"- {part}: {score}" for part, score in value.items())]
        else:
            row = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            rows.append(f"| {title} | {row} |")
    name = str(facts.get("name", "draft"))
    text = _CARD.format(
        title=_TITLES[name],
        about=_DRAFT if name == "draft" else _HEAD,
        rows="\n".join(rows),
        scores="".join(f"{line}\n" for line in scores),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
