"""Methods with trained heads: their trees, their inputs, and their outputs' exactness."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from methods.choose import Choose
from methods.dflash import DFlash
from methods.eagle import Eagle, Eagle2, Eagle3
from methods.hydra_heads import Hydra
from methods.medusa import Medusa
from methods.mtp import Mtp
from methods.pld import PromptLookup
from methods.sam import SuffixAutomatonDecoding
from methods.suffix_decoding import SuffixDecoding
from methods.suffix_else_head import SuffixElseHead
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import AFTER_FINAL_NORM, DecodeState, DraftContext, StepOutcome
from specbench.decoding.verify import RejectionVerifier
from specbench.draft_structures.marginal_tree import likeliest_prefixes
from specbench.draft_structures.static_tree import TREES, load_tree
from specbench.errors import ConfigurationError
from specbench.models.draft.loading import ID_MAP_FILE
from specbench.models.heads import dflash, row_cache
from specbench.models.heads import drafter as head_drafter
from specbench.models.heads.layer_shape import read_shape
from specbench.models.target import Target
from tests.conftest import ARCHITECTURES, engine, tiny_model
from tests.decoding import distributions as exact
from tests.decoding.table_models import TableTarget
from tests.methods import plain_head_trees as plain
from tests.models.heads import tiny_heads

GHOST = tiny_heads.Ghost()
IDS = (2, 4, 5)  # the reference code's states for the ghost's 8 layers
# By name: a small drafter, the plain guesses, the plain tree.
TREE = {
    "medusa": (lambda: Medusa(levels=[3, 4, 2]), plain.medusa_guess, plain.static_tree),
    "ddtree": (lambda: Medusa(tree="dynamic", nodes=9), plain.medusa_guess, likeliest_prefixes),
    "hydra": (lambda: Hydra(levels=[3, 4, 2]), plain.hydra_guess, plain.static_tree),
    "eagle": (lambda: Eagle(levels=[3, 4, 2]), plain.eagle_guess, plain.static_tree),
    "eagle2": (lambda: Eagle2(total=9, depth=2, top_k=3), plain.eagle_guess, plain.dynamic_tree),
    "eagle3": (lambda: Eagle3(total=9, depth=2, top_k=3), plain.eagle3_guess, plain.dynamic_tree),
    "dflash_tree": (lambda: DFlash(tree="dynamic", nodes=9), plain.block_guess, likeliest_prefixes),
}
BLOCKS = ("dflash", "dspark", "gated", "vanilla", "dflash_tree")
TREE |= {b: (partial(DFlash, head=b), plain.block_guess, plain.static_tree) for b in BLOCKS[:4]}
HEADS = {
    "medusa": tiny_heads.medusa(),
    "ddtree": tiny_heads.medusa(),
    "hydra": tiny_heads.hydra(n_heads=4),
    "eagle": tiny_heads.eagle(),
    "eagle2": tiny_heads.eagle(),
    "eagle3": tiny_heads.eagle3(),
    "dflash": tiny_heads.dflash(),
    "dflash_tree": tiny_heads.dflash(),
    "dspark": tiny_heads.dspark(),
    **{kind: tiny_heads.dspark(kind=kind) for kind in ("gated", "vanilla")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_heads.save_each(tmp_path_factory.mktemp("heads"))


def paths_of(tree):
    """Return each node as its path of ids."""
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def begin(drafter, context):
    """Return the drafter's state after ``PROMPT`` and one more token."""
    drafter.setup(context)
    state = DecodeState(PROMPT, 40)
    drafter.observe_prompt_hidden(PROMPT, tiny_heads.states_of(PROMPT, drafter.layers))
    state.commit(PROMPT[:1])
    drafter.begin(state)
    return state


