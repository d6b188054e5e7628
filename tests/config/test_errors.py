"""A typo fails before anything is loaded, with the nearest valid name and what to type."""

import pytest
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from specbench.config.compare import compose_entry, with_parts
from specbench.config.compose import compose, typed
from specbench.config.hydra_errors import translate_hydra_error
from specbench.config.knobs import check_method
from specbench.config.validate import check_values
from specbench.errors import ConfigurationError


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("method=cachebak", ["method 'cachebak'", "'cacheback'"]),
        ("model=smolm2_135m", ["model 'smolm2_135m'", "'smollm2_135m'"]),
        ("dataset=specbnch", ["dataset 'specbnch'", "'specbench'"]),
        ("experiment=cachback_table1", ["'cacheback_table1'"]),
        ("modle=x", ["unknown key 'modle'", "'model'"]),
        ("sead=1", ["unknown key 'sead'", "'seed'"]),
        ("method.leader_leng=3", ["'method.leader_leng'", "'method.leader_len'"]),
        ("dataset.limt=3", ["'dataset.limt'", "'dataset.limit'"]),
        ("model.shape_confg.x=3", ["'model.shape_confg", "model.shape_config"]),
        ("generation.max_new_token=3", ["'generation.max_new_tokens'"]),
        ("runner.batch_k=[1]", ["unknown key 'runner.batch_k'", "It is a key of runner=cost."]),
        ("runner=replay_recored", ["'replay_recorded'"]),
        ("dataset.limit=abc", ["dataset.limit", "'abc'", "whole number"]),
        ("baseline=maybe", ["baseline", "true or false"]),
        ("generation.temperature=hot", ["generation.temperature", "a number"]),
        ("dataset.tasks=qa", ["dataset.tasks", "Type a list"]),
        ("compare=[{a]", ["compare=[{a]", "quotes"]),
        ("pair=null", ["pair=none"]),
        ("+pair.tuned=false", ["pair.tuned is gone", "type budgets=published"]),
        ("budgets=publised", ["budgets", "'published'"]),
        ("dataset.hub.id=x", ["below a value that is null", "your own yaml"]),
        ("dataset.rows={first: 1}", ["dataset.rows is null", "your own yaml"]),
        ("hydra/launcher=foo", ["hydra/launcher 'foo'"]),
        # What composes, but is no value.
        ("engine.weights=int4", ["engine.weights", "'int4'", "stored"]),
        ("model.dtype=float23", ["model.dtype", "'float23'", "'float32'"]),
        ("pair.draft.dtype=float31", ["pair.draft.dtype", "'float31'", "'float32'", "null"]),
        ("model.template=vicunna_v1.1", ["model.template", "'vicuna_v1.1'"]),
        ("dataset.sample=stratify", ["dataset.sample", "'stratified'"]),
        ("dataset.dialogue=mine", ["dataset.dialogue", "ar, own"]),
        ("resume=forced", ["resume", "'force'"]),
        ("estimator=specbnch", ["estimator", "'specbench'"]),
        ("repeats=0", ["repeats=0", "at least 1"]),
        ("dataset.limit=0", ["dataset.limit=0", "at least 1"]),
        ("generation.max_new_tokens=0", ["generation.max_new_tokens=0"]),
        ("generation.temperature=-1", ["generation.temperature=-1"]),
        ("generation.top_p=0", ["generation.top_p"]),
        ("+method.leader_leng=3", ["'leader_leng'", "method.leader_len?"]),
        ("method.leader_len=abc", ["method.leader_len='abc'", "a whole number"]),
        ("method.leader_len=1.5", ["method.leader_len=1.5", "a whole number"]),
        ("method.leader_len=true", ["method.leader_len=True", "a whole number"]),
        ("method.state_scope=promt", ["method.state_scope 'promt'", "'prompt'", "paper"]),
        ("method.merge=3", ["method.merge=3", "true or false"]),
        ("method.leader_len=${model.name}", ["method.leader_len='smollm2_135m'", "a whole number"]),
        ("method.tables=3", ["method.tables=3", "a list or null"]),
        ("method._target_=methods.cacheback.Nope", ["methods.cacheback.Nope"]),
        ("method._target_=nope", ["'nope'"]),
        ("method._target_=os.system", ["'os.system'", "methods/NAME.py"]),
        ("method._target_=methods.ar.annotations", ["is not a class"]),
        ("method.tables=[{_target_: os.getcwd}]", ["method.tables", "'_target_'"]),
        ("method.tables=[{kind: dynamic, leader_len: nan}]", ["method.tables[0].leader_len=nan"]),
        ("method.leader_len=10000000000000000000000", ["method.leader_len", "64 bits"]),
        ("method.label=[a]", ["method.label=['a']", "text"]),
        ("+nosuch=1", ["unknown key 'nosuch'"]),
        ("+sead=1", ["unknown key 'sead'", "'seed'"]),
        ("+generation.max_tokens=1", ["'generation.max_tokens'", "'generation.max_new_tokens'"]),
        ("+pair.draft.random.layer=1", ["'pair.draft.random.layers'"]),
        ("+logger.modus=x", ["unknown key 'logger.modus'"]),
        ("logger.name=wandbb", ["'wandb'"]),
        ("method.name=eagle3", ["name of something else", "method=eagle3"]),
        ("method.name=ar", ["name of something else", "method=ar"]),
        ("dataset.name=gsm8k", ["name of something else", "dataset=gsm8k"]),
        ("dataset.prompt_form=nope", ["dataset.prompt_form: 'nope'", "default"]),
        ("measure.rerun_minutes=-1", ["measure.rerun_minutes=-1", "at least 0"]),
        ("seed=-1", ["seed=-1", "at least 0"]),
        ("pair.draft.random.seed=-1", ["pair.draft.random.seed=-1"]),
        ("repeats=1000000000", ["repeats=1000000000", "at most"]),
        ("measure.rerun_share=nan", ["measure.rerun_share=nan", "finite"]),
        ("measure.disturbed.steal=inf", ["measure.disturbed.steal=inf"]),
        ("engine.packed.memory_gb=inf", ["engine.packed.memory_gb=inf"]),
        ("generation.temperature=1e-320", ["generation.temperature=1e-320", "1e-09"]),
        ("engine.name=foo", ["engine.name", "'foo'", "eager"]),
        ("model.device=tpu", ["model.device='tpu'", "cuda:0"]),
        ("model.device_map=everywhere", ["model.device_map", "balanced"]),
        ("pair.draft.device=tpu", ["pair.draft.device='tpu'"]),
        ("output_dir=''", ["output_dir is empty", "output_dir=FOLDER"]),
        ('output_dir="a\0b"', ["output_dir", "NUL"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_type(override, parts):
    with pytest.raises(ConfigurationError) as caught:
        check_values(compose([override]))
    assert caught.value.exit_code == 2
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "typed_instead"),
    [
        (["model=vicuna7b"], "model.dtype=float32"),
        (["model.device=cuda:0"], "model.device=cpu"),
        (["engine.packed.enabled=false"], "engine.packed.enabled=true"),
        (["engine.packed.memory_gb=0"], "engine.packed.memory_gb=4"),
        (["runner=serve"], "Leave it out"),
    ],
)
def test_shorter_weights_are_of_packed_float32_passes_on_a_cpu(overrides, typed_instead):
    with pytest.raises(ConfigurationError, match=f"engine.weights=stored.*{typed_instead}"):
        check_values(compose(["engine.weights=stored", *overrides]))
    check_values(compose(["engine.weights=stored"]))


