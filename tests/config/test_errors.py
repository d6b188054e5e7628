"""Bad configurations are refused by one sentence with the key and what to type."""

import functools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

import methods
import methods.ar
from runners.launch import dispatch
from specbench.config import validate
from specbench.config.compose import compose, to_config
from specbench.config.entries import compose_entry, with_parts
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.validate import check_method, check_values
from specbench.errors import ConfigurationError


def refusal(*overrides):
    with pytest.raises(ConfigurationError) as caught:
        cfg = compose(overrides)
        check_values(cfg)
        dispatch.resolve_entries(cfg)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("method=cachebak", ["method 'cachebak'", "'cacheback'"]),
        ("method=PLD", ["method 'PLD'", "'pld'"]),
        ("model=smolm2_135m", ["model 'smolm2_135m'", "'smollm2_135m'"]),
        ("dataset=specbnch", ["dataset 'specbnch'", "'specbench'"]),
        ("experiment=cachback_table1", ["'cacheback_table1'"]),
        ("modle=x", ["unknown key 'modle'", "'model'"]),
        ("sead=1", ["unknown key 'sead'", "'seed'"]),
        ("+sead=1", ["unknown key 'sead'", "'seed'"]),
        ("+nosuch=1", ["unknown key 'nosuch'"]),
        ("method.leader_leng=3", ["'method.leader_leng'", "'method.leader_len'"]),
        ("+method.leader_leng=3", ["'leader_leng'", "method.leader_len?"]),
        ("model.shape_confg.x=3", ["'model.shape_confg", "model.shape_config"]),
        ("generation.max_new_token=3", ["'generation.max_new_tokens'"]),
        ("+generation.max_tokens=1", ["'generation.max_tokens'", "'generation.max_new_tokens'"]),
        ("+pair.draft.random.layer=1", ["'pair.draft.random.layers'"]),
        ("+logger.modus=x", ["unknown key 'logger.modus'"]),
        ("logger.name=wandbb", ["'wandb'"]),
        ("runner.batch_k=[1]", ["unknown key 'runner.batch_k'", "It is a key of runner=cost."]),
        ("runner=replay_recored", ["'replay_recorded'"]),
        ("baseline=maybe", ["baseline", "true or false"]),
        ("generation.temperature=hot", ["generation.temperature", "a number"]),
        ("dataset.tasks=qa", ["dataset.tasks", "Type a list"]),
        ("compare=[{a]", ["compare=[{a]", "quotes"]),
        ("pair=null", ["pair=none"]),
        ("dataset.hub.id=x", ["below a value that is null", "your own yaml"]),
        ("dataset.rows={first: 1}", ["dataset.rows is null", "your own yaml"]),
        ("hydra/launcher=foo", ["hydra/launcher 'foo'"]),
        ("method._target_=methods.cacheback.Nope", ["methods.cacheback.Nope"]),
        ("method._target_=nope", ["'nope'"]),
        ("method._target_=os.system", ["'os.system'", "methods/NAME.py"]),
        ("method._target_=methods.ar.annotations", ["is not a class"]),
        ("method.tables=[{_target_: os.getcwd}]", ["method.tables", "'_target_'"]),
        ("method.name=eagle3", ["name of something else", "method=eagle3"]),
        ("dataset.name=gsm8k", ["name of something else", "dataset=gsm8k"]),
        ("dataset.prompt_form=nope", ["dataset.prompt_form: 'nope'", "default"]),
        ("method.state_scope=promt", ["method.state_scope 'promt'", "'prompt'", "paper"]),
        ("pair.draft.random.hidden=60", ["`pair.draft.random.hidden`", "even multiple"]),
        # Forms that other programs have; the key of a group without the group.
        ("method=pld,sam", ["'compare=[pld,sam]'", "-m"]),
        ("compare=cacheback,sam", ["'compare=[cacheback,sam]'"]),
        ("dataset.limit=4,8", ["-m"]),
        ("max_new_tokens=64", ["'generation.max_new_tokens'"]),
        ("max_new_token=64", ["'generation.max_new_tokens'"]),
        ("limit=4", ["'dataset.limit'"]),
        ("temprature=0.7", ["'generation.temperature'"]),
        ("prompts=F", ["'dataset.path'"]),
        ("concurrency=2", ["'server.concurrency'"]),
        ("leader_len=2", ["'method.leader_len'"]),
        ("advice", ["'advise prompts=FILE'"]),
        ("suffix_decodin", ["'method=suffix_decoding'"]),
        ("modle", ["'model=NAME'"]),
        ("bogus-word", ["--help"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_type(override, parts):
    message = refusal(override)
    assert [part for part in parts if part not in message] == []


# Values beyond what a type takes: the key, a value, what the value must be.
BEYOND = [
    ("repeats", "0", "at least 1"),
    ("repeats", "1000000000", "at most"),
    ("batch.size", "0", "at least 1"),
    ("seed", "-1", "at least 0"),
    ("pair.draft.random.seed", "-1", "at least 0"),
    ("pair.draft.random.hidden", "0", "at least 1"),
    ("pair.draft.random.heads", "0", "at least 1"),
    ("dataset.limit", "0", "at least 1"),
    ("dataset.limit", "abc", "a whole number"),
    ("generation.max_new_tokens", "0", "at least 1"),
    ("generation.temperature", "-1", "at least 0"),
    ("generation.temperature", "1e-320", "at least 1e-09"),
    ("generation.top_p", "0", "above 0"),
    ("generation.top_p", "1.5", "at most 1"),
    ("measure.rerun_minutes", "-1", "at least 0"),
    ("measure.rerun_share", "nan", "finite"),
    ("engine.packed.memory_gb", "inf", "finite"),
    ("model.dtype", "float23", "'float32'"),
    ("pair.draft.dtype", "float31", "null"),
    ("model.template", "vicunna_v1.1", "'vicuna_v1.1'"),
    ("model.device", "tpu", "cuda"),
    ("pair.draft.device", "cuda:01", "cuda:N"),
    ("pair.draft.vocabulary", "intersect", "'intersection'"),
    ("model.device_map", "everywhere", "'balanced'"),
    ("engine.name", "foo", "'eager'"),
    ("engine.weights", "int4", "'stored'"),
    ("dataset.sample", "stratify", "'stratified'"),
    ("dataset.dialogue", "mine", "'own'"),
    ("resume", "forced", "'force'"),
    ("estimator", "specbnch", "'specbench'"),
    ("budgets", "publised", "'published'"),
    ("record", "all", "'states'"),
    ("output_dir", "''", "not empty"),
    ("model.path", "''", "not empty"),
    ("output_dir", '"a\0b"', "NUL"),
    ("method.leader_len", "abc", "a whole number"),
    ("method.leader_len", "1.5", "a whole number"),
    ("method.leader_len", "true", "a whole number"),
    ("method.leader_len", "${model.name}", "a whole number"),
    ("method.leader_len", "10000000000000000000000", "64 bits"),
    ("method.tables", "3", "a list or null"),
    ("method.tables", "[{kind: dynamic, leader_len: nan}]", "finite"),
    ("method.label", "[a]", "a text"),
]


@pytest.mark.parametrize(("key", "value", "limit"), BEYOND, ids=str)
def test_a_value_beyond_its_limits_is_refused_with_its_key_and_what_it_must_be(key, value, limit):
    cfg = plain_run().copy()
    with pytest.raises(Exception) as caught:  # OmegaConf's own errors, too
        typed = OverridesParser.create().parse_override(f"{key}={value}")
        OmegaConf.update(cfg, key, typed.value())
        check_values(cfg)
    message = str(translate_hydra_error(caught.value))
    assert key in message and limit in message


@functools.cache
def plain_run():
    return compose()


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("server.concurrency", "0", "at least 1"),
        ("server.context", "0", "at least 1"),
        ("server.draft_p_min", "2", "at most 1"),
        ("server.kv_type", "q8", "'q8_0'"),
        ("server.timeout_s", "0", "at least 0.01"),
    ],
)
def test_a_server_has_limits_too(key, value, limit):
    message = refusal("runner=serve", "server=llamacpp", f"{key}={value}")
    assert f"`{key}`" in message and limit in message


