"""What a replay reads is made first where it is missing, once, and found again."""

import pytest

from runners.launch.prerequisites import jobs
from specbench.config.compose import compose
from specbench.config.run_key import run_key
from specbench.errors import SpecBenchError
from specbench.paths import CONF_DIR
from tests.small_run import run_here


def finished(cfg):
    """Finish the folders of the missing jobs; return these jobs and the final keys."""
    missing, keys = [], {}
    for key, job, path in jobs(cfg):
        keys[key] = path
        if not (path / "DONE").exists():
            path.mkdir(parents=True)
            (path / "DONE").write_text("")
            missing.append(job)
    return missing, keys


@pytest.fixture
def replay(tmp_path):
    return [
        "runner=replay", "runner.traces=record", "runner.surface=measure", "method=ngrammys",
        f"paths.results={tmp_path}", "dataset.limit=3", "generation.max_new_tokens=7",
    ]  # fmt: skip


def test_answers_and_the_surface_are_made_once_for_the_same_questions(replay, tmp_path):
    (recording, measurement), first = finished(compose(replay))
    assert (recording.runner.name, recording.method.name) == ("offline", "ar")
    assert (recording.dataset.limit, recording.generation.max_new_tokens) == (3, 7)
    assert recording.compare == []
    assert (measurement.runner.name, measurement.method.name) == ("cost", "ar")
    assert {path.parent for path in first.values()} == {tmp_path / "recorded"}
    # Another knob of the method: the same questions, the same machine.
    assert finished(compose([*replay, "method.k=5"])) == ([], first)
    # Other questions are recorded anew; the surface holds.
    assert [job.runner.name for job in finished(compose([*replay, "dataset.limit=2"]))[0]] == [
        "offline"
    ]


def test_a_run_of_the_same_job_is_used_wherever_it_lies(replay, tmp_path):
    cost = compose(["experiment=ngrammys_figure1", f"paths.results={tmp_path}"])
    home = tmp_path / "ngrammys_figure1" / f"ar-{run_key(cost)}"
    home.mkdir(parents=True)
    (home / "DONE").write_text("")
    missing, keys = finished(compose(replay))
    assert [job.runner.name for job in missing] == ["offline"]
    assert keys["surface"] == home


def test_a_failed_recording_stops_the_replay(replay, tmp_path):
    with pytest.raises(SpecBenchError, match="failed, which this run was to read"):
        run_here([*replay, f"cache_dir={tmp_path}"], launch=lambda work, job: 1)


def test_other_runners_and_named_files_are_left_alone():
    for overrides in (["runner=offline"], ["runner=replay", "runner.traces=RUN"]):
        assert not jobs(compose(overrides))


@pytest.mark.slow  # over a second
def test_an_experiment_that_runs_live_in_the_paper_s_size_makes_nothing_first():
    files = (CONF_DIR / "experiment").glob("*.yaml")
    replays = [path.stem for path in files if "/runner: replay_" in path.read_text()]
    assert {"cacheback_figure4", "ngrammys_figure3", "ssd_store_size"} <= set(replays)
    for name in replays:
        # As the paper's files sweep it.
        cfg = compose([f"experiment={name}", "scale=paper", "runner=offline"])
        assert cfg.runner.name == "offline"
        assert not jobs(cfg)
