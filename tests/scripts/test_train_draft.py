import hashlib
import itertools
import json

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from scripts.draft_model import folder as draft_folder
from scripts.draft_model import gguf_file, learning, score, sources
from scripts.draft_model import prompts as draft_prompts
from scripts.draft_model import texts as draft_texts
from scripts.draft_model import train as script
from specbench.config.compose import compose
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.checkpoints.bundled import find_gguf
from specbench.models.draft.loading import read_id_map
from tests.conftest import tiny_model

PROSE = [
    f"This is paragraph number {n} about rivers and their long way to the sea." for n in range(9)
]
EOS = 2


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", dtype=torch.float32)


def ask(target, prompts, *, seed=0, greedy=None, eos=frozenset(), limit=6):
    greedy = [True] * len(prompts) if greedy is None else greedy
    return draft_texts.answers(target, prompts, greedy, eos_ids=eos, limit=limit, seed=seed)


def text_of(texts, i):
    return texts.tokens[texts.starts[i] : texts.starts[i + 1]].tolist()


PROMPTS = [[1, 5, 9, 14], [1, 7], [1, 30, 31, 32, 33, 8]]


def test_a_batch_of_unequal_prompts_is_answered_and_read_like_each_alone(target):
    texts = ask(target, PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        assert text_of(texts, i) == ids
    assert texts.prompts.tolist() == [4, 2, 6]
    texts = ask(target, PROMPTS, greedy=[False, True, False])
    for start, end in itertools.pairwise(texts.starts.tolist()):
        distribution = target(texts.tokens[start:end].long()[None]).logits[0].log_softmax(-1)
        values, ids = distribution.topk(draft_texts.TOP, dim=-1)
        assert torch.equal(texts.top_ids[start : end - 1].long(), ids[:-1])
        assert torch.allclose(texts.top_logprobs[start : end - 1].float(), values[:-1], atol=0.01)
        assert texts.top_logprobs[end - 1].isinf().all()


def test_an_answer_ends_at_its_end_token_and_the_others_go_on(target):
    plain = ask(target, PROMPTS)
    end = text_of(plain, 0)[4 + 2]  # the third token of the first answer
    stopped = ask(target, PROMPTS, eos=frozenset({end}))
    for i, prompt in enumerate(PROMPTS):
        answer = text_of(plain, i)[len(prompt) :]
        cut = answer.index(end) + 1 if end in answer else len(answer)
        assert text_of(stopped, i)[len(prompt) :] == answer[:cut]
    assert len(stopped.tokens) < len(plain.tokens)


def test_draws_follow_the_seed_and_joined_texts_keep_their_borders(target):
    drawn = [ask(target, PROMPTS, greedy=[False] * 3, seed=s) for s in (0, 0, 1)]
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
    assert not torch.equal(drawn[0].tokens, drawn[2].tokens)
    both = draft_texts.Texts.joined([drawn[0], drawn[2]])
    assert text_of(both, 1) == text_of(drawn[0], 1) and text_of(both, 5) == text_of(drawn[2], 2)
    assert int(draft_texts.is_answer(both).sum()) == 36


def test_the_vocabulary_holds_what_is_frequent_and_what_must_be_kept(target):
    texts = ask(target, PROMPTS)
    ids = script.frequent_ids(texts, 12, keep=[EOS, 47])
    assert ids[0] == -1 and len(ids) == 12 == len(set(ids.tolist()))
    assert {EOS, 47} <= set(ids.tolist())
    assert ids.tolist() == sorted(ids.tolist())
    answered = texts.tokens[draft_texts.is_answer(texts)]
    assert answered.mode().values.item() in ids.tolist()


def test_a_draft_with_all_layers_and_ids_is_the_target(target):
    ids = torch.cat([torch.tensor([-1]), torch.arange(48)])
    draft = script.cut_down(target, ids, (0, 1))
    rows = torch.tensor([[1, 5, 9, 14]])
    theirs = target(rows).logits.float()
    # The tiny target does not tie its head: compare what the head is given.
    assert torch.allclose(
        draft.model(rows + 1).last_hidden_state, target.model(rows).last_hidden_state, atol=1e-5
    )
    assert draft(rows + 1).logits.shape[-1] == theirs.shape[-1] + 1
    for layers in ((), (0, 2), (-1,)):
        with pytest.raises(ConfigurationError, match="layers 0 to 1"):
            script.cut_down(target, ids, layers)


def test_a_lesson_asks_nothing_where_the_draft_has_no_word(target):
    texts = ask(target, PROMPTS)
    ids = script.frequent_ids(texts, 12, keep=[])
    taught = script.lesson(texts, ids, prompt_weight=0.25)
    known = set(ids.tolist())
    for place, first in enumerate(taught.first.tolist()):
        theirs = int(texts.top_ids[place, 0])
        if taught.weight[place] > 0 and theirs in known:
            assert ids[first] == theirs
        else:
            assert first == -100
    asked = taught.weight > 0
    assert torch.allclose(taught.top_probs[asked].sum(-1), torch.ones(int(asked.sum())))
    last = texts.starts[1:] - 1
    assert (taught.weight[last] == 0).all()
    # The last token of a prompt is where the answer's first is said.
    begin = texts.starts[:-1] + texts.prompts - 1
    assert set(taught.weight[begin].tolist()) <= {0.0, 1.0}
    assert set(taught.weight[: begin[0]].tolist()) <= {0.0, 0.25}


def test_batches_hold_each_text_once_within_the_limit():
    lengths = torch.tensor([3, 50, 4, 8, 40, 3, 3])
    generator = torch.Generator().manual_seed(0)
    found = learning.batches(lengths, 60, generator)
    assert sorted(i for batch in found for i in batch) == list(range(7))
    assert all(len(b) == 1 or len(b) * int(lengths[b].max()) <= 60 + 8 * len(b) for b in found)


def recipe_for(**changes):
    sizes = {"epochs": 8, "lr": 0.01, "batch_tokens": 40, "layers": (0,), "vocab": 30}
    return script.DraftRecipe(**sizes | {"prompt_weight": 0.1} | changes)


@pytest.fixture(scope="module")
def taught(target):
    prompts = [[1, *range(a, a + 4)] for a in range(3, 15)]
    texts = ask(target, prompts, limit=8)
    ids = script.frequent_ids(texts, 30, keep=[EOS])
    return texts, ids, script.lesson(texts, ids, 0.1)


def fresh(target, ids):
    torch.manual_seed(0)
    return script.cut_down(target, ids, (0,)).train().requires_grad_(True)


def stop_at(patch, number):
    """The training is killed in this step of its optimizer."""
    step, steps = torch.optim.AdamW.step, itertools.count(1)

    def stopped(self, *args, **kwargs):
        if next(steps) == number:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    patch.setattr(torch.optim.AdamW, "step", stopped)


def test_training_teaches_and_goes_on_where_it_stopped(
    target, taught, tmp_path, monkeypatch, capsys
):
    texts, ids, lesson = taught
    monkeypatch.setattr(learning, "STEPS_BETWEEN_SAVES", 10)

    def learned(work, **changes):
        work.mkdir(exist_ok=True)
        draft, held = fresh(target, ids), torch.arange(12) < 12
        training = script.training_of(draft, lesson, recipe_for(**changes), (texts, held, 4))
        return draft, learning.learn(training, texts.starts.diff(), torch.arange(12), work)

    whole, progress = learned(tmp_path / "whole")
    scores = [point["held_out_mat"] for point in progress.curve]
    assert len(scores) == 9 and scores[-1] > scores[0]
    assert progress.curve[-1]["loss"] < progress.curve[1]["loss"]
    with monkeypatch.context() as patch:
        stop_at(patch, 17)
        with pytest.raises(KeyboardInterrupt):
            learned(tmp_path / "cut")
    capsys.readouterr()
    resumed, again = learned(tmp_path / "cut")
    assert "going on at batch 10" in capsys.readouterr().out
    assert again.curve == progress.curve
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    learned(tmp_path / "cut", epochs=1, lr=0.02)
    assert "going on" not in capsys.readouterr().out


def test_what_is_written_is_loaded_and_its_card_forgets_scores_with_new_weights(
    target, taught, tmp_path
):
    _, ids, _ = taught
    draft = fresh(target, ids)
    draft_folder.write_draft(draft, ids, tmp_path, "the-hash", {"seed": 7, "layers": [0, 1]})
    loaded = draft_folder.read_draft(tmp_path)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    for ours, written in zip(loaded.parameters(), draft.parameters(), strict=True):
        half_a_step = written.abs().amax(-1, keepdim=True) / 254
        assert ((ours - written).abs() <= half_a_step + 1e-6).all()
    assert torch.equal(load_file(tmp_path / "id_map.safetensors")["ids"], ids)
    assert json.loads((tmp_path / "config.json").read_text())["tokenizer_hash"] == "the-hash"
    draft_folder.write_card(tmp_path, {"specbench": {"overall": "MAT 1.7"}})
    card = (tmp_path / "README.md").read_text()
    assert "| seed | 7 |" in card and "| layers | 0, 1 |" in card and "- overall: MAT 1.7" in card
    draft_folder.write_draft(draft, ids, tmp_path, "hash", {"seed": 8})
    card = (tmp_path / "README.md").read_text()
    assert "| seed | 8 |" in card and "MAT 1.7" not in card


def test_matches_are_the_drafts_first_choices_on_the_text(target, taught):
    texts, ids, _ = taught
    draft = fresh(target, ids).eval()
    tokens = texts.tokens[: texts.starts[1]]
    own = {int(t): i for i, t in enumerate(ids) if t >= 0}
    first = int(texts.prompts[0])
    found = score.matches_on(draft, tokens, first, ids)
    for j in range(first + 1, len(tokens)):
        read = torch.tensor([[own.get(int(t), 0) for t in tokens[:j]]])
        logits = draft(read).logits[0, -1]
        logits[0] = -torch.inf
        assert found[j - first - 1] == (int(ids[logits.argmax()]) == int(tokens[j]))
    assert len(found) == len(tokens) - first - 1


@given(st.integers(1, 6), st.integers(0, 30), st.data())
def test_steps_are_those_of_a_decoding_loop(chain, tokens, data):
    flags = data.draw(st.lists(st.booleans(), min_size=chain * tokens, max_size=chain * tokens))
    right = np.array(flags, dtype=bool).reshape(tokens, chain)
    committed = steps = 0
    while committed < tokens:
        hits = 0
        while hits < chain and committed + hits < tokens and right[committed, hits]:
            hits += 1
        committed, steps = committed + hits + 1, steps + 1
    assert score.steps_of(right) == steps


def test_mat_is_of_chains_of_a_draft_that_reads_the_text_itself():
    matches = np.array([1, 1, 0, 1, 1, 1, 1, 0], dtype=bool)
    assert score.pooled_mat([matches, matches[:0]], 2) == 8 / 3  # 110, 111, 10
    assert score.pooled_mat([matches], 1) == 8 / 5  # 11, 01, 11, 11, 0
    assert np.isnan(score.pooled_mat([], 4))


def test_what_is_missing_is_named(tmp_path, capsys):
    with pytest.raises(ConfigurationError, match=r"texts-0000.*0 of 3 groups"):
        sources.read_texts([sources.group(tmp_path, "texts", i) for i in range(3)])
    (tmp_path / "cases.jsonl").touch()
    assert script.main(["--evaluate", str(tmp_path)]) == 2
    assert "no finished `ar` records" in capsys.readouterr().err


@pytest.mark.parametrize("style", draft_prompts.STYLES)
def test_prompts_follow_the_seed_and_leave_no_field_open(style):
    makers = [draft_prompts.PromptMaker(seed, PROSE) for seed in (0, 0, 1)]
    drawn = [[maker.draw(style) for _ in range(60)] for maker in makers]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 25
    assert not [p for p in drawn[0] if "{" in p or "//" in p or "|" in p]


def test_the_first_prompts_of_a_training_stay_what_they_are():
    drawn = [draft_prompts.prompts_of_group(0, group, 48, PROSE) for group in range(24)]
    found = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
    assert found == "7a195414a210f752a8fb6daf0fb70a9d8b2982bb92171b0e43c8b4ddbb2649d8"


def test_a_prompt_that_repeats_a_question_of_any_form_is_found():
    question = "Tell me please what the nine small birds of the north eat in winter."
    copied = f"Read this. {question.upper()}"
    for form in ({"turns": ["a", question], "other": "d"}, {"question": question}):
        asked = draft_prompts.texts_of(form)
        assert draft_prompts.shared_with(["How do birds live in winter?", copied], asked) == [1]


def test_no_prompt_of_a_held_out_text_is_learnt(target):
    prompts = [[1, 5, 9], *[[1, a] for a in range(3, 26)], [1, 5, 9], [1, 44]]
    texts = ask(target, prompts)
    held, learnt = draft_texts.split(texts)
    assert held.nonzero()[:, 0].tolist() == [0, 24]
    assert (~learnt).nonzero()[:, 0].tolist() == [0, 24]
    texts = ask(target, [*prompts[:24], [1, 44], [1, 5, 9]])
    _, learnt = draft_texts.split(texts)
    assert (~learnt).nonzero()[:, 0].tolist() == [0, 24, 25]


def test_the_shipped_draft_is_complete():
    folder = draft_folder.DRAFT_FOLDER
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= 32_100_000  # weights of 32 MB at most, and what belongs to them
    assert (folder / "int8.safetensors").stat().st_size <= 32_000_000
    draft = draft_folder.read_draft(folder)
    ids = load_file(folder / "id_map.safetensors")["ids"]
    assert len(ids) == draft.config.vocab_size
    assert ids[0] == -1 and (ids[1:].diff() > 0).all()
    facts = json.loads((folder / "training.json").read_text())
    assert facts["parameters"] == sum(p.numel() for p in draft.parameters())
    told = (folder / "README.md").read_text()
    assert all(str(facts[key]) in told for key in ("texts", "tokens", "held_out_mat"))


def test_gguf_rotation_pairs_neighbors_instead_of_halves():
    """Two heads of four rows: row i turns with row i + 2 there, and with i + 1 in llama.cpp."""
    rows = np.arange(8).reshape(8, 1)
    assert gguf_file.interleaved(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gguf_file_keeps_the_row_of_every_known_token_and_drafts_no_other(tmp_path):
    assert gguf_file.main([str(tmp_path / "draft.gguf")]) == 0
    reader = gguf.GGUFReader(tmp_path / "draft.gguf")
    tensors = {t.name: t.data for t in reader.tensors}
    tokenizer = loading.load_tokenizer(compose(["model=smollm2_135m"]))
    made_for = json.loads((draft_folder.DRAFT_FOLDER / "config.json").read_text())["tokenizer_hash"]
    assert made_for == loading.tokenizer_hash(tokenizer)
    ids = read_id_map(draft_folder.DRAFT_FOLDER)
    known = ids[ids >= 0]
    size = len(gguf.GGUFReader(find_gguf(*gguf_file.TARGET)).fields["tokenizer.ggml.tokens"].data)
    assert len(tensors["token_embd.weight"]) == len(tensors["output.weight"]) == size
    assert np.array_equal(tensors["token_embd.weight"][known], tensors["output.weight"][known])
    unknown = np.setdiff1d(np.arange(size), known)
    assert not tensors["output.weight"][unknown].any()
    assert len(np.unique(tensors["token_embd.weight"][unknown], axis=0)) == 1
