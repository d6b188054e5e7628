"""One row per engine: how to send requests, its description of itself, its counters.

A new one is an `Engine` in `ENGINES`, and a yaml in ``conf/server`` that begins with
``defaults: [openai, _self_]`` and names it as ``engine``.

Sources of the counters, read 2026-11: vLLM's pull request 48915 and its Prometheus counters;
SGLang's pull requests 3152 and 33518 and its ``meta_info``; llama.cpp's server (``timings``,
``/metrics``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specbench.config.schema import GenerationConfig
from specbench.errors import ConfigurationError, unknown_name
from specbench.servers.client import Client, NoAnswer, printable
from specbench.servers.counters import CounterNames, ServerJson

UNKNOWN = "not stated"
_LONGEST_NAME = 100

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request that is ready to be sent.

    Attributes:
        longest: new tokens at most.
        prompt_ids: the prompt, where it was put into ids beforehand.
    """

    path: str
    body: ServerJson
    longest: int
    prompt_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with OpenAI's interface.

    Attributes:
        display_name: name in tables.
        properties: paths where it may describe itself; ``marks``: a description is its own where it
            has this key, any description with "".
        version, numerics: keys of the description; ``flags``: a pattern of keys, none secret.
        counters: names of the step counters in answers; ``metrics``: in ``/metrics``.
        extra: further keys of a request's body.
        has_top_k: whether requests may limit the likeliest tokens.
        takes_ids: whether it is given ids, so that the prompt is known exactly (llama.cpp's own
            interface).
    """

    display_name: str
    properties: tuple[str, ...] = ()
    marks: str = ""
    version: str = "version"
    numerics: tuple[str, ...] = ()
    flags: str = ""
    counters: tuple[CounterNames, ...] = ()
    metrics: CounterNames | None = None
    extra: ServerJson = field(default_factory=dict)
    has_top_k: bool = True
    takes_ids: bool = False

    def http_request(
        self,
        client: Client,
        model: str,
        dialogue: ServerJson,
        generation: GenerationConfig,
        seed: int,
        longest: int | None = None,
    ) -> HttpRequest:
        """Make the request for an answer to a dialogue: ``messages``, ``chat_template_kwargs``.

        Args:
            longest: new tokens at most; None: the generation's.

        Raises:
            NoAnswer: the prompt could not be put into ids.
        """
        longest = longest or generation.max_new_tokens
        body: dict[str, object] = {"temperature": generation.temperature, "stream": True}
        if generation.temperature:
            body |= {"top_p": generation.top_p, "seed": seed % 2**31}
        if self.takes_ids:
            reply = client.post_json("/apply-template", dialogue)
            text = reply.get("prompt") if isinstance(reply, Mapping) else None
            ids = _tokenized(client, {"content": text, "add_special": True, "parse_special": True})
            body |= {"prompt": ids, "return_tokens": True, "top_k": generation.top_k}
            # An answer must not be faster because a question before it began alike.
            body |= {"cache_prompt": False, "min_p": 0.0, "n_predict": longest}
            return HttpRequest("/completion", body, longest, ids)
        body |= {**dialogue, "model": model, "max_tokens": longest}
        if generation.top_k and self.has_top_k:
            body["top_k"] = generation.top_k
        body["stream_options"] = {"include_usage": True}
        return HttpRequest("/v1/chat/completions", {**body, **self.extra}, longest)


_VLLM = Engine(
    "vLLM",
    properties=("/version",),
    marks="version",
    extra={"return_token_ids": True},
    counters=(
        CounterNames(
            json_path=("metrics", "speculative_decoding"),
            drafted=("num_draft_tokens",),
            accepted=("num_accepted_draft_tokens",),
            passes="num_spec_steps",
            per_step="per_step_accepted",
            by_event=True,
        ),
    ),
    metrics=CounterNames(
        json_path=(),
        drafted=("vllm:spec_decode_num_draft_tokens_total",),
        accepted=("vllm:spec_decode_num_accepted_tokens_total",),
        passes="vllm:spec_decode_num_drafts_total",
        by_event=True,
        new_tokens="vllm:generation_tokens_total",
    ),
)
_SGLANG = Engine(
    "SGLang",
    properties=("/server_info", "/get_server_info"),  # new, old
    numerics=("dtype", "quantization"),
    flags=r"dtype|quantization|kv_cache_dtype|tp_size|attention_backend|speculative_\w+",
    # It gives no ids: counts in each event tell how many tokens that brought.
    extra={
        "return_spec_tokens_details": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    counters=(
        CounterNames(
            json_path=("sglext", "spec_tokens_details"),
            drafted=("spec_num_proposed_drafts",),
            accepted=("spec_num_correct_drafts",),
            passes="spec_verify_ct",
            all_passes=True,
        ),
        CounterNames(
            json_path=("meta_info",),
            drafted=("spec_num_proposed_drafts", "spec_draft_token_num"),
            accepted=("spec_num_correct_drafts", "spec_accept_token_num"),
            passes="spec_verify_ct",
            all_passes=True,
        ),
    ),
    metrics=CounterNames(
        json_path=(),
        passes="sglang:spec_verify_calls_total",
        all_passes=True,
        new_tokens="sglang:generation_tokens_total",
    ),
)
_LLAMACPP = Engine(
    "llama.cpp",
    properties=("/props",),
    marks="default_generation_settings",
    version="build_info",
    numerics=("model_ftype",),
    flags="total_slots",
    counters=(
        CounterNames(
            json_path=("timings",),
            drafted=("draft_n",),
            accepted=("draft_n_accepted",),
            new_tokens="predicted_n",
            says_zero="predicted_n",
        ),
    ),
    takes_ids=True,
)
# In the order in which a server is tried. Counters of any other engine are read by whichever
# names fit.
ENGINES = {
    "llamacpp": _LLAMACPP,
    "sglang": _SGLANG,
    "vllm": _VLLM,
    "other": Engine(
        "engine",
        counters=(*_VLLM.counters, *_SGLANG.counters, *_LLAMACPP.counters),
        has_top_k=False,
    ),
}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A server as it describes itself.

    Attributes:
        engine: a name of `ENGINES`.
        version: of the engine; ``numerics``: what the weights are kept in.
        model: the name to ask for.
        flags: its start options, as far as it lists them.
    """

    engine: str
    version: str
    numerics: str
    model: str
    flags: ServerJson = field(default_factory=dict)

    @property
    def kind(self) -> Engine:
        return ENGINES[self.engine]

    @property
    def name(self) -> str:
        """``llama.cpp 2026.10``."""
        return f"{self.kind.display_name} {self.version}"


