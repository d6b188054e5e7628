"""Types of the ``server`` group: another engine that ``runner=serve`` asks over HTTP.

The comments of the keys are in ``conf/server``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from omegaconf import MISSING

from specbench.config.limits import ASIDE, Group, OneOf

PLAIN = "none"  # of ``server.speculation``: the server's own plain decoding, the baseline
# llama.cpp's own kinds of drafts that the wheel's server can be started with, by our names.
DRAFT_FILE_NEEDED = ("draft", "eagle3", "mtp", "dflash")
LLAMACPP_SPECULATIONS = (
    *(PLAIN, "ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache"),
    *DRAFT_FILE_NEEDED,
)
# These keep n-grams of earlier requests: a table of all slots, and one that a new request does not
# empty (ggml-org/llama.cpp#27852).
LEARN_FROM_REQUESTS = ("ngram_mod", "ngram_cache")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

_Size = Annotated[int, Ge(1), Le(2**20)]
_Limit = Annotated[float | None, Ge(1e-6), Le(604_800), ASIDE]  # judges, and moves no time


def parts_of(speculation: str) -> list[str]:
    """The kinds of drafts that ``ngram_mod+draft`` names, in the order in which they are asked."""
    return speculation.split("+")


@dataclass
class ServerConfig(Group):
    """What every server has."""

    name: str = MISSING
    speculation: str = PLAIN
    label: str | None = None
    concurrency: Annotated[int, Ge(1), Le(256)] = 1
    timeout_s: Annotated[float, Ge(0.01), Le(604_800), ASIDE] = 300.0
    answer_mb: Annotated[float, Ge(0.01), Le(16_384), ASIDE] = 64.0
    retries: Annotated[int, Ge(0), Le(100), ASIDE] = 2
    retry_wait_s: Annotated[float, Ge(0), Le(3600), ASIDE] = 1.0
    restart: bool = False
    limit_ttft_s: _Limit = None
    limit_tpot_s: _Limit = None


@dataclass
class LlamacppConfig(ServerConfig):
    """llama.cpp's server, started here from the wheel ``xllamacpp``."""

    gguf: str | None = None
    draft_gguf: str | None = None
    threads: _Size | None = None
    context: _Size = 4096
    size_n: _Size = 3
    size_m: _Size = 8
    min_hits: _Size = 1
    draft_max: Annotated[int, Ge(0), Le(2**20)] = 8
    draft_min: Annotated[int, Ge(0), Le(2**20)] = 0
    draft_p_min: Annotated[float, Ge(0), Le(1)] = 0.0
    flash_attention: bool | None = None
    kv_type: Annotated[str | None, OneOf(None, *KV_TYPES)] = None
    batch: _Size | None = None
    ubatch: _Size | None = None
    reuse: Annotated[int | None, Ge(0), Le(2**20)] = None


@dataclass
class OpenaiConfig(ServerConfig):
    """Any running server with OpenAI's interface."""

    base_url: str | None = None
    plain_url: str | None = None
    model: str | None = None
    engine: str = "auto"
    api_key_env: Annotated[str, ASIDE] = "OPENAI_API_KEY"
    numerics: str | None = None


SERVERS: dict[str, type[ServerConfig]] = {"llamacpp": LlamacppConfig, "openai": OpenaiConfig}
# Keys that hold for the whole run; an entry of ``compare`` may set the others.
SHARED_KEYS = (
    *("name", "concurrency", "timeout_s", "answer_mb"),
    *("retries", "retry_wait_s", "restart", "limit_ttft_s", "limit_tpot_s"),
)
# Keys of llama.cpp that its plain decoding depends on as well: a label that drafts has the
# baseline's, or its speedup would be theirs too.
DECODING_KEYS = (
    *("gguf", "threads", "context", "flash_attention", "kv_type", "batch", "ubatch", "reuse"),
)
