"""Types of the ``server`` group: another engine that ``runner=serve`` asks over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.config.dataset_schema import MISSING

PLAIN = "none"  # of ``server.speculation``: the server's own plain decoding, the baseline
# llama.cpp's own kinds of drafts that the wheel's server can be started with, by our names.
LLAMACPP_SPECULATIONS = (
    *(PLAIN, "ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache"),
    *("draft", "eagle3", "mtp", "dflash"),
)
DRAFT_FILE_NEEDED = ("draft", "eagle3", "mtp", "dflash")
# These keep n-grams of earlier requests: a table of all slots, and one that a new request does not
# empty (ggml-org/llama.cpp#27852).
LEARN_FROM_REQUESTS = ("ngram_mod", "ngram_cache")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def parts_of(speculation: str) -> list[str]:
    """The kinds of drafts that ``ngram_mod+draft`` names, in the order in which they are asked."""
    return speculation.split("+")


@dataclass
class ServerConfig:
    """What every server has; the comments are in ``conf/server``."""

    name: str = MISSING
    speculation: str = PLAIN
    label: str | None = None
    concurrency: int = 1
    timeout_s: float = 300.0
    answer_mb: float = 64.0
    retries: int = 2
    retry_wait_s: float = 1.0
    restart: bool = False
    limit_ttft_s: float | None = None
    limit_tpot_s: float | None = None


@dataclass
class LlamacppConfig(ServerConfig):
    """llama.cpp's server, started here from the wheel ``xllamacpp``."""

    gguf: str | None = None
    draft_gguf: str | None = None
    threads: int | None = None
    context: int = 4096
    size_n: int = 3
    size_m: int = 8
    min_hits: int = 1
    draft_max: int = 8
    draft_min: int = 0
    draft_p_min: float = 0.0
    flash_attention: bool | None = None
    kv_type: str | None = None
    batch: int | None = None
    ubatch: int | None = None
    reuse: int | None = None


@dataclass
class OpenaiConfig(ServerConfig):
    """Any running server with OpenAI's interface."""

    base_url: str | None = None
    plain_url: str | None = None
    model: str | None = None
    engine: str = "auto"
    api_key_env: str = "OPENAI_API_KEY"
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
