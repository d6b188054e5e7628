"""Prompts by hand: what a model reads for one and for two turns."""

from datetime import datetime
from typing import Any

import pytest

from specbench.config.compose import compose
from specbench.data import chat_templates
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError
from tests.tiny_checkpoint import tiny_tokenizer

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_TURNS = [("Hello there?", "Good day. "), ("And now?", None)]


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer()


def text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_vicunas_template_stands_in_and_ends_an_answer_with_eos(tokenizer):
    template = PromptTemplate(tokenizer)
    assert template.name == "vicuna_v1.1" and template.stands_in
    ids = template.render([("Hello {user} {0}?", None)])  # braces are text
    assert text(tokenizer, ids) == f"<s>{SYSTEM} USER: Hello {{user}} {{0}}? ASSISTANT:"
    assert all(type(i) is int for i in ids)
    template = PromptTemplate(tokenizer, "vicuna_v1.1")
    assert not template.stands_in
    assert text(tokenizer, template.render(TWO_TURNS)) == (
        f"<s>{SYSTEM} USER: Hello there? ASSISTANT: Good day.</s> USER: And now? ASSISTANT:"
    )
    assert template.render(TWO_TURNS).count(tokenizer.eos_token_id) == 1


def test_tokenizers_own_template(tokenizer):
    tokenizer.chat_template = CHAT
    template = PromptTemplate(tokenizer)
    assert template.name == "chat"
    ids = template.render(TWO_TURNS)
    # No <s> before it: a chat template writes its special tokens itself.
    assert text(tokenizer, ids) == (
        "<|user|>Hello there?</s><|assistant|>Good day. </s><|user|>And now?</s><|assistant|>"
    )
    together = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello there?"}], add_generation_prompt=True, return_dict=True
    )
    assert template.render([("Hello there?", None)]) == list(together["input_ids"])


def test_template_arguments_fix_what_a_template_would_take_from_the_clock(tokenizer):
    tokenizer.chat_template = (
        "{% if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}"
        "{{ date }}: {{ messages[-1].content }}"
    )
    free = PromptTemplate(tokenizer)
    fixed = PromptTemplate(tokenizer, template_kwargs={"date": "1999"})
    assert str(datetime.now().year) in text(tokenizer, free.render([("x", None)]))
    assert text(tokenizer, fixed.render([("x", None)])) == "1999: x"
    assert free.sha != fixed.sha


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.strip() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_does_not_work_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(ConfigurationError, match=r"chat template .* model\.template=vicuna_v1\.1"):
        PromptTemplate(tokenizer).render([("Hello", None)])


@pytest.mark.parametrize("name", ["chat", "vicuna_v1.1", "plain"])
@pytest.mark.parametrize("question", ["a</s>b", "</s></s>", "<s>x<unk> the </s", "no such token"])
def test_special_tokens_in_a_question_are_parsed_or_kept_as_text(tokenizer, name, question):
    tokenizer.chat_template = CHAT
    special = set(tokenizer.all_special_ids)
    harmless = PromptTemplate(tokenizer, name).render([("Hello", None)])
    expected = [i for i in harmless if i in special]

    parsed = PromptTemplate(tokenizer, name).render([(question, None)])
    as_text = PromptTemplate(tokenizer, name, special_tokens="text").render([(question, None)])
    assert text(tokenizer, as_text) == text(tokenizer, parsed)
    assert [i for i in as_text if i in special] == expected
    in_text = sum(question.count(token) for token in tokenizer.all_special_tokens)
    assert len([i for i in parsed if i in special]) == len(expected) + in_text
    if not in_text:
        assert as_text == parsed


def test_sha_tells_templates_apart_and_is_stable(tokenizer):
    first = PromptTemplate(tokenizer)
    assert first.sha == PromptTemplate(tiny_tokenizer(), "vicuna_v1.1").sha
    assert first.sha != PromptTemplate(tokenizer, "plain").sha
    assert len(first.sha) == 64
    tokenizer.chat_template = CHAT
    chat_sha = PromptTemplate(tokenizer).sha
    tokenizer.chat_template = CHAT + " "
    assert PromptTemplate(tokenizer).sha != chat_sha


def test_a_configuration_names_the_template_and_its_arguments(tokenizer):
    with pytest.raises(ConfigurationError, match=r"'vicuna_v1\.1'"):
        PromptTemplate(tokenizer, "vicuna")
    with pytest.raises(ConfigurationError, match="no chat template"):
        PromptTemplate(tokenizer, "chat")
    tokenizer.chat_template = CHAT
    assert PromptTemplate.from_config(tokenizer, compose()).name == "chat"
    vicuna = PromptTemplate.from_config(tokenizer, compose(["model=vicuna7b"]))
    assert vicuna.name == "vicuna_v1.1"
    raw = ["dataset=humaneval", "dataset.prompt_form=raw"]
    assert PromptTemplate.from_config(tokenizer, compose(raw)).name == "plain"
    dated = PromptTemplate.from_config(tokenizer, compose(["model=llama3_1b"]))
    assert dated.sha != PromptTemplate(tokenizer, "chat").sha


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] }}", "ignores the question of a second turn"),
        ("{{ messages[-1]['content'][:3] }}", "ignores the question"),
    ],
)
def test_a_template_that_leaves_out_a_question_is_refused(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(ConfigurationError, match=message):
        PromptTemplate(tokenizer)


def test_a_template_of_one_turn_may_refuse_a_second(tokenizer):
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert PromptTemplate(tokenizer).render([("a", None)])


@pytest.mark.slow  # over a second
def test_a_template_that_does_not_end_is_stopped(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_templates, "_RENDER_S", 1)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    tokenizer.chat_template = "{{ messages[-1]['content'] }}" + loops
    with pytest.raises(ConfigurationError, match="did not end within 1 s"):
        PromptTemplate(tokenizer)
