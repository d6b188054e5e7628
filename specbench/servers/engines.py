"""How each engine is asked, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.config.schema import GenerationConfig
from specbench.errors import ConfigurationError, unknown_name
from specbench.servers.client import Client, NoAnswer

# Of what servers say of themselves, what may go into a manifest: keys and paths must not.
_SGLANG_KEYS = ("dtype", "quantization", "kv_cache_dtype", "tp_size", "attention_backend")
_SGLANG_PREFIX = "speculative_"
_UNKNOWN = "not stated"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A server as it describes itself.

    Attributes:
        engine: one of ``specbench.config.server_schema.ENGINES``, but ``auto``.
        version: of the engine; ``numerics``: what the weights are kept in.
        model: the name to ask for.
        flags: what else it says it was started with.
    """

    engine: str
    version: str
    numerics: str
    model: str
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``llama.cpp 2026.10``."""
        shown = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang"}.get(self.engine, "")
        return f"{shown or 'engine'} {self.version}"


@dataclass(frozen=True, slots=True)
class Question:
    """A request that is ready to be sent.

    Attributes:
        prompt_ids: the prompt, where it was put into ids beforehand.
    """

    path: str
    body: Mapping[str, Any]
    prompt_ids: Sequence[int] = ()


def identify(client: Client, engine: str, model: str | None, numerics: str | None) -> EngineInfo:
    """Ask a server what it is; ``engine``: ``auto``, or what the user says.

    Raises:
        ConfigurationError: no server answers, or it does not know the model.
    """
    name = _model(client, model)
    props = _asked(client, "/props") if engine in ("auto", "llamacpp") else None
    if (props and "default_generation_settings" in props) or engine == "llamacpp":
        props = props or {}
        version = str(props.get("build_info") or _UNKNOWN)
        kept = str(props.get("model_ftype") or _UNKNOWN)
        return EngineInfo(
            "llamacpp", version, numerics or kept, name, {"slots": props.get("total_slots")}
        )
    said = None
    if engine in ("auto", "sglang"):
        said = _asked(client, "/server_info") or _asked(client, "/get_server_info")  # new, old
    if said or engine == "sglang":
        said = said or {}
        flags = {
            key: value
            for key, value in said.items()
            if (key in _SGLANG_KEYS or key.startswith(_SGLANG_PREFIX))
            and isinstance(value, str | int | float)
            and not str(value).startswith("/")
        }
        kept = ", ".join(str(said[k]) for k in ("dtype", "quantization") if said.get(k))
        version = str(said.get("version") or _UNKNOWN)
        return EngineInfo("sglang", version, numerics or kept or _UNKNOWN, name, flags)
    said = _asked(client, "/version") if engine in ("auto", "vllm") else None
    if (said and "version" in said) or engine == "vllm":
        version = str((said or {}).get("version") or _UNKNOWN)
        return EngineInfo("vllm", version, numerics or _UNKNOWN, name)
    return EngineInfo("other", _UNKNOWN, numerics or _UNKNOWN, name)


def _asked(client: Client, path: str) -> Mapping[str, Any] | None:
    try:
        said = client.get_json(path)
    except NoAnswer:
        return None
    return said if isinstance(said, Mapping) else None


def _model(client: Client, wanted: str | None) -> str:
    try:
        said = client.get_json("/v1/models")
    except NoAnswer as error:
        hint = (
            " Set the variable that server.api_key_env names." if error.kind == "http_401" else ""
        )
        raise ConfigurationError(
            f"{error}.{hint} Start the server (docs/servers.md), or name another: "
            "server.base_url=http://HOST:PORT/v1."
        ) from None
    listed = said.get("data") if isinstance(said, Mapping) else None
    names = [
        str(entry["id"])
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, Mapping) and "id" in entry
    ]
    if wanted is not None and wanted not in names:
        raise unknown_name(f"model at {client.url}:", wanted, names)
    if wanted is None and len(names) != 1:
        raise ConfigurationError(
            f"{client.url} serves {', '.join(names) or 'no model'}. Type server.model=NAME."
        )
    return wanted or names[0]


def question(
    info: EngineInfo,
    client: Client,
    messages: Sequence[Mapping[str, str]],
    generation: GenerationConfig,
    seed: int,
) -> Question:
    """The request for an answer. llama.cpp is given ids, so that the prompt is known exactly.

    Raises:
        NoAnswer: the prompt could not be put into ids.
    """
    body: dict[str, Any] = {"temperature": generation.temperature, "stream": True}
    if generation.temperature:
        body |= {"top_p": generation.top_p, "seed": seed % 2**31}
    if info.engine == "llamacpp":
        ids = _llamacpp_prompt(client, messages)
        body |= {"prompt": ids, "n_predict": generation.max_new_tokens, "return_tokens": True}
        # An answer must not be faster because a question before it began alike.
        body |= {"cache_prompt": False, "top_k": generation.top_k, "min_p": 0.0}
        return Question("/completion", body, ids)
    body |= {"model": info.model, "messages": list(messages)}
    body |= {"max_tokens": generation.max_new_tokens, "stream_options": {"include_usage": True}}
    if generation.top_k and info.engine != "other":
        body["top_k"] = generation.top_k
    if info.engine == "vllm":
        body["return_token_ids"] = True
    if info.engine == "sglang":
        body["return_spec_tokens_details"] = True
    return Question("/v1/chat/completions", body)


def _llamacpp_prompt(client: Client, messages: Sequence[Mapping[str, str]]) -> list[int]:
    said = client.post_json("/apply-template", {"messages": list(messages)})
    text = said.get("prompt") if isinstance(said, Mapping) else None
    asked = {"content": text, "add_special": True, "parse_special": True}
    said = client.post_json("/tokenize", asked)
    ids = said.get("tokens") if isinstance(said, Mapping) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise NoAnswer("malformed", "the server gave no ids for the prompt", again=True)
    return ids


def vocabulary(client: Client) -> tuple[int, list[int]]:
    """Of a llama.cpp server: how many ids there are, and the one that ends an answer.

    Raises:
        NoAnswer: it does not say.
    """
    said = client.get_json("/v1/models")
    end = str(client.get_json("/props").get("eos_token"))
    ids = client.post_json("/tokenize", {"content": end, "parse_special": True})["tokens"]
    return int(said["data"][0]["meta"]["n_vocab"]), [int(ids[-1])]
