"""A pass by one call is the model's own, and a row of it does not depend on the others."""

import numpy as np
import pytest
import torch
from accelerate import hooks
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import visibility
from specbench.kernels import panel_kernels
from specbench.kernels.compiled_call import Segment
from specbench.kernels.compiled_pass import ONE_CALL, CompiledPass
from specbench.models.scores import greedy_ids
from specbench.models.target import Target
from tests.conftest import ARCHITECTURES, VOCAB, side_by_side, tiny_model

pytestmark = pytest.mark.skipif(
    not panel_kernels.available(), reason="torch has another OpenMP library"
)
PROMPT = np.arange(3, 9)
TREE = DraftTree(np.array([5, 6, 7, 8, 9]), np.array([-1, 0, 0, 1, -1]))
# No size is a multiple of a register, heads are one and a quarter, and everything has a bias.
ODD = {
    "vocab_size": 45, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40, "attention_bias": True,
    "mlp_bias": True, "max_position_embeddings": 512, "initializer_range": 0.4,
}  # fmt: skip


def odd_model(dtype: torch.dtype, **numbers):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **ODD | numbers)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


def make_model(architecture: str, dtype: torch.dtype):
    if architecture.startswith("odd"):
        return odd_model(dtype, tie_word_embeddings=architecture == "odd_tied")
    return tiny_model(architecture, dtype=dtype)


def target_of(model, **options) -> Target:
    return Target(model, max_len=64, max_nodes=70, batch=3, packed_bytes=1 << 22, **options)


def in_layers(model) -> Target:
    """Passes through transformers' layers of a model that may be packed."""
    target = target_of(model)
    target.compiled = None
    return target


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "odd", "odd_tied"])
def test_passes_are_the_models_in_float64_as_closely_as_torchs_are(architecture):
    """Logits, hidden states, choices, and the cache, behind which another pass reads."""
    exact = Target(make_model(architecture, torch.float64), max_len=64, max_nodes=70, batch=3)
    model = make_model(architecture, torch.float32)
    model.load_state_dict(exact.model.state_dict())
    ours = target_of(model)
    layered = in_layers(model)
    assert ours.packed_weights["pass"] == ONE_CALL and layered.compiled is None
    layers = (0, 1, -1)
    pass_scores = []
    for target in (exact, ours, layered):
        target.prefill(PROMPT)
        first = target.forward(3, TREE, hidden_layers=layers)
        numbers = [first.logits.clone(), *(first.hidden[i] for i in layers)]
        target.commit(TREE, np.array([0, 2]))  # rows move
        numbers.append(target.forward(4, DraftTree.empty()).logits.clone())
        target.commit(DraftTree.empty(), np.array([], dtype=np.int64))
        if architecture != "mistral_window":  # behind the prompt its window is reached
            grown = target.extend(torch.tensor([5, 6]), None, torch.arange(2))
            numbers.append(grown.logits.clone())
            seen = torch.tensor([[True, False, True, False], [True, True, False, True]])
            grown = target.extend(torch.tensor([7, 8]), seen, torch.tensor([0, 1, 1, 2]))
            numbers.append(grown.logits.clone())
            target.cache.retained = 0
        rows = target.forward(7, side_by_side(np.array([5, 6, 7, 8, 9, 4]), 2))
        numbers.append(rows.logits.clone())
        assert np.array_equal(np.asarray(rows.greedy()), greedy_ids(rows.logits).numpy())
        pass_scores.append([n.double() for n in numbers])
    for expected, one_call, torchs in zip(*pass_scores, strict=True):
        unit = float(expected.abs().max()) * torch.finfo(torch.float32).eps
        allowed = 4 * float((torchs - expected).abs().max()) + 8 * unit
        assert float((one_call - expected).abs().max()) <= allowed


@st.composite
def segments_of_rows(draw):
    """Two texts: rows in their caches, parents of the nodes (-1 is none), held ones first."""
    texts = []
    for _ in range(2):
        past, held = draw(st.integers(0, 40)), draw(st.integers(0, 3))
        rows = draw(st.integers(1, 34))
        seed = draw(st.integers(0, 1 << 30))
        rng = np.random.default_rng(seed)
        parents = np.array([rng.integers(-1, i) if i else -1 for i in range(held + rows)])
        texts.append((past, held, rows, parents))
    return texts


