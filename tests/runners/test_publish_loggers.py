"""Copies of finished runs: what cannot be published is refused first, or the exit code tells."""

import pytest
from omegaconf import OmegaConf

from runners.launch import publish
from specbench.config.schema import WandbConfig
from specbench.config.validate import check_limits
from specbench.errors import ConfigurationError

WANDB = {"name": "wandb", "project": "p", "entity": None, "mode": "offline", "tags": []}


@pytest.mark.parametrize(
    "value",
    [
        {"project": "a/b"}, {"project": ""}, {"project": "p" * 129}, {"entity": "my team"},
        {"tags": [""]}, {"tags": ["x" * 65]},
    ],
    ids=str,
)  # fmt: skip
def test_what_wandb_would_refuse_is_refused_before_the_measurement(value):
    (key,) = value

    def check(**changes):
        node = OmegaConf.structured(WandbConfig(**WANDB | changes))
        check_limits(node, WandbConfig, "logger.")

    check(**{key: ["x" * 64] if key == "tags" else "p" * 64})
    with pytest.raises(ConfigurationError, match=f"`logger.{key}` must be"):
        check(**value)
    wandb = pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    if key != "entity" and value != {"project": ""}:
        with pytest.raises(Exception, match=r"(?i)tag|project"):  # wandb says the same
            wandb.Settings(**{"run_tags" if key == "tags" else key: value[key]})


def test_the_finished_runs_of_a_sweep_are_published_together(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(publish, "run_analysis", lambda *args: calls.append(args) or 3)
    folders = [tmp_path / name for name in "abc"]
    jobs = [{"folder": str(folder), "logger": WANDB} for folder in folders]
    assert publish.publish([*jobs, {"folder": None, "logger": WANDB}]) == 0, "none is finished"
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "DONE").touch()
    assert publish.publish([{"folder": str(folders[0]), "logger": {"name": "none"}}]) == 0
    assert not calls
    assert publish.publish(jobs) == 1
    assert [args[:4] for args in calls] == [("publish", *map(str, folders[:2]), "--settings")]
