"""A draft with another tokenizer: what both have is drafted, what it lacks is read in pieces."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from methods.opt_tree import OptTree
from methods.pearl import Pearl
from methods.sps import Sps
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import GREEDY, Sampling
from specbench.decoding.structs import DecodeState, DraftContext
from specbench.models.draft.model import DraftModel
from specbench.models.draft.vocabulary import shared_vocabulary, token_texts
from specbench.models.target import Target
from tests.conftest import engine, tiny_model
from tests.models.test_target import TOLERANCE, plain_logits

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(merges, *, turned=0, left_out=()):
    """A byte-level tokenizer; ``turned`` moves its ids, ``left_out`` are bytes it lacks."""
    signs = [c for c in ALPHABET if c not in left_out]
    spellings = [*signs, *(a + b for a, b in merges)]
    spellings = [*spellings[turned:], *spellings[:turned]]
    vocab = {"<unk>": 0, "</s>": 1} | {word: i + 2 for i, word in enumerate(spellings)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def metaspace():
    """As Llama's: a sign for a space, and bytes spelled."""
    spellings = ["▁", "t", "h", "e", "th", "▁the", *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {"<unk>": 0, "</s>": 1} | {word: i + 2 for i, word in enumerate(spellings)}
    merges = [("t", "h")]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


TARGET = byte_level([("t", "h"), ("th", "e"), ("Ġ", "a"), ("a", "t"), ("at", "at")])
# It shares "th" and "Ġa", lacks "the", "at" and "atat", and has "he" for itself.
DRAFT = byte_level([("t", "h"), ("Ġ", "a"), ("h", "e")], turned=37)
SIZES = {"target_vocab": len(TARGET) + 3, "draft_vocab": len(DRAFT) + 5}  # padded heads
SHARED = shared_vocabulary(TARGET, DRAFT, **SIZES)


@pytest.mark.parametrize("draft", [DRAFT, metaspace(), byte_level([], left_out=("a",))])
def test_shared_ids_spell_the_same_and_all_others_are_read_in_pieces(draft):
    sizes = SIZES | {"draft_vocab": len(draft)}
    shared = shared_vocabulary(TARGET, draft, **sizes)
    ours, theirs = token_texts(TARGET), token_texts(draft)
    for draft_id, target in enumerate(shared.ids.tolist()):
        assert target < 0 or theirs[draft_id] == ours[target]
    partners = set(shared.ids[shared.ids >= 0].tolist())
    common = set(ours.values()) & set(theirs.values())
    assert {ours[i] for i in partners} == common and len(partners) == len(common) > 250
    lacking = b"a" if not any(text == (b"a", False) for text in theirs.values()) else b""
    for target, (text, _) in ours.items():
        read = shared.expand(np.array([target]))
        if text not in (b"a", b" a") or not lacking:
            assert b"".join(theirs[i][0] for i in read.tolist()) == text.replace(lacking, b"")
        assert len(read) == 1 or target not in partners
    whole = np.array(list(ours))
    pieces = [shared.expand(whole[i : i + 1]) for i in range(len(whole))]
    assert shared.expand(whole).tolist() == np.concatenate(pieces).tolist()
    assert shared.expand(whole[:0]).tolist() == []


def test_with_one_way_of_writing_bytes_they_are_those_of_transformers():
    theirs = AssistantToTargetTranslator(TARGET, DRAFT, SIZES["target_vocab"])
    draft_ids = {int(t): draft_id for draft_id, t in enumerate(SHARED.ids.tolist()) if t >= 0}
    assert draft_ids == theirs.target_to_assistant_input_ids


def draft_of(network, shared, nodes=40):
    draft = Target(network, max_len=300 + nodes, max_nodes=nodes)
    return DraftModel(draft, target_vocab=SIZES["target_vocab"], shared=shared, max_nodes=nodes)


def unlike():
    """A draft of the other vocabulary that knows nothing of the target."""
    return draft_of(tiny_model("llama", vocab_size=SIZES["draft_vocab"], seed=1), SHARED)


def test_its_logits_are_those_behind_its_own_reading_of_the_text():
    draft = unlike()
    text = np.array(TARGET.encode("that the atat at a thethe"), dtype=np.int64)
    assert len(SHARED.expand(text)) > len(text) + 3
    never = SHARED.ids < 0
    draft.begin(text[:4])
    for length in (4, 7, len(text)):
        logits = draft.catch_up(text[:length], draft_vocab=True)
        expected = plain_logits(draft.target, SHARED.expand(text[:length]).tolist())[-1]
        assert torch.isneginf(logits[never]).all()
        assert (logits - expected)[~never].abs().max() < TOLERANCE
    # Nodes are tokens that both have; committed, they are not read again.
    nodes = np.array([int(i) for i in SHARED.ids[SHARED.ids >= 0][[3, 9]]])
    row = draft.extend(nodes, np.array([-1, 0]), draft_vocab=True)[1]
    both = np.concatenate((text, nodes))
    expected = plain_logits(draft.target, SHARED.expand(both).tolist())[-1]
    assert (row - expected)[~never].abs().max() < TOLERANCE
    draft.commit_path(np.array([0, 1]))
    read = draft.tokens
    draft.catch_up(np.append(both, text[0]))
    assert draft.tokens == read + len(SHARED.expand(text[:1]))


METHODS = {
    "sps": lambda: Sps(gamma=3),
    "opt_tree": lambda: OptTree(nodes=12, threshold=0.1, max_depth=4),
    "pearl": lambda: Pearl(gamma=3),
}


def decoded(network, draft, drafter, text, n):
    """What the drafter makes of a text, which is plain decoding's, and all that it drafted."""
    target = Target(network, max_len=200, max_nodes=40)
    context = DraftContext(SIZES["target_vocab"], frozenset(), target=target, draft_model=draft)
    drafter.setup(context)
    drafted, propose = set(), drafter.propose

    def proposed(state):
        tree = propose(state)
        drafted.update(np.asarray(tree.tokens).tolist())
        return tree

    drafter.propose = proposed
    loop = engine(target, overlap="serial")
    prompt = np.array(TARGET.encode(text), dtype=np.int64)
    plain = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=n)
    result = loop.decode(prompt, drafter, max_new_tokens=n)
    assert result.output_ids == plain.output_ids
    return result, drafted