def test_a_mode_that_wandb_lacks_is_refused_before_anything_is_measured():
    assert "`logger.mode`" in refusal("logger=wandb", "logger.mode=nope")


@pytest.mark.parametrize(
    ("overrides", "instead"),
    [
        (["engine.weights=stored", "model=vicuna7b"], "model.dtype=float32"),
        (["engine.weights=stored", "model.device=cuda:0"], "model.device=cpu"),
        (["engine.weights=stored", "engine.packed.enabled=false"], "engine.packed.enabled=true"),
        (["engine.weights=stored", "engine.packed.memory_gb=0"], "engine.packed.memory_gb=4"),
        (["engine.weights=stored", "runner=serve"], "runner=offline"),
        (["batch.size=2", "runner=replay"], "batch.size=1"),
        (["measure.pin=true", "runner=replay"], "Leave it out"),
        (["record_layers=[1]"], "record=states"),
        (["verifier=greedy", "generation.temperature=0.5"], "verifier=rejection"),
        (["verifier=typical"], "generation.temperature=0.7"),
        (["verifier=typical", "generation=sampling", "verifier.delta=null"], "verifier.delta=0.3"),
        (["model=local"], "model.path=FOLDER"),
        (["model=local", "model.shape=true"], "model.shape_config"),
    ],
)
def test_keys_that_exclude_each_other_are_refused_with_what_to_type(overrides, instead):
    assert instead in refusal(*overrides)


