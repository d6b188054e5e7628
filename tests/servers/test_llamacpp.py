"""llama.cpp's real server: a run, its end, and its counters against a replay of its answers."""

import json
import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from methods.pld import PromptLookup
from runners.serve import Serve
from specbench import paths
from specbench.config.compose import compose, to_config
from specbench.config.schema import LEARN_FROM_REQUESTS
from specbench.errors import ConfigurationError
from specbench.replay.replayer import Replayer
from specbench.replay.traces import load_traces
from specbench.results.records import read_records
from tests.small_run import run_here

pytest.importorskip("xllamacpp")

QUIET = "measure.disturbed={steal: null, others: null}"
COMMON = ["runner=serve", "server=llamacpp", "measure.warmup=0", "measure.exclusive=false", QUIET]


def run(path, *overrides):
    code = run_here([], *COMMON, *overrides, f"output_dir={path}")
    return code, read_records(path)[0], json.loads((path / "summary.json").read_text())


def servers():
    """List the processes of llama.cpp's server on this machine, with their parents."""
    processes = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline"]):
        if "specbench.servers.llamacpp_process" in (process.info["cmdline"] or []):
            processes.append(process.info)
    return processes


def test_the_real_server_answers_and_is_gone_afterwards(tmp_path):
    overrides = ["dataset.tasks=[qa]", "dataset.limit=1", "generation.max_new_tokens=12"]
    compare = "compare=[{speculation: ngram_simple, label: ngram}]"
    code, records, summary = run(tmp_path / "r", *overrides, compare)
    assert code == 0
    assert [r.label for r in records] == ["ar", "ngram"]
    assert {(r.method, r.numerics) for r in records} == {
        ("llamacpp_none", "Q4_1"),
        ("llamacpp_ngram_simple", "Q4_1"),
    }
    assert all(r.prefill_s > 0 and r.decode_s > 0 for r in records)
    assert len(records[0].prompt_ids) == records[0].n_prompt > 10
    assert records[0].output_ids == records[1].output_ids
    assert summary["served"][1]["equal"] == 1
    flags = json.loads((tmp_path / "r" / "manifest.json").read_text())["servers"]["ar"]["flags"]
    assert flags["wheel"].startswith("xllamacpp ")
    assert summary["conditions"]["server build"] == f"{flags['wheel']} with {flags['simd']}"
    assert not [s for s in servers() if s["ppid"] == os.getpid()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARN_FROM_REQUESTS)
def test_a_question_asked_twice_is_drafted_alike(tmp_path, kind):
    """Servers that learn from requests are started anew for each case, also for a repeat."""
    args = ["dataset.tasks=[qa]", "dataset.limit=2", "generation.max_new_tokens=32", "repeats=2"]
    code, records, _ = run(tmp_path / "r", *args, f"compare=[{{speculation: {kind}, label: it}}]")
    assert code == 0
    rows = [r for r in records if r.label == "it"]
    assert {r.state_scope for r in rows} == {"prompt"}
    counts = [(r.n_drafted, r.n_target_passes) for r in rows]
    assert len(counts) == 4
    assert counts[:2] == counts[2:]


class Watched(PromptLookup):
    """Remembers the last draft of a turn."""

    def propose(self, state):
        tree = super().propose(state)
        self.last = tree.tokens.tolist()
        return tree


