"""Sampling with real passes: repeated token for token in float64, and by chi-square at contexts."""

import numpy as np
import pytest
import torch

from specbench.config.compose import compose
from specbench.data.cases import load_cases
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.sampling import Sampling
from specbench.decoding.structs import DraftTree, Proposal
from specbench.decoding.verify import MatchVerifier, RejectionVerifier
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.scores import Scores
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, engine
from tests.decoding.distributions import P_LEAST, worst_p
from tests.decoding.table_models import plain_depths
from tests.decoding.test_engine import Adversary


@pytest.mark.parametrize("architecture", CARRIERS)
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.5, top_p=0.9, top_k=12)], ids=str)
def test_any_tree_leaves_a_seeds_output_untouched(architecture, sampling, make_target):
    """Drafts that were not drawn: what plain sampling with the same seed emits, token by token."""
    target = make_target(architecture)
    run = engine(target, RejectionVerifier(sampling))
    accepted = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(0, VOCAB, 9)
        plain = run.decode(prompt, Drafter(name="ar"), max_new_tokens=24, seed=seed)
        drafter = Adversary(truth=plain.output_ids, honesty=0.6, seed=seed)
        drafted = run.decode(prompt, drafter, max_new_tokens=24, seed=seed)
        assert drafted.output_ids == plain.output_ids
        assert target.cache.length >= len(prompt) + 23
        accepted += 23 - drafted.n_target_passes
    assert accepted > 0


N_TOKENS, WIDTH, TRIALS = 3, 3, 8000


class PathTarget:
    """A model's rows for every continuation by its likeliest tokens, computed beforehand."""

    device = "cpu"

    def __init__(self, target: Target, prompt: np.ndarray) -> None:
        self.rows = {(): target.prefill(prompt).logits[-1].clone()}
        for first in self.likeliest(()):
            tokens, parents, paths = [], [], [(first,)]
            for depth in range(1, N_TOKENS):
                for i, path in list(enumerate(paths)):
                    if len(path) == depth:
                        # the tokens below a node are known only when its own row is
                        target.prefill(np.append(prompt, path[:-1]))
                        row = target.forward(path[-1], DraftTree.empty()).logits[0]
                        for token in row.topk(WIDTH).indices.tolist():
                            tokens.append(token)
                            parents.append(i - 1)
                            paths.append((*path, token))
            target.prefill(prompt)
            tree = DraftTree(np.array(tokens), np.array(parents))
            scores = target.forward(first, tree).logits  # all rows in one pass, as drafts are seen
            self.rows |= {path: scores[i].clone() for i, path in enumerate(paths)}

    def likeliest(self, path):
        return self.rows[path].topk(WIDTH).indices.tolist()

    def prefill(self, prompt, *, all_logits=False, hidden_layers=()):
        self.path = ()
        return Scores(self.rows[()][None])

    def forward(self, root, tree, *, hidden_layers=()):
        self.root = int(root)
        self.paths = [(*self.path, self.root)]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            self.paths.append((*self.paths[parent + 1], token))
        rows = torch.stack([self.rows[path] for path in self.paths])
        return Scores(rows, depths=plain_depths(tree.parents))

    def commit(self, tree, path):
        self.path = self.paths[int(path[-1]) + 1 if len(path) else 0]

    def free_rows(self):
        return 100


class HotterDrafts(Drafter):
    """A chain of two, drawn from the model's own distribution at a higher temperature."""

    def __init__(self, target, sampling):
        super().__init__(name="hotter")
        self.target, self.q = target, {k: sampling.probs(row) for k, row in target.rows.items()}

    def begin(self, state):
        self.random = torch.Generator().manual_seed(state.seed)

    def propose(self, state):
        path, tokens, rows = tuple(state.new_tokens.tolist()), [], []
        for _ in range(min(2, state.remaining)):
            rows.append(self.q[path])
            tokens.append(int(torch.multinomial(rows[-1], 1, generator=self.random)))
            path = (*path, tokens[-1])
        proposal = Proposal(torch.stack(rows), np.arange(len(rows)))
        parents = np.arange(-1, len(tokens) - 1)
        return DraftTree(np.array(tokens), parents, probs=proposal)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_bundled_model_at_fixed_contexts():
    """The ratio test by chi-square; ``match`` token for token with plain sampling."""
    config = compose(["dataset=demo"])
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer)
    template = PromptTemplate(tokenizer)
    sampling = Sampling(1.0, top_k=WIDTH)
    for case in list(load_cases(config.dataset, None))[:2]:
        prompt = np.array(template.render([(case.turns[0], None)]))
        target = Target(model.model, max_len=len(prompt) + 8)
        known = PathTarget(target, prompt)
        drafter = HotterDrafts(known, Sampling(2.0, top_k=WIDTH))
        joint = np.zeros((WIDTH,) * N_TOKENS)
        for places in np.ndindex(joint.shape):
            path, chance = (), 1.0
            for place in places:
                token = known.likeliest(path)[place]
                chance *= float(sampling.probs(known.rows[path].double())[token])
                path = (*path, token)
            joint[places] = chance

        def decode(verifier, drafter, n, known=known, prompt=prompt):
            loop = engine(known, verifier(sampling))
            results = [
                loop.decode(prompt, drafter, max_new_tokens=N_TOKENS, seed=seed)
                for seed in range(n)
            ]
            passes = sum(result.n_target_passes for result in results)
            return [tuple(result.output_ids) for result in results], passes

        outputs, passes = decode(RejectionVerifier, drafter, TRIALS)
        assert passes < TRIALS * (N_TOKENS - 1 - 1 / 3)
        places = [
            [known.likeliest(text[:i]).index(token) for i, token in enumerate(text)]
            for text in outputs
        ]
        assert worst_p(np.array(places), joint) > P_LEAST
        plain, _ = decode(MatchVerifier, Drafter(name="ar"), 300)
        assert decode(MatchVerifier, drafter, 300)[0] == plain
