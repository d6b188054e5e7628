"""What the picture of advice shows, of what `run.py advise` writes."""

import pytest

from analysis import advice as picture
from runners.advice.answer import Advice, Option, Speed
from specbench.storage import jsonl


@pytest.fixture
def written(tmp_path):
    """A folder with advice on two methods that were run, one replayed, one tried live alone."""
    speeds = {"predicted": Speed(1.4, (1.2, 1.6), 4), "measured": Speed(1.3, (1.1, 1.5), 4)}
    made = [
        Option("pld", {"num_tokens": 4}, 1.5, **speeds),
        Option("sam", {}, 1.1, predicted=Speed(1.1, None, 2)),
        Option("jacobi", {}, 0.5),
    ]
    advice = Advice("m", "mine.txt", 10, 4, 4, made)
    jsonl.write_json(tmp_path / picture.FILE, advice.to_json())
    return tmp_path


def test_every_method_with_a_speedup_has_a_row(written):
    rows = {
        row.name: tuple(map(str, row.values))
        for row in picture.rows_of(jsonl.read_json(written / picture.FILE))
    }
    assert rows == {
        "pld": ("1.40 [1.20, 1.60]", "1.30 [1.10, 1.50]"),
        "sam": ("too few cases", "–"),
    }


def test_it_is_drawn_beside_the_advice_and_a_damaged_one_is_refused(written, capsys):
    assert picture.main([str(written)]) == 0
    assert (written / "advice.png").stat().st_size > 10_000
    jsonl.write_json(written / picture.FILE, {"options": [{}]})
    assert picture.main([str(written)]) == 2
    assert picture.main([str(written / "nowhere")]) == 2
    assert "run.py advise" in capsys.readouterr().err
