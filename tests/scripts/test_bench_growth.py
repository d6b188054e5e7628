"""The arithmetic of the growth measurement; the times themselves are a measurement."""

import json

import numpy as np
import pytest

from scripts.bench import __main__ as bench
from scripts.bench import growth as script


def rows(label, part, times, sizes=(1_000, 10_000, 100_000)):
    return [
        {"part": part, "label": label, "size": size, "both_median_us": time}
        for size, time in zip(sizes, times, strict=True)
    ]


@pytest.mark.parametrize(
    ("label", "part", "times", "power", "within"),
    [
        ("pld", "context", [1, 10, 100], 1.0, True),
        ("pld", "context", [1, 100, 10_000], 2.0, False),
        ("sam", "stores", [5, 5, 5], 0.0, True),
        ("ssd", "stores", [1, 10, 100], 1.0, False),
        ("ngrammys strategy=context", "context", [2, 2, 2], 0.0, True),
    ],
)
def test_growth_is_the_slope_and_is_held_against_what_is_stated(label, part, times, power, within):
    (line,) = script.growth(rows(label, part, times))
    assert line["power"] == pytest.approx(power, abs=1e-3)
    assert line["within"] is within


def test_stored_text_is_seeded_and_repeats_itself():
    text = script.zipf_tokens(5_000, seed=3)
    assert np.array_equal(text, script.zipf_tokens(5_000, seed=3))
    assert text.min() >= 1 and text.max() < script.VOCAB
    windows = {tuple(text[i : i + 12]) for i in range(len(text) - 12)}
    assert len(windows) < 0.9 * (len(text) - 12)
    asked = script.query_text(text, 300, seed=4)
    assert len(asked) == 300
    found = [
        tuple(asked[i : i + 5]) in {tuple(text[j : j + 5]) for j in range(4_995)}
        for i in range(0, 290, 29)
    ]
    assert any(found) and not all(found)


def test_parts_not_measured_now_are_kept(tmp_path, monkeypatch, capsys):
    measured = [
        *rows("pld", "context", [1, 2, 3]),
        *rows("ngrammys strategy=context", "context", [1, 1, 2]),
    ]
    monkeypatch.setitem(script.PARTS, "context", lambda seed: measured)
    monkeypatch.setitem(script.PARTS, "stores", lambda seed: rows("sam", "stores", [4, 4, 4]))
    out = tmp_path / "growth.json"
    assert bench.main(["growth", "--parts", "context", "--out", str(out)]) == 0
    assert bench.main(["growth", "--parts", "stores", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {row["part"] for row in written["rows"]} == {"context", "stores"}
    assert {"command", "date", "environment"} < written.keys()
    assert "size^0.00" in capsys.readouterr().out
