from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.ngrammys import NGrammys, bigram_table
from methods.ngrammys.bigram_table import BigramTable, build, build_table, rank_unigrams
from scripts import build_artifact as script
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.errors import ArtifactError, ConfigurationError
from specbench.models.checkpoints.weights import sample_weights
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, tiny_model
from tests.methods.toy_turns import decode, pairs, plain

# After token t come t + 1, t + 2, … of ten.
SUCCESSORS = np.array([[(t + 1 + i) % 10 for i in range(10)] for t in range(10)], dtype=np.int32)


def write(path, bigrams=SUCCESSORS, unigrams=(7, 3, 5, 1), sample=(1.0,), bos=False, hash_="toy"):
    table = BigramTable(
        np.asarray(bigrams, dtype=np.int32),
        np.asarray(unigrams, dtype=np.int32),
        np.asarray(sample, dtype=np.float32),
        bos,
    )
    table.write(path, tokenizer_hash=hash_, header={})
    return path


def ready(tmp_path, **knobs):
    drafter = NGrammys(**knobs)
    files = {a.name: write(tmp_path / "table.bin") for a in drafter.needs.artifacts}
    drafter.setup(DraftContext(10, frozenset(), "toy", artifacts=files))
    drafter.reset()
    return drafter


def propose(drafter, text):
    return drafter.propose(DecodeState(np.array(text, dtype=np.int64), 4))


def rows_of(tree):
    return tree.tokens.reshape(tree.rows).tolist()


@pytest.mark.parametrize(("strategy", "firsts"), [("bigram", [7, 8]), ("unigram", [7, 3])])
def test_unigrams_and_bigrams_are_single_tokens(tmp_path, strategy, firsts):
    drafter = ready(tmp_path, strategy=strategy, k=2, w=9)
    assert propose(drafter, [5, 6]).tokens.tolist() == firsts
    assert drafter.needs.max_nodes == 2 and drafter.source_names[1] == strategy


def test_a_merged_tree_shares_beginnings_and_names_the_first_row(tmp_path):
    drafter = ready(tmp_path, k=4, w=3, layout="tree")
    tree = propose(drafter, [6, 7, 8, 1, 6, 7, 9, 1, 6])
    # Rows: 7 9 1, 7 8 1, then bigrams 7 8 9 and 8 9 0.
    assert pairs(tree) == [
        (7, -1), (9, 0), (1, 1), (8, 0), (1, 3), (9, 3), (8, -1), (9, 6), (0, 7),
    ]  # fmt: skip
    assert tree.sources.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_rows_of_every_step_are_kept(tmp_path):
    for layout in ("batch", "tree"):
        drafter = ready(tmp_path, k=4, w=3, layout=layout)
        state = DecodeState(np.array([6, 7, 8, 1, 6, 7, 9, 1, 6], dtype=np.int64), 9)
        drafter.begin(state)
        tree = drafter.propose(state)
        third = [6, 7, 8] if layout == "batch" else [0, 3, 5]  # 7 8 9, the third row
        assert tree.tokens[third].tolist() == [7, 8, 9]
        committed = np.array([7, 8, 9, 4])
        state.commit(committed)
        drafter.observe(state, StepOutcome(tree, np.array(third), committed, None))
        tree = drafter.propose(state)
        state.commit(committed[:1])
        drafter.observe(state, StepOutcome(tree, NO_TOKENS, committed[:1], None))
        # A recorded turn that is fed again was not proposed.
        drafter.observe(state, StepOutcome(DraftTree.empty(), NO_TOKENS, committed[:1], None))
        assert drafter.report() == {
            "rows_context": [2, 0],
            "rows_bigram": [2, 4],
            "won_row": [2, -1],
            "won_source": ["bigram", None],
            "won_rank": [0, -1],
            "accepted": [3, 0],
        }
        drafter.begin(state)
        assert drafter.report()["won_row"] == []


def plain_rows(text, strategy, k, w, q):
    """The rules in words."""
    rows = []
    if strategy in ("context", "mixed"):
        windows = [
            tuple(text[i + q : i + q + w])
            for i in range(len(text) - q - w + 1)
            if text[i : i + q] == text[len(text) - q :]
        ]
        counts = Counter(windows)
        latest = {window: i for i, window in enumerate(windows)}
        rows = sorted(counts, key=lambda window: (-counts[window], -latest[window]))[:k]
    if strategy in ("extended_bigram", "mixed"):
        for first in SUCCESSORS[text[-1]]:
            row = tuple((int(first) + j) % 10 for j in range(w))
            if row not in rows and len(rows) < k:
                rows.append(row)
    return [list(row) for row in rows]


