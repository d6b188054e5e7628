"""Checkpoints of a few hundred weights in each published format, and the ends of a target."""

import json
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

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


def random_tensors(shapes, seed=0):
    """Weights of the size that keeps states alive; norms around one."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for key, shape in shapes.items():
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        made[key] = 1 + 0.3 * values if "norm" in key else values / max(shape[-1], 4) ** 0.5
    return made


def layer_shapes(
    prefix,
    width=None,
    norms=(),
    qkv_bias=False,
    o_bias=False,
    head_norms=False,
    hidden=HIDDEN,
    sizes=(HEADS, KV_HEADS, HEAD_DIM, INNER),
):
    width = width or hidden
    heads, kv_heads, head_dim, inner = sizes
    queries, keys = heads * head_dim, kv_heads * head_dim
    shapes = {f"{prefix}.{norm}.weight": (hidden,) for norm in (*norms, "post_attention_layernorm")}
    for part, size in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (size, width)
        if qkv_bias:
            shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (size,)
    if head_norms:
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
    if o_bias:
        shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
    shapes |= {f"{prefix}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def save(folder, config, tensors, name):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if name.endswith(".safetensors"):
        save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)


def medusa(n_heads=5, n_blocks=1, own=True, hidden=HIDDEN, vocab=VOCAB):
    """Its configuration names 2 heads, as the published ones do."""
    shapes = {}
    for i in range(n_heads):
        shapes |= {f"{i}.0.linear.weight": (hidden, hidden), f"{i}.0.linear.bias": (hidden,)}
        if own:
            shapes[f"{i}.{n_blocks}.weight"] = (vocab, hidden)
    tensors = random_tensors(shapes)
    for i in range(n_heads):
        for block in range(1, n_blocks):
            for part in ("weight", "bias"):
                tensors[f"{i}.{block}.linear.{part}"] = tensors[f"{i}.0.linear.{part}"]
    return {"medusa_num_heads": 2, "medusa_num_layers": n_blocks}, tensors


def hydra(arch="prefix-mlp", n_heads=3, n_blocks=3, hidden=HIDDEN, vocab=VOCAB, **sizes):
    """With the copies and accidents of the published files."""
    prefixed = arch == "prefix-mlp"
    shapes = {}
    for i in range(n_heads):
        first = f"hydra_mlp.{i}.{int(prefixed)}"
        for part in ("linear", "res_connection"):
            shapes[f"{first}.{part}.weight"] = (hidden, (i + 2) * hidden)
            shapes[f"{first}.{part}.bias"] = (hidden,)
        second = 3 if prefixed else 1
        shapes[f"hydra_mlp.{i}.{second}.linear.weight"] = (hidden, hidden)
        shapes[f"hydra_mlp.{i}.{second}.linear.bias"] = (hidden,)
        last = f"hydra_lm_head.{i}.1" if prefixed else f"hydra_lm_head.{i}"
        shapes |= {f"{last}.weight": (vocab, hidden), f"{last}.bias": (vocab,)}
    layer = "prefix_embeding_layer"
    if prefixed:
        shapes |= layer_shapes(
            f"{layer}.layers.0", norms=("input_layernorm",), hidden=hidden, **sizes
        )
        shapes[f"{layer}.norm.weight"] = (hidden,)
        shapes[f"{layer}.layers.0.self_attn.rotary_emb.inv_freq"] = (HEAD_DIM // 2,)
        shapes |= {f"{layer}.embed_tokens.weight": (vocab, hidden)}
    shapes["input_embed_fn.weight"] = (vocab, hidden)
    tensors = random_tensors(shapes)
    for i in range(n_heads):
        for block in range(2, n_blocks):
            here = 2 * block + 1 if prefixed else block
            for part in ("weight", "bias"):
                source = f"hydra_mlp.{i}.{3 if prefixed else 1}.linear.{part}"
                tensors[f"hydra_mlp.{i}.{here}.linear.{part}"] = tensors[source]
    config = {"hydra_num_heads": n_heads, "hydra_num_layers": n_blocks, "hydra_head_arch": arch,
              "grounded_heads": True, "hidden_state_offset": 0}  # fmt: skip
    return config, tensors


def eagle(bias=True, qkv_bias=False, hidden=HIDDEN):
    shapes = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= layer_shapes("layers.0", qkv_bias=qkv_bias, hidden=hidden)
    config = LAYER | {"hidden_size": hidden}
    if bias:  # says nothing of it
        shapes["fc.bias"] = (hidden,)
    else:
        config["bias"] = False
    if qkv_bias:
        config["qkv_bias"] = True
    return config, random_tensors(shapes)


def draft_size(vocab):
    """Of an EAGLE-3 head's vocabulary: always some id less than the target has."""
    return min(DRAFT_VOCAB, vocab - 1)


