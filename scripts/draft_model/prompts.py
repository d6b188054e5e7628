"""Prompts that a draft model is trained on: six task styles, none from a benchmark.

    python -m scripts.draft_model.prompts --count 6                 # look at some
    python -m scripts.draft_model.prompts --count 2304 --compare FILE.jsonl

Templates and word lists are this project's own; passages are paragraphs of the installed packages'
documentation (``specbench/artifacts/installed_text.py``). Everything is drawn with a seed.
``--compare`` counts a training's own prompts that share eight words in a row with any question of a
data file.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.artifacts.installed_text import installed_prose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUP = 48  # prompts of one style that the target answers together
STYLES = ("chat", "translation", "summarization", "qa", "math", "rag")

# Words of a passage, and of what --compare takes for a coincidence.
_PASSAGE_WORDS = (40, 110)
_SHARED_WORDS = 8

_TOPICS = """
the water cycle|how bread rises|the history of the bicycle|volcanoes|learning to play the piano
growing tomatoes on a balcony|the life of bees|public libraries|the invention of printing
coral reefs|how vaccines work|the Silk Road|saving money as a student|the human heart
working from home|electric cars|the Great Wall of China|photosynthesis|healthy sleep
the planet Mars|recycling plastic|chess openings|the Renaissance|wind power|keeping a diary
making cheese|the Roman Empire|jazz music|black holes|training a puppy|time management|ocean tides
the printing of money|medieval castles|how airplanes fly|street photography|the periodic table
public speaking|making friends in a new city|deserts|the Olympic Games|machine learning
writing a good letter|vegetarian cooking|the moon landing|first aid at home|how batteries work
cleaning a kitchen|teaching children to read|the stock market|rivers of Europe
the theory of evolution|planning a wedding|mountain hiking|coffee roasting|antibiotics|whales
ancient Egypt|the French Revolution|online privacy|job interviews|urban gardens|earthquakes
computer viruses|the nervous system|learning a foreign language|climate change|remote villages
glass making|a balanced diet|space telescopes|penguins|bridges|clocks|rain forests
the steam engine
"""
_PLACES = """
Lisbon|Kyoto|Nairobi|Vancouver|Lima|Prague|Marrakesh|Dublin|Hanoi|Oslo|Quito|Vienna|Istanbul
Melbourne|Havana|Edinburgh|Cape Town|Naples|Seville|Warsaw|Mumbai|Reykjavik|Boston|Geneva|Athens
Montreal
"""
_NAMES = """
Anna|Bruno|Carla|David|Elena|Farid|Greta|Hassan|Irene|Jonas|Katja|Leo|Maya|Nils|Olga|Pedro|Quinn
Rosa|Samuel|Tanja|Uma|Victor|Wendy|Yusuf|Zoe|Martin|Lucy|Oscar|Priya|Tomas
"""
_THINGS = """
apples|pencils|marbles|stickers|books|oranges|candles|bottles|tickets|cookies|chairs|shirts
flowers|coins|boxes|muffins|eggs|cards|stamps|toys|plates|lamps|bricks|postcards
"""
_JOBS = """
teacher|nurse|software engineer|farmer|chef|journalist|architect|librarian|pilot|carpenter|lawyer
photographer|biologist|tour guide|accountant|mechanic|musician|dentist|baker|electrician
"""
_FACTS = """
capital of Portugal|largest planet in our solar system|longest river in Africa|author of Faust
chemical symbol of gold|boiling point of water|currency of Japan|inventor of the telephone
smallest country in the world|official language of Brazil|highest mountain in Europe
speed of light|largest ocean|first president of the United States|painter of the Starry Night
number of bones in the human body|freezing point of water|largest desert|national flower of India
composer of the Ninth Symphony|distance from the earth to the sun|main ingredient of glass
oldest university in Europe|hardest natural material|largest mammal|capital of New Zealand
"""
_QUESTIONS = """
who invented {object}|when did people first use {object}|why is {object} important
what is {object} made of|what is {object}|how does {object} work|where was {object} first found
how many kinds of {object} are there|who was the first to study {object}
what year was {object} discovered|what is the main use of {object}|what does {object} mean
how long does {object} last
"""
_OBJECTS = """
the compass|paper|the telescope|gunpowder|penicillin|the guitar|porcelain|silk|the thermometer
rubber|the microscope|oxygen|the violin|chocolate|the alphabet|cement|aspirin|the umbrella
the zipper|tea|the wheel|steel|the radio|the calendar|gravity|insulin|the piano|salt|concrete
the transistor|soap
"""
_CHAT = """
Explain {topic} to a ten-year-old child.|Write a short story about {topic}.
Give me five tips about {topic}.|What are the advantages and disadvantages of {topic}?
Write a friendly email to {name} about {topic}.|I am a {job}. How can I learn more about {topic}?
Describe {place} in spring to someone who has never been there.|Compose a poem about {topic}.
Make a three-day travel plan for {place}.|What should I know before I visit {place}?
Act as a {job} and answer my question: what can you tell me about {topic}?
Write a dialogue between a {job} and a {job2} about {topic}.
List ten interesting facts about {topic}.|Compare {topic} with {topic2}.
Write an outline for a blog post about {topic}.|How would a {job} explain {topic}?
Imagine you are {name}, a {job} in {place}. Describe your day.
Write a python function that {code}. Explain how it works.|What are common mistakes with {topic}?
Write a product description for a book about {topic}.|Give step-by-step instructions: {topic}.
Convince {name}, a {job}, to care about {topic}.|Write a speech of one minute about {topic}.
Create a table with three columns about {topic}.
Rewrite this sentence in a formal style: "{sentence}"
Correct the mistakes in this text: "{sentence}"
Name three books about {topic} and describe each of them.
Write a cover letter for a {job} who wants to work in {place}.
Is {topic} a good subject for a school project? Why?
What questions would a {job} ask about {topic}?
Draft a short news report about {topic} in {place}.
"""
_CODE = """
reverses a string|counts the words of a text|finds the largest number in a list
checks for a prime number|sorts a list of names|merges two dictionaries|reads a file line by line
computes the factorial of a number|removes duplicates from a list|converts Celsius to Fahrenheit
finds all even numbers up to n
"""
_TRANSLATION = """
Translate German to English: {german}|Translate German to English: {german}
Translate the following German text into English: {german}
What does this mean in English? {german}
Please give the English translation of this German sentence: {german}
"""
_SUMMARIZATION = """
Summarize: {passage}|Summarize: {passage}|Summarize the following text: {passage}
Write a short summary of this article. {passage}
{passage}////Give the main points in two sentences.
"""
_RAG = """
Answer the question with the help of these passages.////{numbered}////Question: {ask}
{numbered}////Based on the passages above, answer the following question: {ask}
Context://{numbered}////Use only the context. {ask}
I found these documents://{numbered}//What do they say about this: {ask}
"""
_MATH = """
{name} has {a} {thing} and buys {b} more. Then {name} gives {c} {thing} to {name2}. How many \
{thing} does {name} have left?
A box holds {b} {thing}. {name} fills {c} boxes and has {a} {thing} left over. How many {thing} \
are there in all?
{name} earns ${b} an hour and works {c} hours a day for {d} days. How much money does {name} earn?
A train drives {a} kilometers in {c} hours. At the same speed, how far does it drive in {d} hours?
{name} reads {b} pages every day. The book has {e} pages. How many days does {name} need to \
finish it?
A shop sells {thing} for ${c} each. {name} buys {b} {thing} and pays with a ${e} bill. How much \
change does {name} get?
There are {a} students in a school. {p}% of them play football. How many students do not play \
football?
{name} is {b} years old. {name2} is {c} years older than {name}. How old will both be together in \
{d} years?
{name} bakes {e} muffins, sells {b} in the morning and twice as many in the afternoon. How many \
muffins remain?
A garden is {b} meters long and {c} meters wide. A fence costs ${d} per meter. What does a fence \
around the garden cost?
{name} and {name2} share {e} {thing}. {name} gets {b} more than {name2}. How many does each of \
them get?
A bottle costs ${c} and a glass costs ${d}. {name} buys {b} bottles and {a} glasses. What is the \
total price?
{name} runs {c} miles on Monday, {d} miles on Tuesday and {b} miles on Wednesday. How many miles \
does {name} run on average?
A car uses {c} liters of fuel for 100 kilometers. Fuel costs ${d} a liter. What does a trip of \
{e} kilometers cost?
"""
_RAG_ASKS = """
what is described here?|what should a user know?|what happens by default?
what is the main difference?|when should this be used?|what is returned?|why is this needed?
how does it work?|what is {object}?
"""
# A small grammar: nearly every combination of one part each is a German sentence.
_GERMAN_WHO = """
Die Lehrerin|Der alte Bauer|Meine Schwester|Unser Nachbar|Die junge Ärztin|Der Bürgermeister
Ein Freund von mir|Die Regierung|Der Präsident|Eine Gruppe von Studenten|Die Polizei
Das kleine Mädchen|Der Sprecher des Unternehmens|Die Mannschaft|Ein Wissenschaftler aus {place}
Die Zeitung|Der Direktor der Schule|Die Familie
"""
_GERMAN_DOES = """
hat {when} ein neues Haus gekauft|hat {when} einen langen Brief geschrieben
wird {when} nach {place} fahren|hat {when} über die Zukunft der Stadt gesprochen
wollte {when} die Brücke über den Fluss besuchen|musste {when} mit dem Zug zur Arbeit fahren
hat {when} eine wichtige Entscheidung getroffen|konnte {when} das verlorene Fahrrad finden
hat {when} mehr als hundert Bücher gelesen|hat {when} die Ergebnisse der Untersuchung vorgestellt
wird {when} ein großes Fest feiern|hat {when} den Preis für das beste Projekt gewonnen
möchte {when} in {place} ein Geschäft eröffnen
"""
_GERMAN_WHEN = """
gestern|im letzten Sommer|am Montag|vor drei Jahren|im Jahr 2015|nächste Woche|heute Morgen
am Ende des Monats|nach dem Regen|während der Ferien|trotz der Kälte|zum ersten Mal
"""
_GERMAN_TAIL = """
, weil das Wetter so schön war|, obwohl niemand damit gerechnet hatte|, um den Menschen zu helfen
, und alle waren sehr zufrieden| und danach sofort nach Hause gegangen|, sagte {name} der Zeitung
, aber die Kosten waren höher als erwartet|, nachdem die Arbeit beendet war||
, denn die Situation hat sich verändert|, wie viele Leute berichten
"""


def entries(text: str) -> list[str]:
    """Entries of a list above: ``|`` or a line's end separates them, ``//`` is a line break."""
    return [
        entry.replace("//", "\n")
        for line in text.strip("\n").split("\n")
        for entry in line.split("|")
    ]