def plain_tree(rows):
    nodes = []
    for row in rows:
        for depth in range(1, len(row) + 1):
            if row[:depth] not in nodes:
                nodes.append(row[:depth])
    return [(p[-1], nodes.index(p[:-1]) if len(p) > 1 else -1) for p in nodes]


@given(
    text=st.lists(st.integers(0, 9), min_size=1, max_size=60)
    | st.lists(st.integers(0, 1), min_size=1, max_size=60),
    strategy=st.sampled_from(["context", "extended_bigram", "mixed"]),
    k=st.integers(1, 8),
    w=st.integers(1, 5),
    q=st.integers(1, 3),
)
def test_rows_and_trees_equal_the_plain_rules(tmp_path_factory, text, strategy, k, w, q):
    folder = tmp_path_factory.mktemp("table")
    knobs = {"strategy": strategy, "k": k, "w": w, "q": q}
    rows = plain_rows(text, strategy, k, w, q)
    merged = ready(folder, layout="tree", **knobs)
    assert pairs(propose(merged, text)) == plain_tree(rows)
    chains = propose(ready(folder, layout="tree", merge=False, **knobs), text)
    assert chains.tokens.tolist() == [token for row in rows for token in row]
    batch = propose(ready(folder, **knobs), text)
    assert batch.rows == (k, w)
    padding = [rows[-1] if rows else [text[-1]] * w] * (k - len(rows))
    assert rows_of(batch) == rows + padding
    assert len(batch) == merged.needs.max_nodes == k * w


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_the_table_is_what_the_model_says_after_each_token_alone(model):
    table = build_table(model, top=5, batch=7)
    for token in range(VOCAB):
        logits = model(input_ids=torch.tensor([[token]])).logits[0, -1]
        assert table.bigrams[token].tolist() == logits.topk(5).indices.tolist()
    assert table.bigrams.dtype == np.int32 and not table.bos
    after_bos = build_table(model, top=5, bos_id=1)
    logits = model(input_ids=torch.tensor([[1, 9]])).logits[0, -1]
    assert after_bos.bigrams[9].tolist() == logits.topk(5).indices.tolist() and after_bos.bos


def test_unigrams_point_away_from_the_mean_in_the_metric_of_the_input_embeddings(model):
    inputs = model.get_input_embeddings().weight.detach().numpy()
    outputs = model.get_output_embeddings().weight.detach().numpy()
    # The paper's listing: mu @ covV @ Wdec.T, smallest first.
    products = outputs.mean(0) @ (inputs.T @ inputs / VOCAB) @ outputs.T
    assert rank_unigrams(model, 10).tolist() == np.argsort(products)[:10].tolist()
    assert len(rank_unigrams(model, 999)) == VOCAB


def context_of(path, model=None, vocab=10, hash_="toy"):
    target = None if model is None else Target(model, max_len=16, max_nodes=4)
    return DraftContext(vocab, frozenset(), hash_, artifacts={"bigram_table": path}, target=target)


def test_a_table_of_another_tokenizer_or_weights_is_refused(model, tmp_path):
    path = write(tmp_path / "a.bin")
    drafter = NGrammys(k=2)
    with pytest.raises(ArtifactError, match=r"(?s)'toy'.*'real'"):
        drafter.setup(context_of(path, hash_="real"))
    table = build_table(model, top=5)
    table.write(path, tokenizer_hash="toy", header={})
    drafter.setup(context_of(path, tiny_model("llama"), VOCAB))
    # The same weights in another dtype are the same model.
    drafter.setup(context_of(path, tiny_model("llama").to(torch.bfloat16), VOCAB))
    other = tiny_model("llama", seed=1)
    with pytest.raises(ArtifactError, match="weights") as caught:
        drafter.setup(context_of(path, other, VOCAB))
    for weights in (table.sample, sample_weights(other)):
        assert bigram_table.digest(weights) in str(caught.value)


