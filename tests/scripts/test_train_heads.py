"""Heads are trained through their own inference code, resume, and load from what is written."""

import hashlib
import json
import re
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from scripts.draft_model import folder, head_families, head_lesson, head_scores, learning, sources
from scripts.draft_model import train_heads as script
from scripts.draft_model.texts import Texts, answers
from specbench.models.heads import eagle, eagle3, hydra_heads, medusa
from specbench.models.hidden_states import Embeddings
from tests.conftest import tiny_model
from tests.scripts.test_train_draft import stop_at

LAYERS = (0, 1, 1)
CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def texts(target):
    prompts = [[1, *range(a, a + 4)] for a in range(3, 19)]
    greedy = [True] * len(prompts)
    return answers(
        target, prompts, greedy, eos_ids=frozenset(), limit=9, seed=0, layers=(*LAYERS, -1)
    )


def recipe_for(name, **changes):
    return replace(
        script.RECIPES[name],
        **{"epochs": 3, "lr": 5e-3, "batch_tokens": 60, "layers": LAYERS, "vocab": 40} | changes,
    )


def teacher_for(target, texts, recipe):
    ends = Embeddings(target)
    common = head_lesson.frequent(texts, len(ends.embedding))
    sample = [head_lesson.pack(texts, [0, 1, 2, 3], recipe.states)]
    return head_families.Teacher(ends, target.config.to_dict(), common, sample)


def pupil_for(target, texts, recipe):
    teacher = teacher_for(target, texts, recipe)
    torch.manual_seed(0)
    return head_families.make(recipe.name, teacher, LAYERS, recipe.vocab), teacher.common


def learned(target, texts, recipe, folder, **minutes):
    pupil, common = pupil_for(target, texts, recipe)
    folder.mkdir(exist_ok=True)
    other = texts if recipe.average else None
    training = script.training_of(pupil, texts, [0], recipe, common, other)
    rows = torch.arange(1, len(texts.prompts))
    return pupil, learning.learn(training, texts.starts.diff(), rows, folder, **minutes)


def loss_now(pupil, texts, recipe):
    batch = head_lesson.pack(texts, list(range(1, 9)), recipe.states)
    every = torch.arange(len(pupil.head_ids))
    with torch.no_grad():
        return float(head_lesson.loss_of(pupil, batch, recipe.steps, others=every))


def load(name, folder, ends, config):
    modules = {"eagle": eagle, "eagle3": eagle3, "medusa": medusa, "hydra": hydra_heads}
    layer = (config,) if name == "hydra" else ()
    return modules[name].load(folder, ends, *layer, **CPU)


