"""What an experiment's jobs would take on a GPU, by a formula: estimates, not measurements.

    hours  = turns x new tokens x repeats x (labels x bytes / (SHARE x bandwidth) + eager) / 3600
    memory = weights of target and draft + keys and values of a whole context + OVERHEAD

A label's token takes what plain decoding takes that reads its weights at SHARE of the bandwidth: no
speedup is counted on, and every answer is as long as it may be. ``eager``: plain decoding launched
pass by pass, EAGER_S a token or the same again, whichever is longer; a model over several devices
has no other. Drafts, prompts and loading are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from specbench.config.compose import compose
from specbench.paths import CONF_DIR

SHARE, EAGER_S, OVERHEAD = 0.5, 0.03, 3 * 2**30
# Questions and turns of the whole data sets, as their cards say.
SETS = {"specbench": (480, 560), "mtbench": (80, 160), "gsm8k": (1319, 1319), "mbpp": (500, 500),
        "humaneval": (164, 164), "mgsm": (110, 110), "demo": (12, 14)}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One job: its GPU hours and bytes; hours are None without decoding."""

    model: str
    labels: int
    hours: float | None
    memory: int


def jobs_of(experiment: str, overrides: Sequence[str], bytes_per_s: float) -> list[Job]:
    """The jobs that ``python run.py experiment=NAME`` has with these overrides."""
    typed = [f"experiment={experiment}", *overrides]
    found: dict[tuple[str, ...], Job] = {}  # a knob of a method changes none of its estimates
    jobs = []
    for words in _sweep(typed):
        telling = tuple(word for word in words if not word.startswith("method."))
        if telling not in found:
            found[telling] = _job([*typed, *words], bytes_per_s)
        jobs.append(found[telling])
    return jobs


def _sweep(typed: Sequence[str]) -> list[list[str]]:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        hydra = hydra_compose("config", list(typed), return_hydra_config=True).hydra
    if hydra.mode != RunMode.MULTIRUN:
        return [[]]
    chosen = {word.partition("=")[0] for word in typed}
    swept = [f"{k}={v}" for k, v in (hydra.sweeper.params or {}).items() if k not in chosen]
    parsed = OverridesParser.create().parse_overrides(swept)
    return [list(words) for words in BasicSweeper.split_arguments(parsed, None)[0]]


def _job(typed: Sequence[str], bytes_per_s: float) -> Job:
    cfg = compose(typed)
    model, shape = cfg.model, cfg.model.shape_config
    each = 4 if model.dtype == "float32" else 2
    weights = each * _parameters(shape)
    heads = shape.get("num_key_value_heads") or shape.num_attention_heads
    size = shape.get("head_dim") or shape.hidden_size // shape.num_attention_heads
    text = min(model.context_length or 4096, 4096)
    cached = 2 * shape.num_hidden_layers * heads * size * each * text
    draft = each * _named_size((cfg.pair.draft.id if cfg.pair and cfg.pair.draft else None) or "")
    memory = weights * (2 if cfg.runner.name == "hf" else 1) + draft + cached + OVERHEAD
    labels = 1 + len(cfg.compare) + (cfg.baseline and cfg.method.name != "ar")
    hours = None
    if cfg.runner.name in ("offline", "hf"):
        token_s = weights / (SHARE * bytes_per_s)
        eager_s = max(token_s, EAGER_S)
        spread = model.device_map is not None
        both = cfg.baseline and cfg.engine.eager_baseline and not spread and not cfg.measure.phases
        per_token = labels * (eager_s if spread else token_s) + (eager_s if both else 0)
        tokens = _turns(cfg) * cfg.generation.max_new_tokens * cfg.repeats
        hours = tokens * per_token / 3600
    return Job(str(model.name), labels, hours, int(memory))


def _parameters(shape: Any) -> int:
    """Of a decoder in Llama's shape; those of norms and biases aside."""
    wide, heads = shape.hidden_size, shape.num_attention_heads
    size = shape.get("head_dim") or wide // heads
    kept = shape.get("num_key_value_heads") or heads
    layer = wide * size * (2 * heads + 2 * kept) + 3 * wide * shape.intermediate_size
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return int(shape.num_hidden_layers * layer + tables * shape.vocab_size * wide)


def _named_size(name: str) -> int:
    """Parameters that a model's name tells, as ``1.1B`` or ``68m``; 0 where it tells none."""
    found = re.search(r"(\d+(?:\.\d+)?)\s?([bm])(?![a-z])", name.lower())
    return int(float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]]) if found else 0


def _turns(cfg: DictConfig) -> int:
    questions, turns = SETS.get(cfg.dataset.name, (1, 1))
    asked = min(cfg.dataset.limit or questions, questions)
    return math.ceil(turns * asked / questions)
