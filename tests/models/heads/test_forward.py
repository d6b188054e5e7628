"""Forward passes of trained heads are those of the files' authors, and no mistake stays unseen."""

import pytest
import torch
from torch import nn

from specbench.models.heads import (
    decoder,
    eagle,
    eagle3,
    hydra_heads,
    layer_ids,
    layer_shape,
    medusa,
)
from tests.models.heads import parity, tiny_heads


@pytest.mark.parametrize(("n_blocks", "own"), [(1, True), (1, False), (2, True), (2, False)])
def test_medusa_is_its_plain_restatement(tmp_path, n_blocks, own):
    parity.check_medusa(tmp_path, n_blocks, own)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_hydra_is_its_plain_restatement(tmp_path, arch, own):
    parity.check_hydra(tmp_path, arch, own=own)


@pytest.mark.parametrize(("bias", "qkv_bias"), [(True, False), (False, False), (True, True)])
def test_eagle_is_its_plain_restatement(tmp_path, bias, qkv_bias):
    parity.check_eagle(tmp_path, bias=bias, qkv_bias=qkv_bias)


EAGLE3 = {
    "authors": tiny_heads.eagle3,
    "speculators": tiny_heads.speculators,
    "qwen3": lambda: tiny_heads.speculators("qwen3", norm_before_residual=True),
    "biases": lambda: tiny_heads.speculators("biased"),
    "three layers": lambda: tiny_heads.speculators(n_layers=3),
    "norm before fc, four states": lambda: tiny_heads.speculators(
        ids=(1, 3, 5, 7), norm_before_fc=True
    ),
    "norm of each state, normed output": lambda: tiny_heads.speculators(
        fc_norm=True, norm_output=True
    ),
}


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_is_its_plain_restatement(tmp_path, name):
    parity.check_eagle3(tmp_path, EAGLE3[name]())


def test_a_sliding_window_hides_what_is_behind_it(tmp_path):
    config, tensors = tiny_heads.speculators()
    config["transformer_layer_config"]["sliding_window"] = 3
    parity.check_eagle3(tmp_path, (config, tensors))


# -- mistakes of published loaders, each planted ------------------------------------------------


def planted(monkeypatch, owner, name, make):
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def added_input_norm(patch):
    def make(init):
        def changed(self, shape, *, input_norm=True, layer=0):
            init(self, shape, input_norm=input_norm, layer=layer)
            if not input_norm:
                self.input_layernorm = nn.RMSNorm(shape.hidden_size, elementwise_affine=False)

        return changed

    planted(patch, decoder.DecoderLayer, "__init__", make)


def added_final_norm(patch):
    norm = nn.RMSNorm(tiny_heads.HIDDEN, elementwise_affine=False)
    planted(patch, eagle.EagleHead, "logits", lambda logits: lambda self, x: logits(self, norm(x)))


def lost_residual(patch):
    planted(patch, decoder.DecoderLayer, "forward",
            lambda _: lambda self, x, rows: self.mlp(self.post_attention_layernorm(
                x + self.self_attn(self.input_layernorm(x), rows))))  # fmt: skip


def skipped_first_entry(patch):
    def make(catch_up):
        def changed(self, ids, features):
            if self.cache.length:
                return catch_up(self, ids, features)
            out = catch_up(self, ids[1:], features[1:])
            return torch.cat([out[:1], out])

        return changed

    planted(patch, eagle.EagleHead, "catch_up", make)


def kept_guessed_entries(patch):
    def make(committed_rows):
        def changed(self, n):
            if self._cache.retained:
                self._cache.commit(None, 1)  # the first guessed node's
            return committed_rows(self, n)

        return changed

    planted(patch, decoder.RowCache, "committed_rows", make)


def features_of_the_next_token(patch):
    planted(patch, eagle.EagleHead, "catch_up",
            lambda catch_up: lambda self, ids, f: catch_up(self, ids, f.roll(-1, 0)))  # fmt: skip


def swapped_inputs(patch):
    real = torch.cat
    patch.setattr(eagle.torch, "cat", lambda xs, dim=0: real(xs[::-1] if dim == -1 else xs, dim))


def another_theta(patch):
    planted(patch, layer_shape, "_rope", lambda _: lambda config, where: (10000.0, None))


