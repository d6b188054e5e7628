"""The draft model and the heads are trained, resume, load from what is written, and draft."""

import hashlib
import itertools
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from scripts.training import __main__ as training
from scripts.training import draft, heads, live, trainer
from scripts.training import texts as texts_of
from specbench.config.compose import compose, to_config
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.protocols import run_to_completion
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.models.checkpoints import int8
from specbench.models.heads import eagle, eagle3, hydra_heads, medusa
from specbench.results.records import read_records
from tests.conftest import quick_first
from tests.small_run import run_here

PROSE = [
    f"This is paragraph number {n} about rivers and their long way to the sea." for n in range(9)
]
STATES = (0, 1, 1, -1)
MIX = texts_of.Mix(texts=2, asked=1, read=1, batch=8, layers=STATES)
TINY = {"epochs": 2, "lr": 5e-3, "batch_tokens": 500}
RECIPES = {
    "draft": replace(draft.RECIPE, **TINY, layers=(0,), vocab=30),
    **{name: replace(recipe, **TINY) for name, recipe in heads.RECIPES.items()},
}
RECIPES["dflash"] = replace(RECIPES["dflash"], layers=STATES[:3], chain_share=0.1)
RECIPES["eagle3"] = replace(RECIPES["eagle3"], layers=STATES[:3], vocab=24, vocab_in_training=36)


