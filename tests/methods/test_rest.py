import json
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.rest import Retrieval
from methods.rest.datastore import Datastore, build
from scripts import build_artifact as script
from specbench.artifacts import corpora, documentation
from specbench.artifacts.corpora import Corpus
from specbench.decoding.structs import DecodeState, DraftContext
from specbench.errors import ArtifactError, ConfigurationError
from specbench.storage.arrays import read_header
from tests.methods.toy_turns import pairs as pairs_of


def write(path, documents, vocab_size=200_000, name="toy", **options):
    with patch("specbench.models.loading.tokenizer_hash", lambda tokenizer: "toy"):
        build(range(vocab_size), path, corpus=Corpus({"name": name}, documents), **options)
    return path


def ready(path, tokenizer_hash="toy", vocab_size=200_000, **knobs):
    drafter = Retrieval(**knobs)
    drafter.setup(
        DraftContext(vocab_size, frozenset(), tokenizer_hash, artifacts={"datastore": path})
    )
    drafter.reset()
    return drafter


def pairs(drafter, text):
    return pairs_of(drafter.propose(DecodeState(np.array(text, dtype=np.int64), 4)))


def test_no_hit_drafts_nothing_or_the_dummy(tmp_path):
    path = write(tmp_path / "d.bin", [[1, 2, 3]])
    assert pairs(ready(path), [5, 6]) == []
    assert pairs(ready(path, dummy_token=100), [5, 6]) == [(100, -1)]
    with pytest.raises(ConfigurationError, match=r"`method\.dummy_token` must be below 50"):
        ready(path, dummy_token=100, vocab_size=50)


def test_any_vocabulary_size(tmp_path):
    path = write(tmp_path / "d.bin", [[70_000, 150_000, 199_999, 65_536]])
    assert pairs(ready(path), [70_000, 150_000]) == [(199_999, -1), (65_536, 0)]


def plain_tree(chunks, text, knobs):
    """Restate REST's steps over lists of documents."""
    for span in range(min(knobs["max_span"], len(text)), knobs["min_span"] - 1, -1):
        taken, hits = [], 0
        for chunk in chunks:
            matches = sorted(
                (document[i + span :], -c, -i)
                for c, document in enumerate(chunk)
                for i in range(len(document) - span + 1)
                if document[i : i + span] == text[-span:]
            )
            total, limit = len(matches), min(len(matches), knobs["max_matches"])
            hits += total
            stride = total if knobs["matches"] == "even" else limit
            taken += [matches[i * stride // limit][0][: knobs["draft_len"]] for i in range(limit)]
        if hits:
            break
    else:
        return []
    counts = Counter(tuple(c[:d]) for c in taken for d in range(1, len(c) + 1))
    prefixes = sorted(counts, key=lambda p: (-counts[p], len(p), p))[: knobs["choices"]]
    if knobs["cut"]:
        while sum(len(set(p)) for p in prefixes) > knobs["choices"]:
            most = max(len(set(p)) for p in prefixes)
            prefixes.remove([p for p in prefixes if len(set(p)) == most][-1])
    prefixes.sort(key=len)
    return [(p[-1], prefixes.index(p[:-1]) if len(p) > 1 else -1) for p in prefixes]


@given(
    documents=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8
    ),
    chunk=st.integers(14, 60),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    span=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    max_matches=st.sampled_from([1, 2, 3, 5, 5000]),
    matches=st.sampled_from(["first", "first", "even"]),
    draft_len=st.integers(1, 6),
    choices=st.integers(1, 20),
    cut=st.booleans(),
)
def test_equals_the_plain_rule(
    tmp_path_factory, documents, chunk, text, span, max_matches, matches, draft_len, choices, cut
):
    chunks, size = [[]], 0
    for document in documents:
        if size + len(document) + 1 > chunk:
            chunks, size = [*chunks, []], 0
        chunks[-1].append(document)
        size += len(document) + 1
    path = write(tmp_path_factory.mktemp("d") / "d.bin", documents, chunk=chunk)
    assert len(Datastore.open(path, "toy").arrays.offsets) == len(chunks) + 1
    knobs = {
        "min_span": span[0], "max_span": span[1], "draft_len": draft_len, "choices": choices,
        "cut": cut, "max_matches": max_matches, "matches": matches,
    }  # fmt: skip
    drafter = ready(path, **knobs)
    tree = pairs(drafter, text)
    assert tree == plain_tree(chunks, text, knobs)
    assert len(tree) <= drafter.needs.max_nodes == choices


def test_long_documents_are_cut_at_the_chunk(tmp_path):
    text = list(range(100, 125))
    path = write(tmp_path / "d.bin", [text], chunk=10)
    store = Datastore.open(path, "toy").arrays
    assert store.offsets.tolist() == [0, 10, 20, 28]
    assert store.tokens.tolist() == [*text[:9], -1, *text[9:18], -1, *text[18:], -1]
    assert pairs(ready(path, draft_len=3), [112, 113]) == [(114, -1), (115, 0), (116, 1)]


def test_a_build_stops_after_so_many_tokens(tmp_path):
    endless = ([i, i + 1] for i in range(10**9))
    with patch("specbench.models.loading.tokenizer_hash", lambda tokenizer: "toy"):
        build(range(99), tmp_path / "d.bin", corpus=Corpus({}, endless, 50), chunk=8)
    header = read_header(tmp_path / "d.bin")
    assert header["n_tokens"] == 50 and header["n_documents"] == 25


@pytest.mark.parametrize("documents", [[], [[]]])
def test_an_empty_corpus_is_refused(tmp_path, documents):
    with pytest.raises(ArtifactError, match="no text"):
        write(tmp_path / "d.bin", documents)


def test_ids_of_another_vocabulary_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match="vocabulary of 50"):
        write(tmp_path / "d.bin", [[1, 50]], vocab_size=50)


