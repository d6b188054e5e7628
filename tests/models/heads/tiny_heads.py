"""Checkpoints of a few hundred weights in each published format, and the ends of a target."""

import functools
import json
from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from specbench.models.heads.dflash import BlockHead
from specbench.models.heads.dflash import read_config as read_block
from specbench.models.heads.eagle import EagleHead
from specbench.models.heads.eagle3 import Eagle3Head, read_config
from specbench.models.heads.hydra_heads import HydraHeads
from specbench.models.heads.layer_shape import read_shape
from specbench.models.heads.medusa import MedusaHeads

HIDDEN, INNER, VOCAB, DRAFT_VOCAB = 12, 20, 30, 11
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6  # HEADS * HEAD_DIM is not HIDDEN
LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5,
    "rope_theta": 500.0, "vocab_size": VOCAB,
}  # fmt: skip


@dataclass
class Ends:
    """The embedding and LM head of a target that is not there."""

    embedding: torch.Tensor
    head: torch.Tensor
    lm_head_bias = None
    packed = False

    @property
    def lm_head(self):
        return self.head

    def logits(self, states):
        return states @ self.head.T


def target(hidden=HIDDEN, vocab=VOCAB):
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, vocab, hidden, dtype=torch.float64, generator=generator)
    return Ends(embedding, head)


@torch.no_grad()
def random_tensors(module, **others):
    """Weights of the size that keeps states alive, norms around one; ``others``: more shapes."""
    generator = torch.Generator().manual_seed(0)

    def drawn(name, shape):
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        return 1 + 0.3 * values if "norm" in name else values / max(shape[-1], 4) ** 0.5

    for name, parameter in module.double().named_parameters():
        parameter.copy_(drawn(name, parameter.shape))
    more = {name: drawn(name, shape) for name, shape in others.items()}
    return {name: value.clone() for name, value in module.state_dict().items()} | more


def save(folder, config, tensors, name):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if name.endswith(".safetensors"):
        save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)


def medusa(n_heads=5, n_blocks=1, lm_heads=True, hidden=HIDDEN, vocab=VOCAB):
    """Its configuration names 2 heads, as the published ones do."""
    ends = target(hidden, vocab)
    heads = MedusaHeads(ends, n_heads=n_heads, n_blocks=n_blocks, own_lm_heads=lm_heads)
    return {"medusa_num_heads": 2, "medusa_num_layers": n_blocks}, random_tensors(heads)