def test_a_table_that_does_not_fit_the_knobs_is_refused(tmp_path):
    path = write(tmp_path / "a.bin", bigrams=SUCCESSORS[:, :3])
    with pytest.raises(ConfigurationError, match="--top 4"):
        NGrammys(k=4).setup(context_of(path))
    with pytest.raises(ConfigurationError, match="bos=false"):
        NGrammys(k=2, bos=True).setup(context_of(path))
    with pytest.raises(ConfigurationError, match="at most 5"):
        NGrammys(k=2).setup(context_of(path, vocab=5))


def test_the_artifact_is_shared_over_the_papers_grid():
    params = [NGrammys(k=k, w=w).needs.artifacts[0].params for k in (1, 25) for w in (2, 14)]
    assert all(p == params[0] for p in params)
    larger = NGrammys(k=40, bos=True).needs.artifacts[0]
    assert larger.params == {"top": 40, "bos": True}
    assert larger.command.endswith("--model MODEL --bos --top 40")


def test_the_default_builder_runs_the_model_beside_the_tokenizer(tmp_path, monkeypatch):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: "toy")

    class Tokenizer:
        name_or_path = str(tmp_path / "model")
        bos_token_id = None

    path = tmp_path / "table.bin"
    build(Tokenizer(), path, top=5)
    table = BigramTable.open(path, "toy")
    assert np.array_equal(table.bigrams, build_table(model, top=5).bigrams)
    table.check_model(sample_weights(model), path)
    with pytest.raises(ConfigurationError, match="begin token"):
        build(Tokenizer(), path, bos=True)


def test_the_script_builds_a_table(tmp_path, monkeypatch, capsys):
    model = tiny_model("llama")
    loaded = type("Loaded", (), dict(model=model, id="toy", revision=None, dtype="float64"))
    monkeypatch.setattr(script.loading, "load_tokenizer", lambda cfg: None)
    monkeypatch.setattr(script.loading, "load_model", lambda cfg, tokenizer: loaded)
    monkeypatch.setattr(script.loading, "tokenizer_hash", lambda tokenizer: "toy")
    out = tmp_path / "sub" / "table.bin"
    command = ["bigram_table", "--model", "smollm2_135m", "--out", str(out), "--top", "6"]
    assert script.main([*command, "--batch", "10"]) == 0
    assert "next tokens of the model" in capsys.readouterr().out
    assert BigramTable.open(out, "toy").bigrams.shape == (VOCAB, 6)
    assert list(out.parent.iterdir()) == [out]
    assert script.main([*command, "--batch", "0"]) == 2


@pytest.mark.parametrize("architecture", CARRIERS)
@pytest.mark.parametrize("layout", ["batch", "tree"])
def test_both_layouts_decode_plainly_on_every_architecture(architecture, layout, tmp_path, rng):
    model = tiny_model(architecture)
    path = tmp_path / "table.bin"
    build_table(model, top=9).write(path, tokenizer_hash="toy", header={})
    drafter = NGrammys(k=4, w=3, layout=layout)
    needs = drafter.needs
    target = Target(model, max_len=128, max_nodes=needs.max_nodes, batch=needs.batch)
    files = {a.name: path for a in needs.artifacts}
    drafter.setup(DraftContext(VOCAB, frozenset(), "toy", 128, files, target=target))
    # A prompt that ends as its own answer begins, so that the context has something to match.
    seed = rng.integers(0, VOCAB, 10)
    prompt = np.concatenate((seed, plain(target, seed, 12), seed))
    result = decode(target, drafter, prompt, 30)
    assert result.output_ids == plain(target, prompt, 30)
    accepted = result.drafter["accepted"]
    assert len(accepted) == result.n_target_passes
    assert sum(accepted) + len(accepted) >= 29


def test_batch_and_tree_accept_the_same(tmp_path, rng):
    model = tiny_model("qwen2")
    path = tmp_path / "table.bin"
    build_table(model).write(path, tokenizer_hash="toy", header={})
    prompt = np.tile(rng.integers(0, VOCAB, 8), 4)
    steps = []
    for layout in ("batch", "tree"):
        drafter = NGrammys(layout=layout)
        target = Target(model, max_len=128, max_nodes=100, batch=drafter.needs.batch)
        drafter.setup(context_of(path, None, VOCAB))
        result = decode(target, drafter, prompt, 60)
        steps.append((result.output_ids, result.committed_per_step, result.sources_per_step))
        assert result.n_target_passes < 59
        assert sum(map(len, result.sources_per_step)) >= 59 - result.n_target_passes
    assert steps[0] == steps[1]