def test_what_goes_together_is_taken():
    check_values(compose(["engine.weights=stored"]))
    check_values(compose(["verifier=typical", "generation=sampling"]))
    cfg = compose(["+model.template_kwargs.x={a: [b]}", "+model.shape_config.new=1"])
    check_values(cfg)
    assert to_config(cfg).model.template_kwargs == {"x": {"a": ["b"]}}


# Plain decoding is the baseline of every speedup and of the audit.
@pytest.mark.parametrize(
    "overrides",
    [
        ["method=pld", "method.label=ar"],
        ["method=pld", "method.label=ar_eager"],
        ["method=pld", "compare=[{method: token_recycling, label: ar}]"],
        ["method=ar", "compare=[{method: sam, label: ar_eager}]"],
        ["method=ar", "method.label=ar_eager"],
        ["method=sam", "method.label=ar", "baseline=false"],
    ],
)
def test_the_labels_of_plain_decoding_are_its_own(overrides):
    assert "plain decoding" in refusal(*overrides)


def test_plain_decoding_may_have_its_own_label_and_another():
    labels = [e.label for e in dispatch.resolve_entries(compose(["method=ar", "method.label=ar"]))]
    assert labels == ["ar"]
    cfg = compose(["method=pld", "compare=[{method: ar, label: again}]"])
    assert [e.label for e in dispatch.resolve_entries(cfg)] == ["ar", "pld", "again"]


def test_errors_of_hydra_are_translated_and_no_others():
    error = MissingConfigException("x", "hydra/launcher/ray", ["basic"])
    assert "pip install -e '.[ray]'" in str(translate_hydra_error(error))
    assert translate_hydra_error(RuntimeError("boom")) is None
    error = RuntimeError("Invalid plugin 'foo.bar': not the hydra_plugins package")
    assert "hydra/launcher=" in str(translate_hydra_error(error))
    error = ConfigurationError("x")
    assert translate_hydra_error(error) is error


@pytest.mark.parametrize(
    "part",
    [
        "{_target_: pathlib.Path.touch, self: {_target_: pathlib.Path, _args_: [%s]}}",
        "{method: pld, max_ngram: {_target_: pathlib.Path.touch, _args_: [%s]}}",
        "{a: b}",
        "[pld]",  # a list in a list
    ],
)
@pytest.mark.parametrize("knob", ["method.drafters=[%s,pld]", "method.drafters=[[%s]]"])
def test_no_code_runs_from_what_a_method_is_made_of(part, knob, tmp_path):
    file = tmp_path / "made"
    with pytest.raises(ConfigurationError):
        cfg = compose(["method=union", knob % (part % file if "%s" in part else part)])
        check_values(cfg)
        with_parts(OmegaConf.to_container(cfg.method))
    assert not file.exists()


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("plt", ["'plt'", "'pld'"]),
        ({"method": "plt"}, ["'plt'", "'pld'"]),
        ({"method": "pld", "num_token": 3}, ["'num_token'", "'num_tokens'"]),
        ({"method": "pld", "state_scope": "papre"}, ["'papre'", "'paper'"]),
        ({"method": "pld", "lable": "x"}, ["'lable'", "'label'"]),
        ({"method": "pld", "num_tokens": "many"}, ["method.num_tokens", "'many'", "whole number"]),
        ({"label": "x"}, ["compare=[pld]"]),
        (3, ["compare=[pld]"]),
    ],
)
def test_bad_compare_entry(entry, parts):
    with pytest.raises(ConfigurationError) as caught:
        compose_entry(compose(), entry)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_missing_knob_is_named(monkeypatch):
    class Needy:
        def __init__(self, *, name: str, depth: int) -> None:
            self.name, self.depth = name, depth

    monkeypatch.setattr(methods.ar, "Needy", Needy, raising=False)
    with pytest.raises(ConfigurationError, match="lacks depth"):
        check_method({"_target_": "methods.ar.Needy", "name": "needy"})


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import math\nnowhere.attribute\n", "line 2: NameError: name 'nowhere'"),
        ("import not_a_module_of_anybody\n", "line 1: ModuleNotFoundError"),
        ("def broken(:\n    pass\n", "line 1: SyntaxError"),
        ("def ratio():\n    return 1 / 0\n\n\nratio()\n", "line 2: ZeroDivisionError"),
    ],
)
def test_a_method_s_file_that_cannot_be_imported_names_its_line(
    source, line, tmp_path, monkeypatch
):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/unfinished.py").write_text(source)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "methods")])
    monkeypatch.setattr(validate, "PROJECT", tmp_path)
    message = refusal("method._target_=methods.unfinished.Method")
    assert f"methods/unfinished.py, {line}" in message


def test_a_value_that_is_no_ascii_is_answered_with_its_quotes():
    with pytest.raises(ConfigurationError, match=r"type 'method\.label=\"草稿\"'"):
        compose(["method.label=草稿"])
