"""On a GPU, real or pretended: all kinds of methods decode as plain decoding does on the CPU."""

import numpy as np
import pytest
import torch

from methods.random_drafts import RandomDrafts
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DraftTree
from specbench.decoding.verify import MatchVerifier
from specbench.errors import ConfigurationError, DeviceLost
from specbench.models.draft.loading import _placed
from specbench.models.static_pass import StaticPass
from specbench.models.target import Target
from tests.conftest import VOCAB, side_by_side, tiny_model
from tests.gpu_rules import decoders
from tests.gpu_rules.decoders import DEVICE, DRAFTED, FUSED, HEADS, PROMPT, SECOND, TEXT, decode

DRAFTS_COMPARED = {*HEADS, "token_recycling", "sps", "opt_tree"}


@pytest.fixture(scope="module")
def plain():
    return decoders.on_the_cpu()


def test_methods_that_draft_text(gpu, plain):
    target = decoders.target(max_nodes=80)
    for name, make in TEXT.items():
        assert decode(target, make(), turns=2).output_ids == plain, name
    assert not target.reasons


def test_methods_with_a_draft_model(gpu, plain):
    target = decoders.target(max_nodes=31)
    for name in DRAFTED.keys() - DRAFTS_COMPARED:
        drafter = DRAFTED[name]()
        draft = decoders.draft(drafter)
        assert decode(target, drafter, turns=2, draft_model=draft).output_ids == plain, name
    assert not target.reasons


@pytest.mark.parametrize("name", sorted(DRAFTS_COMPARED))
def test_captured_drafts_are_those_of_the_cpu(gpu, plain, tmp_path, name):
    """The text is the target's whatever a head drafts, so trees are compared."""
    make = (HEADS | TEXT | DRAFTED)[name]
    files = {"heads": decoders.heads(tmp_path)} if name in HEADS else {}
    sizes = {"max_nodes": max(make().needs.max_nodes, 5), "max_len": 128}
    target = decoders.target(**sizes)
    # Of the same layers: the hidden states of stock ones are rounded otherwise.
    uncaptured = FUSED(tiny_model("llama"), capture=False, **sizes)

    def drafts(where, drafter, device):
        given = {"draft_model": decoders.draft(drafter, device)} if name in DRAFTED else files
        return decoders.drafts(where, drafter, plain, **given)

    captured, drafter = make(), make()
    found = drafts(target, captured, DEVICE)
    wanted = drafts(uncaptured, drafter, "cpu")
    assert len(found) == len(wanted) > 6
    for (*tree, said), (*other, other_said) in zip(found, wanted, strict=True):
        assert tree == other
        assert said is other_said is None or np.allclose(said, other_said)
    if name in HEADS:
        launched = captured.report()["launched_drafts"]
        assert launched <= len(found) / 2  # paths that no head drafts
        assert not drafter.report()


@pytest.mark.parametrize(
    ("overlap", "names"),
    [("stream", ["pearl", "card"]), ("thread", ["card"]), ("serial", ["pearl", "sps"])],
)
def test_drafting_on_the_second_device(gpu, plain, overlap, names):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    target = decoders.target(max_nodes=31)
    for name in names:
        drafter = DRAFTED[name]()
        draft = decoders.draft(drafter, SECOND)
        found = decode(target, drafter, turns=2, draft_model=draft, overlap=overlap)
        assert found.output_ids == plain, name
    assert not target.reasons


@pytest.mark.parametrize("architecture", ["mistral_window", "qwen3"])
def test_windows_and_the_batch_layout(gpu, architecture):
    """Drafts of several rows, a text longer than a window, and a tree that no bucket holds."""
    wanted = Target(tiny_model(architecture), max_len=128, max_nodes=150, batch=4)
    target = FUSED(
        tiny_model(architecture).to(DEVICE), max_len=128, max_nodes=150, batch=4, layouts=[(4, 4)]
    )
    random = np.random.default_rng(0)
    trees = [
        side_by_side(random.integers(3, VOCAB, 12), 3),
        DraftTree.chain(random.integers(3, VOCAB, 6)),
        DraftTree(random.integers(3, VOCAB, 140), np.repeat([-1, 0], 70)),
    ]
    for each in (wanted, target):
        each.prefill(PROMPT)
    for tree in trees:
        scores = [each.forward(5, tree) for each in (wanted, target)]
        assert torch.equal(*(torch.as_tensor(s.greedy()).cpu() for s in scores))
        for each in (wanted, target):
            each.commit(tree, np.arange(2))
    assert list(target.reasons) == ["141 rows"]


def test_sampled_texts_are_those_of_the_cpu(gpu):
    """With a verifier that draws, the host decides and the rows are moved behind the pass."""
    texts = []
    for target in (
        Target(tiny_model("llama"), max_len=128, max_nodes=31),
        decoders.target(max_nodes=31, commits=False),
    ):
        verifier = MatchVerifier(Sampling(1.0))
        drafter = RandomDrafts(name="random_drafts", n_nodes=20)
        texts.append(decode(target, drafter, verifier=verifier).output_ids)
    assert texts[0] == texts[1]


def test_what_cannot_be_captured_runs_eagerly_and_says_why(gpu, plain, monkeypatch):
    monkeypatch.setattr(StaticPass, "device_part", lambda self: self.numbers.cpu())
    target = decoders.target(max_nodes=20)
    monkeypatch.undo()
    assert not target.graphs
    assert set(target.reasons) == {f"1 x {n} rows, 256 keys" for n in (1, 2, 4, 8, 16, 32)}
    assert decode(target, TEXT["random_drafts"]()).output_ids == plain


def test_a_capture_that_loses_the_gpu_is_not_passed_over(pretended, monkeypatch):
    """All that is captured behind it would fail, too, and be blamed."""

    def lost(self):
        if self.rows == 4:
            pretended.lost = "CUDA error: an illegal memory access was encountered"
        return real(self)

    real = StaticPass.device_part
    monkeypatch.setattr(StaticPass, "device_part", lost)
    said = r"graph of 1 x 4 rows, 256 keys failed with .*illegal.* ran 1 x 2 rows, 256 keys"
    with pytest.raises(DeviceLost, match=said):
        decoders.target(max_nodes=20)


@pytest.mark.parametrize("said", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_graph_without_memory_says_what_to_type(gpu, said, monkeypatch):
    def full(self):
        raise RuntimeError(said)

    monkeypatch.setattr(StaticPass, "device_part", full)
    with pytest.raises(ConfigurationError, match=r"no memory left for the CUDA graph of 1 x 1 row"):
        decoders.target()


def test_a_draft_s_device_that_is_not_there_is_the_target_s(gpu, caplog):
    target = decoders.target(engine=Target)
    assert _placed("cuda", "cuda", target) == (torch.device(DEVICE), 1)
    assert _placed("cuda:77", "cuda:77", target) == (torch.device(DEVICE), 2)
    assert "cuda:77 is not there" in caplog.text
