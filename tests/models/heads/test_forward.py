"""Forward passes of trained heads are those of the files' authors, and no mistake stays unseen."""

from dataclasses import replace

import pytest
import torch

from specbench.models.heads import eagle, eagle3, layer_shape, row_cache
from tests.models.heads import parity, tiny_heads


@pytest.mark.parametrize(("n_blocks", "lm_heads"), [(1, True), (1, False), (2, True), (2, False)])
def test_medusa_is_its_plain_restatement(tmp_path, n_blocks, lm_heads):
    parity.check_medusa(tmp_path, n_blocks, lm_heads)


@pytest.mark.parametrize("lm_heads", [True, False])
@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_hydra_is_its_plain_restatement(tmp_path, arch, lm_heads):
    parity.check_hydra(tmp_path, arch, lm_heads=lm_heads)


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


# -- mistakes that a cache and a tree make possible, each planted ---------------------------------

CHECKS = {
    "hydra": lambda folder: parity.check_hydra(folder, "prefix-mlp"),
    "eagle": parity.check_eagle,
    "eagle3": lambda folder: parity.check_eagle3(folder, tiny_heads.eagle3()),
}
MISTAKES = []


def mistake(owner, name, *families):
    """Register what stands in for ``owner.name``, and gets the right one first."""

    def register(wrong):
        named = [pytest.param(f, owner, name, wrong, id=f"{f}-{wrong.__name__}") for f in families]
        MISTAKES.extend(named)
        return wrong

    return register


@mistake(eagle.EagleHead, "catch_up", "eagle")
def skipped_first_entry(catch_up, self, ids, features):
    if self.cache.length:
        return catch_up(self, ids, features)
    out = catch_up(self, ids[1:], features[1:])
    return torch.cat([out[:1], out])


@mistake(row_cache.RowCache, "committed_rows", "eagle")
def kept_guessed_entries(committed_rows, self, n):
    if self._cache.retained:
        self._cache.commit(None, 1)  # the first guessed node's
    return committed_rows(self, n)


@mistake(layer_shape.LayerShape, "inverse_frequencies", "eagle", "eagle3", "hydra")
def another_theta(frequencies, self):
    return frequencies(replace(self, rope_theta=10000.0))


@mistake(row_cache.RowCache, "_rows", "eagle", "eagle3")
def node_position_one_on(rows, self, positions, visible, parents=None, *more):
    return rows(self, positions + (parents is not None), visible, parents, *more)


@mistake(row_cache.RowCache, "_rows", "eagle")
def siblings_seen(rows, self, positions, visible, parents=None, *more):
    seen = visible if parents is None else torch.ones_like(visible)
    return rows(self, positions, seen, parents, *more)


@mistake(eagle3.Eagle3Head, "step", "eagle3")
def normed_feedback(step, self, *rows):
    return self.norm(step(self, *rows))


@pytest.mark.parametrize(("family", "owner", "name", "wrong"), MISTAKES)
def test_a_mistake_does_not_pass(tmp_path, monkeypatch, family, owner, name, wrong):
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: wrong(right, *args, **options))
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        CHECKS[family](tmp_path)


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
    rounded = parity.load(tmp_path, "eagle", low, dtype)
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
    for off in ((2, 4, 6), (4, 6, 8)):
        caplog.clear()
        assert eagle3.checked_ids(head, states, ids, off) == right
        assert "layer_ids=[3, 5, 7]" in caplog.text
    caplog.clear()
    assert eagle3.checked_ids(head, states, ids, right) == right
    assert not caplog.text


def test_default_layer_ids_are_the_authors():
    assert eagle3.default_ids(32) == (2, 16, 29)
    assert eagle3.default_ids(40) == (2, 20, 37)
    assert eagle3.default_ids(30) == (2, 15, 27)
