"""Prompts: a dialogue rendered as token ids, by the model's own chat template or a named one."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from specbench.config.schema import TEMPLATES, RunConfig
from specbench.errors import ConfigurationError, first_line, unknown_name

# Vicuna v1.1's conversation format, whose wording the checkpoints were trained with.
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_VICUNA_QUESTION = " USER: {user} ASSISTANT:"
_VICUNA_ANSWER = " {answer}</s>"

# Two turns of text, all of which must be in a prompt.
_PROBES = ("tell me of the first and the last", "say the second after all of that")
# A template is a program that comes with the model: a limit for rendering a dialogue.
_RENDER_S = 10

# Breaks up what would be read as a special token: Unicode keeps it out of all texts.
_MARK = "\ufdd0"


class PromptTemplate:
    """Renders dialogues whose last answer is to be written.

    Args:
        tokenizer: a transformers tokenizer.
        template: ``auto`` (the tokenizer's chat template where it has one, else Vicuna v1.1's),
            ``chat``, ``vicuna_v1.1`` or ``plain`` (the bare text, for completion prompts).
        template_kwargs: arguments of the chat template, e.g. to fix the date that it would print.
        special_tokens: what a special token's text in a dialogue is: ``parse``: that token;
            ``text``: the characters that it is written with.

    Attributes:
        name: the template in use, never ``auto``.
        stands_in: whether ``auto`` had to take Vicuna's, as the tokenizer has none.
        sha: SHA-256 hex over its text and arguments, recorded with every run.
        ended_in_eos: whether a prompt that was rendered ends in the tokenizer's end token.

    Raises:
        ConfigurationError: an unknown template; ``chat`` where the tokenizer has none; or one that
            ignores the question.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: str = "parse",
    ) -> None:
        if template not in TEMPLATES:
            raise unknown_name("value of model.template:", template, TEMPLATES)
        chat = getattr(tokenizer, "chat_template", None)
        self.stands_in = template == "auto" and not chat
        if template == "auto":
            template = "chat" if chat else "vicuna_v1.1"
        if template == "chat" and not chat:
            raise ConfigurationError(
                "model.template=chat, but the tokenizer has no chat template. Type "
                "model.template=auto, vicuna_v1.1 or plain."
            )
        self._tokenizer = tokenizer
        names = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        as_text = names and special_tokens == "text"
        self._special = re.compile("|".join(map(re.escape, names))) if as_text else None
        self._begin = _special_prefix(tokenizer)
        self.ended_in_eos = False
        self._kwargs = dict(template_kwargs or {}) if template == "chat" else {}
        self.name = template
        rules = {
            "chat": str(chat),
            "vicuna_v1.1": _VICUNA_SYSTEM + _VICUNA_QUESTION + _VICUNA_ANSWER,
            "plain": "{user}",
        }
        identity = json.dumps([template, rules[template], self._kwargs], sort_keys=True)
        self.sha = hashlib.sha256(identity.encode()).hexdigest()
        if template == "chat":
            self._check_probes()

    def _check_probes(self) -> None:
        first, second = _PROBES
        texts = {"the question": (first, self._chat(messages_of([(first, None)])))}
        # A template may refuse a second turn; it then says so when a data set has one.
        with suppress(ConfigurationError):
            text = self._chat(messages_of([(first, "well"), (second, None)]))
            texts["the question of a second turn"] = second, text
        for name, (question, text) in texts.items():
            if question not in text:
                raise ConfigurationError(
                    f"the tokenizer's chat template ignores {name}: different prompts would be the "
                    "same. Correct the template, or type model.template=vicuna_v1.1 or plain."
                )

    @staticmethod
    def from_config(tokenizer: Any, config: RunConfig) -> PromptTemplate:
        """Make the template of a composed configuration (``dataset.raw`` means plain)."""
        template = "plain" if config.dataset.raw else config.model.template
        kwargs = {str(k): v for k, v in config.model.template_kwargs.items()}
        return PromptTemplate(tokenizer, template, kwargs, config.dataset.special_tokens)

    def render(self, turns: Sequence[tuple[str, str | None]]) -> list[int]:
        """Render a dialogue to ids, special tokens included, up to where the answer begins.

        Args:
            turns: the user's text and the answer of each turn; the last answer is None.

        Raises:
            ConfigurationError: the tokenizer's chat template does not take the dialogue.
        """
        if self.name == "chat":
            return self.render_messages(messages_of(turns))
        marked = [(self._marked(user), answer and self._marked(answer)) for user, answer in turns]
        if self.name == "vicuna_v1.1":
            text = self._vicuna(marked)
        else:
            text = "\n".join(part for turn in marked for part in turn if part is not None)
        return self._note_end([*self._begin, *self._ids(text)])

    def render_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render a list of messages, the last one the user's, to prompt ids as `render` does.

        Args:
            messages: with ``role`` and ``content``; other roles than ``user`` and ``assistant``,
                and contents other than text, need a chat template.

        Raises:
            ConfigurationError: the template does not take these messages.
        """
        if self.name != "chat":
            return self.render(turns_of(messages, self.name))
        marked = [
            {**message, "content": self._marked(message["content"])}
            if isinstance(message["content"], str)
            else dict(message)
            for message in messages
        ]
        # The template writes the special tokens that begin a text by itself.
        return self._note_end(self._ids(self._chat(marked)))

    def _marked(self, text: str) -> str:
        """Mark special tokens in a text so that none is parsed; `_ids` removes the marks."""
        if self._special is None:
            return text
        return self._special.sub(lambda match: match[0][0] + _MARK + match[0][1:], text)

    def _note_end(self, ids: list[int]) -> list[int]:
        self.ended_in_eos |= ids[-1:] == [self._tokenizer.eos_token_id]
        return ids

    def _ids(self, text: str) -> list[int]:
        if self._special is None or _MARK not in text:
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        # A tokenizer cuts a text at special tokens first. Here they are cut out, so that what is
        # left can be read without them.
        ids: list[int] = []
        end = 0
        for special in self._special.finditer(text):
            ids += self._plain_ids(text[end : special.start()])
            ids.append(int(self._tokenizer.convert_tokens_to_ids(special[0])))
            end = special.end()
        return ids + self._plain_ids(text[end:])

    def _plain_ids(self, text: str) -> list[int]:
        if not text:
            return []
        plain = text.replace(_MARK, "")
        encoded = self._tokenizer(plain, add_special_tokens=False, split_special_tokens=True)
        return [int(i) for i in encoded["input_ids"]]

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            with _time_limit(_RENDER_S):
                text = self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **self._kwargs
                )
        except Exception as error:
            # A template is a program that came with the model: it may raise anything.
            raise ConfigurationError(
                "the tokenizer's chat template does not take a dialogue of "
                f"{len(messages)} message(s): {first_line(error)}. Type model.template=vicuna_v1.1 "
                "or plain, or correct the template."
            ) from error
        return str(text)

    def _vicuna(self, turns: Sequence[tuple[str, str | None]]) -> str:
        text = _VICUNA_SYSTEM
        for user, answer in turns:
            text += _VICUNA_QUESTION.format(user=user)
            if answer is not None:
                text += _VICUNA_ANSWER.format(answer=answer.strip())
        return text


def messages_of(turns: Sequence[tuple[str, str | None]]) -> list[dict[str, str]]:
    """Convert the texts of each turn, user's and answer, to messages; an answer of None to none."""
    texts = [text for turn in turns for text in turn if text is not None]
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def turns_of(messages: Sequence[Mapping[str, Any]], template: str) -> list[tuple[str, str | None]]:
    """Convert messages to the texts of each turn, for a template that takes only these.

    Raises:
        ConfigurationError: they do not alternate between texts of user and assistant.
    """
    roles = [str(message["role"]) for message in messages]
    texts = [message["content"] for message in messages]
    alternating = roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    if not alternating or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(
            f"model.template={template} takes texts of user and assistant in turns, the user's "
            f"last, got roles {', '.join(roles)}. Pass such messages, or a tokenizer with a chat "
            "template."
        )
    return list(zip(texts[::2], [*texts[1::2], None], strict=True))


def _special_prefix(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer puts before a text; those after it must not end a prompt."""
    whole = tokenizer(_PROBES[0], add_special_tokens=True)["input_ids"]
    bare = tokenizer(_PROBES[0], add_special_tokens=False)["input_ids"]
    begins = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return [int(i) for i in whole[: next(begins, 0)]]


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError where the block takes longer; only a main thread can be stopped so."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class TokenIdPrompts:
    """A template for prompts that are token ids already: a turn is a JSON list of them.

    Attributes:
        sha: of the template that made the ids, where one did.
    """

    name = "token_ids"
    stands_in = False
    ended_in_eos = False

    def __init__(self, sha: str) -> None:
        self.sha = sha

    def render(self, turns: Sequence[tuple[str, str | None]]) -> list[int]:
        ((text, _),) = turns
        ids: list[int] = json.loads(text)
        return ids
