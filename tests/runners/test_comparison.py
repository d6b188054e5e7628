"""`runners.compare`: a caller's model is measured as in a run, and comes back as it was."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from methods.pld import PromptLookup
from runners import advice, advise, compare, search
from runners.comparison import read_input
from specbench.config import compose
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError
from specbench.results import records
from tests.conftest import quick_first
from tests.small_run import run_here, six_rounds

QUIET = ["measure.warmup=0", "measure.disturbed={steal: null, others: null}"]
ONE = PromptLookup()
TEXTS = ["why is the water blue", "which ship is red and which is blue"]


@pytest.fixture(scope="module", autouse=True)
def quick():
    with six_rounds():
        yield


@pytest.fixture(scope="module")
def lent(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.train(), AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return {"max_new_tokens": 12, "overrides": [*QUIET, f"cache_dir={cache}"]}


def shape_of(model):
    """Modules, forwards, modes and weights, as far as a caller can see them."""
    modules = [(n, id(m), m.training, "forward" in vars(m)) for n, m in model.named_modules()]
    weights = [(n, id(p), p.requires_grad) for n, p in model.named_parameters()]
    return modules, weights, model.config._attn_implementation


def test_prompts_and_drafters_of_every_kind_and_the_model_comes_back_as_it_was(lent, options):
    model, tokenizer = lent
    dialogue = [{"role": "user", "content": TEXTS[0]}]
    text = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, tokenize=False)
    rendered = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompts = [TEXTS[0], dialogue, rendered, torch.tensor([rendered])]
    mine = PromptLookup(name="mine", num_tokens=4)
    drafters = ["pld", {"method": "pld", "num_tokens": 2, "label": "two"}, mine]
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]

    def answer():
        model.eval()
        out = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
        model.train()
        return out

    before, values = answer(), {n: p.clone() for n, p in model.named_parameters()}
    shape, state = shape_of(model), torch.get_rng_state()
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    result = compare(model, tokenizer, prompts, drafters, **options)
    assert shape_of(model) == shape
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.cuda.cudnn_sdp_enabled() == attention
    assert torch.equal(answer(), before)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, values[name])
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    model(input_ids=ids, labels=ids).loss.backward()  # training goes on
    model.zero_grad()
    assert result.lossless
    assert list(result.table["label"]) == ["ar", "pld", "two", "mine"]
    answers = result.cases.groupby("prompt")["text"].first()
    assert len(set(answers)) == 1  # the same prompt, said in four ways
    assert "mine" in str(result)
    assert "mine" in result._repr_html_()
    assert result.table.columns.tolist() == [
        "label", "mat", "speedup", "speedup_low", "speedup_high", "tokens_per_s", "outputs",
    ]  # fmt: skip
    assert set(result.table["outputs"]) == {"4 equal"}
    (axes,) = result.plot().axes
    drafting = result.table[result.table["label"] != "ar"].sort_values("speedup")
    assert list(axes.containers[0].lines[0].get_xdata()) == list(drafting["speedup"])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(drafting["label"])


def test_an_error_within_gives_the_model_back_too(lent, options, monkeypatch):
    model, tokenizer = lent
    shape = shape_of(model)
    monkeypatch.setattr("runners.measure.blocks.BlockRunner.warm_up", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(model, tokenizer, TEXTS, ["pld"], **options)
    assert shape_of(model) == shape


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}blue{% else %}red{% endif %}"
)


@pytest.mark.parametrize("template", quick_first([THINKS, None], [THINKS]))
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+model.template_kwargs.enable_thinking=false"],
        ["model.template=vicuna_v1.1"],
        ["model.template=plain", "dataset.special_tokens=text"],
        ["dataset.special_tokens=text", "+model.template_kwargs.enable_thinking=true"],
    ],
)
def test_a_question_is_one_prompt_however_it_is_passed(lent, template, overrides):
    """And with whatever the template is told, as long as a text says what messages say."""
    model, tokenizer = lent
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    for question in ("which ship is red", "what does </s> end", "{user} {% if %}"):
        messages = [{"role": "user", "content": question}]
        caller = read_input(model, tokenizer, [question, messages], None, [], overrides)
        text, dialogue = (case.turns for case in caller.cases)
        assert text == dialogue
        (line,) = text
        config = compose.to_config(caller.cfg)
        rendered = PromptTemplate.from_config(tokenizer, config).render([(question, None)])
        assert json.loads(line) == rendered  # as a run of run.py renders it
        if template and "+model.template_kwargs.enable_thinking=false" in overrides:
            assert tokenizer.decode(rendered).endswith("blue")


def test_messages_of_several_turns_are_those_of_a_dialogue(lent):
    model, tokenizer = lent
    turns = [(TEXTS[0], "no"), (TEXTS[1], None)]
    roles = ("user", "assistant", "user")
    contents = (TEXTS[0], "no", TEXTS[1])
    messages = [{"role": r, "content": t} for r, t in zip(roles, contents, strict=True)]
    for name in ("chat", "vicuna_v1.1", "plain"):
        caller = read_input(model, tokenizer, [messages], None, [], [f"model.template={name}"])
        expected = PromptTemplate(tokenizer, name).render(turns)
        assert json.loads(caller.cases[0].turns[0]) == expected
    system = [{"role": "system", "content": "be brief"}, *messages]
    with pytest.raises(ConfigurationError, match=r"prompts\[0\].*roles system, user"):
        read_input(model, tokenizer, [system], None, [], ["model.template=plain"])


@pytest.mark.parametrize("drafter", ["ngrammys", "rest"])
def test_a_missing_file_of_a_model_that_lies_nowhere_asks_to_save_it(lent, options, drafter):
    """No builder opens the name of its class."""
    model, tokenizer = lent
    path, model.name_or_path = model.name_or_path, ""
    try:
        with pytest.raises(ValueError, match="DIR_OF_THE_SAVED_MODEL") as refused:
            compare(model, tokenizer, TEXTS, [drafter], **options)
        assert "LlamaForCausalLM" not in str(refused.value)
    finally:
        model.name_or_path = path


def test_a_run_from_the_command_line_has_the_same_outputs(lent, options, small, tmp_path):
    model, tokenizer = lent
    path = tmp_path / "questions.jsonl"
    lines = [f'{{"question_id": {i}, "category": "qa", "turns": ["{t}"]}}\n'
             for i, t in enumerate(TEXTS)]  # fmt: skip
    path.write_text("".join(lines))
    overrides = [f"dataset.path={path}", "model.dtype=float32", f"output_dir={tmp_path}/cli"]
    assert run_here([*small, *overrides, "generation.max_new_tokens=12"]) == 0
    theirs, _ = records.read_records(tmp_path / "cli")
    ours = compare(model, tokenizer, TEXTS, ["pld"], output_dir=tmp_path / "py", **options)
    mine, _ = records.read_records(tmp_path / "py")
    keys = ("label", "case_id", "prompt_ids", "output_ids", "committed_per_step", "lossless")
    assert [[getattr(r, k) for k in keys] for r in mine] == [
        [getattr(r, k) for k in keys] for r in theirs
    ]
    assert len(ours.steps) == sum(record.n_target_passes for record in mine)
    again = compare(model, tokenizer, TEXTS, ["pld"], output_dir=tmp_path / "py", **options)
    assert again.cases.equals(ours.cases)  # read, not measured
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # exactly undone below
    with pytest.raises(ValueError, match="other weights"):
        compare(model, tokenizer, TEXTS, ["pld"], output_dir=tmp_path / "py", **options)
    with torch.no_grad():
        model.lm_head.weight.div_(2)


@pytest.mark.parametrize(
    ("prompts", "methods", "says"),
    [
        ("text", ["pld"], "prompts must be a list"),
        pytest.param([], ["pld"], "prompts must be a list", marks=pytest.mark.slow),
        ({"role": "user", "content": "x"}, ["pld"], "prompts must be a list"),
        ([[1, 999_999]], ["pld"], r"prompts\[0\].*the model's vocabulary"),
        (["x", " "], ["pld"], r"prompts\[1\]"),
        (["x", {"role": "user"}], ["pld"], r"prompts\[1\].*list of messages"),
        (["x"], "pld", r"methods=\['pld'\]"),
        (["x"], ["pld", "pld"], "label 'pld' occurs 2 times"),
        (["x"], [ONE, {"drafter": ONE, "label": "again"}], "'pld' twice"),
        (["x"], ["pdl"], "Did you mean 'pld'"),
        pytest.param(
            ["x"], [{"method": "pld", "num_token": 3}], "num_tokens", marks=pytest.mark.slow
        ),
        (["x"], [3], "run.py --list methods"),
        pytest.param(["x"], [], r"methods=\['pld'\]", marks=pytest.mark.slow),
    ],
)
def test_bad_input_says_what_to_type(lent, options, prompts, methods, says):
    with pytest.raises(ValueError, match=says):
        compare(*lent, prompts, methods, **options)


def test_the_earlier_name_of_methods_is_refused(lent):
    with pytest.raises(ValueError, match=r"type methods="):
        compare(*lent, TEXTS, drafters=["pld"])


@pytest.mark.slow  # over a second
def test_advice_on_a_model_in_memory_which_comes_back_as_it_was(lent, options, monkeypatch):
    model, tokenizer = lent
    grid = {
        "contexts": [32],
        "tree_rows": [1, 8],
        "batch_contexts": [],
        "batch_k": [],
        "batch_w": [],
    }
    monkeypatch.setattr(search, "GRID", grid)
    monkeypatch.setattr(advice, "SETTINGS", (2,))
    shape = shape_of(model)
    prompts = [f"{text} {word}" for text in TEXTS for word in ("ship", "quay", "page")]
    result = advise(model, tokenizer, prompts, methods=["pld"], **options)
    assert shape_of(model) == shape
    (option,) = result.options
    assert (result.choosing, result.confirming) == (3, 3)
    assert option.measured.prompts == option.predicted.prompts == 3
    assert result.decision in ("use", "plain", "undecided")
    if result.decision == "use":
        assert result.command.startswith("compare(model, tokenizer, prompts, [{'method': 'pld'")
    assert result.lines[0] in str(result)
    with pytest.raises(ValueError, match="at least 6 prompts"):
        advise(model, tokenizer, prompts[:5], **options)
