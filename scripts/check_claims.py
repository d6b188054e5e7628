"""Check the ledger of claims (``analysis/runs/claims.yaml``) against its sources' text.

    python scripts/check_claims.py PAPERS_DIR         # exit code 1 where a source says otherwise
    python scripts/check_claims.py PAPERS_DIR --eye   # and list what a reader has to look up

PAPERS_DIR holds a text for each source, named by its key in the ledger: card.txt, spec_bench.md,
ssd_post.md.
A claim from a table is looked for in the table's own row, and its numbers in their own columns: a
row that has others contradicts it. A number from a sentence counts as found only near the words it
is about; where it is not, or there is no text, it is for the eye.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.runs.claims import Claim
from analysis.runs.command import parser_of, reporting_errors
from analysis.runs.ledger import load_claims
from specbench.errors import ResultsError
from specbench.results.tasks import OVERALL, TASKS

FOUND, CONTRADICTED, FOR_THE_EYE = "found", "contradicted", "for the eye"
# A number and what it is of: a metric, and a task or the whole.
Cell = tuple[str, str]
_ENDS = r"## |Table \d"  # the next part, or the table's caption
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?|(?<=[\s|])-(?=[\s|])")


def _whole(*metrics: str) -> list[Cell]:
    return [(metric, OVERALL) for metric in metrics]


@dataclass(frozen=True)
class Table:
    """How a table looks in a source's text.

    Attributes:
        begins: pattern of the heading that its rows come after.
        group: of a claim, pattern of the words that a block of rows begins with; "" where there
            are no blocks. They stand before the block's first row or in a line of their own.
        groups: pattern of any block's words.
        row: of a claim, pattern of what its row begins with.
        columns: of a claim, what the row's numbers are, in order; None skips one.
    """

    begins: str
    row: Callable[[Claim], str]
    columns: Callable[[Claim], Sequence[Cell | None]]
    group: Callable[[Claim], str] = lambda claim: ""
    groups: str = "(?!)"


def _size(claim: Claim) -> str:
    """Of a claim about a Vicuna or Code Llama: ``7B``; the largest counts as 33B."""
    return {7: "7B", 13: "13B"}.get(round(claim.size or 0), "33B")


_BOARD_NAMES = {
    "eagle": r"EAGLE", "eagle2": "EAGLE-?2", "eagle3": "EAGLE-?3", "hydra": "Hydra",
    "lookahead": "Lookahead", "medusa": "Medusa", "pld": "PLD", "rest": "REST", "sps": "SpS",
    "sam_eagle2": r"(SAMD|SAM-Decoding)\\?\[EAGLE2\\?\]",
    "token_recycling": r"(?:Recycling|Tokey Recycle)",
}  # fmt: skip
_BY_TASK = [("speedup", task) for task in TASKS]
_BOARD_COLUMNS = _BY_TASK + _whole("mat", "speedup")


def _board_row(claim: Claim) -> str:
    name = _BOARD_NAMES.get(claim.method)
    if claim.method == "sam":
        part = {"token_recycling": "Token Recycle"}
        found = claim.knobs.get("auxiliary")
        auxiliary = part.get(str(found["name"] if isinstance(found, dict) else found))
        name = "(SAMD|SAM-Decoding)" + (rf"\\?\[{auxiliary}\\?\]" if auxiliary else "")
    return rf"\[?{name}(\]\(\S+?\)\S*)?(?= *\|)"


_TR_ROWS = {"ar": "Vanilla", "lookahead": "Lookahead", "pld": "PLD", "rest": "REST",
            "medusa": r"Medusa\*?", "token_recycling": "Ours"}  # fmt: skip


def _tr_table(columns: Sequence[Cell | None]) -> Table:
    return Table(
        begins=r"\| #Para",
        row=lambda claim: claim.setting or _TR_ROWS[claim.method],
        columns=lambda claim: columns,
        group=lambda claim: _size(claim) + r" \|",
        groups=r"(7|13|33)B \|",
    )


def _ngrammys_columns(claim: Claim) -> list[Cell | None]:
    place = ("mtbench", "humaneval", "gsm8k").index(claim.dataset)
    one = _whole("mat", "speedup", "speedup_sd") if claim.own else _whole("speedup")
    return [*[None] * len(one) * place, *one]


_CARD_ROWS = {"ar": "Vanilla", "sps": "Speculative", "lookahead": "Lookahead", "card": "CARD",
              "ouroboros": "Ouroboros", "pearl": "PEARL"}  # fmt: skip
_CARD_DATA = {"gsm8k": "GSM8k", "mgsm": "MGSM", "mtbench": "MT-Bench"}


def _card_columns(claim: Claim) -> list[Cell | None]:
    place = 0 if claim.model == "llama3_70b" else 2 if claim.temperature else 1
    return [*[None] * 2 * place, *_whole("tokens_per_s", "speedup")]


def _board(begins: str, groups: str = "(?!)") -> Table:
    return Table(
        begins,
        row=_board_row,
        columns=lambda claim: _BOARD_COLUMNS,
        group=lambda claim: rf"### Vicuna-{_size(claim)}" if groups != "(?!)" else "",
        groups=groups,
    )


TABLES = {
    ("cacheback", "table1"): Table(
        begins=r"(?=.*Speed).*MAT",
        row=lambda claim: {"dual": "Dual", "dynamic": "No Frozen", "frozen": "Only Frozen"}[
            str(claim.knobs["table"])
        ],
        columns=lambda claim: _whole("speedup", "mat", "tokens_per_s"),
    ),
    ("token_recycling", "table1"): _tr_table(
        [*_BY_TASK, *_whole("mat", "tokens_per_s", "speedup")]
    ),
    ("token_recycling", "table1_mbpp"): _tr_table(
        [*[None] * 9, *_whole("mat", "tokens_per_s", "speedup")]
    ),
    ("ngrammys", "table1"): Table(
        begins="Model Size Strategy",
        row=lambda claim: {"lookahead": "Lookahead", "rest": "REST"}.get(
            claim.method, r"Ours \(k,w\)\S*" if claim.setting == "best" else r"Ours \(10,10\)\S*"
        ),
        columns=_ngrammys_columns,
        group=lambda claim: {"phi3_mini": "3b", "mistral7b": "7b", "unspecified_7b": "7b"}.get(
            claim.model, "13b"
        ),
        groups=r"(3|7|13)b",
    ),
    ("card", "table1"): Table(
        begins="Task Framework",
        row=lambda claim: _CARD_ROWS[claim.method],
        columns=_card_columns,
        group=lambda claim: _CARD_DATA[claim.dataset],
        groups="GSM8k|MGSM|MT-Bench",
    ),
    ("card", "table2"): Table(
        begins="Method tokens/s",
        row=lambda claim: r"\+ Cache[^\d]*"
        if "correct" in claim.knobs
        else {"ar": "Baseline", "card": r"\+ Correct[^\d]*"}[claim.method],
        columns=lambda claim: _whole("tokens_per_s"),
    ),
    ("card", "table3"): Table(
        begins="Method Target Model",
        row=lambda claim: {"opt_tree": "OPT-Tree", "eagle3": "EAGLE-3", "card": "CARD"}[
            claim.method
        ],
        columns=lambda claim: [
            None, None, *_whole("target_load"), None, None, *_whole("draft_load", "speedup"),
        ],
    ),
    ("spec_bench", "leaderboard_3090"): _board("## Leaderboard on 3090"),
    ("spec_bench", "leaderboard_a100"): _board("## Leaderboard on A100", r"### Vicuna-\d+B"),
    ("sam", "readme"): _board(r"\| Models"),
}  # fmt: skip


def plain(line: str) -> str:
    """A line without what converters leave of formulas: each number once."""
    line = line.replace("**", "").replace(r"×\times", " × ")
    line = re.sub(r"±([\d.]+)superscript.*?\^\{\\pm [\d.]+\}", r" \1", line)
    line = re.sub(r"(\d+\.\d+)\1(?:\1|\{\1\})", r"\1", line)
    return line.strip().removeprefix("|").strip()


def rows_of(table: Table, claim: Claim, text: str) -> Iterator[tuple[int, list[float | None]]]:
    """Line number and numbers of the rows that are the claim's; a dash is None."""
    begun, group = False, ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = plain(raw)
        if not begun:
            begun = re.match(table.begins, raw.strip()) is not None
            continue
        if re.match(_ENDS, raw):
            return
        if head := re.match(table.groups, line):
            group, line = head[0], line[head.end() :].strip()
        wanted = table.group(claim)
        if wanted and not re.fullmatch(wanted, group):
            continue
        if row := re.match(table.row(claim) + r"(?=[\s|]|$)", line):
            cells = _NUMBER.findall(line[row.end() :])
            yield number, [None if cell == "-" else float(cell) for cell in cells]


