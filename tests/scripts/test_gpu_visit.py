"""The visit of a GPU: what is kept, what is run again, and a trial of it on the CPU."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from scripts import gpu_crash, gpu_visit
from scripts.gpu_parts import PACK, PARTS, Part, lessons_learnt
from specbench.paths import PROJECT

# Each part leaves something running that would say so.
RUN = (
    "import sys; from scripts import gpu_visit; from scripts.gpu_parts import Part\n"
    "c = f'ran={sys.argv[1]}; ' + '(sleep 3; echo late >> $ran) & sleep 0.2; '\n"
    "c += 'echo {{}} > {work}/found.json; echo $(basename {work}) >> $ran'\n"
    "gpu_visit.PARTS = [Part(f'p{i}', 1, 9, c, lambda *_: None, ()) for i in range(8)]\n"
    "sys.exit(gpu_visit.main(['--device', 'cpu', '--out', sys.argv[2]]))"
)


def part(name, command="true", check=lambda *_: None, limit_s=9, sources=()):
    return Part(name, 1, limit_s, command, check, sources)


def visit(monkeypatch, out, *parts, arguments=()):
    monkeypatch.setattr(gpu_visit, "PARTS", parts)
    return gpu_visit.main(["--device", "cpu", "--out", str(out), *arguments])


@pytest.mark.slow  # over a second
def test_after_a_kill_at_any_moment_the_next_call_runs_what_is_left(tmp_path):
    ran, out = tmp_path / "ran", tmp_path / "out"
    command = [sys.executable, "-c", RUN, str(ran), str(out)]
    process = subprocess.Popen(command, cwd=PROJECT)
    while not (out / "progress.txt").exists():
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.8))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    time.sleep(3.5)
    before = ran.read_text().split()
    assert "late" not in before  # the part that it had begun went with it
    done = {path.stem for path in (out / "parts").glob("*.json")}
    assert "p0" in done and "p7" not in done
    assert subprocess.run(command, cwd=PROJECT).returncode == 0
    again = ran.read_text().split()[len(before) :]
    assert len({*before, *again}) == 8 and not done & {*again}
    assert {path.stem for path in (out / "parts").glob("*.json")} == {f"p{i}" for i in range(8)}


def test_what_failed_comes_first_and_what_judges_other_files_is_run_again(
    tmp_path, monkeypatch, capsys
):
    judged, out = tmp_path / "judged.py", tmp_path / "gpu"
    judged.write_text("1")
    good = part("good", sources=(str(judged),))
    slow = part("slow", "sleep 9", limit_s=0.25)
    bad = part("bad", "echo {{}} > {work}/found.json", lambda result, _: str(1 / len(result)))
    assert visit(monkeypatch, out, good, slow, bad) == 1
    results = [json.loads((out / f"parts/{n}.json").read_text()) for n in ("good", "slow", "bad")]
    assert [saved["ok"] for saved in results] == [True, False, False]
    assert results[1]["why"] == "not over after 0.75 s" and "ZeroDivisionError" in results[2]["why"]
    assert results[0]["gpu"] == "none" and results[0]["versions"]["torch"] == torch.__version__
    monkeypatch.setattr(gpu_visit, "KEPT", tmp_path)  # another folder goes on from this one
    capsys.readouterr()
    mended = part("bad")
    assert visit(monkeypatch, tmp_path / "new", good, mended, arguments=["--seconds", "60"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("bad: condition met") and printed[1] == "good: done before"
    judged.write_text("2")
    assert visit(monkeypatch, tmp_path / "new", good, arguments=["--seconds", "20"]) == 1
    assert "good: no time is left" in capsys.readouterr().out


def test_without_a_gpu_or_the_versions_it_says_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_visit.main(["--out", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu_crash", "all"])
    assert gpu_crash.main() == 2 and "clear_empty" in capsys.readouterr().err
    real = gpu_visit.importlib.metadata.version
    older = {"transformers": "4.40"}
    monkeypatch.setattr(
        gpu_visit.importlib.metadata, "version", lambda name: older.get(name) or real(name)
    )
    assert gpu_visit.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "(here 4.40). Type make setup" in capsys.readouterr().err


@pytest.mark.slow  # over a second
@pytest.mark.timeout(300)  # two processes that import torch
def test_a_short_trial_on_the_cpu(tmp_path, monkeypatch):
    parts = [p for p in PARTS if p.name in ("bandwidth", "kernels")]
    assert visit(monkeypatch, tmp_path, *parts) == 0
    assert "1 rows after 32 tokens" in (tmp_path / "parts/kernels/printed.txt").read_text()
    assert "kernels: condition met" in (tmp_path / "progress.txt").read_text()


def test_heads_come_back_in_pieces_and_must_have_learnt(tmp_path):
    lessons, work = tmp_path / "lessons", tmp_path / "work"
    work.mkdir()
    for i, curve in enumerate([(4, 3), (9, 8), (5, 4), (7, 7)]):
        (lessons / f"heads/h{i}").mkdir(parents=True)
        facts = {"name": f"h{i}", "curve": {f"visits {n}": f"loss {n}" for n in curve}}
        (lessons / f"heads/h{i}/training.json").write_text(json.dumps(facts))
    (lessons / "texts").write_bytes(random.Random(0).randbytes(15 * 2**10))
    command = (PACK.replace("15M", "15k") + "pack half").format(lessons=lessons, work=work)
    subprocess.run(["bash", "-c", command], check=True)
    assert [path.name for path in sorted(work.iterdir())] == ["live.tgz.0", "live.tgz.1"]
    assert "learnt nothing: ['h3']" in lessons_learnt({}, work)
    facts = {"name": "h3", "curve": {"visits 1": "loss 7", "visits 2": "loss 6"}}
    (lessons / "heads/h3/training.json").write_text(json.dumps(facts))
    subprocess.run(["bash", "-c", command], check=True)
    assert lessons_learnt({}, work) is None
    (work / "live.tgz.1").unlink()
    with pytest.raises(EOFError):
        lessons_learnt({}, work)


def test_parts_fit_into_two_commands_of_ten_minutes():
    for number in (1, 2, 4):
        assert sum(p.limit_s for p in PARTS if p.visit == number) <= 560
    for part in PARTS:
        for source in part.sources:
            assert (PROJECT / source).exists(), f"{part.name}: {source}"