@pytest.fixture(scope="module")
def overrides(checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    named = ["model=local", f"model.path={checkpoint}", "model.dtype=float32"]
    return [*named, "model.context_length=256", f"cache_dir={cache}"]


@pytest.fixture(scope="module")
def loaded(overrides):
    return loading.load_model(to_config(compose([*overrides, "model.device=cpu"])))


@pytest.fixture(scope="module")
def author(overrides, loaded):
    template = PromptTemplate.from_config(loaded.tokenizer, to_config(compose(overrides)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts_of, "installed_prose", lambda: [("these tests", PROSE)])
        yield texts_of.Author(MIX, loaded, template)


@pytest.fixture(scope="module")
def work(author, tmp_path_factory):
    """A folder of texts."""
    folder = tmp_path_factory.mktemp("work")
    texts_of.prepare_texts(MIX, folder, lambda: author)
    return folder


@pytest.fixture(scope="module")
def texts(work):
    return texts_of.prepare_texts(MIX, work, pytest.fail)


@pytest.fixture(scope="module")
def trained(overrides, work, tmp_path_factory):
    """A folder of each kind of weights."""
    out = tmp_path_factory.mktemp("trained")
    training.train([RECIPES["draft"]], MIX, work, out / "draft", model=overrides)
    others = [recipe for name, recipe in RECIPES.items() if name != "draft"]
    training.train(others, MIX, work, out, model=overrides)
    return out


def trainable_of(name, loaded, texts, **changes):
    torch.manual_seed(0)
    family = heads.FAMILIES.get(name, draft.TrainableDraft)
    return family(replace(RECIPES[name], **changes), loaded, texts, texts[1:])


@pytest.mark.slow  # over a second
@pytest.mark.parametrize("name", list(RECIPES)[:-1])  # DFlash's is not shipped
def test_what_is_written_has_the_names_and_keys_of_the_shipped_weights(name, trained):
    shipped = draft.FOLDER if name == "draft" else heads.FOLDER / name
    ours = trained / name
    assert {path.name for path in ours.iterdir()} == {path.name for path in shipped.iterdir()}
    for path in ours.glob("*.safetensors"):
        written, expected = (
            {(re.sub(r"layers\.\d", "layers", k), v.dtype, v.dim()) for k, v in tensors.items()}
            for tensors in (load_file(path), load_file(shipped / path.name))
        )
        assert written == expected
    card, facts = (ours / "README.md").read_text(), json.loads((ours / "training.json").read_text())
    assert facts["sha256"] in card and facts["curve"]["epoch 2"] in card
    first, last = (float(facts["curve"][f"epoch {i}"].rpartition(" ")[2]) for i in (0, 2))
    assert last < first and facts["texts"] > 20
    configs = [json.loads((folder / "config.json").read_text()) for folder in (ours, shipped)]
    # A draft's names where its target came from, too.
    assert name == "draft" or configs[0].keys() == configs[1].keys()


@pytest.mark.slow
def test_every_trained_kind_is_loaded_by_a_run_and_changes_no_output(small, trained, tmp_path):
    others = ", ".join(
        f"{{method: {method}, head: {trained / head}}}"
        for method, head in [(name, name) for name in ("eagle3", "medusa", "hydra", "dflash")]
    )  # fmt: skip
    typed_ones = ["model.dtype=float32", "method=eagle", f"method.head={trained / 'eagle'}"]
    typed_ones += ["pair=none", f"pair.draft.path={trained / 'draft'}", "dataset.limit=2"]
    typed_ones += [f"compare=[{others}, sps]", f"output_dir={tmp_path / 'run'}"]
    assert run_here(small, *typed_ones) == 0
    records, _ = read_records(tmp_path / "run" / "cases.jsonl")
    outputs = {}
    for record in records:
        assert record.status != "failed"
        outputs.setdefault((record.case_id, record.turn), {})[record.label] = record.output_ids
    for by_label in outputs.values():
        assert by_label.keys() == {"ar", "eagle", "eagle3", "medusa", "hydra", "dflash", "sps"}
        assert all(output == by_label["ar"] for output in by_label.values())


@pytest.mark.parametrize("name", quick_first(RECIPES, ["draft"]))
def test_a_killed_training_goes_on_and_gives_the_same_weights(
    name, loaded, texts, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer, "STEPS_BETWEEN_SAVES", 4)
    step, taken = torch.optim.AdamW.step, []
    killed_at = [0]

    def stepping(self, *args, **kwargs):
        taken.append(self)
        if len(taken) == killed_at[0]:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    def learned(folder, kill=0):
        folder.mkdir(exist_ok=True)
        taken.clear()
        killed_at[0] = kill
        trainable = trainable_of(name, loaded, texts, batch_tokens=1000)
        return trainable, trainer.learn(trainable, texts[1:], texts[:1], folder)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    trainable, facts = learned(tmp_path / "whole")
    assert len(taken) == facts["batches_done"] >= 8
    with pytest.raises(KeyboardInterrupt):
        learned(tmp_path / "cut", kill=7)
    again, resumed = learned(tmp_path / "cut")
    assert len(taken) == facts["batches_done"] - 4 and resumed["curve"] == facts["curve"]
    for key, weight in trainable.module.state_dict().items():
        assert torch.equal(weight, again.module.state_dict()[key]), key


@pytest.mark.slow  # over a second
def test_texts_are_the_target_s_with_what_it_says_everywhere(author, loaded, texts):
    again = author.write("texts", 1)
    assert any(torch.equal(again[0].tokens, text.tokens) for text in texts)
    assert not torch.equal(again[1].tokens, author.write("texts", 7)[1].tokens)
    for source in ("texts", "asked", "read"):
        for i, text in enumerate(author.write(source, 0)[:4]):
            out = loaded.model(text.tokens[None].long(), output_hidden_states=True)
            likely = out.logits[0].log_softmax(-1).topk(texts_of.TOP)
            assert torch.allclose(text.top_logprobs[:-1].float(), likely.values[:-1], atol=0.02)
            assert text.top_logprobs[-1].isinf().all()
            states = torch.stack([out.hidden_states[n][0] for n in STATES], dim=1)
            assert torch.allclose(text.states.float(), states, rtol=2e-3, atol=2e-3)
            answer = text.tokens[text.prompt :]
            assert not (answer[:-1] == 2).any() or source == "read"  # an end token ends the answer
            if source != "read" and i % 2 == 0:
                assert torch.equal(text.top_ids[text.prompt - 1 : -1, 0], answer)


def test_texts_made_with_other_settings_are_refused(work):
    with pytest.raises(ConfigurationError, match="must be made with"):
        texts_of.prepare_texts(replace(MIX, layers=(0, -1)), work, pytest.fail)


def test_the_first_prompts_of_a_training_stay_what_they_are():
    drawn = []
    for group in range(24):
        style, maker = texts_of.STYLES[group % 6], texts_of.PromptMaker(group, PROSE)
        drawn.append((style, [maker.draw(style) for _ in range(48)]))
    digest = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
    assert digest == "7a195414a210f752a8fb6daf0fb70a9d8b2982bb92171b0e43c8b4ddbb2649d8"


def test_a_text_that_repeats_a_question_of_any_form_is_found(tmp_path):
    question = " ".join(f"word{i}" for i in range(14))
    for form in ({"turns": ["a", question]}, {"question": question}):
        (tmp_path / "q.jsonl").write_text("\ufeff" + json.dumps(form), encoding="utf-8")
        texts = ["other", f"Look: {question.upper()}", question.removeprefix("word0 word1 ")]
        assert texts_of.near_a_question(texts, [tmp_path / "q.jsonl"]) == {1}


def test_no_prompt_of_a_held_out_text_is_learnt(texts):
    many = [*texts[:24], texts[1], texts[0]]
    held, learnt = texts_of.split_held_out(many)
    assert held == [many[0], many[24]] and not {0, 1, 24, 25} & set(learnt)


def test_batches_hold_each_text_once_within_the_limit():
    lengths = torch.tensor([3, 50, 4, 8, 40, 3, 3])
    batches = trainer.batches(lengths, 60, torch.Generator().manual_seed(0))
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(len(b) == 1 or len(b) * int(lengths[b].max()) <= 60 + 8 * len(b) for b in batches)


def test_a_draft_with_all_layers_and_ids_is_the_target(loaded):
    model = loaded.model
    ids = torch.cat([torch.tensor([-1]), torch.arange(model.config.vocab_size)])
    cut, rows = draft.cut_down(model, ids, (0, 1)), torch.tensor([[1, 5, 9, 14]])
    ours, theirs = cut.model(rows + 1)[0], model.model(rows)[0]
    assert torch.allclose(ours, theirs, atol=1e-5)  # the tiny target does not tie its head


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_unrolled_guesses_are_those_of_a_drafting_head(name, loaded, texts, monkeypatch):
    """Row j's guess of step i is what a chain drafted behind the rows up to j gives."""
    monkeypatch.setattr(heads, "_NOISE", 0.0)
    trainable = trainable_of(name, loaded, texts)
    with torch.no_grad():
        for parameter in trainable.module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        draw = torch.Generator().manual_seed(0)
        shares = {"prompt_share": 1.0, "draw": draw}
        batch = heads.Batch([texts[3], texts[7]], trainable.states, trainable.device, **shares)
        batch.continues[::3] = False
        guesses = trainable.guess(batch, 3, draw)
        for row in (2, 8, 16, 20):
            start = row - int(batch.positions[row])
            states = batch.states[start : row + 1]
            states = states[:, :-1].flatten(1) if name == "eagle3" else states[:, -1]
            trainable.module.reserve(512, 4)
            out = trainable.module.catch_up(batch.tokens[start + 1 : row + 2], states)[-1:]
            for step in range(3):
                rows = batch.rows_for(step).tolist()
                if row not in rows:
                    assert step and row % 3 == 0
                    continue
                expected = trainable.module.norm(out) if name == "eagle3" else out
                index = rows.index(row)
                guess = guesses[step][1][index]
                assert torch.allclose(guess, expected[0], atol=1e-3), (row, step)
                token = batch.tokens[batch.ahead(2 + step)[row]][None]
                out = trainable.module.extend(token, out, torch.tensor([step - 1]))


def test_blocks_in_training_are_those_that_are_drafted(loaded, texts):
    trainable = trainable_of("dflash", loaded, texts)
    with torch.no_grad():
        for parameter in trainable.module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        batch = heads.Batch(texts[3:5], trainable.states, trainable.device, prompt_share=1.0)
        guesses, head = trainable.guess(batch, heads.BLOCK - 1, torch.Generator()), trainable.module
        for row in guesses[0][0][[1, 5, -1]].tolist():
            start = row - int(batch.positions[row])
            head.reserve(512, heads.BLOCK)
            head.catch_up(batch.tokens[:0], batch.states[start : row + 1, :-1].flatten(1))
            root = batch.tokens[row + 1 : row + 2]
            drafted = run_to_completion(head.guessing(root, heads.BLOCK))
            for step, (rows, states) in enumerate(guesses):
                index = (rows == row).nonzero()
                assert len(index) == (row in batch.rows_for(step).tolist())
                for guess in states[index[:, 0]]:
                    assert torch.allclose(guess, drafted[step], atol=1e-3), (row, step)


@pytest.mark.slow
def test_a_live_target_teaches_as_kept_outputs_do(loaded, texts, monkeypatch):
    """The same losses for 30 steps, where what is kept has all ids, in full precision."""
    monkeypatch.setattr(heads, "_NOISE", 0.0)
    monkeypatch.setattr(heads, "_CHOICES", loaded.model.config.vocab_size)
    monkeypatch.setattr(heads, "MIX", MIX)
    stored = []
    for text in texts[:6]:
        out = loaded.model(text.tokens[None].long(), output_hidden_states=True)
        top = out.logits[0].log_softmax(-1).sort(descending=True)
        states = torch.stack([out.hidden_states[n][0] for n in STATES], dim=1)
        parts = (part.detach() for part in (top.indices, top.values, states))
        stored.append(texts_of.Text(text.style, text.prompt, text.tokens, *parts))

    makers = (
        partial(live.read, loaded.model),
        lambda some, **shares: heads.Batch(some, slice(None), "cpu", **shares),
    )
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    for name in list(RECIPES)[1:]:
        head = trainable_of(name, loaded, texts)
        shares = {"prompt_share": 0.5, "chain_share": head.recipe.chain_share}
        for step in range(30):
            live_batch, batch = (
                make([some[step % 6], some[(step + 1) % 6]], **shares, draw=draw)
                for some, make, draw in zip((texts, stored), makers, draws, strict=True)
            )
            losses = [head.loss_of(b, torch.Generator()) for b in (live_batch, batch)]
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4), (step, name)
            losses[0].backward()
            with torch.no_grad():
                for parameter in head.module.parameters():
                    parameter -= 0.01 * (0 if parameter.grad is None else parameter.grad)
            head.module.zero_grad()


@pytest.mark.slow  # over a second
def test_a_live_training_goes_on_from_what_it_wrote(
    loaded, texts, overrides, tmp_path, monkeypatch
):
    monkeypatch.setattr(heads, "MIX", MIX)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_SAVES", 5)
    monkeypatch.setattr(texts_of, "installed_prose", lambda: [("these tests", PROSE)])
    folder, curves = tmp_path / "heads", []
    recipes = [replace(RECIPES[name], vocab=24) for name in ("eagle", "medusa")]
    for looks in (60, 150):  # at the clock
        ticks = itertools.count()
        clock = SimpleNamespace(monotonic=lambda ticks=ticks: float(next(ticks)))
        for module in (live, training):
            monkeypatch.setattr(module, "time", clock)
        mix = texts_of.Mix(texts=2, batch=8, live=True)
        training.train(recipes, mix, tmp_path, folder, model=overrides, minutes=looks / 60)
        monkeypatch.setattr(texts_of.Author, "write", pytest.fail)  # the next time they are there
        curves.append(
            [json.loads((folder / r.name / "training.json").read_text()) for r in recipes]
        )
    saved = load_file(tmp_path / "texts-0000.safetensors")
    assert saved["tokens"].dtype == torch.uint16 and not saved["states"].numel()
    for first, again in zip(*curves, strict=True):
        assert again["token_visits"] > first["token_visits"] > 0
        assert first["curve"].items() < again["curve"].items()
        losses = [float(v.rpartition(" ")[2]) for v in again["curve"].values()]
        assert losses[-1] < losses[0]
    for name in ("eagle", "medusa"):
        recipe = replace(RECIPES[name], vocab=24)
        head = heads.FAMILIES[name](recipe, loaded, texts, texts[1:], begin=folder / name)
        written, file = load_file(head.save(tmp_path)), folder / name / head.file_name
        assert all(torch.equal(w, written[k]) for k, w in load_file(file).items() if w.dim() == 2)
    target = SimpleNamespace(
        embeddings=head.ends, dtype=torch.float32, device=torch.device("cpu"), config=head.target
    )
    read = medusa.load(folder / "medusa", target)
    state, ids = torch.randn(3, 32), load_file(folder / "medusa/id_map.safetensors")["ids"]
    best = torch.stack(head.module.states(state)[:1])[0] @ head.lm_head_of(0).T
    assert len(ids) == 24 and read(state).shape == (3, heads.HEADS, 24)
    assert torch.equal(
        read.to_target_ids(read(state)[:, 0].argmax(-1)), ids[best.argmax(-1)].long()
    )


def test_no_guess_leaves_its_text_or_goes_unanswered(texts):
    batch = heads.Batch(texts[:3], slice(-1, None), torch.device("cpu"))
    for step in range(4):
        rows = batch.rows_for(step)
        assert (batch.last[rows + 1 + step] == batch.last[rows]).all()
        assert (rows + 1 + step < batch.last[rows]).all()  # the last token's next is not known
    every = heads.Batch(texts[:3], slice(-1, None), torch.device("cpu"), prompt_share=1.0)
    assert int(every.learned.sum()) == len(every) - 3


def test_the_shipped_weights_are_those_on_their_cards_and_small(loaded):
    class Ends:
        packed = False
        embedding = torch.empty(49152, 576, device="meta")

    folder = draft.FOLDER
    shipped = int8.load(folder, dtype=torch.float32, attention="sdpa")
    ids = load_file(folder / "id_map.safetensors")["ids"]
    assert len(ids) == shipped.config.vocab_size and ids[0] == -1 and (ids[1:].diff() > 0).all()
    facts = json.loads((folder / "training.json").read_text())
    assert facts["parameters"] == sum(p.numel() for p in shipped.parameters())
    assert (folder / "int8.safetensors").stat().st_size <= 32_000_000
    # That of EAGLE's head describes a layer of the target's sizes.
    config = json.loads((heads.FOLDER / "eagle" / "config.json").read_text())
    target = SimpleNamespace(
        embeddings=Ends(), config=config, dtype=torch.float32, device=torch.device("cpu")
    )
    modules = {"eagle": eagle, "eagle3": eagle3, "medusa": medusa, "hydra": hydra_heads}
    size = 0
    for name, module in modules.items():
        shipped = heads.FOLDER / name
        facts = json.loads((shipped / "training.json").read_text())
        weights = (shipped / heads.FAMILIES[name].file_name).read_bytes()
        assert hashlib.sha256(weights).hexdigest() == facts["sha256"]
        head = module.load(shipped, target)
        assert sum(p.numel() for p in head.parameters()) == facts["parameters"]
        size += len(weights)
    assert size <= 40_000_000
