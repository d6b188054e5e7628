"""Prompts: a dialogue rendered as token ids, by the model's own chat template or a named one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.config.schema import TEMPLATES, RunConfig
from specbench.errors import ConfigurationError, unknown_name

# Vicuna v1.1's conversation format, whose wording the checkpoints were trained with.
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_VICUNA_QUESTION = " USER: {user} ASSISTANT:"
_VICUNA_ANSWER = " {answer}</s>"


class PromptTemplate:
    """Renders dialogues whose last answer is to be written.

    Args:
        tokenizer: a transformers tokenizer.
        template: ``auto`` (the tokenizer's chat template where it has one, else Vicuna v1.1's),
            ``chat``, ``vicuna_v1.1`` or ``plain`` (the bare text, for completion prompts).
        template_kwargs: arguments of the chat template, e.g. to fix the date that it would print.

    Attributes:
        name: the template in use, never ``auto``.
        sha: SHA-256 hex over its text and arguments, recorded with every run.

    Raises:
        ConfigurationError: an unknown template, or ``chat`` where the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if template not in TEMPLATES:
            raise unknown_name("value of model.template:", template, TEMPLATES)
        own = getattr(tokenizer, "chat_template", None)
        if template == "auto":
            template = "chat" if own else "vicuna_v1.1"
        if template == "chat" and not own:
            raise ConfigurationError(
                "model.template=chat, but the tokenizer has no chat template. Type "
                "model.template=auto, vicuna_v1.1 or plain."
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {}) if template == "chat" else {}
        self.name = template
        rules = {
            "chat": str(own),
            "vicuna_v1.1": _VICUNA_SYSTEM + _VICUNA_QUESTION + _VICUNA_ANSWER,
            "plain": "{user}",
        }
        identity = json.dumps([template, rules[template], self._kwargs], sort_keys=True)
        self.sha = hashlib.sha256(identity.encode()).hexdigest()

    @staticmethod
    def from_config(tokenizer: Any, config: RunConfig) -> PromptTemplate:
        """The template that a composed configuration asks for (``dataset.raw`` means plain)."""
        template = "plain" if config.dataset.raw else config.model.template
        kwargs = {str(k): v for k, v in config.model.template_kwargs.items()}
        return PromptTemplate(tokenizer, template, kwargs)

    def render(self, turns: Sequence[tuple[str, str | None]]) -> list[int]:
        """Prompt ids of a dialogue, special tokens included, up to where the answer begins.

        Args:
            turns: the user's text and the answer of each turn; the last answer is None.
        """
        if self.name == "chat":
            # The template writes the special tokens that begin a text by itself.
            text = self._chat(turns)
            return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        if self.name == "vicuna_v1.1":
            text = self._vicuna(turns)
        else:
            text = "\n".join(part for turn in turns for part in turn if part is not None)
        return [int(i) for i in self._tokenizer(text)["input_ids"]]

    def _chat(self, turns: Sequence[tuple[str, str | None]]) -> str:
        messages = []
        for user, answer in turns:
            messages.append({"role": "user", "content": user})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return str(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._kwargs
            )
        )

    def _vicuna(self, turns: Sequence[tuple[str, str | None]]) -> str:
        text = _VICUNA_SYSTEM
        for user, answer in turns:
            text += _VICUNA_QUESTION.format(user=user)
            if answer is not None:
                text += _VICUNA_ANSWER.format(answer=answer.strip())
        return text