def test_errors_of_hydra_are_translated_and_no_others():
    error = MissingConfigException("x", "hydra/launcher/ray", ["basic"])
    assert "pip install -e '.[ray]'" in str(translate_hydra_error(error))
    assert translate_hydra_error(RuntimeError("boom")) is None
    assert translate_hydra_error(ValueError("boom")) is None
    error = RuntimeError("Invalid plugin 'foo.bar': not the hydra_plugins package")
    assert "hydra/launcher=" in str(translate_hydra_error(error))
    error = ConfigurationError("x")
    assert translate_hydra_error(error) is error


def test_a_mode_of_wandb_that_it_lacks_is_refused_before_anything_is_measured():
    with pytest.raises(ConfigurationError, match=r"logger\.mode: 'nope'"):
        check_values(compose(["logger=wandb", "logger.mode=nope"]))


def test_unknown_prompt_form():
    with pytest.raises(ConfigurationError, match="token_recycling"):
        check_values(compose(["dataset=mbpp", "dataset.prompt_form=token_recyclng"]))


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


def test_open_mappings_take_any_key():
    cfg = compose(["+model.template_kwargs.x={a: [b]}", "+model.shape_config.new=1"])
    check_values(cfg)
    assert typed(cfg).model.template_kwargs == {"x": {"a": ["b"]}}


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("plt", ["'plt'", "'pld'"]),
        ({"method": "plt"}, ["'plt'", "'pld'"]),
        ({"method": "pld", "num_token": 3}, ["'num_token'", "'num_tokens'"]),
        ({"method": "pld", "state_scope": "papre"}, ["'papre'", "'paper'"]),
        ({"method": "pld", "lable": "x"}, ["'lable'", "'label'"]),
        ({"method": "pld", "num_tokens": "many"}, ["method.num_tokens='many'", "whole number"]),
        ({"label": "x"}, ["compare=[pld]"]),
        (3, ["compare=[pld]"]),
    ],
)
def test_bad_compare_entry(entry, parts):
    with pytest.raises(ConfigurationError) as caught:
        compose_entry(compose(), entry)
    for part in parts:
        assert part in str(caught.value)


def test_missing_knob_is_named(monkeypatch):
    import methods.ar

    class Needy:
        def __init__(self, *, name: str, depth: int) -> None:
            self.name, self.depth = name, depth

    monkeypatch.setattr(methods.ar, "Needy", Needy, raising=False)
    with pytest.raises(ConfigurationError, match="lacks depth"):
        check_method({"_target_": "methods.ar.Needy", "name": "needy"})
