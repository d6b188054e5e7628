"""The heads once more, from the keys of their files: one branch at a time, loops, no cache."""

import math

import torch


def rms(x, weight, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def silu(x):
    return x / (1 + torch.exp(-x))


def linear(w, name, x):
    out = w[f"{name}.weight"] @ x
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def rotate(x, position, theta):
    """Each pair (i, i + half) turned by its own angle."""
    half = len(x) // 2
    angle = position * theta ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def attention(w, name, xs, layer, context=None):
    """``xs``: inputs of the rows of one branch, each seeing itself and those before it.

    After a ``context``, which gives keys and values alone, every row sees all.
    """
    n_before = 0 if context is None else len(context)
    rows = [*(context or ()), *xs]
    size, heads, kv = layer["head_dim"], layer["num_attention_heads"], layer["num_key_value_heads"]
    theta, eps, window = layer["rope_theta"], layer["rms_norm_eps"], layer.get("sliding_window")

    def split(part, x, position):
        parts = linear(w, f"{name}.{part}_proj", x).split(size)
        if f"{name}.{part}_norm.weight" in w:
            parts = [rms(p, w[f"{name}.{part}_norm.weight"], eps) for p in parts]
        return torch.stack(parts if part == "v" else [rotate(p, position, theta) for p in parts])

    queries, keys, values = (  # [rows, heads, size]
        torch.stack([split(part, x, i) for i, x in enumerate(rows)]) for part in ("q", "k", "v")
    )
    outs = []
    for i in range(n_before, len(rows)):
        first = 0 if window is None else max(0, i + 1 - window)
        end = i + 1 if context is None else len(rows)
        mixed = []
        for h in range(heads):
            g = h // (heads // kv)
            scores = keys[first:end, g] @ queries[i, h] / math.sqrt(size)
            mixed.append(torch.softmax(scores, 0) @ values[first:end, g])
        outs.append(linear(w, f"{name}.o_proj", torch.cat(mixed)))
    return outs


def mlp(w, name, x):
    gated = silu(linear(w, f"{name}.gate_proj", x)) * linear(w, f"{name}.up_proj", x)
    return linear(w, f"{name}.down_proj", gated)


def llama_layer(w, name, xs, layer, input_norm=True, context=None):
    eps = layer["rms_norm_eps"]
    inputs = [rms(x, w[f"{name}.input_layernorm.weight"], eps) if input_norm else x for x in xs]
    outs = []
    attended = attention(w, f"{name}.self_attn", inputs, layer, context)
    for x, o in zip(xs, attended, strict=True):
        y = x + o
        scale = w[f"{name}.post_attention_layernorm.weight"]
        outs.append(y + mlp(w, f"{name}.mlp", rms(y, scale, eps)))
    return outs


def medusa(w, hidden, n_blocks, lm_head=None):
    """Logits by head."""
    n_heads = 1 + max(int(key.split(".")[0]) for key in w)
    logits = []
    for i in range(n_heads):
        x = hidden
        for block in range(n_blocks):
            x = x + silu(linear(w, f"{i}.{block}.linear", x))
        logits.append(w.get(f"{i}.{n_blocks}.weight", lm_head) @ x)
    return logits


def hydra_prefix(w, states, layer):
    name = "prefix_embeding_layer"
    out = llama_layer(w, f"{name}.layers.0", list(states), layer)[-1]
    return rms(out, w[f"{name}.norm.weight"], layer["rms_norm_eps"])


def hydra(w, prefix, path, embedding, numbers, lm_head):
    """Logits behind one path; ``numbers``: those of the blocks in the keys.

    ``lm_head`` is the target's, for files that have none.
    """
    i = len(path) - 1
    z = torch.cat([prefix, *(embedding[token] for token in path)])
    first = f"hydra_mlp.{i}.{numbers[0]}"
    x = silu(linear(w, f"{first}.linear", z)) + linear(w, f"{first}.res_connection", z)
    for number in numbers[1:]:
        x = x + silu(linear(w, f"hydra_mlp.{i}.{number}.linear", x))
    last = f"hydra_lm_head.{i}.1" if f"hydra_lm_head.{i}.1.weight" in w else f"hydra_lm_head.{i}"
    return linear(w, last, x) if f"{last}.weight" in w else lm_head @ x


def eagle(w, embedding, layer, ids, features, path):
    """Guessed features of the committed rows and of the nodes along ``path``."""
    zs = [
        linear(w, "fc", torch.cat([embedding[token], feature]))
        for token, feature in zip(ids, features, strict=True)
    ]
    outs = llama_layer(w, "layers.0", zs, layer, input_norm=False)
    for token in path:
        zs.append(linear(w, "fc", torch.cat([embedding[token], outs[-1]])))
        outs = llama_layer(w, "layers.0", zs, layer, input_norm=False)
    return outs


def eagle3(w, embedding, config, ids, states, path):
    """Guessed features, and logits by row; of either dialect."""
    layer = config.get("transformer_layer_config", config)
    theirs = "transformer_layer_config" in config
    name, eps = ("layers.0" if theirs else "midlayer"), layer["rms_norm_eps"]

    def join(state):
        if "input_norm.weight" in w:
            state = rms(state, w["input_norm.weight"], eps)
        if "fc_norm.0.weight" in w:
            parts = state.split(len(w["fc_norm.0.weight"]))
            state = torch.cat([rms(p, w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)])
        return linear(w, "fc", state)

    def run(pairs):
        joined, residuals = [], []
        for token, g in pairs:
            normed = rms(g, w[f"{name}.hidden_norm.weight"], eps)
            tokens = rms(embedding[token], w[f"{name}.input_layernorm.weight"], eps)
            joined.append(torch.cat([tokens, normed]))
            residuals.append(normed if theirs and config["norm_before_residual"] else g)
        outs = []
        for r, o in zip(residuals, attention(w, f"{name}.self_attn", joined, layer), strict=True):
            y = r + o
            scale = w[f"{name}.post_attention_layernorm.weight"]
            outs.append(y + mlp(w, f"{name}.mlp", rms(y, scale, eps)))
        for i in range(1, layer["num_hidden_layers"] if theirs else 1):
            outs = llama_layer(w, f"layers.{i}", outs, layer)
        normed = [rms(out, w["norm.weight"], eps) for out in outs]
        fed = normed if theirs and config.get("norm_output") else outs
        return fed, [w["lm_head.weight"] @ x for x in normed]

    pairs = [(token, join(state)) for token, state in zip(ids, states, strict=True)]
    outs, logits = run(pairs)
    for token in path:
        pairs.append((token, outs[-1]))
        outs, logits = run(pairs)
    return outs, logits


def block(w, embedding, config, root, states, size):
    """Normed states of a DFlash or DSpark block of ``size`` rows."""
    eps = config["rms_norm_eps"]
    context = [rms(linear(w, "fc", s), w["hidden_norm.weight"], eps) for s in states]
    config = config | config.get("dflash_config", {})
    xs = [embedding[token] for token in [root] + [config["mask_token_id"]] * (size - 1)]
    for i in range(config["num_hidden_layers"]):
        slides = config.get("layer_types", [""] * 9)[i] == "sliding_attention"
        layer = config | {"sliding_window": config["sliding_window"] if slides else None}
        xs = llama_layer(w, f"layers.{i}", xs, layer, context=context)
    return [rms(x, w["norm.weight"], eps) for x in xs]


def markov(w, kind, ids, states):
    """What the Markov head adds to the logits of the last of ``states``, after ``ids``."""
    name, memory = "markov_head", torch.zeros(w["markov_head.markov_w1.weight"].shape[1])
    for token, state in zip(ids, states, strict=True):
        e = out = w[f"{name}.markov_w1.weight"][token]
        if kind == "gated":
            out = torch.sigmoid(linear(w, f"{name}.gate_proj", torch.cat([state, e]))) * e
        if kind == "rnn":
            joint = linear(w, f"{name}.joint_proj", torch.cat([memory, e, state]))
            gate, candidate, out = joint.split(len(e))
            gate, out = torch.sigmoid(gate), torch.tanh(out)
            memory = gate * memory + (1 - gate) * torch.tanh(candidate)
    return linear(w, f"{name}.markov_w2", out)
