"""Any configuration and any line of questions is either usable or refused in words.

Values are drawn from what has broken programs before, and put at any key. What is not a refusal of
ours, or of Hydra's that we translate, fails the test.
"""

import json
from functools import cache

import hydra.utils
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from runners.launch import dispatch
from specbench.config.compose import compose, option_names, to_config
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.run_key import run_key
from specbench.config.schema import DatasetConfig
from specbench.config.validate import check_values
from specbench.data.cases import load_cases
from specbench.errors import ConfigurationError, DatasetError

METHODS = option_names("method")
NUMBERS = [0, 1, -1, 2**31, 2**63, -(2**70), 10**25, 0.5, -0.0, 1e-320, 1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
WORDS = ["", " ", "pld", "auto", "[red]x[/blue]", "<script>", "=cmd|x", "../..", "a\0b", "\ud800",
         "${seed}", "${nothing.there}", "${oc.env:HOME", "???", "null", "-rf", "é\n漢"]  # fmt: skip
SMALL = st.sampled_from([*NUMBERS, *WORDS, None, True, False])
VALUES = st.recursive(
    SMALL,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["method", "_target_", "label", "kind", "x"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@cache
def composed(method: str) -> DictConfig:
    return compose([f"method={method}", "pair=none"])


@cache
def keys(method: str) -> list[str]:
    """List every key of a run with the method, groups included."""
    names = []

    def walk(node: DictConfig, prefix: str) -> None:
        for key in node:
            names.append(f"{prefix}{key}")
            value = None if OmegaConf.is_missing(node, key) else node[key]
            if isinstance(value, DictConfig):
                walk(value, f"{prefix}{key}.")

    walk(composed(method), "")
    return names


def usable(cfg: DictConfig) -> bool:
    """Do what a run does before its first file: check values, entries and key, make drafters."""
    check_values(cfg)
    entries = dispatch.resolve_entries(cfg)
    run_key(cfg)
    to_config(cfg)
    for entry in entries:
        hydra.utils.instantiate(dict(entry.method), _convert_="all")
    return True


@pytest.mark.timeout(1800)
@given(data=st.data())
def test_values_anywhere_are_taken_or_refused(data):
    method = data.draw(st.sampled_from(METHODS))
    cfg = composed(method).copy()
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from([*keys(method), "compare[0]", "nosuch", "engine.nosuch"]))
        value = data.draw(VALUES)
        try:
            OmegaConf.update(cfg, key, value, force_add=data.draw(st.booleans()))
        except Exception as error:
            assert translate_hydra_error(error) is not None or isinstance(error, TypeError)
            event("refused by the schema")
            return
    try:
        usable(cfg)
        event("usable")
    except hydra.errors.InstantiationException as error:
        assert isinstance(error.__cause__, ConfigurationError)
        event("refused by the method")
    except Exception as error:
        translated = translate_hydra_error(error)
        assert translated is not None and translated.exit_code == 2
        event("refused")


CELLS = st.recursive(
    SMALL,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["", "id", "turns"]), inner, max_size=2)
    ),
    max_leaves=6,
)
QUESTION = {"question_id": 81, "category": "qa", "turns": ["Why?", "And then?"]}
LINES = st.one_of(
    st.text(min_size=1).map(lambda key: json.dumps({**QUESTION, "question_id": key})),
    st.tuples(st.sampled_from([*QUESTION, "reference"]), CELLS).map(
        lambda cell: json.dumps({**QUESTION, cell[0]: cell[1]})
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "question_id": CELLS,
            "category": st.just("qa") | st.just("overall") | CELLS,
            "turns": st.lists(st.text(max_size=5), max_size=2) | CELLS,
        },
    ).map(json.dumps),
    CELLS.map(json.dumps),
    st.text(max_size=20),
    st.sampled_from(
        [
            '{"turns": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "[" * 100_000,
            '{"question_id": ' + "9" * 5000 + "}",
            '{"question_id": 1e400}',
            "\ufeff{}",
            "{",
            "\0",
        ]
    ),
)
FILES = st.lists(LINES, min_size=1, max_size=3)


@pytest.mark.timeout(1800)
@given(lines=FILES)
def test_files_of_questions_are_read_or_refused_with_their_line(lines, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    columns = {"id": "question_id", "turns": "turns", "category": "category"}
    values = {"name": "own", "path": str(path), "columns": columns, "order": "interleaved"}
    dataset = OmegaConf.to_object(OmegaConf.merge(DatasetConfig, values))
    try:
        cases = load_cases(dataset)
    except DatasetError as error:
        assert error.exit_code == 2
        if "has no questions" in str(error):
            assert str(path) in str(error)
            event("without a question")
        else:
            assert f"{path}, line " in str(error)
            event("refused")
        return
    event("read")
    for case in cases:
        assert all(turn.strip() for turn in case.turns)
        written = [case.case_id, case.category, *case.turns]
        json.dumps(written, ensure_ascii=False).encode()
