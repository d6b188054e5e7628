"""Broken servers: every answer ends in time and size, in words, and shows no key."""

import json
from dataclasses import replace

import pytest

from specbench.config.compose import compose, to_config
from specbench.config.schema import OpenaiConfig
from specbench.errors import ConfigurationError
from specbench.servers import load_generator
from specbench.servers.adapters import identify
from specbench.servers.client import Client
from specbench.servers.load_generator import Request, Servers
from specbench.storage.jsonl import append_jsonl, read_jsonl
from tests.servers import broken
from tests.servers.fake import KEY, Fake, serving

TIMEOUT_S, ANSWER_MB = 0.2, 0.25
PATIENCE_S = 30.0  # where time is not what is wrong
pytestmark = pytest.mark.timeout(60)  # a hang fails


@pytest.fixture(scope="module")
def server():
    with serving(key=KEY) as (url, fake):
        yield url, fake


@pytest.fixture
def waits(monkeypatch):
    """The seconds that are waited before a question is request again, in no time."""
    seconds = []
    clock = type("Clock", (), vars(load_generator.time) | {"sleep": staticmethod(seconds.append)})
    monkeypatch.setattr(load_generator, "time", clock)
    monkeypatch.setattr(load_generator, "_METRICS_S", 0.02)
    monkeypatch.setenv("MY_KEY", KEY)
    return seconds


GENERATION = replace(to_config(compose([])).generation, max_new_tokens=16)


def ask(url, way, folder):
    config = OpenaiConfig(
        name="openai",
        base_url=url,
        engine="vllm",
        api_key_env="MY_KEY",
        speculation="eagle3" if way.accepted else "none",
        timeout_s=TIMEOUT_S if way.pause_s else PATIENCE_S,
        answer_mb=ANSWER_MB,
        retries=0 if way.wait_s is None else 1,
        retry_wait_s=0.0,
    )
    request = Request([{"role": "user", "content": "a question"}], 0)
    Servers(config, {"it": config}, GENERATION, {}, None, folder).send("it", [request])
    return request


@pytest.mark.parametrize("name", broken.ALL)
def test_an_answer_of_a_broken_server_is_read_or_refused_with_its_reason(
    name, server, waits, tmp_path
):
    url, fake = server
    way = broken.ALL[name]
    fake.broken, fake.accepted = way, way.accepted
    fake.per_request = way.path != "/metrics"
    request = ask(url, way, tmp_path)
    if way.kind is not None:
        assert (request.answer, request.error.kind) == (None, way.kind)
        assert KEY not in str(request.error)
    else:
        assert request.error is None
        line = {"text": request.answer.text, "counters": request.answer.counters}
        append_jsonl(tmp_path / "file", [line])
        assert read_jsonl(tmp_path / "file") == ([line], False)
        assert KEY not in json.dumps(line)
        assert request.answer.n_new <= GENERATION.max_new_tokens
    assert waits == ([] if way.wait_s is None else [way.wait_s])


@pytest.mark.parametrize("name", broken.DESCRIPTIONS)
def test_a_server_that_does_not_say_what_it_is_ends_the_run_with_what_to_type(name, server):
    url, fake = server
    fake.broken = broken.Broken(None, raw=broken.DESCRIPTIONS[name], path="/v1/models")
    with pytest.raises(ConfigurationError, match=r"server\.") as error:
        identify(Client(url, TIMEOUT_S, ANSWER_MB, KEY), "auto", None, None)
    assert KEY not in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("status", ["404 Not Found", "405 No", "501 No"])
def test_a_server_without_a_list_of_models_is_asked_for_the_typed_one(status, server):
    url, fake = server
    fake.broken = broken.Broken(None, raw=broken.response(status), path="/v1/models")
    client = Client(url, TIMEOUT_S, ANSWER_MB, KEY)
    assert identify(client, "vllm", "typed/model", None).model == "typed/model"
    with pytest.raises(ConfigurationError, match=r"server\.model=NAME"):
        identify(client, "vllm", None, None)
    # A list that is there, and a wrong key, stay what they are.
    fake.broken = None
    with pytest.raises(ConfigurationError, match="unknown model"):
        identify(client, "vllm", "typed/model", None)
    with pytest.raises(ConfigurationError, match=r"server\.api_key_env"):
        identify(Client(url, TIMEOUT_S, ANSWER_MB, "wrong"), "vllm", "typed/model", None)


def test_what_a_server_says_of_itself_is_shown_without_key_and_controls():
    named = f"1.0\x1b[2J\n{KEY}\ud800"
    with serving(Fake(key=KEY, version=named)) as (url, _):
        info = identify(Client(url, TIMEOUT_S, ANSWER_MB, KEY), "auto", None, None)
    assert info.version == "1.0 [2J …"


@pytest.mark.parametrize(
    ("key", "text", "shown"),
    [
        ("sk-abcdefghijk", "Bearer sk-abcdefghijk, sk-abcdefghijk", "Bearer …, …"),
        ("EMPTY", "EMPTY", "EMPTY"),  # a placeholder is a word of answers
        ("", "text", "text"),
    ],
)
def test_a_key_is_hidden_and_a_placeholder_is_not(key, text, shown):
    client = Client("http://127.0.0.1:1", 1.0, 1.0, key)
    assert client.hide(text) == shown
    assert not key or key not in repr(client)