@pytest.mark.parametrize("name", script.RECIPES)
def test_a_head_learns_resumes_and_loads_from_what_is_written(
    name, target, texts, tmp_path, monkeypatch
):
    broad = {"average": 0.5, "looks": (0.5,), "weight_decay": 0.01} if name == "eagle" else {}
    recipe = recipe_for(name, **broad)
    monkeypatch.setattr(learning, "STEPS_BETWEEN_SAVES", 4)
    untaught, _ = pupil_for(target, texts, recipe)
    whole, progress = learned(target, texts, recipe, tmp_path / "whole")
    assert loss_now(whole, texts, recipe) < loss_now(untaught, texts, recipe)
    looked = [point["epoch"] for point in progress.curve]
    assert looked == [0, *recipe.looks, *range(1, recipe.epochs + 1)]

    _, first = learned(target, texts, recipe, tmp_path / "cut", minutes=0)
    assert first.done == 0 and [point["epoch"] for point in first.curve] == [0]
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            learned(target, texts, recipe, tmp_path / "cut")
    resumed, again = learned(target, texts, recipe, tmp_path / "cut")
    assert [p["top1"] for p in again.curve] == [p["top1"] for p in progress.curve]
    for key, weight in whole.head.state_dict().items():
        assert torch.equal(weight, resumed.head.state_dict()[key]), key

    folder.write_head(
        tmp_path / "head", whole.file(), {"name": name, "texts": 16} | progress.facts()
    )
    loaded = load(name, tmp_path / "head", Embeddings(target), target.config.to_dict())
    for key, weight in whole.head.state_dict().items():
        half_a_step = weight.abs().amax(-1, keepdim=True) / 254
        assert ((loaded.state_dict()[key] - weight).abs() <= half_a_step + 1e-6).all(), key
    read = head_scores.taught(name, tmp_path / "head", teacher_for(target, texts, recipe), LAYERS)
    assert torch.equal(read.head_ids, whole.head_ids)
    for key, weight in loaded.state_dict().items():
        assert torch.equal(weight, read.head.state_dict()[key]), key
    card = (tmp_path / "head" / "README.md").read_text()
    facts = json.loads((tmp_path / "head" / "training.json").read_text())
    assert facts["sha256"] in card and f"epoch {recipe.epochs}" in card


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_a_training_ends_with_the_weights_of_its_best_score(average, tmp_path):
    """The weight falls by one a batch; the second of three epochs of one batch scores best."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    scores = iter([0.0, 1.0, 3.0, 2.0])
    training = learning.Training(
        recipe=learning.Recipe(name="m", epochs=3, lr=1.0, batch_tokens=9, average=average),
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        loss=lambda chosen, draw: 30 * model.weight.sum(),
        score=lambda: {"worth": next(scores), "weight": model.weight.item()},
        clip=1.0,
        judge=lambda score: score["worth"],
    )
    lengths = torch.tensor([3, 3])
    progress = learning.learn(training, lengths, torch.tensor([0, 1]), tmp_path)
    assert model.weight.item() == progress.curve[2]["weight"]
    assert [point["visits"] for point in progress.curve] == [0, 6, 12, 18]


def test_a_curve_says_what_ten_times_the_tokens_would_give(tmp_path, capsys):
    tokens = [20_000, 50_000, 100_000, 300_000, 1_000_000, 2_000_000]
    epochs = [0.02, 0.05, 0.1, 0.3, 1.0, 2]
    curve = [{"epoch": 0.0, "visits": 0, "top1": [0.0], "other_top1": [0.0]}] + [
        {"epoch": epoch, "visits": n, "top1": [0.0], "other_top1": [0.6 - 4 * n**-0.3]}
        for epoch, n in zip(epochs, tokens, strict=True)
    ]
    folder.write_card(
        tmp_path / "eagle", {"name": "eagle"} | learning.Progress(curve=curve).facts()
    )
    figure, fits = tmp_path / "curves.png", tmp_path / "fits.json"
    typed = ["--curves", str(tmp_path), "--figure", str(figure), "--out", str(fits)]
    assert head_scores.main(typed) == 0
    (row,) = json.loads(fits.read_text())["rows"]
    assert row["predicted"] == pytest.approx(0.6 - 4 * 1e7**-0.3, abs=1e-3)
    assert row["reached"] == pytest.approx(0.6 - 4 * 2e6**-0.3)
    expected = f"10,000,000 tokens: {0.6 - 4 * 1e7**-0.3:.3f}"
    assert expected in capsys.readouterr().out and figure.stat().st_size > 5000
    assert head_scores.main(["--curves", str(tmp_path / "none")]) == 2


class _Words:
    """A tokenizer and a template of words; the numbers 1 and 2 stand around a question."""

    def encode(self, text, add_special_tokens=True):
        numbered = re.compile(r"w\d+").fullmatch
        return [
            int(word[1:]) if numbered(word) else 3 + zlib.crc32(word.encode()) % 40
            for word in text.split()
        ]

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(f"w{token}" for token in ids)

    def render(self, turns):
        return [1, 1, *self.encode(turns[0][0]), 2]


def test_the_target_asks_itself_and_reads(target, tmp_path, monkeypatch):
    prose = [f"paragraph {i} says " + "many words " * 30 for i in range(9)]
    monkeypatch.setattr(sources, "read_paragraphs", lambda: prose)
    options = script.parse(["--batch", "6", "--new-tokens", "4", "--asked", "2", "--read", "1"])
    words, eos = _Words(), frozenset(range(20, 40))
    loaded = SimpleNamespace(model=target, eos_ids=eos)
    author = sources.Author(options, (*LAYERS, -1), loaded, words, words)
    by_source = {}
    for at in [g for g in sources.groups_of(options) if g.source != "texts"]:
        _, found = author.write(at)
        again = author.write(at)[1]
        assert torch.equal(found.tokens, again.tokens) and len(found.states) == len(found.tokens)
        by_source.setdefault(at.source, []).append(found)
    first, second = by_source["asked"]
    assert not torch.equal(first.tokens[:40], second.tokens[:40])
    for a, length in zip(first.starts, first.prompts, strict=False):
        prompt = first.tokens[int(a) : int(a + length)].tolist()
        assert prompt[:2] == [1, 1] and prompt[-1] == 2 and not eos & set(prompt[2:-1])
    (read,) = by_source["read"]
    assert len(read.prompts) == 6 and (read.prompts == 23).all()  # twenty words, and what is around
    assert (read.starts.diff() > 150).all()
    joined = Texts.joined([first, read])
    at = int(joined.starts[len(first.prompts) + 2])
    assert torch.equal(joined.states[at : at + 9], read.states[at - len(first.tokens) :][:9])


def test_a_text_that_repeats_a_measured_question_is_known(texts, tmp_path):
    said = [f"word{i}" for i in range(14)]
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": [" ".join(said)]}))
    calls = iter([" ".join(said[:12]), "Look: " + " ".join(said[1:])] + ["other"] * 99)
    near = sources.near_a_question(texts, lambda ids: next(calls), [tmp_path / "q.jsonl"])
    assert near == [1]


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_unrolled_guesses_are_those_of_a_drafting_head(name, target, texts):
    """Row j's guess of step i is what a chain drafted behind the rows up to j gives."""
    recipe = recipe_for(name)
    pupil, _ = pupil_for(target, texts, recipe)
    with torch.no_grad():
        for parameter in pupil.head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        every = torch.Generator().manual_seed(0)
        layers = recipe.states
        batch = head_lesson.pack(texts, [3, 7], layers, prompt_share=1.0, generator=every)
        batch.going_on[::3] = False
        found = pupil.guess(batch, 3, None)
        for row in (2, 8, 16, 20):
            start = row - int(batch.places[row])
            read = slice(start, row + 1)
            states = batch.states[read]
            states = states[:, :-1].flatten(1) if name == "eagle3" else states[:, -1]
            pupil.head.reserve(32, 4)
            out = pupil.head.catch_up(batch.tokens[start + 1 : row + 2], states)[-1:]
            for step in range(3):
                said = pupil.head.norm(out) if name == "eagle3" else out
                place = batch.rows_for(step).tolist().index(row)
                assert torch.allclose(found[step][place], said[0], atol=1e-4), (row, step)
                token = batch.tokens[batch.ahead(2 + step)[row]][None]
                out = pupil.head.extend(token, out, torch.tensor([step - 1]))