def plain_tree(name, drafter, text, states):
    """Compute the expected draft after a text: every row goes with the token after it."""
    _, guesses, grown = TREE[name]
    guess = guesses(HEADS[name], GHOST.embeddings, text[1:], states)
    if grown is plain.static_tree:
        chain = [(0,) * (i + 1) for i in range(drafter.max_levels)]
        return plain.static_tree(guess, drafter._tree.paths if "levels" in vars(drafter) else chain)
    if grown is likeliest_prefixes:
        levels, nodes = drafter.max_levels, drafter.nodes
        if name == "ddtree":
            assert drafter.shape.level_sizes == [nodes] * levels  # its candidates
        whole = torch.zeros(2, levels, nodes)  # as a graph drafts, whatever remains of the turn
        assert {*drafter._tree_of(whole, levels=1).parents} == {-1}
        marginals = [guess((0,) * level)[:nodes] for level in range(levels)]
        return paths_of(likeliest_prefixes(*np.moveaxis(marginals, 2, 0), nodes))
    return grown(guess, drafter.total, drafter.depth, drafter.top_k)


def check_trees(name, folders, n_texts, n_steps=3):
    """Compare trees over several steps of random texts that contain drafted tokens."""
    drafter = TREE[name][0]()
    drafter.setup(DraftContext(tiny_heads.VOCAB, frozenset(), target=GHOST, heads=folders))
    layers = IDS if name == "eagle3" else (0, 1) if name in BLOCKS else (AFTER_FINAL_NORM,)
    for seed in range(n_texts):
        random = np.random.default_rng(seed)
        text = random.integers(0, tiny_heads.VOCAB, 4)
        state = DecodeState(text[:3], 40)
        given = drafter.needs.hidden_layers  # as the engine does
        drafter.observe_prompt_hidden(text[:3], tiny_heads.states_of(text[:3], given))
        state.commit(text[3:])
        drafter.begin(state)
        for _ in range(n_steps):
            states = tiny_heads.states_of(state.tokens[:-1], layers)
            joined = torch.cat([states[i] for i in layers], dim=-1)
            tree = drafter.propose(state)
            expected = plain_tree(name, drafter, torch.from_numpy(state.tokens.copy()), joined)
            assert paths_of(tree) == expected
            new = random.integers(0, tiny_heads.VOCAB, random.integers(1, 4))
            read = state.tokens[-1:].tolist() + new[:-1].tolist()
            state.commit(new)
            path = np.arange(0)  # which nodes they were does not matter to a head
            hidden = tiny_heads.states_of(read, given)
            drafter.observe(state, StepOutcome(tree, path, new, None, hidden=hidden))
        drafter.end(state)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n_texts", [2, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TREE)
def test_trees_are_their_plain_restatement(name, folders, n_texts):
    check_trees(name, folders, n_texts)


# -- mistakes of published engines, each planted ---------------------------------------------------


def embedding_of_the_row_s_own_token(patch):
    patch.setattr(
        "specbench.models.heads.drafter.to_device",
        lambda ids, device: torch.as_tensor(np.roll(ids, 1)),
    )


def rows_of_a_step_not_read(patch):
    patch.setattr(head_drafter.HeadDrafter, "observe", lambda self, state, outcome: None)


def states_before_the_final_norm(patch):
    patch.setattr(head_drafter.HeadDrafter, "layers", (7,))


def layers_one_off(patch):
    patch.setattr("specbench.models.heads.eagle3.default_ids", lambda n: (3, 5, 6))


def own_ids_as_the_target_s(patch):
    patch.setattr("specbench.models.heads.decoder.TrainedHead.to_target_ids", lambda self, ids: ids)


def infill_one_off(patch):
    patch.setattr(dflash.BlockConfig, "infill", property(lambda self: self.markov_rank > 0))


def window_ignored(patch):
    plan = row_cache.AttentionPlan()
    patch.setattr(row_cache, "AttentionPlan", lambda **masks: plan)


def memory_lost(patch):
    step = dflash.MarkovHead.forward
    patch.setattr(dflash.MarkovHead, "forward", lambda self, *a: (step(self, *a)[0], None))


MISTAKES = [
    ("dflash", infill_one_off),
    ("dspark", infill_one_off),
    ("dflash", window_ignored),
    ("dspark", memory_lost),
    ("medusa", states_before_the_final_norm),
    ("hydra", rows_of_a_step_not_read),
    ("eagle", embedding_of_the_row_s_own_token),
    ("eagle3", layers_one_off),
    ("eagle3", own_ids_as_the_target_s),
]


