"""Losslessness on the real small model, as users run it: float32, packed linears, real text."""

import gc
import json

import numpy as np
import pytest
import torch

from specbench.config.compose import compose
from specbench.data.cases import load_cases
from specbench.data.chat_templates import PromptTemplate
from specbench.decoding.drafter import Drafter
from specbench.decoding.engine import Engine
from specbench.decoding.lossless import TOLERANCE, audit_output
from specbench.decoding.verify import GreedyVerifier
from specbench.models.loading import load_model, load_tokenizer
from specbench.models.target import Target
from specbench.results import records
from tests.small_run import run_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def loaded():
    config = compose(["dataset=demo"])
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer)
    template = PromptTemplate(tokenizer)
    prompts = [template.render([(c.turns[0], None)]) for c in load_cases(config.dataset, None)]
    target = Target(
        model.model,
        max_len=max(map(len, prompts)) + NEW_TOKENS,
        packed_bytes=4 << 30,
    )
    return model, target, [np.array(p) for p in prompts[::2]]


def test_plain_decoding_is_transformers_own(loaded):
    model, target, prompts = loaded
    engine = Engine(target, GreedyVerifier(), eos_ids=model.eos_ids)
    for prompt in prompts[:3]:
        ours = engine.decode(prompt, Drafter(name="ar"), max_new_tokens=NEW_TOKENS).output_ids
        model.model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            batch = torch.from_numpy(prompt)[None]
            theirs = model.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=sorted(model.eos_ids),
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        model.model.set_attn_implementation("specbench")
        verdict = audit_output(target, prompt, ours, theirs, TOLERANCE["float32"]).verdict
        assert verdict in ("equal", "near_tie")


def test_the_shipped_draft_changes_no_output_and_is_of_use(tmp_path):
    """SpS and PEARL as users run them, on the pair that comes with the project."""
    texts = [
        "Write one sentence about the sea.",
        "What is 12 plus 30? Answer with a number and explain it.",
        "Translate to French: the book is on the table.",
    ]
    questions = tmp_path / "questions.jsonl"
    lines = [{"question_id": i, "category": "qa", "turns": [t]} for i, t in enumerate(texts)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    typed = [
        "method=sps",
        "compare=[pearl]",
        "dataset=jsonl",
        f"dataset.path={questions}",
        f"generation.max_new_tokens={NEW_TOKENS}",
        "model.device=cpu",
        "measure.exclusive=false",
        "measure.reruns=0",
        "measure.warmup=0",
        f"output_dir={tmp_path}/run",
    ]
    code = run_here(typed)
    gc.unfreeze()
    assert code == 0
    run_records = records.read_records(tmp_path / "run")[0]
    assert len(run_records) == 3 * len(texts)
    assert {r.lossless.verdict for r in run_records} <= {"equal", "near_tie"}
    for label in ("sps", "pearl"):
        rows = [r for r in run_records if r.label == label]
        assert sum(r.n_new - 1 for r in rows) > 1.15 * sum(r.n_target_passes for r in rows), label
        assert all(r.drafter["draft_forwards"] > 0 for r in rows)