def node_position_one_on(patch):
    def make(rows):
        def changed(self, positions, visible, parents=None, keys=None):
            moved = positions if parents is None else positions + 1
            return rows(self, moved, visible, parents, keys)

        return changed

    planted(patch, decoder.RowCache, "_rows", make)


def siblings_seen(patch):
    def make(rows):
        def changed(self, positions, visible, parents=None, keys=None):
            seen = visible if parents is None else torch.ones_like(visible)
            return rows(self, positions, seen, parents, keys)

        return changed

    planted(patch, decoder.RowCache, "_rows", make)


@pytest.mark.parametrize(
    "mistake",
    [
        added_input_norm,
        added_final_norm,
        lost_residual,
        skipped_first_entry,
        kept_guessed_entries,
        features_of_the_next_token,
        swapped_inputs,
        another_theta,
        node_position_one_on,
        siblings_seen,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_eagle_does_not_pass(tmp_path, monkeypatch, mistake):
    parity.check_eagle(tmp_path)
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        parity.check_eagle(tmp_path, save=False)


def normed_residual(patch):
    def make(init):
        def changed(self, shape, *, norm_before_residual):
            init(self, shape, norm_before_residual=True)

        return changed

    planted(patch, eagle3.JoiningLayer, "__init__", make)


def normed_feedback(patch):
    planted(patch, eagle3.Eagle3Head, "_run",
            lambda run: lambda self, *rows: self.norm(run(self, *rows)))  # fmt: skip


def norm_before_lm_head_missing(patch):
    patch.setattr(eagle3.Eagle3Head, "logits", lambda self, x: self.lm_head(x))


def states_from_the_top(patch):
    planted(patch, eagle3.Eagle3Head, "_feature", lambda join: lambda self, x: join(
        self, torch.cat(x.chunk(3, dim=-1)[::-1], dim=-1)))  # fmt: skip


def offsets_as_ids(patch):
    patch.setattr(eagle3, "_target_ids", lambda found, draft, vocab: found.tensors["d2t"])


@pytest.mark.parametrize(
    "mistake",
    [
        normed_residual,
        normed_feedback,
        norm_before_lm_head_missing,
        states_from_the_top,
        offsets_as_ids,
        another_theta,
        node_position_one_on,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_eagle3_does_not_pass(tmp_path, monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        parity.check_eagle3(tmp_path, tiny_heads.eagle3())


def no_final_norm(patch):
    planted(patch, hydra_heads.PrefixLayer, "__init__", lambda init: lambda self, shape: (
        init(self, shape), setattr(self, "norm", Unnormed(shape.hidden_size)))[0])  # fmt: skip


class Unnormed(nn.RMSNorm):
    def forward(self, x):
        return x * self.weight


def path_from_the_node_up(patch):
    planted(patch, hydra_heads.HydraHeads, "forward",
            lambda forward: lambda self, g, paths: forward(self, g, paths.flip(1)))  # fmt: skip


def first_residual_dropped(patch):
    def make(init):
        def changed(self, depth, hidden, vocab, n_blocks):
            init(self, depth, hidden, vocab, n_blocks)
            self.first_residual.forward = lambda z: 0 * z[:, :hidden]

        return changed

    planted(patch, hydra_heads.HydraHead, "__init__", make)


def block_run_once(patch):
    planted(patch, hydra_heads.HydraHead, "__init__", lambda init: lambda self, d, h, v, n: (
        init(self, d, h, v, n), setattr(self, "_repeats", 1))[0])  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [
        no_final_norm,
        path_from_the_node_up,
        first_residual_dropped,
        block_run_once,
        another_theta,
        lost_residual,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_hydra_does_not_pass(tmp_path, monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        parity.check_hydra(tmp_path, "prefix-mlp")


def heads_in_another_order(patch):
    def make(forward):
        return lambda self, x, n_heads=None: forward(self, x).roll(1, dims=1)[:, :n_heads]

    planted(patch, medusa.MedusaHeads, "forward", make)


def norm_before_the_block(patch):
    norm = nn.RMSNorm(tiny_heads.HIDDEN, elementwise_affine=False)
    planted(patch, medusa.MedusaHeads, "forward",
            lambda forward: lambda self, x, n=None: forward(self, norm(x), n))  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [heads_in_another_order, norm_before_the_block],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_medusa_does_not_pass(tmp_path, monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        parity.check_medusa(tmp_path, n_blocks=2, own=True)


# -- edges -----------------------------------------------------------------------------------------


def made_eagle(folder, **kwargs):
    head = parity.load(parity.saved(folder, "eagle"), "eagle")
    head.reserve(**kwargs)
    return head


def test_rows_and_nodes_beyond_the_cache_are_refused(tmp_path):
    head = made_eagle(tmp_path, max_len=2, max_nodes=1)
    features = torch.zeros(3, tiny_heads.HIDDEN, dtype=torch.float64)
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="3 rows exceed the 2"):
        head.catch_up(ids, features)
    head.catch_up(ids[:2], features[:2])
    with pytest.raises(ValueError, match="2 nodes exceed the 1"):
        head.extend(ids[:2], features[:2], torch.tensor([-1, -1]))
    with pytest.raises(ValueError, match="parent"):
        head.extend(ids[:1], features[:1], torch.tensor([0]))


def test_a_shorter_text_begins_where_the_old_one_agrees(tmp_path):
    head = made_eagle(tmp_path, max_len=8, max_nodes=2)
    features = torch.randn(6, tiny_heads.HIDDEN, dtype=torch.float64)
    ids = torch.arange(6)
    whole = head.catch_up(ids, features)
    head.extend(ids[:1], whole[-1:], torch.tensor([-1]))
    head.cache.truncate(4)
    parity.close(head.catch_up(ids[4:], features[4:]), whole[4:])


def test_states_of_another_width_are_refused(tmp_path):
    head = parity.load(parity.saved(tmp_path, "eagle3"), "eagle3")
    head.reserve(4, 1)
    with pytest.raises(ValueError, match="24 wide; the head joins 36"):
        head.catch_up(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 24, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_runs_in_the_targets_dtype(tmp_path, dtype):
    ends = tiny_heads.target()
    exact = parity.load(parity.saved(tmp_path, "eagle"), "eagle", ends)
    low = tiny_heads.Ends(ends.embedding.to(dtype), ends.head.to(dtype))
    rounded = eagle.load(tmp_path, low, dtype=dtype, device=torch.device("cpu"))
    features = torch.randn(5, tiny_heads.HIDDEN, dtype=torch.float64)
    outs = []
    for head, like in ((exact, torch.float64), (rounded, dtype)):
        head.reserve(8, 2)
        out = head.catch_up(torch.arange(5), features.to(like))
        node = head.extend(torch.tensor([3]), out[-1:], torch.tensor([-1]))
        assert node.dtype == like
        outs.append(head.logits(torch.cat([out, node])).double())
    scale = float(outs[0].abs().max())
    assert float((outs[0] - outs[1]).abs().max()) < 30 * torch.finfo(dtype).eps * scale


def test_a_head_that_was_trained_on_the_next_layer_is_noticed(tmp_path, caplog):
    """Of a text whose next tokens the states of layers 3, 5, 7 alone give away."""
    ends = tiny_heads.target()
    head = parity.load(parity.saved(tmp_path, "eagle3"), "eagle3", ends)
    head.reserve(40, 1)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(11, 32, tiny_heads.HIDDEN, dtype=torch.float64, generator=generator)
    ids = torch.randint(tiny_heads.VOCAB, (32,), generator=generator)
    right = (3, 5, 7)
    joined = torch.cat([states[i] for i in right], dim=-1)
    for at in range(len(ids) - 2):  # its guess is the text, one token after the other
        head.cache.truncate(0)
        feature = head.catch_up(ids[1 : at + 2], joined[: at + 1])[-1]
        ids[at + 2] = head.to_target_ids(head.logits(feature).argmax(-1))
    assert layer_ids.agreement(head, states, ids, right) == 1.0
    for off in ((2, 4, 6), (4, 6, 8)):
        caplog.clear()
        assert layer_ids.check(head, states, ids, off) == right
        assert "layer_ids=[3, 5, 7]" in caplog.text
    caplog.clear()
    assert layer_ids.check(head, states, ids, right) == right
    assert not caplog.text


def test_default_layer_ids_are_the_authors():
    assert layer_ids.default_ids(32) == (2, 16, 29)
    assert layer_ids.default_ids(40) == (2, 20, 37)
    assert layer_ids.default_ids(30) == (2, 15, 27)
