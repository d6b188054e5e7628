"""Trees of the head methods restated: from the keys of the heads' files, node by node.

A tree is a list of paths of ids. Guesses come from ``tests.models.heads.plain_heads``, which
recomputes each branch from all committed rows.
"""

import functools

import torch

from tests.models.heads import plain_heads
from tests.models.heads.tiny_heads import LAYER


def ranked(logits, ids=None):
    """Return ``(id, log-probability)``, the likeliest first; ``ids`` names the logits' ids."""
    gained = torch.log_softmax(logits, -1).tolist()
    order = sorted(range(len(gained)), key=lambda i: -gained[i])
    return [(i if ids is None else int(ids[i]), gained[i]) for i in order]


def static_tree(guess, rank_paths):
    """Fill ``rank_paths``; ``guess(path)`` returns the `ranked` children of a path of ids."""
    ids_of, guess = {(): ()}, functools.cache(guess)
    for ranks in rank_paths:
        above = ids_of[ranks[:-1]]
        ids_of[ranks] = (*above, guess(above)[ranks[-1]][0])
    return [ids_of[ranks] for ranks in rank_paths]


def dynamic_tree(guess, total, depth, top_k):
    """Grow EAGLE-2's tree, the best node first."""
    nodes = [((i,), gained) for i, gained in guess(())[:top_k]]
    layer = list(nodes)
    for _ in range(depth):
        below = [
            ((*path, i), score + gained)
            for path, score in layer
            for i, gained in guess(path)[:top_k]
        ]
        nodes += below
        layer = sorted(below, key=lambda node: -node[1])[:top_k]
    return [path for path, _ in sorted(nodes, key=lambda node: -node[1])[: total - 1]]


def eagle_guess(head, ends, ids, states):
    config, tensors = head

    def guess(path):
        outs = plain_heads.eagle(tensors, ends.embedding, config, ids, states, path)
        return ranked(ends.head @ outs[-1])

    return guess


def eagle3_guess(head, ends, ids, states):
    config, tensors = head
    target_ids = [i for i, in_draft in enumerate(tensors["t2d"].tolist()) if in_draft]

    def guess(path):
        _, logits = plain_heads.eagle3(tensors, ends.embedding, config, ids, states, path)
        return ranked(logits[-1], target_ids)

    return guess


def block_guess(head, ends, ids, states):
    """Of DFlash and DSpark; a chain is `static_tree` of the first ranks."""
    config, tensors = head
    root, infill = int(ids[-1]), "dflash_config" in config
    out = plain_heads.block(tensors, ends.embedding, config, root, states, config["block_size"])
    out = out[infill:]

    def guess(path):
        read, logits = out[: len(path) + 1], ends.head @ out[len(path)]
        if "markov_head_type" in config:
            kind = config["markov_head_type"]
            logits = logits + plain_heads.markov(tensors, kind, [root, *path], read)
        return ranked(logits)

    return guess


def medusa_guess(head, ends, ids, states):
    _, tensors = head
    logits = plain_heads.medusa(tensors, states[-1], 1, ends.head)
    return lambda path: ranked(logits[len(path)])


def hydra_guess(head, ends, ids, states):
    _, tensors = head
    prefix = plain_heads.hydra_prefix(tensors, states, LAYER)

    def guess(path):
        read = [int(ids[-1]), *path]
        return ranked(
            plain_heads.hydra(tensors, prefix, read, ends.embedding, [1, 3, 5], ends.head)
        )

    return guess
