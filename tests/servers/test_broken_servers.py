"""Broken servers: every answer ends in time and size, in words, and shows no key."""

import json
import shutil
import ssl
import subprocess
from base64 import b64encode
from dataclasses import replace

import pytest

from specbench.config.compose import compose, typed
from specbench.config.server_schema import OpenaiConfig
from specbench.errors import ConfigurationError
from specbench.servers import asking
from specbench.servers.asking import Asked, Servers
from specbench.servers.client import Client, NoAnswer
from specbench.servers.engines import identify
from specbench.servers.secret import Secret
from specbench.servers.stream import read_answer
from specbench.storage.jsonl import append_jsonl, read_jsonl
from tests.servers import broken
from tests.servers.fake import KEY, Fake, serving

TIMEOUT_S, ANSWER_MB = 0.2, 0.25
PATIENCE_S = 30.0  # where time is not what is wrong
PARTS = [KEY[i : i + 8] for i in range(len(KEY) - 7)]
pytestmark = pytest.mark.timeout(60)  # a hang fails


@pytest.fixture(scope="module")
def server():
    with serving(key=KEY) as (url, fake):
        yield url, fake


@pytest.fixture
def waits(monkeypatch):
    """The seconds that are waited before a question is asked again, in no time."""
    found = []
    clock = type("Clock", (), vars(asking.time) | {"sleep": staticmethod(found.append)})
    monkeypatch.setattr(asking, "time", clock)
    monkeypatch.setattr(asking, "_METRICS_S", 0.02)
    monkeypatch.setenv("MY_KEY", KEY)
    return found


GENERATION = replace(typed(compose([])).generation, max_new_tokens=16)


def ask(url, way, folder):
    config = OpenaiConfig(
        name="openai",
        base_url=url,
        engine=way.engine,
        api_key_env="MY_KEY",
        speculation="eagle3" if way.accepted else "none",
        timeout_s=TIMEOUT_S if way.pause_s else PATIENCE_S,
        answer_mb=ANSWER_MB,
        retries=0 if way.wait_s is None else 1,
        retry_wait_s=0.0,
    )
    asked = Asked([{"role": "user", "content": "a question"}], 0)
    Servers(config, {"it": config}, GENERATION, None, folder).ask("it", [asked])
    return asked


def shows_the_key(text):
    return any(part in text.lower() for part in PARTS)


@pytest.mark.parametrize("name", broken.ALL)
def test_an_answer_of_a_broken_server_is_read_or_refused_with_its_reason(
    name, server, waits, tmp_path
):
    url, fake = server
    way = broken.ALL[name]
    fake.broken, fake.engine, fake.accepted = way, way.engine, way.accepted
    fake.per_request = way.path != "/metrics"
    asked = ask(url, way, tmp_path)
    if way.kind is not None:
        assert (asked.answer, asked.error.kind) == (None, way.kind)
        assert not shows_the_key(str(asked.error))
    else:
        assert asked.error is None
        line = {"text": asked.answer.text, "counters": asked.answer.counters}
        append_jsonl(tmp_path / "file", [line])
        assert read_jsonl(tmp_path / "file") == ([line], False)
        assert not shows_the_key(json.dumps(line))
        assert asked.answer.n_new <= GENERATION.max_new_tokens
    assert waits == ([] if way.wait_s is None else [way.wait_s])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