def wanted_cells(claim: Claim) -> dict[Cell, float]:
    cells = {
        (metric, task): value
        for metric, by_task in claim.values.items()
        for task, value in by_task.items()
    }
    if claim.speedup_sd is not None:
        cells["speedup_sd", OVERALL] = claim.speedup_sd
    return cells


def check_in_table(table: Table, claim: Claim, text: str) -> tuple[str, str]:
    """Verdict, and where it comes from."""
    rows = list(rows_of(table, claim, text))
    wanted = wanted_cells(claim)
    columns = table.columns(claim)
    if len(rows) != 1 or not wanted.keys() <= set(columns):
        return FOR_THE_EYE, f"{len(rows)} rows of this name"
    number, cells = rows[0]
    found = {
        column: cell for column, cell in zip(columns, cells, strict=False) if column is not None
    }
    wrong = [
        f"{metric} {task}: {value:g} claimed, {found.get((metric, task))} there"
        for (metric, task), value in wanted.items()
        if found.get((metric, task)) != value
    ]
    return (CONTRADICTED, f"line {number}: {'; '.join(wrong)}") if wrong else (
        FOUND, f"line {number}",
    )  # fmt: skip


# --- sentences ------------------------------------------------------------------------------------

_NEAR = 260  # characters on either side
_PERCENT = {"gain", "hit_rate"}
# Of a metric: what stands behind the number, and a word that is near.
_SAID = {
    "speedup": (r" ?(x\b|×|-?times)", "speed|accelerat"),
    "speed_ratio": (r" ?(x\b|×|-?times)", "speed|gain|faster"),
    "load_ratio": (r" ?(x\b|×|-?times)", "comput|load"),
    "gain": (" ?%", "improv|outperform|difference|speed"),
    "hit_rate": (" ?%", "hit rate"),
    "tokens_per_s": (r"(-\d+)? ?tok", "speed|accelerat"),
    "storage_mb": (" ?MB", "stor|memory"),
    "build_minutes": (".{0,20} minute", "generat|build"),
    "mat": ("", "tokens per call|accept"),
    "draft_nodes": (" tokens", "draft"),
    "max_accepted": ("", "accept"),
    "best_nodes": ("", "breadth|nodes"),
    "best_cache_size": ("", r"K ?="),
    "best_leader_len": ("", r"\bLL\b"),
    "best_follower_len": ("", r"\bFL\b"),
}
_TASK_WORDS = {
    "mt_bench": "Multi-turn", "translation": "Trans", "summarization": "Summarization",
    "qa": "Question Answering", "math_reasoning": "Mathematical", "rag": "Retrieval-Augmented",
}  # fmt: skip
_MODEL_WORDS = {
    "vicuna7b": "7B", "vicuna33b": "33B", "llama_7b": "7B", "llama3_70b": "70B",
    "mistral7b": "Mistral|7B", "phi3_mini": "Phi",
}  # fmt: skip


