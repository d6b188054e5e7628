"""The GPU check: its plan, what it keeps, and a trial of it on the CPU."""

import time

import pytest

from scripts import gpu_check
from scripts.bench import gpu
from specbench.system import environment

TRIAL = ["--device", "cpu", "--models", "tiny", "--tokens", "8", "--repeats", "1",
         "--contexts", "32,64"]  # fmt: skip
GIT = {"commit": "a" * 40, "dirty": False}
SOFTWARE = "torch 9, an H100"


def plan(*words):
    return gpu_check.parts(gpu_check.arguments([*words]), "abc")


def test_no_part_takes_more_than_eight_minutes_and_the_quick_ones_five_together():
    assert all(part.limit_s <= 480 for part in plan())
    assert sum(part.limit_s for part in plan("--quick")) <= 300
    assert plan()[0].name == plan("--quick")[0].name == "numerics-quick"
    assert {"methods", "steps", "numerics"} <= {part.name for part in plan()}


def test_a_dry_run_runs_nothing_and_prints_what_would(tmp_path, capsys):
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "torch " in shown and "transformers " in shown
    assert "to do     rows vicuna7b" in shown and "runner.tree_rows=[1,2,4" in shown
    assert "nothing was run" in shown and "next: python -m scripts.gpu_check" in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"), [(["--models", "vicuna8b"], "vicuna8b"), (["--contexts", "1,x"], "128,448")]
)
def test_a_wrong_word_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.arguments(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_or_gpu_is_named_with_what_to_type(monkeypatch, capsys, tmp_path):
    real = gpu_check.importlib.metadata.version

    def version(name):
        if name == "transformers":
            return "4.40"
        if name == "numba":
            raise gpu_check.importlib.metadata.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(gpu_check.importlib.metadata, "version", version)
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr().out
    assert "transformers<6,>=5.17 (here 4.40)" in shown
    assert "numba>=0.61" in shown and "pip install" in shown
    monkeypatch.setattr(gpu_check, "preflight", lambda: ("torch sees no GPU", []))
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "--device cpu is a trial" in capsys.readouterr().out


def part_of(tmp_path, command, limit_s=60):
    args = gpu_check.arguments([*TRIAL, "--out", str(tmp_path)])
    return args, gpu_check.Part("loops tiny", limit_s, [gpu_check.sys.executable, *command])


def test_a_part_is_kept_for_its_own_commit_command_and_machine_only(tmp_path):
    args, part = part_of(tmp_path, ["-c", "print('done')"])
    assert gpu_check.kept(args, part, GIT, SOFTWARE) is None
    assert gpu_check.measure(args, part, GIT, SOFTWARE)["exit"] == 0
    assert gpu_check.kept(args, part, GIT, SOFTWARE)["result"]["last_line"] == "done"
    assert gpu_check.kept(args, part, GIT | {"commit": "b" * 40}, SOFTWARE) is None
    assert gpu_check.kept(args, part, GIT | {"dirty": True, "changes": "c"}, SOFTWARE) is None
    assert gpu_check.kept(args, part, GIT, "torch 10, an A100") is None
    other = gpu_check.Part(part.name, 60, [*part.command, "more"])
    assert gpu_check.kept(args, other, GIT, SOFTWARE) is None
    # Runs of other changes or versions have folders of their own.
    changed = GIT | {"dirty": True, "changes": "c"}
    names = [gpu_check.code_of(*of) for of in ((GIT, "9"), (GIT, "10"), (changed, "9"))]
    assert len(set(names)) == 3 and all(name.startswith("a" * 8) for name in names)


def test_a_part_that_is_stopped_leaves_what_it_had_and_one_that_fails_nothing(
    tmp_path, monkeypatch
):
    out = gpu_check.file_of(tmp_path, "loops tiny", ".found.json")
    code = f"import time; open({str(out)!r}, 'w').write('{{\"half\": 1}}'); time.sleep(60)"
    args, part = part_of(tmp_path, ["-c", code], limit_s=0)
    wait = gpu_check.subprocess.Popen.wait

    def until_it_has_some(process, timeout):
        while process.poll() is None and not (out.exists() and out.read_text()):
            time.sleep(0.01)
        return wait(process, 0.05)

    with monkeypatch.context() as patch:
        patch.setattr(gpu_check.subprocess.Popen, "wait", until_it_has_some)
        found = gpu_check.measure(args, part, GIT, SOFTWARE)
    assert found["timed_out"] and found["exit"] != 0
    assert found["result"]["half"] == 1
    # What it left is not taken for numbers of a part that fails; nor are tests all skipped.
    args, part = part_of(tmp_path, ["-c", "raise SystemExit(3)"])
    found = gpu_check.measure(args, part, GIT, SOFTWARE)
    assert found["exit"] == 3 and "half" not in found["result"]
    args, part = part_of(tmp_path, ["-c", "print('9 skipped in 1s')", "pytest"])
    assert gpu_check.measure(args, part, GIT, SOFTWARE)["exit"] == 1


def test_throttling_is_told_and_idling_is_not():
    fast = "1980, 2619, 512.3, 61, 0x0000000000000000"
    idle = "345, 2619, 80.0, 30, 0x0000000000000001"
    assert (
        gpu_check.watched([fast, idle])
        == "345-1980 MHz SM, 2619-2619 MHz memory, 80-512 W, 30-61 °C"
    )
    assert "THROTTLED 0x4" in gpu_check.watched([fast.replace("0x0000000000000000", "0x4")])
    assert gpu_check.watched(["[N/A], [N/A], [N/A], [N/A], [N/A]"]) == ""


def test_the_report_has_what_parts_printed_and_what_is_left_outside_the_pass(tmp_path):
    row = {"task": "overall", "label": "pld", "phase_share": {"verify": 0.6, "prefill": 0.2}}
    row["phase_share"] |= {"draft": 0.2}
    result = {"printed": "a table\n", "last_line": "no memory", "nodes_per_step": {"pld": 7.0}}
    result["summary.json"] = {"rows": [row]}
    part = {"state": "FAILED", "seconds": 1.0, "watched": "", "device": "cpu", "result": result}
    gpu_check.report(tmp_path / "r.md", {"steps": part}, "torch 9", GIT)
    page = (tmp_path / "r.md").read_text()
    assert "- pld: 7.0 nodes a step, 25.0% of a step outside the target's pass" in page
    assert "FAILED in 1 s" in page and "no memory" in page and "a table" in page
    assert "A trial on a CPU" in page


def test_loops_print_what_they_reached_and_what_ran_eagerly(capsys):
    layers = {"stock": {"GemmaMLP": 2}}
    results = {
        "tokens": 128, "weight_bytes": 13e9, "copy_bytes_per_s": 4e12, "failed": {},
        "tokens_per_s": {"graph": [190.0, 200.0, 210.0]}, "passes_per_s": {"graph": [200.0]},
        "clock_over_wall": [0.999, 1.02],
        "passes": {"graph": {"eager": {"1 x 1 rows, 256 keys": "no"}, "layers": layers}},
    }  # fmt: skip
    gpu.show(results)
    shown = capsys.readouterr().out
    assert "200 [190, 210] of 3" in shown and "65%" in shown  # 13 GB, 200 times a second, of 4 TB/s
    assert "graph ran eagerly: {'1 x 1 rows, 256 keys': 'no'}" in shown
    assert "not fused: {'GemmaMLP': 2}" in shown
    assert "off by at most 2.00%, NOT within 1 %" in shown


@pytest.mark.slow  # processes of its own, which import torch
@pytest.mark.timeout(900)
def test_a_trial_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "git_state", lambda: GIT)
    words = [*TRIAL, "--only", "loops,kernels,rows", "--out", str(tmp_path)]
    assert gpu_check.main(words) == 0
    shown = (tmp_path / "gpu_check.md").read_text()
    for word in (
        "A trial on a CPU",
        "generate_static",
        "graph_stock",
        "product",
        "milliseconds of a pass",
    ):
        assert word in shown
    monkeypatch.setattr(gpu_check, "measure", lambda *_: pytest.fail("it was done"))
    assert gpu_check.main(words) == 0
