"""Prompts that a draft model is trained on: six task styles, none from a benchmark.

    python -m scripts.draft_model.prompts --count 6                 # look at some
    python -m scripts.draft_model.prompts --count 2304 --compare FILE.jsonl

Templates and word lists are this project's own (``prompts.yaml``); passages are paragraphs of the
installed packages' documentation (``specbench/artifacts/documentation.py``). Everything is drawn
with a seed. ``--compare`` counts a training's own prompts that share eight words in a row with any
question of a data file.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from analysis.runs.command import parser_of
from specbench.artifacts.documentation import installed_prose

GROUP = 48  # prompts of one style that the target answers together
STYLES = ("chat", "translation", "summarization", "qa", "math", "rag")

# Words of a passage, and of what --compare takes for a coincidence.
_PASSAGE_WORDS = (40, 110)
_SHARED_WORDS = 8


@cache
def _lists() -> dict[str, dict[str, list[str]]]:
    path = Path(__file__).with_name("prompts.yaml")
    found: dict[str, dict[str, list[str]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


class PromptMaker:
    """Draws prompts: the same seed and paragraphs of prose give the same ones."""

    def __init__(self, seed: int, paragraphs: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._paragraphs = paragraphs

    def draw(self, style: str) -> str:
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
                return self._fill(style, **self._numbers())
            case "rag":
                passages = [self._passage() for _ in range(self._random.choice((1, 1, 2)))]
                numbered = "\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))
                return self._fill(style, numbered=numbered, ask=self._fill("rag_asks"))
        raise ValueError(f"style must be one of {', '.join(STYLES)}, got {style}")

    def _fill(self, template: str, **values: object) -> str:
        """A template with its fields filled from the lists, or from ``values`` first."""
        lists = _lists()["fields"]
        drawn: dict[str, object] = {}
        # In this order, and all of them: a seed's prompts must stay what they are.
        for field in ("name", "topic", "job"):
            drawn[field], drawn[f"{field}2"] = self._random.sample(lists[field], 2)
        for field in ("place", "thing", "code", "object", "when"):
            drawn[field] = self._random.choice(lists[field])
        return self._random.choice(_lists()["templates"][template]).format(**drawn | values)

    def _passage(self) -> str:
        wanted = self._random.randint(*_PASSAGE_WORDS)
        at = self._random.randrange(len(self._paragraphs))
        words: list[str] = []
        while len(words) < wanted:
            words += self._paragraphs[at % len(self._paragraphs)].split()
            at += 1
        return " ".join(words[: _PASSAGE_WORDS[1]])

    def _numbers(self) -> dict[str, int]:
        draw = self._random.randint
        numbers = {"a": draw(20, 90), "b": draw(4, 19), "c": draw(2, 4), "d": draw(2, 9)}
        return numbers | {"e": draw(10, 30) * 10, "p": draw(1, 18) * 5}


def read_paragraphs() -> list[str]:
    return [paragraph for _, found in installed_prose() for paragraph in found]


def prompts_of_group(
    seed: int, group: int, count: int, paragraphs: Sequence[str]
) -> tuple[str, list[str]]:
    """Style and prompts of one group of a training; groups can be made in any order and number."""
    maker = PromptMaker(seed_of_group(seed, group), paragraphs)
    style = STYLES[group % len(STYLES)]
    return style, [maker.draw(style) for _ in range(count)]


def seed_of_group(seed: int, group: int) -> int:
    """Each group's own seed, of its prompts and its answers."""
    return seed * 1_000_003 + group


def texts_of(question: dict[str, Any]) -> list[str]:
    """What a line of a data file asks, whichever of the known forms it has."""
    named = (str(question[key]) for key in ("question", "prompt", "text") if key in question)
    return [*question.get("turns", []), *named]


def shared_with(
    prompts: Sequence[str], questions: Sequence[str], *, words: int = _SHARED_WORDS
) -> list[int]:
    """Numbers of the prompts that share this many words in a row with a question."""

    def runs(text: str) -> set[tuple[str, ...]]:
        said = re.findall(r"\w+", text.lower())
        return {tuple(said[i : i + words]) for i in range(len(said) - words + 1)}

    known = set().union(*map(runs, questions))
    return [i for i, prompt in enumerate(prompts) if runs(prompt) & known]


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=Path, nargs="*", default=[], metavar="FILE.jsonl")
    options = parser.parse_args(argv)
    paragraphs = read_paragraphs()
    if not options.compare:
        maker = PromptMaker(options.seed, paragraphs)
        for i in range(options.count):
            print(json.dumps(maker.draw(STYLES[i % len(STYLES)]), ensure_ascii=False))
        return 0
    prompts = [
        prompt
        for group in range(-(-options.count // GROUP))
        for prompt in prompts_of_group(options.seed, group, GROUP, paragraphs)[1]
    ][: options.count]
    for path in options.compare:
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = [text for line in lines for text in texts_of(json.loads(line))]
        found = shared_with(prompts, questions)
        print(
            f"{path.name}: {len(found)} of {len(prompts)} prompts share {_SHARED_WORDS} words in "
            "a row with a question"
        )
        for i in found[:5]:
            print(f"  {prompts[i]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