def test_states_are_the_targets_own(target, texts):
    for i in (0, 5):
        a, b = int(texts.starts[i]), int(texts.starts[i + 1])
        out = target(texts.tokens[a:b].long()[None], output_hidden_states=True)
        theirs = torch.stack([out.hidden_states[n][0] for n in (*LAYERS, -1)], dim=1)
        assert torch.allclose(texts.states[a : b - 1].float(), theirs[:-1], rtol=2e-3, atol=2e-3)
        assert not texts.states[b - 1].any()


def test_no_guess_leaves_its_text_or_goes_unanswered(texts):
    batch = head_lesson.pack(texts, [2, 5, 8], [3])
    for step in range(4):
        rows = batch.rows_for(step)
        assert (batch.last[rows + 1 + step] == batch.last[rows]).all()
        assert (rows + 1 + step < batch.last[rows]).all()  # the last token's next is not known
        assert (batch.places[rows + 1 + step] >= 4).all()  # answers alone
        later = batch.tokens[batch.ahead(2 + step)][rows]
        assert torch.equal(later, batch.ids[rows + 1 + step, 0])  # greedy texts
    generator = torch.Generator().manual_seed(0)
    more = head_lesson.pack(texts, [2, 5, 8], [3], prompt_share=1.0, generator=generator)
    assert int(more.asked.sum()) == len(more) - 3


