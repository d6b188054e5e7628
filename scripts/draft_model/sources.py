"""Where texts to learn come from: four sources, in groups that are files of the work folder.

``texts``: prompts of ``prompts.py``, answered by the target. ``asked``: questions that the target
asks itself, as it learned them, answered likewise: the broadest, and what it will be asked is what
it was taught. ``read``: prose of the installed documentation and of ``--data``, read in one pass
instead of written, a quarter of the cost. ``other``: questions of a file, answered greedily; they
are never learnt, and say when a training has learnt enough.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scripts.draft_model.prompts import (
    prompts_of_group,
    read_paragraphs,
    seed_of_group,
    shared_with,
    texts_of,
)
from scripts.draft_model.texts import Texts, answers
from specbench.artifacts.documentation import paragraphs
from specbench.config.compose import compose, typed
from specbench.data.chat_templates import PromptTemplate
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

LEARNT = ("texts", "asked", "read")
_QUESTION_TOKENS = 64  # at most; longer ones are cut off and left out
_OF_QUESTIONS = 500_009  # added to the seed of the answers
_READ_WORDS = 150  # of a passage that is read, at least
_WORDS_APART = 13  # words in a row that no text may share with a question of --apart


@dataclass(frozen=True)
class Group:
    """A file of texts: its source, and its number there."""

    source: str
    number: int
    path: Path


def add_options(parser: argparse.ArgumentParser, *, work: str, groups: int, batch: int) -> None:
    """What every training that begins with texts can be told."""
    add = parser.add_argument
    add("--work", type=Path, default=Path(work), help="texts and the training's state")
    add("--seed", type=int, default=0)
    add("--groups", type=int, default=groups, help="batches of prompts (default: %(default)s)")
    add("--asked", type=int, default=0, help="batches of questions that the target asks itself")
    add("--read", type=int, default=0, help="batches of passages that are read, not written")
    add("--data", type=Path, help="folder of .txt files whose prose is read beside documentation")
    add("--other", type=Path, help="questions (.jsonl) whose answers score and are not learnt")
    add(
        "--apart",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE.jsonl",
        help=f"questions that no text may share {_WORDS_APART} words in a row with",
    )
    add("--batch", type=int, default=batch, help="prompts in each (default: %(default)s)")
    add("--new-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    add("--threads", type=int, help="of the CPU; fewer than cores is faster on a busy machine")
    add("--share", type=share, default=(0, 1), metavar="I/N", help="texts of every N-th group")


def share(text: str) -> tuple[int, int]:
    """I and N of ``I/N``."""
    number, shares = (int(part) for part in text.split("/"))
    if not 0 <= number < shares:
        raise ValueError(text)
    return number, shares


def numbers(text: str) -> tuple[int, ...]:
    """Of a list with commas."""
    return tuple(int(part) for part in text.split(","))


def groups_of(options: argparse.Namespace) -> list[Group]:
    """The groups that are learnt, sources by turns: the first of them are a mix like the whole."""
    counts = zip(LEARNT, (options.groups, options.asked, options.read), strict=True)
    every = [(i / n, group(options.work, source, i)) for source, n in counts for i in range(n)]
    return [found for _, found in sorted(every, key=lambda pair: pair[0])]


def group(work: Path, source: str, i: int) -> Group:
    return Group(source, i, work / f"{source}-{i:04d}.safetensors")


def prepare(options: argparse.Namespace, layers: Sequence[int] = ()) -> None:
    """Write the groups that are missing; ``layers`` are hidden states to keep of the target."""
    mine, shares = options.share
    # What is held out comes first: without it nothing is scored.
    wanted = [group(options.work, "other", 0)] if options.other else []
    wanted += groups_of(options)
    missing = [g for i, g in enumerate(wanted) if i % shares == mine and not g.path.is_file()]
    if not missing:
        return
    # Where the machine has instructions for it, half the precision is twice the speed, and what is
    # learnt here need not be exact; where it has none, it is four times as slow.
    half = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    dtype = "bfloat16" if half else "float32"
    cfg = typed(compose(["model=smollm2_135m", f"model.dtype={dtype}"]))
    tokenizer = loading.load_tokenizer(cfg)
    template = PromptTemplate(tokenizer, str(cfg.model.template))
    author = Author(options, layers, loading.load_model(cfg, tokenizer), tokenizer, template)
    for at in missing:
        start = time.perf_counter()
        style, texts = author.write(at)
        about = {"style": style, "dtype": dtype} | _made_with(options, at, layers)
        with jsonl.replacing(at.path) as partial:
            known = {k: v for k, v in vars(texts).items() if v is not None}
            save_file(known, partial, metadata=about)
        answered = len(texts.tokens) - int(texts.prompts.sum())
        print(
            f"{at.path.stem} ({style}): {len(texts.tokens)} tokens, {answered} of them answers, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


def _made_with(options: argparse.Namespace, at: Group, layers: Sequence[int]) -> dict[str, str]:
    """What was typed that a group depends on."""
    known = {"layers": ",".join(map(str, layers)), "batch": options.batch}
    known["new-tokens"] = options.new_tokens
    if at.source == "other":
        known["other"] = file_sha256(options.other)
    else:
        known |= {"seed": options.seed, "data": options.data}
    return {key: str(value) for key, value in known.items()}


def check(options: argparse.Namespace, groups: Sequence[Group], layers: Sequence[int]) -> None:
    """Refuse groups that other words made than those typed now.

    Raises:
        ConfigurationError: says which.
    """
    for at in groups:
        with safe_open(at.path, "pt") as opened:
            stored = opened.metadata()
        for key, value in _made_with(options, at, layers).items():
            if stored.get(key) != value:
                raise ConfigurationError(
                    f"{at.path} was made with another --{key} ({stored.get(key)}, not {value}). "
                    "Type that, or name another folder with --work."
                )


class Author:
    """The target, as it writes and reads texts."""

    def __init__(
        self,
        options: argparse.Namespace,
        layers: Sequence[int],
        loaded: loading.LoadedModel,
        tokenizer: Any,
        template: PromptTemplate,
    ) -> None:
        self._target, self._tokenizer, self._template = loaded, tokenizer, template
        self._options, self._layers = options, layers
        self._paragraphs = cache(lambda: [*read_paragraphs(), *prose_in(options.data)])

    def write(self, at: Group) -> tuple[str, Texts]:
        """Style and texts of a group."""
        count, seed = self._options.batch, seed_of_group(self._options.seed, at.number)
        match at.source:
            case "texts":
                known = self._paragraphs()
                style, asked = prompts_of_group(self._options.seed, at.number, count, known)
                return style, self._answers(asked, seed)
            case "asked":
                return "asked by the target", self._answers(self._questions(count, seed), seed)
            case "read":
                return "prose that was read", self._reads(count, seed)
        asked = [turns[0] for turns in questions_in([self._options.other])]
        chosen = random.Random(0).sample(asked, min(count, len(asked)))
        return "other", self._answers(chosen, seed, greedy=True)

    def _answers(self, asked: Sequence[str], seed: int, *, greedy: bool = False) -> Texts:
        prompts = [self._template.render([(question, None)]) for question in asked]
        limit, first = self._options.new_tokens, [greedy or i % 2 == 0 for i in range(len(asked))]
        return self._say(prompts, first, limit, seed, layers=self._layers)

    def _say(
        self, prompts: list[list[int]], greedy: list[bool], limit: int, seed: int, **others: object
    ) -> Texts:
        eos = self._target.eos_ids
        model = self._target.model
        return answers(model, prompts, greedy, eos_ids=eos, limit=limit, seed=seed, **others)  # type: ignore[arg-type]

    def _questions(self, count: int, seed: int) -> list[str]:
        """What the target says where a user would speak; some more, as the unended are left out."""
        first, second = (self._template.render([(word, None)]) for word in ("A", "B"))
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        before = [token for token, _ in pairs]
        prompts = [before] * (count * 3 // 2)
        texts = self._say(
            prompts, [False] * len(prompts), _QUESTION_TOKENS, seed + _OF_QUESTIONS, temperature=1.0
        )
        said = [
            texts.tokens[int(a) + len(before) : int(b)].tolist()
            for a, b in zip(texts.starts, texts.starts[1:], strict=False)
        ]
        ended = [ids[:-1] for ids in said if ids[-1] in self._target.eos_ids and len(ids) > 4]
        asked = [self._tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in ended]
        return list(dict.fromkeys(asked))[:count]

    def _reads(self, count: int, seed: int) -> Texts:
        """Passages: the first sentence stands as the question, what follows as the answer."""
        known, draw = self._paragraphs(), random.Random(seed)
        prompts, asked = [], []
        for _ in range(count):
            words: list[str] = []
            at = draw.randrange(len(known))
            while len(words) < _READ_WORDS:
                words += known[at % len(known)].split()
                at += 1
            first, rest = words[:20], words[20 : 2 * _READ_WORDS]
            prompt = self._template.render([(" ".join(first), None)])
            ids = self._tokenizer.encode(" ".join(rest), add_special_tokens=False)
            prompts.append([*prompt, *ids][: 2 * _READ_WORDS])
            asked.append(len(prompt))
        texts = self._say(prompts, [True] * count, 1, seed, layers=self._layers)
        return replace(texts, prompts=torch.tensor(asked))


def prose_in(folder: Path | None) -> list[str]:
    """The paragraphs of the .txt files in a folder."""
    files = sorted(folder.rglob("*.txt")) if folder else []
    return [p for path in files for p in paragraphs(path.read_text("utf-8", errors="replace"))]


def questions_in(files: Sequence[Path]) -> list[list[str]]:
    """The turns of each line of some data files."""
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return [texts_of(json.loads(line)) for line in lines]


def read_texts(groups: Sequence[Group]) -> tuple[Texts, list[str]]:
    """Texts of the groups, and the style of each; states stay in the files until they are used.

    Raises:
        ConfigurationError: a group is missing.
    """
    parts, styles = [], []
    for i, at in enumerate(groups):
        if not at.path.is_file():
            raise ConfigurationError(
                f"{at.path} is missing: {i} of {len(groups)} groups of texts are there. Type the "
                "command without --only or --stage, or with fewer --groups, --asked and --read."
            )
        parts.append(Texts(**load_file(at.path)))
        with safe_open(at.path, "pt") as opened:
            styles += [opened.metadata()["style"]] * len(parts[-1].prompts)
    return Texts.joined(parts), styles


def near_a_question(
    texts: Texts, decode: Callable[[list[int]], Any], files: Sequence[Path]
) -> list[int]:
    """Numbers of the texts that share ``_WORDS_APART`` words in a row with a question."""
    spans = zip(texts.starts.tolist(), texts.starts[1:].tolist(), strict=False)
    said = [decode(texts.tokens[a:b].tolist()) for a, b in spans]
    turns = [turn for asked in questions_in(files) for turn in asked]
    return shared_with(said, turns, words=_WORDS_APART)


def mix_of(texts: Texts, styles: Sequence[str], learnt: torch.Tensor) -> dict[str, str]:
    """Of each style the positions that are learnt, and their share."""
    lengths = texts.starts.diff()
    by_style: dict[str, int] = {}
    for i in learnt.tolist():
        by_style[styles[i]] = by_style.get(styles[i], 0) + int(lengths[i])
    total = max(sum(by_style.values()), 1)
    return {style: f"{n} positions, {n / total:.1%}" for style, n in sorted(by_style.items())}