class PromptMaker:
    """Draws prompts.

    Args:
        seed: the same seed and paragraphs give the same prompts.
        paragraphs: prose that passages are made of, one paragraph a string.
    """

    def __init__(self, seed: int, paragraphs: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._paragraphs = paragraphs

    def draw(self, style: str) -> str:
        """What the user says in one prompt of a style in ``STYLES``."""
        makers: dict[str, Callable[[], str]] = {
            "chat": lambda: self._fill(_CHAT, sentence=self._passage().split(". ")[0]),
            "translation": lambda: self._fill(_TRANSLATION, german=self._german()),
            "summarization": lambda: self._fill(_SUMMARIZATION, passage=self._passage()),
            "qa": self._question,
            "math": lambda: self._fill(_MATH, **self._numbers()),
            "rag": self._rag,
        }
        return makers[style]()

    def _pick(self, text: str) -> str:
        return self._random.choice(entries(text))

    def _fill(self, templates: str, **values: object) -> str:
        """A template with its fields filled from the lists, or from ``values`` first."""
        name, name2 = self._random.sample(entries(_NAMES), 2)
        topic, topic2 = self._random.sample(entries(_TOPICS), 2)
        job, job2 = self._random.sample(entries(_JOBS), 2)
        fields = {
            "name": name, "name2": name2, "topic": topic, "topic2": topic2,
            "job": job, "job2": job2, "place": self._pick(_PLACES),
            "thing": self._pick(_THINGS), "code": self._pick(_CODE),
            "object": self._pick(_OBJECTS), "when": self._pick(_GERMAN_WHEN),
        }  # fmt: skip
        return self._pick(templates).format(**fields | values)

    def _passage(self) -> str:
        """Paragraphs in a row, up to a drawn number of words."""
        wanted = self._random.randint(*_PASSAGE_WORDS)
        at = self._random.randrange(len(self._paragraphs))
        words: list[str] = []
        while len(words) < wanted:
            words += self._paragraphs[at % len(self._paragraphs)].split()
            at += 1
        return " ".join(words[: _PASSAGE_WORDS[1]])

    def _question(self) -> str:
        if self._random.random() < 0.5:
            return f"what is the {self._pick(_FACTS)}?"
        return f"{self._fill(_QUESTIONS)}?"

    def _german(self) -> str:
        who, does, tail = (self._fill(part) for part in (_GERMAN_WHO, _GERMAN_DOES, _GERMAN_TAIL))
        return f"{who} {does}{tail}."

    def _numbers(self) -> dict[str, int]:
        draw = self._random.randint
        return {
            "a": draw(20, 90), "b": draw(4, 19), "c": draw(2, 4), "d": draw(2, 9),
            "e": draw(10, 30) * 10, "p": draw(1, 18) * 5,
        }  # fmt: skip

    def _rag(self) -> str:
        passages = [self._passage() for _ in range(self._random.choice((1, 1, 2)))]
        numbered = "\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))
        return self._fill(_RAG, numbered=numbered, ask=self._fill(_RAG_ASKS))


def read_paragraphs() -> list[str]:
    """Prose of this machine, in a fixed order."""
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


def _texts_of(question: dict[str, Any]) -> list[str]:
    """What a line of a data file asks, whichever of the known forms it has."""
    return [
        *question.get("turns", []),
        *(str(question[key]) for key in ("question", "prompt", "text") if key in question),
    ]


def shared_with(prompts: Sequence[str], questions: Sequence[str]) -> list[int]:
    """Numbers of the prompts that share ``_SHARED_WORDS`` words in a row with a question."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + _SHARED_WORDS]) for i in range(len(words) - _SHARED_WORDS + 1)}

    known = set().union(*map(runs, questions))
    return [i for i, prompt in enumerate(prompts) if runs(prompt) & known]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=Path, nargs="*", default=[], metavar="FILE.jsonl")
    options = parser.parse_args(argv)
    if not options.compare:
        maker = PromptMaker(options.seed, read_paragraphs())
        for i in range(options.count):
            print(json.dumps(maker.draw(STYLES[i % len(STYLES)]), ensure_ascii=False))
        return 0
    paragraphs = read_paragraphs()
    prompts = [
        prompt
        for group in range(-(-options.count // GROUP))
        for prompt in prompts_of_group(options.seed, group, GROUP, paragraphs)[1]
    ][: options.count]
    for path in options.compare:
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = [text for line in lines for text in _texts_of(json.loads(line))]
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
