"""How each engine is asked, what it says of itself, and what it counts: a class for each.

A new one is a subclass of `ServerEngine` that stands in `ENGINES`, and a yaml in ``conf/server``
that begins with ``defaults: [openai, _self_]`` and names it as ``engine``.

Sources of the counters, read 2026-11: vLLM's pull request 48915 and its Prometheus counters;
SGLang's pull requests 3152 and 33518 and its ``meta_info``; llama.cpp's server (``timings``,
``/metrics``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from specbench.config.schema import GenerationConfig
from specbench.errors import ConfigurationError, unknown_name
from specbench.servers.client import Client, NoAnswer, printable
from specbench.servers.counters import Said, Words, whole

UNKNOWN = "not stated"
_LONGEST_NAME = 100

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A server as it describes itself.

    Attributes:
        engine: a name of `ENGINES`.
        version: of the engine; ``numerics``: what the weights are kept in.
        model: the name to ask for.
        flags: what else it says it was started with; keys and paths must not be among them.
    """

    engine: str
    version: str
    numerics: str
    model: str
    flags: Said = field(default_factory=dict)

    @property
    def kind(self) -> ServerEngine:
        return ENGINES[self.engine]

    @property
    def name(self) -> str:
        """``llama.cpp 2026.10``."""
        return f"{self.kind.shown} {self.version}"


@dataclass(frozen=True, slots=True)
class Question:
    """A request that is ready to be sent.

    Attributes:
        longest: new tokens at most.
        prompt_ids: the prompt, where it was put into ids beforehand.
    """

    path: str
    body: Said
    longest: int
    prompt_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and how many at most; ``body``: in the words of all engines."""

    longest: int
    top_k: int
    body: Said

    @classmethod
    def of(cls, generation: GenerationConfig, seed: int, longest: int | None = None) -> Sampling:
        body: dict[str, object] = {"temperature": generation.temperature, "stream": True}
        if generation.temperature:
            body |= {"top_p": generation.top_p, "seed": seed % 2**31}
        return cls(longest or generation.max_new_tokens, generation.top_k, body)


class ServerEngine:
    """An engine that nothing is known of but that it has OpenAI's interface.

    Attributes:
        name: as in ``server.engine``; ``shown``: in tables.
        properties: paths where it may describe itself.
        counters: how its answers say what its steps did; ``metrics``: how ``/metrics`` does.
        asked: what a request asks for besides.
        has_top_k: whether requests may limit the likeliest tokens.
    """

    name = "other"
    shown = "engine"
    properties: tuple[str, ...] = ()
    counters: tuple[Words, ...] = ()
    metrics: Words | None = None
    asked: ClassVar[Said] = {}
    has_top_k = True

    def recognises(self, said: Said) -> bool:
        """Whether what a server says of itself is this engine's."""
        return False

    def version(self, said: Said) -> object:
        return said.get("version")

    def numerics(self, said: Said) -> object:
        """What the weights are kept in."""
        return None

    def flags(self, said: Said) -> Said:
        return {}

    def question(self, client: Client, model: str, dialogue: Said, sampling: Sampling) -> Question:
        """The request for an answer to a dialogue: its ``messages`` and ``chat_template_kwargs``.

        Raises:
            NoAnswer: the prompt could not be put into ids.
        """
        body = {**dialogue, **sampling.body, "model": model, "max_tokens": sampling.longest}
        if sampling.top_k and self.has_top_k:
            body["top_k"] = sampling.top_k
        body["stream_options"] = {"include_usage": True}
        return Question("/v1/chat/completions", {**body, **self.asked}, sampling.longest)


class Vllm(ServerEngine):
    """vLLM."""

    name, shown = "vllm", "vLLM"
    properties = ("/version",)
    asked: ClassVar[Said] = {"return_token_ids": True}
    counters = (
        Words(
            place=("metrics", "speculative_decoding"),
            drafted=("num_draft_tokens",),
            accepted=("num_accepted_draft_tokens",),
            passes="num_spec_steps",
            per_step="per_step_accepted",
            by_event=True,
        ),
    )
    metrics = Words(
        place=(),
        drafted=("vllm:spec_decode_num_draft_tokens_total",),
        accepted=("vllm:spec_decode_num_accepted_tokens_total",),
        passes="vllm:spec_decode_num_drafts_total",
        by_event=True,
        new_tokens="vllm:generation_tokens_total",
    )

    def recognises(self, said: Said) -> bool:
        return "version" in said