SIZES = [(3, 8), (2, 6), (4, 12), (3, 4)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_replay_with_llamacpps_rules_counts_what_the_server_counts(tmp_path):
    """To the token, but for draft tokens that it accepts behind an answer's end token."""
    entries = ", ".join(
        f"{{speculation: ngram_simple, size_n: {n}, size_m: {m}, label: n{n}m{m}}}"
        for n, m in SIZES
    )
    path = tmp_path / "r"
    code, records, _ = run(path, f"compare=[{entries}]", "generation.max_new_tokens=48")
    assert code == 0
    traces = load_traces(str(path))
    config = to_config(compose([]))
    replayer = Replayer(traces, None, model=config.model, cache_dir=tmp_path, seed=0)
    by_key = {(r.label, r.case_id, r.turn): r for r in records}
    exact, behind_the_end = [], []
    for n, m in SIZES:
        drafter = Watched(variant="llamacpp", max_ngram=n, num_tokens=m)
        replayer.prepare(drafter)
        for key, turn in traces.turns.items():
            if key[0] != f"n{n}m{m}":
                continue
            drafter.last = []
            decoded = replayer.replay_turn(drafter, turn, empty=True, seed=0).decoded
            timings = by_key[key].served.counters["timings"]
            theirs = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
            ours = (decoded.n_drafted, len(turn.output_ids) - 1 - len(decoded.committed_per_step))
            if ours == theirs:
                exact.append(key)
                continue
            # The server counts what it accepted before it looks for the end.
            assert by_key[key].finish_reason == "eos", (key, ours, theirs)
            assert int(turn.output_ids[-1]) in drafter.last, (key, ours, theirs)
            assert ours[0] == theirs[0]
            assert 0 < theirs[1] - ours[1] <= m
            behind_the_end.append(key)
    print(f"\n{len(exact)} requests to the token, {len(behind_the_end)} with an end in a draft")
    assert len(exact) >= 50
    drafted = sum(by_key[key].n_drafted for key in exact)
    assert drafted > 100  # there was something to count


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["server", "client"])
def test_a_kill_of_server_or_client_loses_nothing_and_leaves_nobody(tmp_path, victim):
    path = tmp_path / "r"
    overrides = [*COMMON, "dataset.limit=4", "generation.max_new_tokens=16", f"output_dir={path}"]
    overrides.append("compare=[{speculation: ngram_simple, label: ngram}]")
    start = partial(subprocess.Popen, [sys.executable, "run.py", *overrides], cwd=paths.PROJECT)
    process = start()
    cases = path / "cases.jsonl"
    while not (cases.exists() and cases.stat().st_size):  # it has begun to ask
        assert process.poll() is None
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    ours = [p for p in family if "specbench.servers.llamacpp_process" in " ".join(p.cmdline())]
    assert len(ours) == 2
    if victim == "server":
        ours[0].kill()
    else:
        process.kill()
        process.wait()
        assert not psutil.wait_procs(family, timeout=20)[1]
        process = start()
    assert process.wait(300) == 0
    records, truncated = read_records(path)
    assert not truncated
    assert len({r.key for r in records}) == len(records)
    assert len({r.case_id for r in records}) == 4
    assert all(r.status == "ok" and len(r.output_ids) == r.n_new for r in records)
    assert not [s for s in servers() if str(tmp_path) in " ".join(s["cmdline"])]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("server.speculation=ngram_mod+ngram_simpel", "ngram_simple"),
        ("server.speculation=ngram_mod+ngram_mod", "Type each once"),
        ("server.speculation=none+ngram_mod", "Type each once"),
        ("server.speculation=ngram_mod+draft", "server.draft_gguf=FILE"),
        ("server.kv_type=q8_1", "q8_0"),
        ("server.ubatch=0", "server.ubatch"),
        ("server.limit_tpot_s=0", "server.limit_tpot_s"),
    ],
)
def test_what_llamacpp_cannot_be_started_with_is_refused(tmp_path, word, says):
    with pytest.raises(ConfigurationError, match=says):
        run(tmp_path / "r", word)


@pytest.mark.parametrize("knob", ["kv_type: q8_0", "threads: 1", "flash_attention: false"])
def test_a_label_that_drafts_decodes_as_the_baseline(tmp_path, knob):
    """Else its speedup would be the knob's too; a plain label may differ, and shows the knob's."""
    typed = f"server.{knob.replace(': ', '=')}"
    drafting = f"{{speculation: ngram_simple, label: it, {knob}}}"
    with pytest.raises(ConfigurationError, match=f"Type {typed} for all labels"):
        run(tmp_path / "r", f"compare=[{drafting}]")
    cfg = compose(
        [*COMMON, typed, f"compare=[{drafting}, {{speculation: none, label: p, {knob}}}]"]
    )
    assert [entry.label for entry in Serve().entries(cfg)] == ["ar", "it", "p"]
    cfg = compose([*COMMON, f"compare=[{{speculation: none, label: p, {knob}}}]"])
    assert [entry.label for entry in Serve().entries(cfg)] == ["ar", "p"]


@pytest.mark.slow  # over a second
def test_the_real_server_takes_several_kinds_of_drafts_and_its_own_knobs(tmp_path):
    """Its log would tell of a key that it does not know by not starting."""
    overrides = ["dataset.tasks=[qa]", "dataset.limit=1", "generation.max_new_tokens=8"]
    knobs = {"flash_attention": "true", "kv_type": "q8_0", "batch": 64, "ubatch": 32, "reuse": 16}
    overrides += [f"server.{key}={value}" for key, value in knobs.items()]
    both = "compare=[{speculation: ngram_mod+ngram_simple, label: both}]"
    code, records, summary = run(tmp_path / "r", *overrides, both, "server.limit_ttft_s=1000")
    assert code == 0
    assert [r.label for r in records] == ["ar", "both"]
    assert [row["good_requests_per_s"] > 0 for row in summary["served"]] == [True, True]
    servers = json.loads((tmp_path / "r" / "manifest.json").read_text())["servers"]
    assert {servers[label]["flags"]["kv_type"] for label in ("ar", "both")} == {"q8_0"}
