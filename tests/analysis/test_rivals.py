"""A method against the best of all other labels, plain decoding among them."""

import pandas as pd
import pytest

from analysis import rivals
from tests.analysis.folders import edit_manifest, edit_records
from tests.analysis.test_residuals import write

CASES = ("a", "b", "c", "d")
SECONDS = {"ar": 2.0, "cut": 1.5, "bad": 4.0, "whole": 1.8}


@pytest.fixture
def run(tmp_path):
    """Plain decoding, a fixed budget (whole) and two labels of a method; each case is longer."""
    folder = write(tmp_path / "run", "measured", SECONDS, CASES)
    methods = {"cut": "adaptive", "bad": "adaptive", "whole": "pld", "ar": "ar"}
    edit_manifest(folder, labels={label: {"method": m} for label, m in methods.items()})

    def slower(record):
        factor = 1 + CASES.index(record["case_id"])
        times = {key: record[key] * factor for key in ("decode_s", "wall_s")}
        return record | times | {"method": methods[record["label"]]}

    edit_records(folder, slower)
    return folder


def test_it_is_compared_with_the_fastest_of_the_others(run, capsys):
    first, second = rivals.rivalries(rivals.load_runs([run])[0], "adaptive")
    assert (first.label, first.rival, first.n_cases) == ("cut", "whole", 4)
    assert first.ratio == pytest.approx(1.8 / 1.5)
    assert first.interval == pytest.approx((1.2, 1.2))  # the same in each case
    assert second.ratio == pytest.approx(1.8 / 4.0)  # and not over its method's other label
    assert (first.apart, *first.apart_interval) == pytest.approx((1.2, 1.2, 1.2))
    assert rivals.main([str(run), "--method", "adaptive", "--least", "1.19"]) == 0
    assert rivals.main([str(run), "--method", "adaptive", "--least", "1.21"]) == 1
    assert "1.200" in capsys.readouterr().out


def test_its_file_says_which_code_was_measured(run, tmp_path):
    edit_manifest(run, code="1" * 16, git={"commit": "a" * 40})
    assert rivals.main([str(run), "--method", "adaptive", "--csv", str(tmp_path / "r.csv")]) == 0
    (said,) = set(pd.read_csv(tmp_path / "r.csv")["code"])
    assert said.endswith(f"(code {'1' * 16})")


def test_a_rival_is_chosen_by_the_cases_that_it_is_not_measured_on(run):
    """Plain decoding is far ahead on one case alone, and so the best over all cases."""

    def lucky(record):
        times = {key: 0.01 for key in ("decode_s", "wall_s")}
        return record | (times if (record["label"], record["case_id"]) == ("ar", "d") else {})

    edit_records(run, lucky)
    loaded = rivals.load_runs([run])[0]
    first, _ = rivals.rivalries(loaded, "adaptive")
    assert first.rival == "ar"
    seconds = {(r.label, r.case_id): r.decode_s for r in loaded.records}
    used = 0.0
    for case in CASES:
        others = [c for c in CASES if c != case]
        best = min(("ar", "whole"), key=lambda label: sum(seconds[label, c] for c in others))
        used += seconds[best, case]
    assert used > sum(seconds["ar", case] for case in CASES)  # the luck is not counted
    assert first.apart == pytest.approx(used / sum(seconds["cut", case] for case in CASES))


def test_a_method_that_is_not_there_is_named_with_those_that_are(run, capsys):
    assert rivals.main([str(run), "--method", "adaptve"]) == 2
    assert "adaptive" in capsys.readouterr().err
