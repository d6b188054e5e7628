"""Training data: texts with the target's outputs at every position, in files that resume.

Sources: ``texts``, this project's own prompts (``prompts.yaml``; none is a benchmark's), which the
target answers; ``asked``, questions that it asks itself, as it learned them, and answers; ``read``,
prose of the installed documentation that is read instead of written.
Every group of texts is a file with a seed of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specbench.artifacts.documentation import installed_prose
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError
from specbench.models.loading import LoadedModel
from specbench.storage import jsonl

STYLES = ("chat", "translation", "summarization", "qa", "math", "rag")
TOP = 16  # next tokens of the target kept for each position; sampling draws from them
_ANSWER, _QUESTION = 160, 64  # tokens at most
_TEMPERATURE = 0.7  # of every second answer; the others are greedy
_PASSAGE_WORDS = (40, 110)  # in a prompt
_READ_WORDS = 150  # of a passage that is read, at least
_WORDS_APART = 13  # in a row that no text may share with a question of --apart
_HELD = 24  # every so many-th text is held out
_TENSORS = ("tokens", "top_ids", "top_logprobs", "states")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The texts that a family learns from.

    Attributes:
        texts, asked, read: groups of each source, of ``batch`` texts each.
        layers: numbers of the hidden states that are kept, as transformers lists them.
        live: keep tokens alone; a training runs the target on them again.
    """

    texts: int = 0
    asked: int = 0
    read: int = 0
    batch: int
    layers: tuple[int, ...] = ()
    live: bool = False

    def scaled(self, by: float) -> Mix:
        """Scale the groups of each source, to at least one of each that has some."""
        counts = {source: getattr(self, source) for source in ("texts", "asked", "read")}
        return replace(self, **{s: max(1, round(n * by)) for s, n in counts.items() if n})

    def groups(self, work: Path) -> list[tuple[str, int, Path]]:
        """List source, number and file of each; the first of them are a mix like the whole."""
        counts = [("texts", self.texts), ("asked", self.asked), ("read", self.read)]
        groups = [(i / n, source, i) for source, n in counts for i in range(n)]
        groups.sort(key=lambda group: group[0])
        return [(source, i, work / f"{source}-{i:04d}.safetensors") for _, source, i in groups]

    def made_with(self) -> str:
        """Format the settings that a file of texts depends on."""
        made_with = {"batch": self.batch, "layers": self.layers}
        return json.dumps(made_with | ({"live": True} if self.live else {}))


@dataclass(frozen=True)
class Text:
    """A prompt with the target's answer.

    Attributes:
        prompt: tokens before the answer.
        tokens: ``[n]`` int32.
        top_ids: ``[n, TOP]`` int32 the target's likeliest next tokens.
        top_logprobs: ``[n, TOP]`` float16; minus infinity after the last token, where the target
            was not run.
        states: ``[n, layers, hidden]`` float16 of the target; in their file until they are used.
    """

    style: str
    prompt: int
    tokens: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    states: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def answered(self) -> torch.Tensor:
        """``[n]`` bool: tokens that the target wrote."""
        return torch.arange(len(self)) >= self.prompt


Texts = Sequence[Text]