class Sglang(ServerEngine):
    """SGLang."""

    name, shown = "sglang", "SGLang"
    properties = ("/server_info", "/get_server_info")  # new, old
    # It gives no ids: counts in each event tell how many tokens that brought.
    asked: ClassVar[Said] = {
        "return_spec_tokens_details": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    counters = (
        Words(
            place=("sglext", "spec_tokens_details"),
            drafted=("spec_num_proposed_drafts",),
            accepted=("spec_num_correct_drafts",),
            passes="spec_verify_ct",
            all_passes=True,
        ),
        Words(
            place=("meta_info",),
            drafted=("spec_num_proposed_drafts", "spec_draft_token_num"),
            accepted=("spec_num_correct_drafts", "spec_accept_token_num"),
            passes="spec_verify_ct",
            all_passes=True,
        ),
    )
    metrics = Words(
        place=(),
        passes="sglang:spec_verify_calls_total",
        all_passes=True,
        new_tokens="sglang:generation_tokens_total",
    )

    def recognises(self, said: Said) -> bool:
        return bool(said)

    def numerics(self, said: Said) -> object:
        return ", ".join(str(said[k]) for k in ("dtype", "quantization") if said.get(k))

    def flags(self, said: Said) -> Said:
        known = ("dtype", "quantization", "kv_cache_dtype", "tp_size", "attention_backend")
        return {
            key: value
            for key, value in said.items()
            if (key in known or key.startswith("speculative_"))
            and isinstance(value, str | int | float)
            and not str(value).startswith("/")
        }


class LlamaCpp(ServerEngine):
    """llama.cpp's server; it is given ids, so that the prompt is known exactly."""

    name, shown = "llamacpp", "llama.cpp"
    properties = ("/props",)
    counters = (
        Words(
            place=("timings",),
            drafted=("draft_n",),
            accepted=("draft_n_accepted",),
            new_tokens="predicted_n",
            says_zero="predicted_n",
        ),
    )

    def recognises(self, said: Said) -> bool:
        return "default_generation_settings" in said

    def version(self, said: Said) -> object:
        return said.get("build_info")

    def numerics(self, said: Said) -> object:
        return said.get("model_ftype")

    def flags(self, said: Said) -> Said:
        return {"slots": whole(said.get("total_slots"))}

    def question(self, client: Client, model: str, dialogue: Said, sampling: Sampling) -> Question:
        said = client.post_json("/apply-template", dialogue)
        text = said.get("prompt") if isinstance(said, Mapping) else None
        ids = _tokenized(client, {"content": text, "add_special": True, "parse_special": True})
        body = {**sampling.body, "prompt": ids, "return_tokens": True, "top_k": sampling.top_k}
        # An answer must not be faster because a question before it began alike.
        body |= {"cache_prompt": False, "min_p": 0.0, "n_predict": sampling.longest}
        return Question("/completion", body, sampling.longest, ids)


class Other(ServerEngine):
    """Any other one: what it counts is read as whichever engine says it so."""

    counters = (*Vllm.counters, *Sglang.counters, *LlamaCpp.counters)
    has_top_k = False

    def recognises(self, said: Said) -> bool:
        return True


# In the order in which a server is asked which of them it is.
ENGINES: dict[str, ServerEngine] = {e.name: e for e in (LlamaCpp(), Sglang(), Vllm(), Other())}


def identify(client: Client, engine: str, model: str | None, numerics: str | None) -> EngineInfo:
    """Ask a server what it is; ``engine``: ``auto``, or what the user says.

    Raises:
        ConfigurationError: no server answers, or it does not know the model.
    """
    name = _model(client, model)
    for kind in ENGINES.values() if engine == "auto" else [ENGINES[engine]]:
        answers = (_asked(client, path) for path in kind.properties)
        said = next((answer for answer in answers if answer), {})
        if engine == kind.name or kind.recognises(said):
            break
    return EngineInfo(
        kind.name,
        _shown(kind.version(said)),
        numerics or _shown(kind.numerics(said)),
        name,
        {key: _shown(v) if isinstance(v, str) else v for key, v in kind.flags(said).items()},
    )


def _shown(value: object) -> str:
    """What a server says of itself, as tables and files can show it."""
    return printable(str("" if value is None else value))[:_LONGEST_NAME] or UNKNOWN


def _asked(client: Client, path: str) -> Said:
    try:
        said = client.get_json(path)
    except NoAnswer:
        return {}
    return said if isinstance(said, Mapping) else {}


def _model(client: Client, wanted: str | None) -> str:
    """The model to ask for; a server without a list of models is asked for the wanted one."""
    listed: object = None
    try:
        said = client.get_json("/v1/models")
        listed = said.get("data") if isinstance(said, Mapping) else None
    except NoAnswer as error:
        refused = error.kind in ("http_401", "http_403")
        if refused or not wanted or not re.fullmatch("http_4..|http_501|malformed", error.kind):
            key = " Set the variable that server.api_key_env names." if refused else ""
            raise ConfigurationError(
                f"{error}.{key} Start the server (docs/servers.md), type server.model=NAME where "
                "it lists no models, or name another server: server.base_url=http://HOST:PORT/v1."
            ) from None
    entries = [e for e in listed if isinstance(e, Mapping)] if isinstance(listed, list) else []
    names = [str(e["id"]) for e in entries if isinstance(e.get("id"), str)]
    names = [name for name in names if name == printable(name)]
    if wanted is not None and names and wanted not in names:
        raise unknown_name(f"model at {client.url}:", wanted, names)
    if wanted is None and len(names) != 1:
        raise ConfigurationError(
            f"{client.url} serves {', '.join(names) or 'no model'}. Type server.model=NAME."
        )
    return wanted or names[0]


def _tokenized(client: Client, text: Said) -> list[int]:
    said = client.post_json("/tokenize", text)
    ids = said.get("tokens") if isinstance(said, Mapping) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise NoAnswer("malformed", "the server gave no ids for the prompt", again=True)
    return ids


def vocabulary(client: Client) -> tuple[int, list[int]]:
    """Of a llama.cpp server: how many ids there are, and the one that ends an answer.

    Raises:
        NoAnswer: it does not say.
    """
    end = str(_asked(client, "/props").get("eos_token"))
    ids = _tokenized(client, {"content": end, "parse_special": True})
    match client.get_json("/v1/models"):
        case {"data": [{"meta": {"n_vocab": int(size)}}, *_]}:
            return size, ids[-1:]
    raise NoAnswer("malformed", "the server does not say its vocabulary", again=True)
