"""Each head against its plain restatement, in float64, over several steps of random drafts."""

import torch

from specbench.models.heads import eagle, eagle3, hydra_heads, medusa
from tests.models.heads import plain_heads, tiny_heads

EXACT = {"rtol": 0.0, "atol": 1e-9}


LOADERS = {
    "medusa": (tiny_heads.medusa, "medusa_lm_head.pt", medusa.load),
    "hydra": (tiny_heads.hydra, "hydra_lm_head.pt", hydra_heads.load),
    "eagle": (tiny_heads.eagle, "pytorch_model.bin", eagle.load),
    "eagle3": (tiny_heads.eagle3, "model.safetensors", eagle3.load),
    "speculators": (tiny_heads.speculators, "model.safetensors", eagle3.load),
}


def load(folder, family, ends=None, dtype=torch.float64, **options):
    return LOADERS[family][2](folder, tiny_heads.Ghost(dtype=dtype, ends=ends), **options)


def saved(folder, family, change=None, head_files=None):
    """Write a family's checkpoint, or one ``made`` otherwise, changed by ``change``."""
    make, name, _ = LOADERS[family]
    config, tensors = head_files or make()
    if change:
        change(config, tensors)
    tiny_heads.save(folder, config, tensors, name)
    return folder


def close(ours, plain):
    torch.testing.assert_close(ours, torch.as_tensor(plain), **EXACT)


def steps(head, width, vocab=tiny_heads.VOCAB, n_steps=2):
    """Steps: rows committed, then a tree of two levels grown on them.

    Yields ids and states of all rows so far, the rows' guessed features, and the nodes: their ids
    from the root down with the guessed feature of each.
    """
    generator = torch.Generator().manual_seed(0)
    head.reserve(max_len=24, max_nodes=6)
    ids, states = torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=torch.float64)
    for step in range(n_steps):
        n = 3 if step == 0 else int(torch.randint(1, 4, (), generator=generator))
        new_ids = torch.randint(vocab, (n,), generator=generator)
        new = torch.randn(n, width, dtype=torch.float64, generator=generator)
        ids, states = torch.cat([ids, new_ids]), torch.cat([states, new])
        rows = head.catch_up(new_ids, new)
        tokens = torch.randint(vocab, (6,), generator=generator)
        first = head.extend(tokens[:3], rows[-1].expand(3, -1), torch.full((3,), -1))
        below = torch.randint(3, (3,), generator=generator)
        second = head.extend(tokens[3:], first[below], below)
        paths = [[int(t)] for t in tokens[:3]]
        paths += [[int(tokens[p]), int(t)] for p, t in zip(below, tokens[3:], strict=True)]
        yield ids, states, rows, list(zip(paths, torch.cat([first, second]), strict=True))


def check_eagle(folder, **options):
    config, tensors = head_files = tiny_heads.eagle(**options)
    target = tiny_heads.target()
    head = load(saved(folder, "eagle", head_files=head_files), "eagle", target)
    for ids, states, rows, nodes in steps(head, tiny_heads.HIDDEN):
        for path, feature in nodes[::3]:
            plain = plain_heads.eagle(tensors, target.embedding, config, ids, states, path)
            close(feature, plain[-1])
            close(head.logits(feature), target.head @ plain[-1])
            close(rows, torch.stack(plain[: len(ids)])[-len(rows) :])


def check_eagle3(folder, head_files):
    config, tensors = head_files
    target = tiny_heads.target()
    head = load(saved(folder, "eagle3", head_files=head_files), "eagle3", target)
    width = tensors["fc.weight"].shape[1]
    for ids, states, rows, nodes in steps(head, width):
        for path, feature in nodes[::3]:
            plain, logits = plain_heads.eagle3(tensors, target.embedding, config, ids, states, path)
            close(feature, plain[-1])
            close(head.logits(feature), logits[-1])
            close(rows, torch.stack(plain[: len(ids)])[-len(rows) :])
    draft_ids = torch.arange(tiny_heads.DRAFT_VOCAB)
    close(head.to_target_ids(draft_ids), tensors["t2d"].nonzero()[:, 0])


def check_hydra(folder, arch, lm_heads=True):
    config, tensors = tiny_heads.hydra(arch)
    if not lm_heads:
        tensors = {key: w for key, w in tensors.items() if not key.startswith("hydra_lm_head.")}
    target = tiny_heads.target()
    head = load(saved(folder, "hydra", head_files=(config, tensors)), "hydra", target)
    prefixed = arch == "prefix-mlp"
    numbers = [1, 3, 5] if prefixed else [0, 1, 2]
    generator = torch.Generator().manual_seed(0)
    head.reserve(20)
    states = torch.empty(0, tiny_heads.HIDDEN, dtype=torch.float64)
    for n in (3, 1, 2):
        new = torch.randn(n, tiny_heads.HIDDEN, dtype=torch.float64, generator=generator)
        states = torch.cat([states, new])
        prefix = head.catch_up(torch.zeros(n, dtype=torch.int64), new)[-1]
        plain = states[-1]
        if prefixed:
            plain = plain_heads.hydra_prefix(tensors, states, tiny_heads.LAYER)
        close(prefix, plain)
        for depth in range(3):
            paths = torch.randint(tiny_heads.VOCAB, (2, depth + 1), generator=generator)
            logits = [
                plain_heads.hydra(tensors, plain, path, target.embedding, numbers, target.head)
                for path in paths.tolist()
            ]
            close(head(prefix, paths), torch.stack(logits))


def check_medusa(folder, n_blocks, lm_heads):
    config, tensors = tiny_heads.medusa(n_blocks=n_blocks, lm_heads=lm_heads)
    name = "medusa_lm_head.pt" if lm_heads else "medusa_lm_head.safetensors"
    tiny_heads.save(folder, config, tensors, name)
    target = tiny_heads.target()
    heads = load(folder, "medusa", target)
    hidden = torch.randn(3, tiny_heads.HIDDEN, dtype=torch.float64)
    ours = heads(hidden)
    assert ours.shape == (3, 5, tiny_heads.VOCAB)
    for row, h in zip(ours, hidden, strict=True):
        close(row, torch.stack(plain_heads.medusa(tensors, h, n_blocks, target.head)))
