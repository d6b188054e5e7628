"""Runs of models whose template, tokenizer or settings are odd, as published ones are."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from specbench.data.chat_templates import PromptTemplate
from specbench.results import records
from specbench.results.conditions import Warned
from tests.conftest import quick_first
from tests.small_run import _TEMPLATE, run_here

_NO_EMPTY_ANSWER = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content.strip() %}"
    "{{ raise_exception('an answer has no text') }}{% endif %}{% endfor %}"
)


@pytest.fixture
def model(checkpoint, tmp_path):
    """Copy the tiny checkpoint, to be changed."""
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture
def run(small, tmp_path, model):
    """Run the changed model; gives exit code, records by case, turn and label, and the notes."""

    def execute(*args, name="run"):
        folder = tmp_path / name
        code = run_here(small, f"model.path={model}", f"output_dir={folder}", *args)
        by_turn = {(r.case_id, r.turn, r.label): r for r in records.read_records(folder)[0]}
        summary = json.loads((folder / "summary.json").read_text())
        return code, by_turn, " ".join(Warned(**line).text for line in summary["warnings"])

    return execute


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_template(model, template):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)


@pytest.mark.parametrize("args", quick_first([[], ["dataset.dialogue=own", "batch.size=2"]], [[]]))
def test_a_template_that_refuses_empty_answers_costs_the_turn_behind_one_alone(run, model, args):
    with_template(model, _NO_EMPTY_ANSWER + _TEMPLATE)
    code, by_turn, _ = run(*args)
    assert code == 0
    assert len(by_turn) == 14 and all(r.status == "ok" for r in by_turn.values())

    # What the model writes first in a dialogue becomes its end: that answer is then empty.
    firsts = {case: by_turn[case, 0, "ar"].output_ids[0] for case in ("81", "84")}
    change(model / "generation_config.json", eos_token_id=firsts["84"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(firsts["84"])
    tokenizer.save_pretrained(model)
    empty = {case for case, token in firsts.items() if token == firsts["84"]}
    code, by_turn, _ = run(*args, name="empty")
    assert code == 1
    failed = {key[:2] for key, record in by_turn.items() if record.status == "failed"}
    assert failed == {(case, 1) for case in empty}


@pytest.mark.parametrize(
    ("token", "args"),
    quick_first(
        [("pad_token", []), ("sep_token", ["batch.size=2"]), ("pad_token", ["runner=hf"])],
        [("pad_token", [])],
        unpack=True,
    ),
)
def test_a_token_without_embedding_fails_the_prompt_that_has_it_alone(
    run, model, tmp_path, token, args
):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({token: "<beyond>"})
    tokenizer.save_pretrained(model)
    prompts = tmp_path / "asked.txt"
    prompts.write_text("why is the <beyond> blue\ncount to seven\nthe name of the ship\n")
    code, by_turn, _ = run(f"dataset.path={prompts}", *args)
    assert code == 1
    assert {key[0] for key, record in by_turn.items() if record.status == "failed"} == {"1"}
    assert {key[0] for key, record in by_turn.items() if record.status == "ok"} == {"2", "3"}
    errors = (tmp_path / "run" / "errors.jsonl").read_text().splitlines()
    assert {json.loads(line)["type"] for line in errors} == {"unknown_token"}


@pytest.mark.parametrize("template", ["plain", "vicuna_v1.1", "chat"])
@pytest.mark.parametrize("special", ["parse", "text"])
def test_no_prompt_ends_in_what_a_tokenizer_appends(model, template, special):
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.save(str(model / "tokenizer.json"))
    rendered = PromptTemplate(
        AutoTokenizer.from_pretrained(model), template, special_tokens=special
    )
    for turns in ([("which ship", None)], [("which ship", "red"), ("which page", None)]):
        ids = rendered.render(turns)
        assert ids[-1] != 2
        assert template == "chat" or ids[0] == 1
    assert not rendered.ended_in_eos


def test_a_template_that_ends_in_the_end_token_is_named(run, model):
    with_template(model, "{% for m in messages %}{{ m['content'] }} </s>{% endfor %}")
    _, by_turn, notes = run("dataset.limit=1")
    assert all(record.prompt_ids[-1] == 2 for record in by_turn.values())
    assert "prompts end in the end-of-text token" in notes


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 3, "stop_strings": ["ship"]}, "num_beams=3, stop_strings=['ship']"),
        ({"num_beams": 1, "guidance_scale": 1.0, "min_new_tokens": 0, "stop_strings": None}, ""),
    ],
)
def test_settings_of_a_model_that_nobody_applies_are_named(run, model, settings, named):
    # As of a file that somebody wrote: of one made from config.json transformers takes less.
    change(model / "generation_config.json", _from_model_config=False, **settings)
    code, _, notes = run("dataset.limit=1")
    assert code == 0
    assert f"generation_config.json asks for {named}; no label applies that" in notes or not named
    assert named or "asks for" not in notes
