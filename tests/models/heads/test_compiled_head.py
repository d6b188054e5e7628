"""A head's layers in one compiled call guess what they guess layer by layer."""

import copy
from types import SimpleNamespace

import pytest
import torch

from specbench.decoding.protocols import run_to_completion
from specbench.kernels import panel_kernels
from specbench.kernels.packed_linear import pack_linears
from specbench.models.heads import decoder
from specbench.models.heads.dflash import BlockHead, read_config
from specbench.models.heads.eagle import EagleHead
from specbench.models.heads.eagle3 import Eagle3Config, Eagle3Head
from specbench.models.heads.hydra_heads import HydraHeads
from specbench.models.heads.layer_shape import LayerShape

pytestmark = pytest.mark.skipif(not panel_kernels.available(), reason="no panels here")

_VOCAB = 50


def _head(kind, width=48, **more):
    torch.manual_seed(1)
    shape = LayerShape(width, 2 * width + 5, 6, 2, 8, 1e-5, 10_000.0, **more)
    ends = SimpleNamespace(embedding=torch.randn(_VOCAB, width), packed=None)
    if kind == "eagle":
        head = EagleHead(ends, shape)
    elif kind == "block":
        config = {"architectures": ["DFlashDraftModel"], "block_size": 4, "mask_token_id": 0,
                  "num_hidden_layers": 2, "target_layer_ids": [1]}  # fmt: skip
        ends.lm_head = ends.embedding
        head = BlockHead(ends, shape, read_config(config, "", 8))
    elif kind == "hydra":
        head = HydraHeads(ends, n_heads=1, n_blocks=1, prefix=shape)
    else:
        states = dict(draft_vocab_size=_VOCAB, target_hidden_size=width)
        head = Eagle3Head(ends, Eagle3Config(shape=shape, n_layers=int(kind[-1]), **states))
    for name, weight in head.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    head.eval().requires_grad_(False)
    pack_linears(head)
    return head, 3 * width if "eagle3" in kind else width


def _rows(n, width):
    return torch.randint(0, _VOCAB, (n,)), torch.randn(n, width)


def _guesses(head, width, compiled):
    """Of a prompt, of committed rows, of a tree that grows in two passes, and of rows again."""
    head.reserve(60, 12)
    assert head.compiled is not None
    if not compiled:
        head.compiled, head.cache.few = None, 0
    torch.manual_seed(2)
    size = head.shape.hidden_size

    if isinstance(head, BlockHead):
        for n in (9, 3):
            head.catch_up(*_rows(n, width))
            block = run_to_completion(head.guessing(torch.tensor([1]), 4))
        return block
    features = [head.catch_up(*_rows(n, width)) for n in (9, 3, 1)]
    features.append(head.extend(*_rows(3, size), torch.tensor([-1, -1, -1])))
    features.append(head.extend(*_rows(4, size), torch.tensor([0, 2, 2, 1])))
    features.append(head.catch_up(*_rows(2, width)))
    return torch.cat(features)


@pytest.mark.parametrize(
    ("more", "threads"), [({}, 1), ({"qkv_bias": True, "o_bias": True, "head_norms": True}, 2)]
)
@pytest.mark.parametrize("kind", ["block", "eagle", "eagle3 of 1", "eagle3 of 2", "hydra"])
def test_guesses_are_those_of_the_layers(kind, more, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        head, width = _head(kind, **more)
        with torch.inference_mode():
            compiled_rows, other = (_guesses(head, width, compiled) for compiled in (True, False))
    finally:
        torch.set_num_threads(before)
    assert float(compiled_rows.abs().max()) > 0.5
    torch.testing.assert_close(compiled_rows, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3 of 1"])
def test_texts_in_one_call_are_each_as_alone(kind, monkeypatch):
    """Also where one text's rows are too many for a call, and more rows than were reserved for."""
    monkeypatch.setattr(decoder, "MOST_ROWS", 4)
    head, width = _head(kind)
    heads = [head, copy.copy(head), copy.copy(head)]
    counts = (2, 9, 3)
    with torch.inference_mode():
        for part in heads:
            part.reserve(60, 4)
            part.cache.few = 4
        torch.manual_seed(3)
        batch = [_rows(n, width) for n in counts]
        alone = [part.catch_up(*rows) for part, rows in zip(heads, batch, strict=True)]
        for part in heads:
            part.cache.truncate(0)
        works = [part.catching_up(*rows) for part, rows in zip(heads, batch, strict=True)]
        calls = [next(work) for work in works]
        if kind != "eagle":  # the states become features first
            calls = [
                work.send(feature)
                for work, feature in zip(
                    works, calls[0].answer([c.request for c in calls]), strict=True
                )
            ]
        for chosen in ([0, 1, 2], [0, 2]):
            for part in heads:
                part.cache.truncate(0)
            answers = calls[0].answer([calls[i].request for i in chosen])
            for i, answer in zip(chosen, answers, strict=True):
                assert torch.equal(answer, alone[i])


def test_a_short_text_s_head_has_room_for_the_keys_of_a_longer_text(monkeypatch):
    """The first text's head runs the call of all: nothing may be written behind its scratch."""
    behind = []
    real = torch.empty

    def with_bytes_behind(*sizes, **more):
        if more.get("dtype") is not torch.uint8:
            return real(*sizes, **more)
        (size,) = sizes
        filler = torch.full((size + 1_000_000,), 7, dtype=torch.uint8)
        behind.append(filler[size:])
        return filler[:size]

    monkeypatch.setattr(torch, "empty", with_bytes_behind)
    head, width = _head("eagle")
    texts = [head, copy.copy(head)]
    with torch.inference_mode():
        for part, room in zip(texts, (60, 3000), strict=True):
            part.reserve(room, 4)
        torch.manual_seed(3)
        texts[1].catch_up(*_rows(2900, width))
        batch = [_rows(2, width), _rows(3, width)]
        alone = [part.catch_up(*rows) for part, rows in zip(texts, batch, strict=True)]
        texts[0].cache.truncate(0)
        texts[1].cache.truncate(2900)
        calls = [next(part.catching_up(*rows)) for part, rows in zip(texts, batch, strict=True)]
        answers = calls[0].answer([call.request for call in calls])
    for joint, other in zip(answers, alone, strict=True):
        torch.testing.assert_close(joint, other, atol=2e-5, rtol=2e-5)
    assert behind and all((rest == 7).all() for rest in behind)


def test_a_window_or_a_part_that_is_not_packed_keeps_the_layers():
    head, _ = _head("eagle", window=4)
    head.reserve(20, 2)
    assert head.compiled is None and head.cache.few == 0
    head, _ = _head("eagle")
    head.fc = torch.nn.Linear(96, 48)
    head.reserve(20, 2)
    assert head.compiled is None
