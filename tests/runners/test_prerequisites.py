"""What a replay reads is made first where it is missing, once, and found again."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runners.launch.prerequisites import missing, with_folders
from specbench.config.compose import compose
from specbench.config.run_key import run_key
from specbench.errors import SpecBenchError
from specbench.paths import CONF_DIR
from tests.small_run import run_here


class Execute:
    """Notes the jobs it is given and leaves a finished folder for each."""

    def __init__(self, code=0):
        self.jobs = []
        self.code = code

    def __call__(self, cfg):
        self.jobs.append(cfg)
        path = Path(cfg.output_dir)
        path.mkdir(parents=True, exist_ok=True)
        if not self.code:
            (path / "DONE").write_text("")
        return self.code


def ensure(cfg, execute):
    for job in missing(cfg):
        execute(job)
    return with_folders(cfg)


@pytest.fixture
def replay(tmp_path):
    return [
        "runner=replay", "runner.traces=record", "runner.surface=measure", "method=ngrammys",
        f"paths.results={tmp_path}", "dataset.limit=3", "generation.max_new_tokens=7",
    ]  # fmt: skip


def test_answers_and_the_surface_are_made_once_for_the_same_questions(replay, tmp_path):
    execute = Execute()
    first = ensure(compose(replay), execute)
    recording, measurement = execute.jobs
    assert (recording.runner.name, recording.method.name) == ("offline", "ar")
    assert (recording.dataset.limit, recording.generation.max_new_tokens) == (3, 7)
    assert recording.compare == []
    assert (measurement.runner.name, measurement.method.name) == ("cost", "ar")
    assert first.runner.traces == recording.output_dir
    assert Path(first.runner.surface) == Path(measurement.output_dir) / "surface.json"
    assert Path(first.runner.traces).parent == tmp_path / "recorded"
    execute.jobs.clear()
    # Another knob of the method: the same questions, the same machine.
    second = ensure(compose([*replay, "method.k=5"]), execute)
    assert execute.jobs == []
    assert OmegaConf.to_container(second.runner) == OmegaConf.to_container(first.runner)
    # Other questions are recorded anew; the surface holds.
    ensure(compose([*replay, "dataset.limit=2"]), execute)
    assert [job.runner.name for job in execute.jobs] == ["offline"]


def test_a_run_of_the_same_job_is_used_wherever_it_lies(replay, tmp_path):
    cost = compose(["experiment=ngrammys_figure1", f"paths.results={tmp_path}"])
    home = tmp_path / "ngrammys_figure1" / f"ar-{run_key(cost)}"
    home.mkdir(parents=True)
    (home / "DONE").write_text("")
    execute = Execute()
    cfg = ensure(compose(replay), execute)
    assert [job.runner.name for job in execute.jobs] == ["offline"]
    assert Path(cfg.runner.surface).parent == home


def test_a_failed_recording_stops_the_replay(replay, tmp_path):
    with pytest.raises(SpecBenchError, match="failed, which this run was to read"):
        run_here([*replay, f"cache_dir={tmp_path}"], launch=lambda work, job: 1)


def test_other_runners_and_named_files_are_left_alone():
    for overrides in (["runner=offline"], ["runner=replay", "runner.traces=RUN"]):
        cfg = compose(overrides)
        assert ensure(cfg, Execute(code=1)) is cfg


@pytest.mark.slow  # over a second
def test_an_experiment_that_runs_live_in_the_paper_s_size_makes_nothing_first():
    files = (CONF_DIR / "experiment").glob("*.yaml")
    replays = [path.stem for path in files if "/runner: replay_" in path.read_text()]
    assert {"cacheback_figure4", "ngrammys_figure3", "ssd_store_size"} <= set(replays)
    for name in replays:
        # As the paper's files sweep it.
        cfg = compose([f"experiment={name}", "scale=paper", "runner=offline"])
        assert cfg.runner.name == "offline"
        assert ensure(cfg, Execute(code=1)) is cfg