@pytest.mark.parametrize("name", ["dripping header", "dripping tokens", "endless tokens"])
def test_the_limits_hold_over_tls(name, tmp_path, monkeypatch):
    certificate, private = tmp_path / "certificate", tmp_path / "private"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt"]
    command += ["ec_paramgen_curve:P-256", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", private, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    way = broken.ALL[name]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    with serving(Fake(broken=way, heals_after=1), context) as (url, _):
        patience_s = 2 * TIMEOUT_S if way.pause_s else PATIENCE_S
        body = {"model": "org/small-model", "messages": [{"role": "user", "content": "a"}]}
        with pytest.raises(NoAnswer) as error:
            read_answer(Client(url, patience_s, ANSWER_MB).stream(broken.ANSWER, body))
        assert error.value.kind == way.kind
        client = Client(url, PATIENCE_S, ANSWER_MB)
        assert read_answer(client.stream(broken.ANSWER, body)).n_new == 12


@pytest.mark.parametrize("name", broken.DESCRIPTIONS)
def test_a_server_that_does_not_say_what_it_is_ends_the_run_with_what_to_type(name, server):
    url, fake = server
    raw, pause_s = broken.DESCRIPTIONS[name]
    fake.broken = broken.Broken(None, raw=raw, path="/v1/models", pause_s=pause_s)
    with pytest.raises(ConfigurationError, match=r"server\.") as error:
        identify(Client(url, TIMEOUT_S, ANSWER_MB, KEY), "auto", None, None)
    assert not shows_the_key(str(error.value))
    assert str(error.value).isprintable()


def test_what_a_server_says_of_itself_is_shown_without_key_and_controls():
    named = f"1.0\x1b[2J\n{KEY}\ud800"
    with serving(Fake(key=KEY, version=named)) as (url, _):
        info = identify(Client(url, TIMEOUT_S, ANSWER_MB, KEY), "auto", None, None)
    assert info.version == "1.0 [2J …"


@pytest.mark.parametrize(
    ("key", "said", "shown"),
    [
        ("s3cret/key+1", "?k=s3cret%2Fkey%2B1&x", "?k=…&x"),
        ("s3cret/key+1", "?k=s3cret%2fkey%2b1&x", "?k=…&x"),
        ('quo"te\\key', json.dumps({"a": 'quo"te\\key'}), '{"a": "…"}'),
        ("sk-abcdefghijk", "sk-abcde***", "…***"),
        ("sk-abcdefghijk", "an abcdefg", "an abcdefg"),
        ("sk-abcdefghijk", "Bearer SK-ABCDEFGHIJK, sk-abcdefghijk", "Bearer …, …"),
        ("secret", "the secret", "the …"),
        ("s3cret/key+1", b64encode(b"s3cret/key+1").decode(), "…"),
        ("s3cret/key+1", "".join(f"&#{ord(c)};" for c in "s3cret/key+1"), "…"),
        ("sk-no-key-required", "no key is required", "no key is required"),
        # A placeholder is a word of answers.
        ("EMPTY", "EMPTY", "EMPTY"),
        ("", "text", "text"),
    ],
)
def test_a_key_is_hidden_however_it_is_spelt(key, said, shown):
    assert Secret(key).hide(said) == shown


def test_of_an_answer_only_the_whole_key_is_hidden():
    secret = Secret("sk-harbour-master-7")
    assert secret.hide_in_answer("the harbour-master") == "the harbour-master"
    assert secret.hide_in_answer("say sk-harbour-master-7") == "say …"


def test_a_key_is_hidden_in_the_errors_that_an_error_came_from():
    def fail():
        try:
            raise ValueError(f"Bearer {KEY}", [KEY])
        except ValueError as error:
            raise RuntimeError(KEY) from error

    with pytest.raises(RuntimeError) as caught:
        fail()
    Secret(KEY).hide_in_error(caught.value)
    assert caught.value.args == ("…",)
    assert caught.value.__cause__.args == ("Bearer …", ["…"])


def test_more_tokens_than_a_text_has_bytes_are_a_lie():
    def streamed(tokens):
        last = {"delta": {"content": "b"}, "finish_reason": "length"}
        return [
            (0.1, {"choices": [{"delta": {"content": "a"}}]}),
            (0.2, {"choices": [last], "usage": {"completion_tokens": tokens}}),
        ]

    assert read_answer(streamed(3)).n_new == 3, "an end token has no text"
    with pytest.raises(NoAnswer, match="16 tokens for a text of 2 bytes"):
        read_answer(streamed(16))