@pytest.mark.parametrize(
    ("name", "mistake"), MISTAKES, ids=[f"{n}-{m.__name__}" for n, m in MISTAKES]
)
def test_a_mistake_does_not_pass(name, mistake, folders, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check_trees(name, folders, n_texts=2)


# -- exactness -------------------------------------------------------------------------------------

FEW = 12  # ids: so few that trees of random heads hold the target's choices
PROMPT = np.array([5, 9, 5, 9, 7, 5, 9])
WIDE = {
    "medusa": lambda: Medusa(levels=[6, 8, 6, 4]),
    "ddtree": lambda: Medusa(tree="dynamic", nodes=24),
    "hydra": lambda: Hydra(levels=[6, 8, 6, 4]),
    "eagle": lambda: Eagle(levels=[6, 8, 6, 4]),
    "eagle2": lambda: Eagle2(total=25, depth=3, top_k=6),
    "eagle3": lambda: Eagle3(total=25, depth=2, top_k=6, layer_ids=[0, 1, 2]),
    "dflash": DFlash,
    "dflash_tree": lambda: DFlash(tree="dynamic", nodes=24),
    "dspark": lambda: DFlash(head="dspark"),
    "sam_eagle2": lambda: SuffixAutomatonDecoding(
        auxiliary=Eagle2(total=20, depth=2, top_k=5), automata="dynamic", len_threshold=2,
        max_predicts=6,
    ),
    "union": lambda: Union(
        drafters=[PromptLookup(num_tokens=4), Eagle2(total=20, depth=2, top_k=5),
                  Medusa(levels=[3])],
        max_nodes=16, fill="priority",
    ),
    "mtp": lambda: Mtp(total=8, depth=2, top_k=3),
    "choose": lambda: Choose(
        drafters=[PromptLookup(num_tokens=4), Eagle2(total=20, depth=2, top_k=5),
                  Hydra(levels=[6, 8])],
    ),
    "suffix_else_head": lambda: SuffixElseHead(
        drafters=[SuffixDecoding(), Eagle2(total=20, depth=2, top_k=5)], min_score=1.5
    ),
}  # fmt: skip


def check_exact(architecture, names, folder, monkeypatch):
    monkeypatch.setattr(head_drafter, "_LENGTH_STEP", 4)  # the caches grow on the way
    target = Target(tiny_model(architecture, vocab_size=FEW), max_len=64, max_nodes=32)
    shape = read_shape(target.config, architecture)
    heads = tiny_heads.save_each(folder / architecture, FEW, shape)
    loop = engine(target)
    steps = 0
    for name in names:
        drafter = WIDE[name]()
        drafter.setup(DraftContext(FEW, frozenset(), max_len=64, target=target, heads=heads))
        for prompt in (PROMPT[:3], np.concatenate([PROMPT, PROMPT])):
            drafter.reset()
            expected = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=24).output_ids
            result = loop.decode(prompt, drafter, max_new_tokens=24)
            assert result.output_ids == expected
            steps += result.n_target_passes
    assert steps < 0.9 * len(names) * 2 * 23


