"""Copies of finished runs: whatever the service does, a sweep goes on, and soon."""

import json
import sys
import time

import psutil
import pytest
from omegaconf import OmegaConf

from analysis import publish as wandb_publish
from runners.launch import publish

ONLINE = OmegaConf.create({"name": "wandb", "mode": "online"})


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Puts code in the place of the module that makes copies; ``mode`` is the one it is given."""
    monkeypatch.setattr(publish, "_MODULE", "stand_in_for_wandb")
    monkeypatch.setattr(publish, "_lost", set())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(code):
        head = "import json, sys\nmode = json.loads(sys.argv[3])['mode']\n"
        (tmp_path / "stand_in_for_wandb.py").write_text(head + code)

    return install


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_nothing_of_a_copy_that_takes_too_long_lives_on(service, tmp_path, monkeypatch, capsys):
    service(
        "import os, pathlib, subprocess, time\n"
        "if mode == 'offline':\n"
        "    sys.exit(print('laid down'))\n"
        "wait = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        # As wandb's service does: out of reach of whoever kills the group.
        "own = [subprocess.Popen(wait), subprocess.Popen(wait, start_new_session=True)]\n"
        f"path = pathlib.Path({str(tmp_path)!r}, 'pids')\n"
        "path.write_text(json.dumps([os.getpid(), *(process.pid for process in own)]))\n"
        "time.sleep(600)\n"
    )
    for seconds in (0.5, 4.0, 30.0):  # a busy machine starts processes late
        monkeypatch.setattr(publish, "_PUBLISH_S", seconds)
        monkeypatch.setattr(publish, "_lost", set())
        publish.publish(ONLINE, tmp_path)
        if (tmp_path / "pids").exists():
            break
    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) == 3
    patience = time.monotonic() + 10  # a killed process is gone soon, not at once
    while any(map(lives, pids)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert [pid for pid in pids if lives(pid)] == []
    said = capsys.readouterr().out
    assert f"took more than {seconds:g} s" in said
    assert said.endswith("wandb: laid down\n")


def test_an_unreachable_service_is_asked_once_in_a_sweep(service, tmp_path, capsys):
    service(
        f"open({str(tmp_path / 'asked')!r}, 'a').write(mode + ' ')\n"
        "if mode == 'online':\n"
        "    sys.exit(print('no network', file=sys.stderr) or 3)\n"
        "print('laid down')\n"
    )
    for job in ("first", "second", "third"):
        publish.publish(ONLINE, tmp_path / job)
    assert (tmp_path / "asked").read_text().split() == ["online", *["offline"] * 3]
    said = capsys.readouterr().out
    assert said.count("no network") == said.count("are laid down offline") == 1
    assert said.count("wandb: laid down\n") == 3


def test_another_failure_changes_nothing_for_the_next_job(service, tmp_path, capsys):
    service("sys.exit('refused: ' + mode)\n")
    for job in ("first", "second"):
        publish.publish(ONLINE, tmp_path / job)
    assert capsys.readouterr().out == "wandb: refused: online\n" * 2


def test_both_sides_mean_the_same_by_the_exit_code():
    assert publish._UNREACHABLE == wandb_publish.UNREACHABLE


def test_a_copy_that_cannot_be_started_is_only_reported(service, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    publish.publish(ONLINE, tmp_path)
    assert "not published" in capsys.readouterr().out