@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_plain_decoding_s_and_no_draft_lies_outside(method):
    network, drafter = tiny_model("llama", vocab_size=SIZES["target_vocab"]), METHODS[method]()
    draft = unlike()
    draft.reserve(300, drafter.needs.draft_nodes or drafter.needs.max_nodes)
    _, drafted = decoded(network, draft, drafter, "the atat", 30)
    assert drafted <= set(SHARED.ids.tolist())
    assert drafted or method == "pearl"  # which drafts behind what was accepted alone


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_is_the_target_under_other_ids_is_accepted(method):
    network = tiny_model("llama", vocab_size=SIZES["target_vocab"])
    drafter = METHODS[method]()
    nodes = drafter.needs.draft_nodes or drafter.needs.max_nodes
    turned = byte_level([("t", "h"), ("th", "e"), ("Ġ", "a"), ("a", "t"), ("at", "at")], turned=91)
    shared = shared_vocabulary(TARGET, turned, **SIZES | {"draft_vocab": len(turned)})
    draft_network = tiny_model("llama", vocab_size=len(turned))
    state = {k: v for k, v in network.state_dict().items() if v.shape[0] != SIZES["target_vocab"]}
    draft_network.load_state_dict(state, strict=False)
    with torch.no_grad():
        for ours, theirs in (
            (network.get_input_embeddings(), draft_network.get_input_embeddings()),
            (network.lm_head, draft_network.lm_head),
        ):
            theirs.weight.copy_(ours.weight[torch.from_numpy(shared.ids)])
        network.lm_head.weight[len(TARGET) :] = 0.0  # padding is never said
    result, _ = decoded(network, draft_of(draft_network, shared, nodes), drafter, "the a", 41)
    if method == "sps":
        assert result.committed_per_step == [4] * 10
    assert np.mean(result.committed_per_step) > 2


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_k=20)])
def test_the_law_given_to_the_verifier_is_the_masked_one(sampling):
    draft = unlike()
    drafter = Sps(gamma=4)
    drafter.setup(
        DraftContext(SIZES["target_vocab"], frozenset(), sampling=sampling, draft_model=draft)
    )
    assert sampling != GREEDY
    text = np.array(TARGET.encode("that a"), dtype=np.int64)
    state = DecodeState(text[:-1], 20)
    state.commit(text[-1:])
    drafter.begin(state)
    tree = drafter.propose(state)
    logits = plain_logits(draft.target, SHARED.expand(text).tolist())[-1].clone()
    logits[SHARED.ids < 0] = -torch.inf
    law = sampling.probs(logits[None])[0]
    q = tree.probs.q[0].double()
    shared_ids = np.flatnonzero(SHARED.ids >= 0)
    assert (q[SHARED.ids[shared_ids]] - law[shared_ids].double()).abs().max() < 1e-6
    assert float(q.sum()) == pytest.approx(1.0)