def test_output_is_plain_decoding_s(tmp_path, monkeypatch):
    names = ("ddtree", "dflash_tree", "dspark", "hydra", "eagle2", "eagle3", "mtp", "choose")
    check_exact("qwen3", names, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_plain_decoding_s_on_every_architecture(architecture, tmp_path, monkeypatch):
    check_exact(architecture, WIDE, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [*TREE, "choose", "mtp", "sam_eagle2", "suffix_else_head", "union"]
)
def test_sampled_texts_follow_the_target_s_distribution(name, tmp_path):
    sampling = Sampling(1.0)
    heads = tiny_heads.save_each(tmp_path, vocab=exact.VOCAB)
    drafter = TREE[name][0]() if name in TREE else WIDE[name]()
    ghost = tiny_heads.Ghost(exact.VOCAB)
    context = DraftContext(exact.VOCAB, frozenset(), target=ghost, heads=heads, sampling=sampling)
    drafter.setup(context)
    outputs, per_step = exact.turns(RejectionVerifier(sampling), drafter, 400, 8)
    assert exact.worst_p(outputs, exact.distribution_of(sampling)) > exact.P_LEAST
    assert exact.transitions_p(outputs, sampling) > exact.P_LEAST
    assert per_step > 1.2


# -- a head that is right, and edges ---------------------------------------------------------------


class Permuted(tiny_heads.Ghost):
    """Each token is followed by the next id; the embedding is one number per id."""

    @property
    def embeddings(self):
        eye = torch.eye(tiny_heads.HIDDEN, dtype=torch.float64)
        return tiny_heads.Ends(eye, eye.roll(1, 0))


@pytest.mark.parametrize(
    ("make", "per_step"),
    [
        (partial(Eagle, levels=[1] * 5), 6),
        (partial(Eagle2, total=20, depth=4, top_k=2), 6),
        (partial(Eagle2, total=60, depth=0, top_k=1), 2),
        (partial(Eagle2, total=1), 1),
    ],
)
def test_a_perfect_head_is_accepted_to_the_end_of_its_tree(make, per_step, tmp_path):
    config, tensors = tiny_heads.eagle()
    size = tiny_heads.HIDDEN
    for key, value in tensors.items():
        if "o_proj" in key or "down_proj" in key or key == "fc.bias":
            value.zero_()
    tensors["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1).double()
    tiny_heads.save(tmp_path, config, tensors, "pytorch_model.bin")
    drafter = make()
    ghost = Permuted(vocab_size=size)
    drafter.setup(DraftContext(size, frozenset(), target=ghost, heads={"eagle": tmp_path}))
    ids = torch.arange(size)
    logits = torch.zeros(size, size, size)
    logits[:, ids, (ids + 1) % size] = 9.0
    n_new = 1 + 4 * per_step
    result = engine(TableTarget(logits)).decode(np.array([3, 4]), drafter, max_new_tokens=n_new)
    assert result.output_ids == [(5 + i) % size for i in range(n_new)]
    assert result.committed_per_step == [per_step] * 4


def test_equal_scores_cut_no_branch(tmp_path):
    """All scores are equal: the nodes made first stay, each with its parent."""
    config, tensors = tiny_heads.eagle()
    tiny_heads.save(tmp_path, config, tensors, "pytorch_model.bin")

    class Level(tiny_heads.Ghost):
        @property
        def embeddings(self):
            ends = super().embeddings
            return tiny_heads.Ends(ends.embedding, torch.zeros_like(ends.head))

    for total, depth, top_k in ((60, 5, 10), (7, 2, 3), (500, 2, 3), (2, 5, 10), (40, 3, 1)):
        drafter = Eagle2(total=total, depth=depth, top_k=top_k)
        context = DraftContext(30, frozenset(), target=Level(), heads={"eagle": tmp_path})
        tree = drafter.propose(begin(drafter, context))
        assert len(tree) == min(total - 1, top_k + depth * top_k**2)
        assert len(tree) <= drafter.needs.max_nodes
        assert (tree.parents < np.arange(len(tree))).all()
        assert len(set(paths_of(tree))) == len(tree)


def test_a_short_list_of_ids_is_drafted_from_alone(tmp_path):
    ids = torch.tensor([-1, 3, 9, 4, 17, 22, 28])  # -1: all other ids
    save_file({"ids": ids}, tmp_path / ID_MAP_FILE)
    heads = {
        "medusa": (tiny_heads.medusa(lm_heads=False), "medusa_lm_head.pt"),
        "eagle": (tiny_heads.eagle(), "pytorch_model.bin"),
    }
    for name, (head, file) in heads.items():
        tiny_heads.save(tmp_path / name, *head, file)
    context = DraftContext(
        30, frozenset(), target=GHOST, heads={name: tmp_path / name for name in heads}
    )
    listed_ids = ids[1:]
    for make, guesses in ((Medusa, plain.medusa_guess), (Eagle, plain.eagle_guess)):
        drafter = make(levels=[2, 3], vocabulary=str(tmp_path))
        state = begin(drafter, context)
        states = tiny_heads.states_of(PROMPT, (AFTER_FINAL_NORM,))[AFTER_FINAL_NORM]
        text = torch.from_numpy(state.tokens[1:].copy())
        guess = guesses(heads[drafter.head][0], GHOST.embeddings, text, states)
        listed = lambda path, guess=guess: [c for c in guess(path) if c[0] in listed_ids]  # noqa: E731
        assert paths_of(drafter.propose(state)) == plain.static_tree(listed, drafter._tree.paths)
    drafter = Medusa(tree="dynamic", nodes=5, vocabulary=str(tmp_path))
    drafted = drafter.propose(begin(drafter, context)).tokens
    assert len(drafted) == 5 and {*drafted.tolist()} <= {*listed_ids.tolist()}
    with pytest.raises(ConfigurationError, match=r"method\.vocabulary=.*null"):
        Eagle(vocabulary=str(tmp_path / "medusa")).setup(context)
    save_file({"ids": torch.tensor([4, 31])}, tmp_path / ID_MAP_FILE)
    with pytest.raises(ConfigurationError, match="another vocabulary"):
        Eagle(vocabulary=str(tmp_path)).setup(replace(context, head_cache={}))


def test_published_trees():
    """Nodes per level match the published lists, which for Medusa have 63 nodes each."""
    for name, levels in (
        ("medusa_63", [10, 28, 23, 2]),
        ("vicuna_7b_stage2", [10, 23, 23, 7]),
        ("vicuna_13b_stage2", [10, 19, 25, 9]),
        ("vicuna_33b_stage2", [10, 24, 24, 5]),
        ("zephyr_stage2", [10, 27, 23, 3]),
        ("eagle_25", [4, 8, 8, 3, 2]),
    ):
        tree = load_tree(TREES[name])
        assert tree.level_sizes == levels
        smaller = {(*path[:-1], path[-1] - 1) for path in tree.paths if path[-1]}
        assert smaller <= set(tree.paths)
    inner = [len(layer.inner) for layer in load_tree(TREES["medusa_63"]).layers()]
    assert inner == [10, 10, 1, 0]
    assert [len(x.inner) for x in load_tree(TREES["eagle_25"]).layers()] == [4, 4, 1, 1, 0]


def test_medusa_takes_the_tree_that_its_authors_take_for_a_model(tmp_path):
    for target, tree in (
        ("lmsys/vicuna-7b-v1.3", "vicuna_7b_stage2"),
        ("lmsys/vicuna-13b-v1.5-16k", "vicuna_13b_stage2"),
        ("/models/vicuna-33b-v1.3", "vicuna_33b_stage2"),
        ("HuggingFaceH4/zephyr-7b-beta", "zephyr_stage2"),
        ("lmsys/Vicuna-7B", "medusa_63"),  # the reference code is case-sensitive, too
        (None, "medusa_63"),
    ):
        config, tensors = tiny_heads.medusa()
        config["base_model_name_or_path"] = target
        tiny_heads.save(tmp_path, config, tensors, "medusa_lm_head.pt")
        context = DraftContext(30, frozenset(), target=GHOST, heads={"medusa": tmp_path})
        ours, named = Medusa(tree="by_model"), Medusa(tree=tree)
        trees = [drafter.propose(begin(drafter, context)) for drafter in (ours, named)]
        assert paths_of(trees[0]) == paths_of(trees[1])
        assert len(trees[0]) == ours.needs.max_nodes == 63


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle"])
def test_a_tree_may_stand_in_a_file(name, folders, tmp_path):
    file = tmp_path / "tree.json"
    context = DraftContext(30, frozenset(), target=GHOST, heads=folders)
    paths = [[1], [0], [0, 2], [1, 1], [0, 2, 0]]
    for text in (paths, {"name": "mine", "paths": paths}):
        file.write_text("\ufeff" + json.dumps(text), encoding="utf-8")  # an editor's mark
        drafter = {"medusa": Medusa, "hydra": Hydra, "eagle": Eagle}[name](tree=str(file))
        (artifact,) = drafter.needs.artifacts  # the manifest holds its hash
        assert artifact.path == str(file)
        state = begin(drafter, context)
        states = tiny_heads.states_of(PROMPT, (AFTER_FINAL_NORM,))[AFTER_FINAL_NORM]
        _, guesses, _ = TREE[name]
        text = torch.from_numpy(state.tokens[1:].copy())
        guess = guesses(HEADS[name], GHOST.embeddings, text, states)
        ranks = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        assert paths_of(drafter.propose(state)) == plain.static_tree(guess, ranks)
    file.write_text("[[0], [30]]", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"method\.tree=.*31 candidates.*30 ids"):
        type(drafter)(tree=str(file)).setup(context)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [0, 1", "Expecting"),
        ("[" * 100_000, "recursion"),
        ("[]", "a list of at least 1"),
        ('{"nodes": [[0]]}', "must be a list"),
        ("[[0], 1]", r"\[1\] is 1, it must be a list"),
        ("[[0], [0.5]]", r"\[1\]\[0\] is 0\.5"),
        ('[["0"]]', r"\[0\]\[0\] is"),
        ("[[0], [true]]", r"\[1\]\[0\] is"),
        ("[[0], [-1]]", r"\[1\]\[0\] is"),
        (f"[[0], [{10**30}]]", r"\[1\]\[0\] is"),
        ("[[0], []]", "empty"),
        ("[[0], [0]]", "occurs twice"),
        ("[[0], [1, 0]]", r"\[1, 0\] has no parent"),
        (None, "No such file"),
    ],
)
def test_a_file_without_a_tree_is_refused(tmp_path, text, message):
    file = tmp_path / "tree.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"tree\.json is not.*{message}.*\[\[0\], \[1\]"):
        Medusa(tree=str(file))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Medusa(levels=[0]), r"method\.levels=\[0\] cannot make a tree"),
        (lambda: Hydra(tree="medusa"), r"method\.tree.*FILE\.json.*medusa_63"),
        (lambda: Hydra(tree="by_model"), r"method\.tree"),
        (lambda: Medusa(tree="by-model"), r"method\.tree.*'by_model'"),
        (lambda: Eagle2(top_k=0), r"`method\.top_k` must be at least 1"),
        (lambda: Eagle2(depth=-1), r"`method\.depth` must be at least 0"),
        (lambda: Eagle(head=""), r"`method\.head` must be a text"),
    ],
)
def test_knobs_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_tree_deeper_than_there_are_heads_is_refused(folders):
    context = DraftContext(tiny_heads.VOCAB, frozenset(), target=GHOST, heads=folders)
    for drafter, n in ((Medusa(levels=[1] * 6), 5), (Hydra(levels=[1] * 5), 4)):
        with pytest.raises(ConfigurationError, match=f"has {n} heads"):
            drafter.setup(context)