def test_held_out_shares_are_of_rows_whose_earlier_guesses_were_right(texts):
    """A head that is right in the first place alone, and one that always is."""
    one_hot = torch.eye(int(texts.top_ids.max()) + 1)

    def pupil(steps_right):
        def guess(batch, steps, noise):
            truth = [batch.ids[batch.ahead(1 + i), 0] for i in range(steps)]
            said = [(ids + int(i >= steps_right)) % len(one_hot) for i, ids in enumerate(truth)]
            return [one_hot[ids[batch.rows_for(i)]] for i, ids in enumerate(said)]

        return head_lesson.Pupil(
            torch.nn.Module(), guess, lambda: None, one_hot, torch.arange(len(one_hot))
        )

    first = head_lesson.held_out(pupil(1), texts, [0, 1], [3])
    assert first == {"top1": [1.0, 0.0, 0.0, 0.0], "chain_mat": 2.0}
    every = head_lesson.held_out(pupil(4), texts, [0, 1], [3])
    assert every == {"top1": [1.0] * 4, "chain_mat": 4.0}  # 8 tokens in steps of 5 and 3


def test_a_linear_start_finds_the_map_that_is_there():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 6, generator=generator)
    weight, bias = torch.randn(3, 6, generator=generator), torch.tensor([1.0, -2.0, 0.5])
    pairs = iter([(part, part @ weight.T + bias) for part in x.split(500)])
    found, offset = head_lesson.least_squares(pairs)
    assert torch.allclose(found, weight, atol=0.05) and torch.allclose(offset, bias, atol=0.05)


def test_texts_kept_with_other_states_are_refused(texts, tmp_path, capsys):
    from safetensors.torch import save_file

    save_file(
        {k: v for k, v in vars(texts).items() if v is not None},
        tmp_path / "texts-0000.safetensors",
        metadata={"style": "chat", "layers": "2,15,27,-1"},
    )
    options = ["--work", str(tmp_path), "--groups", "1", "--stage", "eagle", "--layers", "2,19,27"]
    assert script.main(options) == 2
    assert "2,15,27,-1" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.pt"))


def test_shipped_heads_are_those_on_their_cards_and_small():
    class Ends:
        packed = False
        embedding = torch.empty(49152, 576, device="meta")

    # That of EAGLE's head describes a layer of the target's sizes.
    config = json.loads((folder.HEADS_FOLDER / "eagle" / "config.json").read_text())
    learned_from, size = set(), 0
    for name in script.RECIPES:
        shipped = folder.HEADS_FOLDER / name
        facts = json.loads((shipped / "training.json").read_text())
        weights = next(shipped.glob("*.safetensors")).read_bytes()
        assert hashlib.sha256(weights).hexdigest() == facts["sha256"]
        assert facts["sha256"] in (shipped / "README.md").read_text()
        head = load(name, shipped, Ends(), config)
        assert sum(p.numel() for p in head.parameters()) == facts["parameters"]
        learned_from.add(facts["texts_sha256"])
        size += len(weights)
    assert len(learned_from) == 1 and 0 < size <= 40_000_000
