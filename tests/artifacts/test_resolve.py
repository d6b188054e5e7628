import sys
import threading
import time
import types
from dataclasses import replace

import pytest

from methods.cacheback.frozen_table import FrozenTable
from specbench.artifacts import resolve as artifacts
from specbench.decoding.structs import Artifact
from specbench.errors import ConfigurationError, NeedsNotMet


class Tokenizer:
    def __init__(self, name="a"):
        self.name = name


@pytest.fixture
def builder(monkeypatch):
    """A builder that counts its calls, as a module of its own."""
    module = types.ModuleType("toy_builder")
    module.STEM, module.BUILDER_VERSION, module.calls = "toy", 1, []

    def build(tokenizer, out_path, **params):
        module.calls.append((tokenizer.name, params))
        out_path.write_text("begun")
        time.sleep(0.01)
        if params.get("fail"):
            raise RuntimeError("no more disk")
        out_path.write_text("done")

    module.build = build
    monkeypatch.setitem(sys.modules, "toy_builder", module)
    monkeypatch.setattr("specbench.models.loading.tokenizer_hash", lambda tokenizer: tokenizer.name)
    return module


def artifact(path=None, **params):
    return Artifact("toy", "toy_builder:build", "python build.py --toy", path, params)


def resolve(tmp_path, *items, tokenizer=None, bundled=True):
    return artifacts.resolve(
        items,
        tokenizer=tokenizer or Tokenizer(),
        bundled=bundled,
        cache_dir=tmp_path,
    )


def test_a_missing_one_is_built_once_for_a_tokenizer_parameters_and_version(
    tmp_path, builder, monkeypatch
):
    first = resolve(tmp_path, artifact(n=1))["toy"]
    assert resolve(tmp_path, artifact(n=1))["toy"] == first
    assert first.read_text() == "done"
    assert builder.calls == [("a", {"n": 1})]
    paths = {first, resolve(tmp_path, artifact(n=2))["toy"]}
    paths.add(resolve(tmp_path, artifact(n=1), tokenizer=Tokenizer("b"))["toy"])
    monkeypatch.setattr(builder, "BUILDER_VERSION", 2)
    paths.add(resolve(tmp_path, artifact(n=1))["toy"])
    assert len(paths) == len(builder.calls) == 4


def test_a_file_of_one_model_is_no_other_models(tmp_path, builder):
    of_weights = replace(artifact(), per_model=True)
    look = {"tokenizer": Tokenizer(), "bundled": True, "cache_dir": tmp_path}
    paths = {
        artifacts.resolve([of_weights], model_key=key, **look)["toy"]
        for key in ("one", "two", "two")
    }
    assert len(paths) == len(builder.calls) == 2
    with pytest.raises(ValueError, match="model_key"):
        artifacts.resolve([of_weights], **look)


def test_elsewhere_a_missing_one_is_refused_with_the_command(tmp_path, builder):
    with pytest.raises(NeedsNotMet, match=r"python build\.py --toy"):
        resolve(tmp_path, artifact(), bundled=False)
    path = artifacts.default_path(artifact(), tokenizer=Tokenizer(), cache_dir=tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("built by hand")
    assert resolve(tmp_path, artifact(), bundled=False) == {"toy": path}
    assert builder.calls == []


def test_a_named_file_is_taken_and_a_missing_one_refused(tmp_path, builder):
    (tmp_path / "mine.bin").write_text("x")
    assert resolve(tmp_path, artifact(str(tmp_path / "mine.bin")))["toy"].name == "mine.bin"
    with pytest.raises(NeedsNotMet, match=r"yours\.bin"):
        resolve(tmp_path, artifact(str(tmp_path / "yours.bin")))
    assert builder.calls == []


def test_a_failed_build_leaves_no_file_and_is_tried_again(tmp_path, builder):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more disk"):
            resolve(tmp_path, artifact(fail=True))
    assert not list((tmp_path / "artefacts").glob("*.bin"))
    assert len(builder.calls) == 2


def test_two_at_once_build_one(tmp_path, builder):
    files = []
    threads = [
        threading.Thread(target=lambda: files.append(resolve(tmp_path, artifact(n=3))["toy"]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builder.calls) == 1
    assert [path.read_text() for path in files] == ["done"] * 4


def test_a_file_that_another_process_builds_is_refused(tmp_path):
    path = tmp_path / "table.bin"
    refused = pytest.raises(ConfigurationError, match=r"another process.*table\.bin")
    with artifacts.build_lock(path), refused, artifacts.build_lock(path):
        pass


def test_a_file_is_described_with_its_hash_and_header(tmp_path):
    path = tmp_path / "t.bin"
    FrozenTable.empty(1, 2).write(path, tokenizer_hash="h", header={"corpus": {"name": "none"}})
    facts = artifacts.describe(path)
    assert facts["header"]["corpus"] == {"name": "none"}
    assert (len(facts["sha256"]), facts["bytes"]) == (64, path.stat().st_size)
    (tmp_path / "plain").write_bytes(b"x" * 50)
    assert "header" not in artifacts.describe(tmp_path / "plain")