def check_in_sentences(claim: Claim, text: str) -> tuple[str, str]:
    """Found only where every number stands near its unit, metric, task, model and rival."""
    flat = re.sub(r"\s+", " ", text)
    for (metric, task), value in wanted_cells(claim).items():
        unit, word = _SAID.get(metric, ("", "(?!)"))
        words = [word, _TASK_WORDS.get(task, ""), _MODEL_WORDS.get(claim.model, "")]
        words.append((claim.over or "").replace("_", "[ -]?").removesuffix(" methods"))
        shown = f"{abs(100 * value if metric in _PERCENT else value):g}"
        number = rf"(?<![\d.]){re.escape(shown)}(?:\.?0+)?(?![\d.]*\d){unit}"
        if not any(
            all(re.search(word, flat[max(0, at.start() - _NEAR) : at.end() + _NEAR], re.IGNORECASE)
                for word in words)
            for at in re.finditer(number, flat)
        ):  # fmt: skip
            return FOR_THE_EYE, f"{metric} {value:g} is not near its words"
    return FOUND, "in a sentence"


def check(claim: Claim, texts: dict[str, str]) -> tuple[str, str]:
    """Verdict on a claim, and where it comes from."""
    if claim.paper not in texts:
        return FOR_THE_EYE, "no text of this source"
    table = TABLES.get((claim.paper, claim.exhibit))
    if table is not None:
        return check_in_table(table, claim, texts[claim.paper])
    return check_in_sentences(claim, texts[claim.paper])


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a source says otherwise."""
    parser = parser_of(__doc__)
    parser.add_argument("papers", type=Path, metavar="PAPERS_DIR")
    parser.add_argument("--eye", action="store_true", help="list the claims that are for the eye")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: report(options.papers, options.eye))


def report(folder: Path, eye: bool) -> int:
    if not folder.is_dir():
        raise ResultsError(f"{folder} is not a folder. Name one that holds texts such as card.txt.")
    claims = load_claims()
    papers = {claim.paper for claim in claims}
    texts = {
        paper: path.read_text(encoding="utf-8")
        for path in sorted(folder.iterdir())
        for paper in papers
        if path.stem == paper or path.stem.startswith(f"{paper}_")
    }
    if not texts:
        names = ", ".join(sorted(papers))
        raise ResultsError(f"{folder} holds no text named by one of these sources: {names}.")
    counts: Counter[tuple[str, str]] = Counter()
    for claim in claims:
        verdict, where = check(claim, texts)
        counts[claim.paper, verdict] += 1
        if verdict == CONTRADICTED or (eye and verdict == FOR_THE_EYE):
            said = ", ".join(
                f"{metric} {value:g}" for (metric, _), value in wanted_cells(claim).items()
            )
            who = f"{claim.method}, {claim.model}, {claim.dataset}"
            print(f"{verdict}: {claim.paper}; {claim.source}; {who}: {said} ({where})")
    verdicts = (FOUND, CONTRADICTED, FOR_THE_EYE)
    print(f"{'source':<18}" + "".join(f"{verdict:>14}" for verdict in verdicts))
    for paper in dict.fromkeys(claim.paper for claim in claims):
        print(f"{paper:<18}" + "".join(f"{counts[paper, verdict]:>14}" for verdict in verdicts))
    totals = [sum(counts[paper, verdict] for paper in papers) for verdict in verdicts]
    print(f"{'all':<18}" + "".join(f"{total:>14}" for total in totals))
    return int(totals[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