def test_a_block_ends_before_the_first_unsure_token(folders):
    context = DraftContext(tiny_heads.VOCAB, frozenset(), target=GHOST, heads=folders)
    whole = (drafter := DFlash(head="dspark")).propose(begin(drafter, context))
    confidences = whole.path_probs / np.append(1, whole.path_probs[:-1])
    drafter = DFlash(head="dspark", confidence=float(confidences[1:].min()) + 1e-6)
    cut = drafter.propose(begin(drafter, context))
    assert paths_of(cut) == paths_of(whole)[: (confidences < drafter.confidence).argmax()]


def test_what_a_block_drafter_cannot_run_is_refused(folders):
    context = DraftContext(tiny_heads.VOCAB, frozenset(), target=GHOST, heads=folders)
    for drafter in (DFlash(head="dspark", tree="dynamic"), DFlash(confidence=0.5)):
        with pytest.raises(ConfigurationError, match=r"Type .* method\.confidence=0\."):
            drafter.setup(context)
    config = {**tiny_heads.dflash()[0], "dflash_config": {"mask_token_id": 1}}
    for wrong in ({"num_target_layers": 9}, {"target_layer_ids": [0, 7]}):
        with pytest.raises(ConfigurationError, match="this one has 8"):
            dflash.read_config(config | wrong, "", 8)
    spread = dflash.read_config(config | {"num_hidden_layers": 5}, "", 36)
    assert spread.layer_ids == (2, 10, 18, 26, 34)  # those of the authors' head for Qwen3-8B
