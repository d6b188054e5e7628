import numpy as np
import pytest

from methods.cacheback import Cacheback, frozen_table
from methods.cacheback.frozen_table import FrozenTable
from scripts import build_artifact as script
from specbench.artifacts import corpora, documentation, resolve
from specbench.errors import NeedsNotMet
from tests.contract.driver import WordTokenizer

TEXT = "the cat sat on the mat\nand the cat slept\n\n\na dog came\n\nthe cat sat still\n"


@pytest.fixture
def tokenizer(monkeypatch, tmp_path):
    word_tokenizer = WordTokenizer()
    monkeypatch.setattr("specbench.models.loading.load_tokenizer", lambda cfg: word_tokenizer)
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "words")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return word_tokenizer


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def arguments(corpus, *more):
    files = ("--corpus", "files", "--files", str(corpus), "--sample", "1")
    return ["frozen_table", "--model", "vicuna7b", *files, *more]


def test_the_table_has_what_followed_in_the_texts(tokenizer, corpus, tmp_path, capsys):
    out = tmp_path / "table.bin"
    options = ("--out", str(out), "--leader-len", "2", "--follower-len", "1")
    assert script.main(arguments(corpus, *options)) == 0
    assert "17 tokens of files" in capsys.readouterr().out
    (the, cat, sat, on, still) = tokenizer(["the cat sat on still"])["input_ids"][0]
    table = FrozenTable.open(out, "words")
    assert table.followers((the, cat))[0] == (sat,)
    assert sorted(table.followers((cat, sat))) == sorted([(on,), (still,)])
    assert table.header["corpus"]["files"] == ["corpus.txt"]
    assert table.header["n_documents"] == 3


def test_the_default_place_is_where_a_run_looks(tokenizer, corpus, tmp_path):
    needed = Cacheback(follower_len=2, total_draft_len=32).needs.artifacts
    look = {"tokenizer": tokenizer, "bundled": False, "cache_dir": tmp_path / "cache"}
    with pytest.raises(NeedsNotMet) as caught:
        resolve.resolve(needed, **look)
    # The command of the message is the one that helps.
    options = str(caught.value).partition("build_artifact.py frozen_table --model MODEL")[2].split()
    assert script.main(arguments(corpus, *options)) == 0
    assert resolve.resolve(needed, **look)["frozen_table"].is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sample", "0"], "--sample"),
        (["--follower-len", "0"], "--follower-len"),
        (["--files", "nowhere.txt"], "nowhere.txt"),
        (["--corpus", "alpaca"], "--files"),
        (["--model", "vicuna7"], "vicuna7b"),
    ],
)
def test_bad_arguments_exit_with_2_and_leave_nothing(
    tokenizer, corpus, tmp_path, capsys, more, message
):
    out = tmp_path / "out" / "table.bin"
    assert script.main(arguments(corpus, "--out", str(out), *more)) == 2
    assert message in capsys.readouterr().err
    assert not out.parent.exists() or not list(out.parent.iterdir())


@pytest.mark.parametrize("name", ["frozen_table", "datastore"])
def test_an_interrupted_build_leaves_nothing(tokenizer, corpus, tmp_path, monkeypatch, name):
    read = type(tokenizer).__call__

    def interrupted(self, texts, **options):
        read(self, texts, **options)
        raise KeyboardInterrupt

    out = tmp_path / "sub" / "table.bin"
    command = [name, "--model", "vicuna7b", "--files", str(corpus), "--out", str(out)]
    command += ["--sample", "1"] if name == "frozen_table" else []
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "__call__", interrupted)
        assert script.main(command) == 130
    assert not list(out.parent.iterdir())
    assert script.main(command) == 0
    assert list(out.parent.iterdir()) == [out]


def test_one_reading_of_the_documentation_serves_all_lengths(tokenizer, tmp_path, monkeypatch):
    letters = np.random.default_rng(0).choice(list("abcde"), (60, 9))
    # Documents shorter than a window among them: each width leaves out others.
    texts = [" ".join(letters[i, : i % 10]) for i in range(60)]
    readings = []

    def installed():
        readings.append(len(readings))
        yield "toy", texts

    monkeypatch.setattr(documentation, "installed_prose", installed)
    monkeypatch.setattr(documentation, "sources", lambda: {"toy": "1"})
    room = {"leader_capacity": 40, "follower_capacity": 3, "total_draft_len": 32}
    lengths = [(leader, follower) for leader in (1, 2, 3) for follower in (1, 2, 4)]
    for leader_len, follower_len in lengths:
        method = Cacheback(leader_len=leader_len, follower_len=follower_len, **room)
        files = resolve.resolve(
            method.needs.artifacts, tokenizer=tokenizer, bundled=True, cache_dir=tmp_path
        )
        table = FrozenTable.open(files["frozen_table"], "words")
        corpus = corpora.Corpus({"name": "toy"}, corpora.tokenized(texts, tokenizer))
        params = method.needs.artifacts[0].params
        frozen_table.build(tokenizer, tmp_path / "plain.bin", corpus=corpus, **params)
        plain = FrozenTable.open(tmp_path / "plain.bin")
        assert all(map(np.array_equal, table.arrays, plain.arrays))
        assert table.header["corpus"]["sha256"] == corpus.described()["sha256"]
        assert table.header["n_windows"] == plain.header["n_windows"]
        assert len(table.arrays.followers)
    assert len(readings) == 1
    # Other versions of the packages are read again.
    monkeypatch.setattr(documentation, "sources", lambda: {"toy": "2"})
    frozen_table.build(tokenizer, tmp_path / "artefacts" / "again.bin", **params)
    assert len(readings) == 2