@cache
def _lists() -> dict[str, dict[str, list[str]]]:
    path = Path(__file__).with_name("prompts.yaml")
    lists: dict[str, dict[str, list[str]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return lists


class PromptMaker:
    """Draws prompts: the same seed and paragraphs of prose give the same ones."""

    def __init__(self, seed: int, paragraphs: Sequence[str]) -> None:
        self._random, self._paragraphs = random.Random(seed), paragraphs

    def draw(self, style: str) -> str:
        draw = self._random.randint
        match style:
            case "chat":
                return self._fill(style, sentence=self._passage().split(". ")[0])
            case "translation":
                parts = [self._fill(f"german_{part}") for part in ("who", "does", "tail")]
                return self._fill(style, german="{} {}{}.".format(*parts))
            case "summarization":
                return self._fill(style, passage=self._passage())
            case "qa":
                if self._random.random() < 0.5:
                    return f"what is the {self._random.choice(_lists()['templates']['facts'])}?"
                return f"{self._fill(style)}?"
            case "math":
                numbers = {"a": draw(20, 90), "b": draw(4, 19), "c": draw(2, 4), "d": draw(2, 9)}
                return self._fill(style, **numbers, e=draw(10, 30) * 10, p=draw(1, 18) * 5)
        passages = [self._passage() for _ in range(self._random.choice((1, 1, 2)))]
        numbered = "\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))
        return self._fill("rag", numbered=numbered, ask=self._fill("rag_asks"))

    def _fill(self, template: str, **values: object) -> str:
        """Fill a template's fields from ``values``, else from the lists."""
        lists = _lists()["fields"]
        drawn: dict[str, object] = {}
        # In this order, and all of them: a seed's prompts must stay what they are.
        for field in ("name", "topic", "job"):
            drawn[field], drawn[f"{field}2"] = self._random.sample(lists[field], 2)
        for field in ("place", "thing", "code", "object", "when"):
            drawn[field] = self._random.choice(lists[field])
        return self._random.choice(_lists()["templates"][template]).format(**drawn | values)

    def _passage(self) -> str:
        count = self._random.randint(*_PASSAGE_WORDS)
        return " ".join(_draw_prose(self._random, self._paragraphs, count)[: _PASSAGE_WORDS[1]])


def _draw_prose(draw: random.Random, paragraphs: Sequence[str], at_least: int) -> list[str]:
    """Draw at least so many words, from paragraphs that follow each other."""
    drawn: list[str] = []
    at = draw.randrange(len(paragraphs))
    while len(drawn) < at_least:
        drawn += paragraphs[at % len(paragraphs)].split()
        at += 1
    return drawn


class Author:
    """The target, which writes and reads texts."""

    def __init__(self, mix: Mix, loaded: LoadedModel, template: PromptTemplate) -> None:
        self._mix, self._loaded, self._template = mix, loaded, template
        self._tokenizer: Any = loaded.tokenizer

    @cached_property
    def _paragraphs(self) -> list[str]:
        return [paragraph for _, prose in installed_prose() for paragraph in prose]

    def write(self, source: str, number: int) -> list[Text]:
        """Make the texts of a group."""
        count = self._mix.batch
        if source == "read":
            draw = random.Random(number)
            pairs = [self._passage(draw) for _ in range(count)]
            return self._read("prose that was read", pairs)
        style, questions = "asked by the target", []
        if source == "texts":
            style = STYLES[number % len(STYLES)]
            maker = PromptMaker(number, self._paragraphs)
            questions = [maker.draw(style) for _ in range(count)]
        prompts = [self._render(q) for q in questions or self._questions(count, number)]
        answers: list[list[int]] = [[]] * len(prompts)
        answers[::2] = self._generate(prompts[::2], _ANSWER, number, 0.0)
        answers[1::2] = self._generate(prompts[1::2], _ANSWER, number, _TEMPERATURE)
        return self._read(style, list(zip(prompts, answers, strict=True)))

    def _render(self, question: str) -> list[int]:
        return self._template.render([(question, None)])

    @torch.inference_mode()
    def _generate(
        self, prompts: list[list[int]], limit: int, seed: int, temperature: float
    ) -> list[list[int]]:
        """Generate the target's answers of at most ``limit`` tokens, with their end token."""
        if not prompts:
            return []
        model: Any = self._loaded.model
        ends, longest = self._loaded.eos_ids, max(map(len, prompts))
        # Padding on the left: all answers begin in the same column.
        fed = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": TOP, "top_p": 1.0}
        torch.manual_seed(seed)
        out = model.generate(
            fed,
            attention_mask=mask.to(model.device),
            max_new_tokens=limit,
            eos_token_id=sorted(ends),
            pad_token_id=0,
            **sampling,
        )
        answers = out[:, longest:].tolist()
        lengths = [next((i for i, t in enumerate(a, 1) if t in ends), limit) for a in answers]
        return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]

    @torch.inference_mode()
    def _read(self, style: str, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Text]:
        """Make texts of prompts and answers, with the target's outputs at every position."""
        model: Any = self._loaded.model
        texts = []
        for prompt, answer in pairs:
            ids = torch.tensor([*prompt, *answer])
            if self._mix.live:
                nothing = torch.empty(len(ids), 0)
                likely = [nothing.int(), nothing.half(), nothing.half()[..., None]]
                texts.append(Text(style, len(prompt), ids.int(), *likely))
                continue
            out = model(ids[None].to(model.device), output_hidden_states=True, use_cache=False)
            top = out.logits[0].float().log_softmax(-1).topk(TOP)
            top.values[-1] = -torch.inf
            layers = [out.hidden_states[i][0].half() for i in self._mix.layers]
            states = torch.stack(layers, dim=1) if layers else torch.empty(len(ids), 0, 0)
            likely = [top.indices.int(), top.values.half(), states]
            texts.append(Text(style, len(prompt), ids.int(), *(part.cpu() for part in likely)))
        return texts

    def _questions(self, count: int, seed: int) -> list[str]:
        """Generate user turns by the target; some more, as the unended are left out."""
        pairs = zip(self._render("A"), self._render("B"), strict=False)
        before = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        more = count * 3 // 2
        replies = self._generate([before] * more, _QUESTION, seed + 500_009, 1.0)
        ended = [ids[:-1] for ids in replies if ids[-1] in self._loaded.eos_ids and len(ids) > 4]
        questions = [self._tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in ended]
        return list(dict.fromkeys(questions))[:count]

    def _passage(self, draw: random.Random) -> tuple[list[int], list[int]]:
        """Use the first twenty words as the question, what follows as the answer."""
        passage = _draw_prose(draw, self._paragraphs, _READ_WORDS)[: 2 * _READ_WORDS]
        prompt = self._render(" ".join(passage[:20]))
        ids = self._tokenizer.encode(" ".join(passage[20:]), add_special_tokens=False)
        return prompt, ids[: 2 * _READ_WORDS - len(prompt)]


def prepare_texts(
    mix: Mix, work: Path, author: Callable[[], Author], seconds: float = math.inf
) -> list[Text]:
    """Load all texts of a mix; groups that are missing below ``work`` are written first.

    Args:
        seconds: after which no further group is begun; the texts are then those that are there.

    Raises:
        ConfigurationError: a file was made with other settings.
    """
    groups, texts = mix.groups(work), []
    work.mkdir(parents=True, exist_ok=True)
    missing, began = [group for group in groups if not group[2].is_file()], time.perf_counter()
    writer = author() if missing else None
    for source, number, path in missing:
        assert writer is not None
        start = time.perf_counter()
        if start - began >= seconds:
            break
        written = writer.write(source, number)
        flat = {name: torch.cat([getattr(text, name) for text in written]) for name in _TENSORS}
        flat["lengths"] = torch.tensor([len(text) for text in written])
        flat["prompts"] = torch.tensor([text.prompt for text in written])
        if mix.live and int(flat["tokens"].max()) < 2**16:
            flat["tokens"] = flat["tokens"].to(torch.uint16)
        with jsonl.replacing(path) as partial:
            about = {"style": written[0].style, "made_with": mix.made_with()}
            save_file(flat, partial, metadata=about)
        spent = time.perf_counter() - start
        print(f"{path.stem}, one of {len(missing)}: {len(flat['tokens'])} tokens, {spent:.0f} s")
    for path in (path for *_, path in groups if seconds == math.inf or path.is_file()):
        with safe_open(path, "pt") as opened:
            about = opened.metadata()
        if about["made_with"] != mix.made_with():
            raise ConfigurationError(
                f"{path} must be made with {mix.made_with()}, got {about['made_with']}. "
                "Name another folder with --work."
            )
        flat = load_file(path)
        flat["tokens"] = flat["tokens"].int()
        parts = [flat[name].split(flat["lengths"].tolist()) for name in _TENSORS]
        of_each = zip(flat["prompts"].tolist(), *parts, strict=True)
        texts += [Text(about["style"], prompt, *tensors) for prompt, *tensors in of_each]
    return texts


def split_held_out(texts: Texts, near: Collection[int] = ()) -> tuple[list[Text], list[int]]:
    """Split into held-out texts, all of them greedy, and the numbers of those that are learnt.

    Short prompts come up more than once: where one of two is held out the other is not learnt.
    Texts with a number in ``near`` are neither.
    """
    prompts = [tuple(text.tokens[: text.prompt].tolist()) for text in texts]
    unseen = set(prompts[::_HELD])
    held = [texts[i] for i in range(0, len(texts), _HELD) if i not in near]
    return held, [i for i, p in enumerate(prompts) if p not in unseen and i not in near]


def take_evenly(texts: Texts, count: int) -> list[Text]:
    """Choose at most so many of the texts, evenly spaced."""
    return [*texts[:: max(1, -(-len(texts) // count))]]


def ids_by_frequency(texts: Texts, vocab: int) -> torch.Tensor:
    """Sort all ids ``[vocab]`` by how often the target wrote them or nearly did."""
    answered = torch.cat([text.tokens[text.answered] for text in texts]).long()
    top = torch.cat([text.top_ids[:, :2] for text in texts]).flatten().long()
    count = 2 * torch.bincount(answered, minlength=vocab) + torch.bincount(top, minlength=vocab)
    return torch.argsort(count, descending=True, stable=True)


def near_a_question(texts: Sequence[str], files: Sequence[Path]) -> set[int]:
    """Find the texts that share ``_WORDS_APART`` words in a row with a line of the files."""

    def runs(text: str) -> set[tuple[str, ...]]:
        terms = re.findall(r"\w+", text.lower())
        return {tuple(terms[i : i + _WORDS_APART]) for i in range(len(terms) - _WORDS_APART + 1)}

    known_runs: set[tuple[str, ...]] = set()
    for line in (row for path in files for row in path.read_text("utf-8-sig").splitlines()):
        question = json.loads(line)
        named = (str(question[key]) for key in ("question", "prompt", "text") if key in question)
        known_runs.update(*map(runs, [*question.get("turns", []), *named]))
    return {i for i, text in enumerate(texts) if not runs(text).isdisjoint(known_runs)}


def sha256_of(texts: Texts) -> str:
    """Hash their tokens."""
    return hashlib.sha256(b"".join(text.tokens.numpy().tobytes() for text in texts)).hexdigest()


def facts_of(texts: Texts, learnt: Texts) -> dict[str, object]:
    """Describe the texts for a card, of which some are learnt."""
    positions = Counter[str]()
    for text in learnt:
        positions[text.style] += len(text)
    return {
        "texts": len(texts),
        "texts_learnt": len(learnt),
        "tokens": sum(map(len, texts)),
        "answer_tokens": sum(len(text) - text.prompt for text in texts),
        "texts_sha256": sha256_of(texts),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "mix": {style: f"{n} positions" for style, n in sorted(positions.items())},
    }
