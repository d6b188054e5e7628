"""Complete checkpoints of a few thousand weights, written and read as real ones are."""

from pathlib import Path
from typing import Any

VOCAB = 300
# Grouped-query attention in two layers.
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer with the special tokens ``<s>``, ``</s>`` and no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    merges = [("h", "e"), ("t", "h")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder: Path, architecture: str = "llama", **numbers: Any) -> Any:
    """Write a random two-layer model with its tokenizer; returns the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        | TINY
        | numbers,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model
