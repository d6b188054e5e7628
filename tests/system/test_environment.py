"""Records about the machine and the code, with faked tools and with real ones."""

import os
import subprocess
import sys

from specbench.system import environment


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_fingerprint_leaves_out_what_may_change():
    here = environment.describe()
    other = {**here, "versions": {**here["versions"], "scipy": "0"}}
    other["hardware"] = {**here["hardware"], "memory_gib": 0}
    assert environment.fingerprint(other) == environment.fingerprint(here)
    for part, key in (("hardware", "cpu"), ("versions", "torch")):
        changed = {**here, part: {**here[part], key: "another"}}
        assert environment.fingerprint(changed) != environment.fingerprint(here)
    moved = {**here, "git": {"commit": "another", "dirty": False}}
    assert environment.fingerprint(moved) != environment.fingerprint(here)
    other_kernels = {**here, "cuda_settings": {"cudnn_attention": True}}
    assert environment.fingerprint(other_kernels) != environment.fingerprint(here)
    assert environment.fingerprint({**here, "git": None})["commit"] is None


def test_git_state(tmp_path, monkeypatch):
    assert environment.git_state(tmp_path) is None
    git(tmp_path, "init")
    code = tmp_path / "a.py"
    code.write_text("1\n")
    assert environment.git_state(tmp_path)["commit"] is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = environment.git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "notes.md").write_text("prose\n")
    assert environment.git_state(tmp_path) == clean
    code.write_text("2\n")
    changed = environment.git_state(tmp_path)
    assert changed["dirty"] is True
    assert changed["commit"] == clean["commit"]
    code.write_text("3\n")
    assert environment.git_state(tmp_path)["changes"] != changed["changes"]
    code.write_text("1\n")
    (tmp_path / "new.yaml").write_text("a: 1\n")
    assert environment.git_state(tmp_path)["dirty"] is True
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert environment.git_state(tmp_path) is None


def test_uncommitted_code_can_be_applied_to_its_commit(tmp_path):
    assert environment.code_changes(tmp_path) == ""
    git(tmp_path, "init")
    (tmp_path / "a.py").write_text("1\n2\n3\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    assert environment.code_changes(tmp_path) == ""
    written = {"a.py": "1\n2\n4\n", "methods/new.py": "def f():\n    pass\n"}
    (tmp_path / "methods").mkdir()
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.md").write_text("prose\n")
    changes = tmp_path / "changes.diff"
    changes.write_text(environment.code_changes(tmp_path))
    git(tmp_path, "checkout", "--", "a.py")
    (tmp_path / "methods" / "new.py").unlink()
    git(tmp_path, "apply", str(changes))
    for name, text in written.items():
        assert (tmp_path / name).read_text() == text


def test_threads_have_a_cpu_each_and_cores_come_before_their_second_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5}, raising=False)
    for cpu, core in enumerate(["0-1", "0-1", "2-3", "2-3", "4-5", "4-5"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core}\n")
    variables = environment.pinned_threads(tmp_path)
    assert variables == {"OMP_PROC_BIND": "close", "OMP_PLACES": "{0},{2},{5},{1},{3}"}
    # OpenMP then keeps the first thread on the first place, which says nothing about the process.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.allowed_cpus() == [0, 1, 2, 3, 5]
    assert environment.cpus_usable() == 5


def test_the_last_caches_of_the_allowed_cpus_count_once_each(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert environment.cache_bytes(tmp_path) is None
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for level, size, whose in ((1, "48K", str(cpu)), (3, "32768K", shared)):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", whose)):
                (folder / name).write_text(f"{value}\n")
    assert environment.cache_bytes(tmp_path) == 2 * 32768 * 1024
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert environment.cache_bytes(tmp_path) == 32768 * 1024


def test_gpus_by_the_drivers_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA X, 80 GB, 81920, 570.1'\necho 'NVIDIA Y, [N/A], 570.1'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    environment._gpus.cache_clear()
    try:
        assert environment.gpus() == [
            {"name": "NVIDIA X, 80 GB", "memory_gib": 80, "driver": "570.1"},
            {"name": "NVIDIA Y", "memory_gib": 0, "driver": "570.1"},
        ]
    finally:
        environment._gpus.cache_clear()


def test_looking_at_a_machine_imports_no_torch():
    code = (
        "import sys; from specbench.system import clock, environment, interference;"
        "environment.describe(); interference.SystemMonitor().end(); clock.make_clock('cpu');"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_code_of_a_run_is_its_kernels_engine_methods_and_settings(tmp_path):
    files = ("specbench/kernels/a.py", "methods/b/c.py", "conf/method/d.yaml")
    others = ("analysis/e.py", "conf/experiment/f.yaml", "specbench/kernels/notes.md")
    for name in (*files, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    seen = {environment.code_sha256(tmp_path)}
    for name in others:
        (tmp_path / name).write_text("two")
    assert {environment.code_sha256(tmp_path)} == seen
    for name in files:
        (tmp_path / name).write_text("two")
        seen.add(environment.code_sha256(tmp_path))
    assert len(seen) == 1 + len(files)