def hydra(arch="prefix-mlp", n_heads=3, n_blocks=3, hidden=HIDDEN, vocab=VOCAB, shape=None):
    """With the accidents of the published files; ``shape``: of the target's layers."""
    prefix, others = None, {"input_embed_fn.weight": (vocab, hidden)}
    if arch == "prefix-mlp":
        prefix, layer = shape or read_shape(LAYER, ""), "prefix_embeding_layer"
        others[f"{layer}.layers.0.self_attn.rotary_emb.inv_freq"] = (HEAD_DIM // 2,)
        others[f"{layer}.embed_tokens.weight"] = (vocab, hidden)
    heads = HydraHeads(target(hidden, vocab), n_heads=n_heads, n_blocks=n_blocks, prefix=prefix)
    config = {"hydra_num_heads": n_heads, "hydra_num_layers": n_blocks, "hydra_head_arch": arch,
              "grounded_heads": True, "hidden_state_offset": 0}  # fmt: skip
    return config, random_tensors(heads, **others)


def eagle(bias=True, qkv_bias=False, hidden=HIDDEN):
    config = LAYER | {"hidden_size": hidden} | ({} if bias else {"bias": False})
    config |= {"qkv_bias": True} if qkv_bias else {}  # else says nothing of it
    shape = read_shape(config, "", qkv_bias_alone=True)
    return config, random_tensors(EagleHead(target(hidden), shape, bias=bias))


@functools.cache
def mtp(n_mtp=1, hidden=HIDDEN, vocab=VOCAB, below=46, kind="glm4_moe"):
    """MTP layers behind the ``below`` of their target, as its checkpoint has them."""
    sizes = LAYER | {
        "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": below, "head_dim": 8,
        "num_mtp_layers": n_mtp, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "eos_token_id": None,
        "use_qk_norm": True, "max_position_embeddings": 512, "initializer_range": 0.1,
    }  # fmt: skip
    if kind == "deepseek_v3":
        latent = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
        sizes |= latent | {"q_lora_rank": None, "num_key_value_heads": HEADS, "head_dim": 4}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        layers = MtpModel(AutoModelForCausalLM.from_config(config), n_mtp).layers
    shapes = {}
    for key, value in layers.state_dict().items():
        layer, _, name = key.replace("mtp_block.", "").partition(".")
        name = name.replace("post_norm", "shared_head.norm")
        shapes[f"model.layers.{below + int(layer)}.{name}"] = value.shape
    return config.to_dict(), random_tensors(torch.nn.Module(), **shapes)


def draft_vocabulary(vocab=VOCAB):
    """``d2t`` and ``t2d`` of a third of the first ids and of the last two, never of all."""
    size = min(DRAFT_VOCAB, vocab - 1)
    ids = torch.arange(vocab)[1 :: 3 if vocab >= VOCAB else 1][: size - 2]
    ids = torch.cat([ids, torch.tensor([vocab - 2, vocab - 1])])
    draftable = torch.zeros(vocab, dtype=torch.bool)
    draftable[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": draftable}


def _eagle3(config, keys, vocab=VOCAB):
    vocabulary = draft_vocabulary(vocab)
    config["draft_vocab_size"] = len(vocabulary["d2t"])
    read = read_config(config, frozenset(keys), "")
    return config, random_tensors(Eagle3Head(target(read.shape.hidden_size), read)) | vocabulary


def eagle3(hidden=HIDDEN, vocab=VOCAB):
    """The authors' dialect; the configuration says 40 layers, as a published one does."""
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": 40}
    return _eagle3(LAYER | sizes, (), vocab)


def speculators(kind="llama", n_layers=1, ids=(2, 5, 7), **flags):
    """The dialect of vllm-project/speculators; ``flags`` are keys of its configuration."""
    layer = {**LAYER, "num_hidden_layers": n_layers, "attention_bias": kind == "biased"}
    if kind == "llama":  # where it is missing, Qwen3 is meant
        layer["model_type"] = "llama"
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer,
              "eagle_aux_hidden_state_layer_ids": list(ids),
              "norm_before_residual": False, **flags}  # fmt: skip
    return _eagle3(config, [f"layers.{i}." for i in range(n_layers)])


def dflash(hidden=HIDDEN, vocab=VOCAB, **more):
    """Of two layers, one with a window."""
    inner = {"mask_token_id": vocab - 1, "target_layer_ids": [-1, 0]}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": inner, **kinds}
    return _block(config, {"use_sliding_window": True, **more}, hidden, vocab)


def dspark(hidden=HIDDEN, vocab=VOCAB, kind="rnn", **more):
    """``kind``: of its Markov head."""
    config = {"architectures": ["Qwen3DSparkModel"], "mask_token_id": vocab - 1, "markov_rank": 5,
              "target_layer_ids": [-1, 0], "enable_confidence_head": True, "markov_head_type": kind,
              "confidence_head_with_markov": kind == "rnn"}  # fmt: skip
    return _block(config, more, hidden, vocab)


def _block(config, more, hidden, vocab):
    config |= LAYER | {"hidden_size": hidden, "num_hidden_layers": 2, "block_size": 4, **more}
    shape = read_shape(config | {"model_type": "qwen3"}, "")
    head = BlockHead(target(hidden, vocab), shape, read_block(config, "", 8))
    return config, random_tensors(head)


def save_each(folder, vocab=VOCAB, shape=None):
    """One head of each kind, for `DraftContext.heads`: folders by name.

    ``shape``: of the target's layers.
    """
    hidden = shape.hidden_size if shape else HIDDEN
    heads = {
        "medusa": (medusa(hidden=hidden, vocab=vocab), "medusa_lm_head.pt"),
        "hydra": (hydra(n_heads=4, hidden=hidden, vocab=vocab, shape=shape), "hydra_lm_head.pt"),
        "eagle": (eagle(hidden=hidden), "pytorch_model.bin"),
        "eagle3": (eagle3(hidden, vocab), "model.safetensors"),
        "dflash": (dflash(hidden, vocab), "model.safetensors"),
        "dspark": (dspark(hidden, vocab), "model.safetensors"),
        "mtp": (mtp(hidden=hidden, vocab=vocab), "model.safetensors"),
        "gated": (dspark(hidden, vocab, "gated"), "model.safetensors"),
        "vanilla": (dspark(hidden, vocab, "vanilla"), "model.safetensors"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (head, file) in heads.items():
        if not (folder / name / file).exists():
            save(folder / name, *head, file)
    return {name: folder / name for name in heads}


def states_of(tokens, layers, hidden=HIDDEN):
    """Hidden states of a target that is not there, by number: they depend on the token alone."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(100, hidden, dtype=torch.float64, generator=generator)
    return {layer: table[torch.as_tensor(tokens) - layer % 7] for layer in layers}


@dataclass
class Ghost:
    """What a head's drafter asks of a target (``TargetInfo``) that is not there."""

    vocab_size: int = VOCAB
    dtype: torch.dtype = torch.float64
    ends: Ends | None = None
    device = torch.device("cpu")
    n_parameters = 10
    n_layers = 8
    max_nodes = 128
    graph_tokens = 0
    config = LAYER

    @property
    def embeddings(self):
        return self.ends or target(vocab=self.vocab_size)