def test_records_name_the_corpus(tmp_path):
    write(tmp_path / "d.bin", [[1, 2, 3]], name="ultrachat")
    assert ready(tmp_path / "d.bin").report() == {"corpus": "ultrachat"}


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path):
    path = write(tmp_path / "d.bin", [[1, 2, 3]])
    with pytest.raises(ArtifactError, match=r"(?s)'toy'.*'real'"):
        ready(path, tokenizer_hash="real")


class WordTokenizer:
    """One id per word, by its length."""

    def __len__(self):
        return 30

    def __call__(self, texts, **_):
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


def test_the_bundled_default_is_made_of_installed_text(tmp_path, monkeypatch):
    prose = [("python", ["a bb ccc", "dddd a bb"]), ("numpy", ["ccc"])]
    monkeypatch.setattr(documentation, "installed_prose", lambda: iter(prose))
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "toy")
    path = tmp_path / "artefacts" / "d.bin"
    build(WordTokenizer(), path)
    store = Datastore.open(path, "toy").arrays
    assert store.tokens.tolist() == [1, 2, 3, -1, 4, 1, 2, -1, 3, -1]
    assert read_header(path)["corpus"]["name"] == "installed_documentation"


@pytest.fixture
def toy_models(monkeypatch):
    monkeypatch.setattr(script.loading, "load_tokenizer", lambda cfg: WordTokenizer())
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "toy")


def test_the_script_builds_from_files_and_refuses_nonsense(tmp_path, toy_models, capsys):
    file, out = tmp_path / "a.txt", tmp_path / "sub" / "d.bin"
    file.write_text("a bb ccc\n\ndddd a bb\n")
    command = ["datastore", "--model", "smollm2_135m", "--out", str(out), "--corpus", "files"]
    assert script.main([*command, "--files", str(file)]) == 0
    assert "6 tokens in 2 documents of files" in capsys.readouterr().out
    assert Datastore.open(out, "toy").arrays.tokens.tolist() == [1, 2, 3, -1, 4, 1, 2, -1]
    assert list(out.parent.iterdir()) == [out]
    assert script.main(command) == 2
    assert "--files belong together" in capsys.readouterr().err
    assert script.main(["datastore", "--model", "smollm2_135m", "--chunk", "1"]) == 2


def test_a_smaller_store_is_a_file_of_its_own_where_the_method_looks(tmp_path, toy_models):
    file = tmp_path / "a.txt"
    file.write_text("a bb ccc\n\ndddd a bb\n\na a\n")
    command = ["datastore", "--model", "smollm2_135m", "--corpus", "files", "--files", str(file)]
    stores = {}
    for size in (None, 4, 2):
        (needed,) = Retrieval(store_tokens=size).needs.artifacts
        option = [] if size is None else ["--store-tokens", str(size)]
        assert needed.command.endswith(" ".join(option) or "ultrachat")
        cfg = script.to_config(script.compose(["model=smollm2_135m", f"cache_dir={tmp_path}"]))
        options = script.parse([*command, *option])
        options.overrides = [f"cache_dir={tmp_path}"]
        path = script.resolve.default_path(
            needed, tokenizer=WordTokenizer(), cache_dir=cfg.cache_dir
        )
        assert script.build(options) == path
        stores[size] = Datastore.open(path, "toy").arrays.tokens
    assert [int((tokens >= 0).sum()) for tokens in stores.values()] == [8, 6, 3]
    with pytest.raises(ConfigurationError, match="store_tokens"):
        Retrieval(store_tokens=4, datastore="d.bin")


def test_the_script_builds_from_earlier_outputs(tmp_path, toy_models, monkeypatch):
    turns = [(np.array([1, 2]), np.array([3])), (np.array([4]), np.array([5, 6]))]
    monkeypatch.setattr(corpora, "recorded_turns", lambda path, tokenizer_hash: iter(turns))
    out = tmp_path / "d.bin"
    command = "datastore --model smollm2_135m --corpus outputs --cases results/one --out"
    assert script.main([*command.split(), str(out)]) == 0
    assert Datastore.open(out, "toy").arrays.tokens.tolist() == [1, 2, 3, -1, 4, 5, 6, -1]
    assert json.loads(json.dumps(read_header(out)["corpus"]["runs"])) == ["one"]
