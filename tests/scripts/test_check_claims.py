"""The check of the ledger against its sources, on texts made up here."""

import dataclasses

import pytest

from analysis.runs import ledger
from scripts import check_claims
from scripts.check_claims import CONTRADICTED, FOR_THE_EYE, FOUND, check, plain

TABLE = """
Table 2 in the text comes later.
Method tokens/s
Baseline 8.75
+ Cache (query but don't correct) 30.23
+ Correct (correct generation direction) 41.34
Table 2: The ablation studies
Baseline 9.99
Over long texts CARD is 1.30× faster than PEARL on average, a gain that 1.39 does not state.
"""
BOARD = """
## Leaderboard on 3090
| [EAGLE2](https://a/b)\U0001f948 | 2.56x | 1.78x | 2.09x | 2.07x | 2.66x | 1.86x | 4.35 | 2.19x |
| [EAGLE](https://a/b) | **2.31x** | 1.72x | 2.00x | 1.91x | 2.38x | 1.75x | 3.57 | 2.03x |
## Leaderboard on A100
### Vicuna-7B-v1.3
| [PLD](https://a/b) | 1.60x | 1.06x | 2.66x | 1.19x | 1.62x | 1.86x | 1.75 | 1.66x |
### Vicuna-13B-v1.3
| [PLD](https://a/b) | 1.54x | 1.03x | 2.30x | 1.05x | 1.65x | 1.82x | 1.67 | 1.56x |
"""


def claim(paper, exhibit, method, model, **more):
    (found,) = [
        one
        for one in ledger.load_claims()
        if (one.paper, one.exhibit, one.method, one.model) == (paper, exhibit, method, model)
        and all(getattr(one, key) == value for key, value in more.items())
    ]
    return found


@pytest.mark.parametrize(
    ("paper", "exhibit", "method", "model"),
    [
        ("card", "table2", "ar", "llama3_70b"),
        ("spec_bench", "leaderboard_3090", "eagle", "vicuna7b"),
        ("spec_bench", "leaderboard_3090", "eagle2", "vicuna7b"),
        ("spec_bench", "leaderboard_a100", "pld", "vicuna7b"),
        ("spec_bench", "leaderboard_a100", "pld", "vicuna13b"),
    ],
)
def test_a_row_s_numbers_stand_in_their_columns(paper, exhibit, method, model):
    one = claim(paper, exhibit, method, model)
    texts = {"card": TABLE, "spec_bench": BOARD}
    assert check(one, texts)[0] == FOUND
    for metric, by_task in one.values.items():
        for task in by_task:
            wrong = dataclasses.replace(
                one, values={**one.values, metric: {**by_task, task: by_task[task] + 0.01}}
            )
            verdict, where = check(wrong, texts)
            assert verdict == CONTRADICTED
            assert f"{metric} {task}" in where
    assert check(one, {"card": "no table", "spec_bench": ""})[0] == FOR_THE_EYE
    assert check(one, {})[0] == FOR_THE_EYE


def test_a_sentence_s_number_counts_near_its_words_alone():
    assert (
        check(claim("card", "sentences", "card", "all", over="pearl"), {"card": TABLE})[0] == FOUND
    )
    ouroboros = claim("card", "sentences", "card", "all", over="ouroboros")
    assert check(ouroboros, {"card": TABLE})[0] == FOR_THE_EYE
    assert check(ouroboros, {"card": TABLE + "and 1.39× over Ouroboros"})[0] == FOUND
    assert check(ouroboros, {"card": TABLE + "and 11.39× over Ouroboros"})[0] == FOR_THE_EYE


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (r"| 1.86×\times 2.42 |", "1.86 ×  2.42 |"),
        (
            r"2.362.362.36 2.18±0.02superscript2.18plus-or-minus0.022.18^{\pm 0.02}",
            "2.36 2.18 0.02",
        ),
        ("2.562.56{2.56} **2.31x**", "2.56 2.31x"),
    ],
)
def test_formulas_that_a_converter_repeated(line, read):
    assert plain(line) == read


def test_the_program_counts_and_refuses(tmp_path, monkeypatch, capsys):
    assert check_claims.main([str(tmp_path / "nowhere")]) == 2
    (tmp_path / "notes.txt").write_text("nothing")
    assert check_claims.main([str(tmp_path)]) == 2
    assert "holds no text named by one of these sources" in capsys.readouterr().err
    (tmp_path / "card.txt").write_text(TABLE)
    assert check_claims.main([str(tmp_path), "--eye"]) == 0
    printed = capsys.readouterr().out
    assert "for the eye: pld; README: CNN/DM and HAGRID;" in printed
    counted = next(line.split() for line in printed.splitlines() if line.startswith("card "))
    assert counted[1:3] == ["4", "0"], "three rows and a sentence"
    (tmp_path / "card.txt").write_text(TABLE.replace("41.34", "41.35"))
    assert check_claims.main([str(tmp_path)]) == 1
    assert "contradicted: card; Table 2; card, llama3_70b, gsm8k" in capsys.readouterr().out