def identify(client: Client, engine: str, model: str | None, numerics: str | None) -> EngineInfo:
    """Ask a server what it is; ``engine``: ``auto``, or the user's choice.

    Raises:
        ConfigurationError: no server answers, or it does not know the model.
    """
    model = _model(client, model)
    for name in ENGINES if engine == "auto" else [engine]:
        kind = ENGINES[name]
        replies = (_described(client, path) for path in kind.properties)
        reply = next((reply for reply in replies if reply), {})
        if engine == name or name == "other" or (reply and kind.marks in ("", *reply)):
            break
    weight_types = ", ".join(str(reply[key]) for key in kind.numerics if reply.get(key))
    flags = {
        key: _clean(value) if isinstance(value, str) else value
        for key, value in reply.items()
        if re.fullmatch(kind.flags, key)
        and isinstance(value, str | int | float)
        and not str(value).startswith("/")
    }
    version = _clean(reply.get(kind.version))
    return EngineInfo(name, version, numerics or _clean(weight_types), model, flags)


def _clean(value: object) -> str:
    """Shorten a value of a server's description so that tables and files can show it."""
    return printable(str("" if value is None else value))[:_LONGEST_NAME] or UNKNOWN


def _described(client: Client, path: str) -> ServerJson:
    try:
        reply = client.get_json(path)
    except NoAnswer:
        return {}
    return reply if isinstance(reply, Mapping) else {}


def _model(client: Client, requested: str | None) -> str:
    """Choose the model to request; a server without a model list gets the requested one."""
    names: list[str] = []
    try:
        match client.get_json("/v1/models"):
            case {"data": [*entries]}:
                ids = (e.get("id") for e in entries if isinstance(e, Mapping))
                names = [name for name in ids if isinstance(name, str) and name == printable(name)]
    except NoAnswer as error:
        refused = error.kind in ("http_401", "http_403")
        unlisted = re.fullmatch("http_4..|http_501|malformed", error.kind)
        if refused or not requested or not unlisted:
            key = " Set the variable that server.api_key_env names." if refused else ""
            raise ConfigurationError(
                f"{error}.{key} Start the server (docs/servers.md), type server.model=NAME where "
                "it lists no models, or name another server: server.base_url=http://HOST:PORT/v1."
            ) from None
    if requested is not None and names and requested not in names:
        raise unknown_name(f"model at {client.url}:", requested, names)
    if requested is None and len(names) != 1:
        raise ConfigurationError(
            f"{client.url} serves {', '.join(names) or 'no model'}. Type server.model=NAME."
        )
    return requested or names[0]


def _tokenized(client: Client, text: ServerJson) -> list[int]:
    reply = client.post_json("/tokenize", text)
    ids = reply.get("tokens") if isinstance(reply, Mapping) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise NoAnswer("malformed", "the server gave no ids for the prompt", again=True)
    return ids


def vocabulary(client: Client) -> tuple[int, list[int]]:
    """Read a llama.cpp server's vocabulary size and its end-of-sequence id.

    Raises:
        NoAnswer: it does not say.
    """
    end = str(_described(client, "/props").get("eos_token"))
    ids = _tokenized(client, {"content": end, "parse_special": True})
    match client.get_json("/v1/models"):
        case {"data": [{"meta": {"n_vocab": int(size)}}, *_]}:
            return size, ids[-1:]
    raise NoAnswer("malformed", "the server does not say its vocabulary", again=True)