@given(texts=segments_of_rows(), threads=st.integers(1, 3))
def test_rows_depend_on_no_other_row_and_no_other_segment(texts, threads):
    """To the last bit, in any number of threads; and they are what layers give."""
    alone_target, layered, compiled = _targets()
    storage = torch.randn(alone_target.cache.storage.shape, generator=torch.manual_seed(1))
    ids, positions, segments, apart = [], [], [], []
    for text, (past, held, rows, parents) in enumerate(texts):
        tree, depths = visibility(torch.from_numpy(parents))
        visible, depths = tree[1 + held :, 1:], depths[1:] - 1
        tokens = torch.from_numpy(np.arange(rows) * 7 % VOCAB)
        segments.append(Segment(storage, text, past, held, rows, visible))
        ids.append(tokens)
        positions.append(past + depths[-rows:])
        # The same by layers, in batch row 0 of a cache of its own.
        cache = layered.cache
        cache.storage[:, :1] = storage[:, text : text + 1]
        cache.length, cache.retained = past, held
        expected = layered.extend(tokens, visible, depths).logits.clone()
        apart.append(expected)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            both = compiled.run(torch.cat(ids), torch.cat(positions), segments)
            together = both.logits.clone()
            torch.set_num_threads(1)
            for i, segment in enumerate(segments):
                single = compiled.run(ids[i], positions[i], [segment])
                first = 0 if i == 0 else len(ids[0])
                assert torch.equal(single.logits, together[first : first + segment.rows])
                torch.testing.assert_close(single.logits, apart[i], atol=2e-3, rtol=2e-3)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(both.choices, greedy_ids(together).numpy())


_MADE: list = []


def _targets():
    """A target, one whose passes go through the layers, and the call alone; made once."""
    if not _MADE:
        model = tiny_model("qwen2", dtype=torch.float32)
        first = target_of(model)
        length = first.cache.max_len
        _MADE.extend([first, in_layers(model), CompiledPass(model, length, 80)])
    return _MADE


def test_a_chain_is_its_rows_one_by_one_to_the_last_bit():
    target, _, _ = _targets()
    tokens = np.arange(40) % VOCAB
    target.prefill(PROMPT)
    whole = target.forward(3, DraftTree.chain(tokens)).logits.clone()
    for i, token in enumerate([3, *tokens]):
        alone = target.forward(int(token), DraftTree.empty())
        assert torch.equal(alone.logits[0], whole[i])
        target.commit(DraftTree.empty(), np.array([], dtype=np.int64))


def test_logits_stay_while_held_and_their_memory_serves_the_next_pass():
    target, _, _ = _targets()
    target.prefill(PROMPT)
    logits = target.forward(3, TREE).logits
    address, part = logits.data_ptr(), logits[2:4]
    before = part.clone()
    del logits  # a view is held still
    other = target.forward(4, TREE).logits
    assert torch.equal(part, before) and not torch.equal(other[2:4], before)
    del part
    assert target.forward(3, DraftTree.empty()).logits.data_ptr() == address


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_choices_tell_ties_and_what_is_not_finite(bad):
    model = odd_model(torch.float32)
    weight = model.lm_head.weight.data
    weight.zero_()
    weight[7] = weight[40] = torch.linspace(-1, 1, ODD["hidden_size"])  # as large, elsewhere
    if bad is not None:
        weight[44, 0] = bad
    target = target_of(model)
    target.prefill(PROMPT)
    scores = target.forward(3, TREE)
    expected = greedy_ids(scores.logits).numpy()
    assert set(expected.tolist()) <= ({0, 7} if bad is None else {-1, 0, 7})
    assert np.array_equal(scores.greedy(), expected)


class _Doubling(hooks.ModelHook):
    def post_forward(self, module, output):
        return 2 * output


def _hooked(model):
    hooks.add_hook_to_module(model.lm_head, _Doubling())


def _torch_hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda _m, _args, out: 2 * out)


def _gelu(model):
    model.config.hidden_act = "gelu"


@pytest.mark.parametrize("change", [_hooked, _torch_hooked, _gelu])
def test_what_is_not_known_in_whole_goes_through_its_layers(change):
    model = tiny_model("llama", dtype=torch.float32)
    change(model)
    target = target_of(model)
    assert target.packed_weights["pass"] not in (ONE_CALL, None)
    target.prefill(PROMPT)
    assert not isinstance(target.forward(3, TREE).greedy(), np.ndarray)


def test_a_token_outside_the_vocabulary_is_refused_and_reads_no_memory():
    target, _, _ = _targets()
    target.prefill(PROMPT)
    with pytest.raises(IndexError):
        target.extend(torch.tensor([VOCAB]), None, torch.zeros(1, dtype=torch.int64))