def draft_vocabulary(vocab=VOCAB):
    """``d2t`` and ``t2d`` of a third of the first ids, and of the last two."""
    size = draft_size(vocab)
    ids = torch.arange(vocab)[1 :: 3 if vocab >= VOCAB else 1][: size - 2]
    ids = torch.cat([ids, torch.tensor([vocab - 2, vocab - 1])])
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": known}


def eagle3_shapes(first, n_states=3, hidden=HIDDEN, vocab=VOCAB, **layer):
    norms = ("input_layernorm", "hidden_norm")
    shapes = {"fc.weight": (hidden, n_states * hidden)}
    shapes |= layer_shapes(first, width=2 * hidden, norms=norms, hidden=hidden, **layer)
    return shapes | {"norm.weight": (hidden,), "lm_head.weight": (draft_size(vocab), hidden)}


def eagle3(hidden=HIDDEN, vocab=VOCAB):
    """The authors' dialect; the configuration says 40 layers, as a published one does."""
    config = LAYER | {"draft_vocab_size": draft_size(vocab), "num_hidden_layers": 40}
    config |= {"hidden_size": hidden, "vocab_size": vocab}
    tensors = random_tensors(eagle3_shapes("midlayer", hidden=hidden, vocab=vocab))
    return config, tensors | draft_vocabulary(vocab)


def speculators(kind="llama", n_layers=1, ids=(2, 5, 7), **flags):
    """The dialect of vllm-project/speculators; ``flags`` are keys of its configuration."""
    qwen3, bias = kind != "llama", kind == "biased"
    shapes = eagle3_shapes("layers.0", len(ids), qkv_bias=bias, o_bias=bias, head_norms=qwen3)
    for i in range(1, n_layers):
        norms = ("input_layernorm",)
        shapes |= layer_shapes(
            f"layers.{i}", norms=norms, qkv_bias=bias, o_bias=bias, head_norms=qwen3
        )
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(ids) * HIDDEN,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(len(ids))}
    layer = {**LAYER, "num_hidden_layers": n_layers, "attention_bias": bias}
    if not qwen3:  # where it is missing, Qwen3 is meant
        layer["model_type"] = "llama"
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer,
              "draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": list(ids),
              "norm_before_residual": False, **flags}  # fmt: skip
    return config, random_tensors(shapes) | draft_vocabulary()


def of_shape(shape):
    """Arguments of `hydra` whose prefix layer has this ``LayerShape``: a target's."""
    sizes = (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.intermediate_size)
    biases = {"qkv_bias": shape.qkv_bias, "o_bias": shape.o_bias}
    return {"sizes": sizes, "head_norms": shape.head_norms, **biases}


def save_each(folder, hidden=HIDDEN, vocab=VOCAB, **layer):
    """One head of each kind, for `DraftContext.heads`: folders by name."""
    made = {
        "medusa": (medusa(hidden=hidden, vocab=vocab), "medusa_lm_head.pt"),
        "hydra": (hydra(n_heads=4, hidden=hidden, vocab=vocab, **layer), "hydra_lm_head.pt"),
        "eagle": (eagle(hidden=hidden), "pytorch_model.bin"),
        "eagle3": (eagle3(hidden, vocab), "model.safetensors"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (head, file) in made.items():
        if not (folder / name / file).exists():
            save(folder / name, *head, file)
    return {name: folder / name for name in made}


def states_of(tokens, layers, hidden=HIDDEN):
    """Hidden states of a target that is not there, by number: they depend on the token alone."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(100, hidden, dtype=torch.float64, generator=generator)
    return {layer: table[torch.as_tensor(tokens) - layer % 7] for layer in layers}


@dataclass
class Ghost:
    """What a head's drafter asks of a target (``TargetInfo``) that is not there."""

    vocab_size: int = VOCAB
    device = torch.device("cpu")
    dtype = torch.float64
    n_parameters = 10
    n_layers = 8
    max_nodes = 128
    graph_tokens = 0
    config = LAYER

    @property
    def embeddings(self):
        return target(vocab=self.vocab_size)
