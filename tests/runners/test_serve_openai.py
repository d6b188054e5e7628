"""runner=serve against servers that answer as vLLM and SGLang document it."""

import json
import re

import pytest

from runners.launch.dispatch import Invocation, execute
from specbench.config.compose import compose
from specbench.errors import ConfigurationError
from specbench.results.manifest import RunManifest
from tests.conftest import quick_first
from tests.servers import broken
from tests.servers.fake import KEY, serving
from tests.servers.served_run import run
from tests.small_run import warning_texts


def row(summary, label):
    return next(r for r in summary["rows"] if r["label"] == label and r["task"] == "overall")


# 12 tokens: the prompt's pass gives one, a step without a draft one, three steps 3, 1 and 6.
# MAT is 11 tokens over 4 steps.
SCRIPT = {"accepted": (2, 0, 5), "drafted": 6, "idle": 1}
MAT = 11 / 4


@pytest.mark.parametrize("per_request", quick_first([True, False], [True]))
@pytest.mark.parametrize(
    ("engine", "script", "mat", "single"),
    [
        ("vllm", SCRIPT, MAT, (1, 3, 1, 6)),
        ("sglang", SCRIPT, MAT, None),
        # vLLM's answer and its events tell each step, its counters the totals only.
        ("vllm", {"accepted": (2, 0, 5), "drafted": 6}, 10 / 3, (3, 1, 6)),
    ],
    ids=["vllm", "sglang", "single steps"],
)
def test_mat_is_what_a_hand_computes_from_the_servers_counters(
    tmp_path, engine, script, mat, single, per_request
):
    with (
        serving(engine=engine) as (plain, _),
        serving(engine=engine, per_request=per_request, **script) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        code, records, summary = run(tmp_path / "r", *where, "server.speculation=eagle3")
    assert code == 0
    assert row(summary, "openai_eagle3")["mat"] == pytest.approx(mat)
    assert row(summary, "ar")["mat"] == 1.0
    assert {r.method for r in records} == {"openai_none", "openai_eagle3"}
    drafted = [r for r in records if r.label != "ar"]
    if script is SCRIPT:  # else the two answers are not of one length
        assert row(summary, "openai_eagle3")["lossless"]["equal"] == len(records) // 2
    expected = single if per_request and single else ()
    assert {tuple(r.committed_per_step) for r in drafted} == {expected}
    assert {r.n_target_passes for r in drafted} == {4 if script is SCRIPT else 3}
    version = {"vllm": "vLLM 0.30.1", "sglang": "SGLang 0.6.2"}[engine]
    assert {r.engine for r in records} == {version}
    assert version in summary["conditions"]["engine"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_baseline_whose_server_drafts_is_refused(tmp_path, engine):
    with serving(engine=engine, **SCRIPT) as (url, _):
        with pytest.raises(ConfigurationError, match=r"server\.plain_url"):
            run(tmp_path / "warm", f"server.base_url={url}", "measure.warmup=1")
        code, records, _ = run(tmp_path / "cold", f"server.base_url={url}", "dataset.limit=1")
    assert code == 1
    assert {r.status for r in records} == {"failed"}


@pytest.mark.parametrize(
    ("faults", "warmup"),
    quick_first([(3, 1), (1000, 1), (1000, 0)], [(3, 1), (1000, 0)], unpack=True),
)
def test_a_server_that_always_fails_costs_no_other_label_its_numbers(tmp_path, faults, warmup):
    out = tmp_path / "r"
    with (
        serving(wait_s=0.002) as (plain, _),
        serving(faults=[500] * faults, **SCRIPT) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        overrides = [*where, "server.speculation=eagle3", "server.retry_wait_s=0"]
        code, records, summary = run(out, *overrides, f"measure.warmup={warmup}")
    assert code == 1
    assert {row["label"] for row in summary["rows"]} == {"ar"}
    assert row(summary, "ar")["n_cases"] == len({r.case_id for r in records})
    assert row(summary, "ar")["tokens_per_s"]
    reason = "in its warm-up" if warmup else "in 2 of 2 cases"
    assert any("LEFT OUT: openai_eagle3. It failed " + reason in n for n in warning_texts(summary))


def errors(path):
    return [json.loads(line) for line in (path / "errors.jsonl").read_text().splitlines()]


FAULTS = [["cut"], [429], [500, 503], ["json"], ["error"], ["unended"]]


@pytest.mark.parametrize("faults", quick_first(FAULTS, FAULTS[::2]), ids=str)
def test_an_answer_that_did_not_come_whole_is_asked_for_again_and_counted_once(tmp_path, faults):
    with serving(faults=list(faults)) as (url, fake):
        code, records, _ = run(tmp_path / "r", f"server.base_url={url}", "dataset.limit=1")
    assert code == 0
    assert [r.status for r in records] == ["ok"] * len(records)
    assert sum(r.served.requests for r in records) == len(records) + len(faults)
    assert len(fake.requests) == len(records) + len(faults)
    assert all(r.n_new == fake.n_new == len(r.output_ids) for r in records)
    assert records[0].served.batch_s is None  # its time is not a whole batch's


@pytest.mark.parametrize(
    ("faults", "kind", "requests"),
    [([500] * 3, "http_500", 3), (["cut"] * 3, "cut", 3), ([400], "http_400", 1)],
    ids=str,
)
def test_what_asking_again_does_not_help_fails_the_case_alone(tmp_path, faults, kind, requests):
    out = tmp_path / "r"
    with serving(faults=list(faults)) as (url, fake):
        code, records, _ = run(out, f"server.base_url={url}", "dataset.tasks=[qa]")
    assert code == 1
    assert [r.status for r in records] == ["failed", "ok"]
    assert [(e["type"], e["during"]) for e in errors(out)] == [(kind, "decode")]
    assert len(fake.requests) == requests + 1


def saying(old, new, after=0):
    """Change the numbers in a stream, from an answer on."""
    seen = []

    def change(line):
        seen.append(old in line)
        return line.replace(old, new) if sum(seen) > after else line

    return change


LIES = {
    "more than asked": (b'"completion_tokens": 12', b'"completion_tokens": 100', "asked for 16"),
    "another count of equal text": (
        *(
            b'"completion_tokens": 12',
            b'"completion_tokens": 14',
            r"1[24] tokens in a text that had 1[24] for ",
        ),
    ),
    "another count of one prompt": (
        *(
            b'"prompt_tokens": 5',
            b'"prompt_tokens": 9',
            r"[59] tokens in a prompt that had [59] for ",
        ),
    ),
}


def test_a_batch_that_lost_an_answer_has_no_time(tmp_path):
    old, new, _ = LIES[next(iter(LIES))]
    with (
        serving(engine="other") as (plain, _),
        serving(engine="other", mutate=saying(old, new, 1)) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        extra = ["server.speculation=mtp", "dataset.tasks=[qa]", "server.concurrency=2"]
        _, records, summary = run(tmp_path / "r", *where, *extra, "generation.max_new_tokens=16")
    times = {(r.label, r.status): r.served and r.served.batch_s for r in records}
    assert times[("openai_mtp", "failed")] is times[("openai_mtp", "ok")] is None
    assert times[("ar", "ok")] > 0
    assert [served["system_tokens_per_s"] for served in summary["served"]] == [None, None]


@pytest.mark.parametrize("lie", LIES)
def test_a_case_whose_server_miscounts_fails_and_the_others_stand(tmp_path, lie):
    old, new, says = LIES[lie]
    out, n_honest = tmp_path / "r", 1
    with (
        serving(engine="other") as (plain, _),
        serving(engine="other", mutate=saying(old, new, n_honest)) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        extra = ["server.speculation=mtp", "dataset.tasks=[qa]", "generation.max_new_tokens=16"]
        code, records, summary = run(out, *where, *extra)
    assert code == 1
    failed = [r for r in records if r.status == "failed"]
    failures = errors(out)
    assert [e["type"] for e in failures] == ["bad_count"] * len(failed) == ["bad_count"]
    assert re.search(says, failures[0]["message"])
    lost = {r.case_id for r in failed}
    assert len(lost) == len({r.case_id for r in records}) - n_honest
    assert row(summary, "openai_mtp")["n_cases"] == n_honest
    # Of the lie no number is made.
    assert {(r.n_new, r.n_prompt) for r in records if r.case_id not in lost} == {(12, 5)}


def test_a_repeat_that_counts_otherwise_fails_also_after_a_resume(tmp_path):
    out, old, new = tmp_path / "r", b'"completion_tokens": 12', b'"completion_tokens": 14'
    with serving(engine="other") as (url, fake):
        extra = [f"server.base_url={url}", "repeats=2", "dataset.tasks=[qa]"]
        assert run(out, *extra)[0] == 0
        for name in ("DONE", "summary.json"):
            (out / name).unlink()
        whole = (out / "cases.jsonl").read_text().splitlines(keepends=True)
        (out / "cases.jsonl").write_text("".join(whole[: len(whole) // 2]))
        fake.mutate = saying(old, new)
        code, records, _ = run(out, *extra)
    assert code == 1
    assert [(r.repeat, r.status) for r in records] == [
        *[(0, "ok")] * (len(whole) // 2),
        *[(1, "failed")] * (len(whole) // 2),
    ]
    assert {e["type"] for e in errors(out)} == {"bad_count"}


def test_a_server_that_never_ends_fails_the_case_alone(tmp_path):
    out = tmp_path / "r"
    with serving(broken=broken.ALL["dripping tokens"]) as (url, fake):
        extra = ["server.timeout_s=0.3", "server.retries=0", "dataset.tasks=[qa]"]
        fake.heals_after = 1
        code, records, _ = run(out, f"server.base_url={url}", *extra)
    assert code == 1
    assert [r.status for r in records] == ["failed", "ok"]
    assert [e["type"] for e in errors(out)] == ["timeout"]


ECHOES = ["key in an event", "key cut by us", "key in pieces", "key in counters", "key in a reason"]


@pytest.mark.slow  # over a second
@pytest.mark.parametrize("echo", ECHOES)
def test_the_key_is_not_in_a_file_or_on_the_terminal(tmp_path, monkeypatch, capsys, caplog, echo):
    monkeypatch.setenv("MY_KEY", KEY)
    out = tmp_path / "r"
    with serving(key=KEY, broken=broken.ALL[echo], version=f"1.0 {KEY}") as (url, _):
        extra = ["server.api_key_env=MY_KEY", "server.retries=0", "dataset.limit=1"]
        run(out, f"server.base_url={url}", *extra)
    printed = capsys.readouterr()
    written = "".join(p.read_bytes().decode(errors="replace") for p in out.iterdir())
    for text in (written, printed.out, printed.err, caplog.text):
        assert KEY not in text
    assert "vLLM 1.0 …" in written


def test_missing_counters_leave_mat_out_and_say_so(tmp_path, capsys):
    with (
        serving(engine="other", wait_s=0.002) as (plain, _),
        serving(engine="other", wait_s=0.002, **SCRIPT) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        code, _, summary = run(tmp_path / "r", *where, "server.speculation=mtp")
    drafted = row(summary, "openai_mtp")
    assert code == 0
    assert drafted["mat"] is None
    assert drafted["speedup"] > 0
    assert "did not report its steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "first"),
    quick_first([("vllm", 8), ("sglang", 11), ("other", 3)], [("vllm", 8)], unpack=True),
)
def test_tokens_that_come_together_first_make_no_speedup(tmp_path, engine, first):
    with (
        serving(engine=engine, wait_s=0.005) as (plain, _),
        serving(engine=engine, wait_s=0.005, firsts=[first] * 99) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        code, records, summary = run(tmp_path / "r", *where, "server.speculation=mtp")
    assert code == 0
    assert {r.n_decoded for r in records if r.label != "ar"} == {12 - first}
    (plain_row, mine) = summary["served"]
    assert mine["user_tokens_per_s"] == pytest.approx(plain_row["user_tokens_per_s"], rel=0.2)
    assert mine["latency"]["tpot"]["p50"] == pytest.approx(
        plain_row["latency"]["tpot"]["p50"], rel=0.2
    )


@pytest.mark.slow  # over a second
@pytest.mark.parametrize("engine", ["vllm", "other"])
def test_answers_whose_tokens_come_together_count_in_no_decode_speed(tmp_path, engine):
    def run_together(folder, n_together):
        with (
            serving(engine=engine, wait_s=0.01) as (plain, _),
            serving(engine=engine, wait_s=0.01, firsts=[12] * n_together) as (drafting, _),
        ):
            where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
            return run(tmp_path / folder, *where, "server.speculation=mtp")

    code, records, summary = run_together("some", 3)
    assert code == 0
    assert {(r.status, r.n_new) for r in records} == {("ok", 12)}
    assert sum(not r.n_decoded for r in records) == 3
    assert [row["user_tokens_per_s"] > 0 for row in summary["served"]] == [True, True]
    assert summary["served"][1]["user_tokens_per_s"] < 120
    assert any("openai_mtp" in text and "3 turns" in text for text in warning_texts(summary))
    code, records, summary = run_together("all", 99)
    assert code == 0
    assert row(summary, "openai_mtp")["speedup"] is None
    assert any("openai_mtp" in text and "stream" in text for text in warning_texts(summary))


@pytest.mark.parametrize(
    ("thoughts", "text", "quote"),
    [
        (("Let", "me", "think."), "a b c d e f g h i j k l", "d e f g h i j k l"),
        ((), "<think> Let me think. </think> A river in France. x x", "A river in France. x x"),
        ((), "Let me think. </think> A river in France. x x x x", "A river in France. x x x x"),
        ((), "<think> and so on, without an end or an answer x", ""),
        ((), "a b c d e f g h i j k l", "a b c d e f g h i j k l"),
    ],
)
def test_a_dialogue_quotes_answers_and_no_reasoning(tmp_path, thoughts, text, quote):
    with serving(engine="other", thoughts=thoughts, text=text) as (url, fake):
        code, records, _ = run(tmp_path / "r", f"server.base_url={url}", "dataset.limit=1")
        sent = [body["messages"] for _, body in fake.requests]
    assert code == 0
    assert [len(messages) for messages in sent] == [1, 3]
    assert sent[1][1]["content"].strip() == quote
    assert {r.n_new for r in records} == {len(text.split())}
    assert all(r.served.text.startswith(" ".join(thoughts)) for r in records)


@pytest.mark.parametrize("engine", quick_first(["vllm", "sglang", "other"], ["vllm"]))
def test_arguments_of_the_chat_template_are_sent_and_other_templates_refused(tmp_path, engine):
    with serving(engine=engine) as (url, fake):
        extra = [f"server.base_url={url}", "dataset.limit=1"]
        kwargs = "+model.template_kwargs={enable_thinking: false, date_string: 26 Jul 2024}"
        code, _, _ = run(tmp_path / "r", *extra, kwargs)
        sent = [body.get("chat_template_kwargs") for _, body in fake.requests]
        assert code == 0
        assert sent == [{"enable_thinking": False, "date_string": "26 Jul 2024"}] * len(sent)
        fake.requests.clear()
        run(tmp_path / "s", *extra)
        assert not any("chat_template_kwargs" in body for _, body in fake.requests)
    assert RunManifest.read(tmp_path / "r").setting("model", "template_kwargs") == sent[0]


def test_a_difference_from_the_servers_plain_output_is_shown_and_is_no_bug(tmp_path, capsys):
    plain_text = "a b c d e f g h i j k l"
    with (
        serving(engine="other", text=plain_text) as (plain, _),
        serving(engine="other", text=plain_text.replace("e", "X")) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}"]
        code, records, summary = run(
            tmp_path / "r", *where, "server.speculation=mtp", "dataset.tasks=[qa]"
        )
    assert code == 0
    assert row(summary, "openai_mtp")["lossless"]["differs"] == 2
    assert {r.lossless.first_diff for r in records if r.label != "ar"} == {8}
    printed = capsys.readouterr().out
    assert "character 8: 'X f g" in printed
    assert "0 of 2" in printed


def test_questions_are_asked_at_once_and_each_answer_counts_once(tmp_path):
    with serving(wait_s=0.01) as (url, fake):
        code, records, summary = run(
            tmp_path / "r", f"server.base_url={url}", "server.concurrency=4", "dataset.limit=8"
        )
    assert code == 0
    assert 2 <= fake.most_at_once <= 4
    assert len({r.key for r in records}) == len(records)
    served = summary["served"][0]
    assert served["concurrency"] == 4
    assert served["system_tokens_per_s"] > served["user_tokens_per_s"]
    batches = {(r.served.batch, r.turn) for r in records}
    assert len(batches) < len(records)


def test_a_resumed_run_asks_only_what_is_missing(tmp_path):
    out = tmp_path / "r"
    with serving() as (url, fake):
        run(out, f"server.base_url={url}", "dataset.limit=3")
        whole = (out / "cases.jsonl").read_text().splitlines(keepends=True)
        n_asked = len(fake.requests)
        for name in ("DONE", "summary.json"):
            (out / name).unlink()
        (out / "cases.jsonl").write_text("".join(whole[:-1]))
        # Other limits are the same run's.
        extra = ["dataset.limit=3", "server.timeout_s=100", "server.answer_mb=9"]
        _, records, _ = run(out, f"server.base_url={url}", *extra)
    assert len(records) == len(whole)
    assert n_asked < len(fake.requests) < 2 * n_asked


def test_the_manifest_says_who_answered_and_the_key_is_written_nowhere(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MY_KEY", KEY)
    for engine in ("vllm", "sglang"):
        out = tmp_path / engine
        with serving(engine=engine, key=KEY) as (url, fake):
            fake.faults = ["cut"]
            code, _, _ = run(out, f"server.base_url={url}", "server.api_key_env=MY_KEY")
        assert code == 0
        written = b"".join(path.read_bytes() for path in out.iterdir())
        assert KEY.encode() not in written
    printed = capsys.readouterr()
    assert KEY not in printed.out + printed.err
    manifest = RunManifest.read(tmp_path / "sglang")
    server = manifest.servers["ar"]
    assert (server["engine"], server["numerics"]) == ("SGLang 0.6.2", "bfloat16, fp8")
    assert server["flags"]["speculative_algorithm"] == "EAGLE3"
    assert manifest.model.dtype == "bfloat16, fp8"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["method=pld"], "server.speculation=ngram_simple"),
        (["method.leader_len=2"], "server.speculation=ngram_simple"),
        (["server.model=org/smal-model"], "Did you mean 'org/small-model'?"),
        (["server.speculation=mtp"], "server.plain_url"),
        (["server.speculation=mtp", "server.plain_url=URL/"], "baseline=false"),
        (["server.engine=vlm"], "vllm"),
        (["server.concurrency=0"], "server.concurrency"),
        (["server.timeout_s=0"], "server.timeout_s"),
        (["server.timeout_s=inf"], "server.timeout_s"),
        (["server.api_key_env=NO_KEY"], "variable is called NO_KEY"),
        (["server.api_key_env=sk-secret1"], "not the key"),
        (["server.api_key_env=hf_secret1"], "not the key"),
        (["server.answer_mb=nan"], "server.answer_mb"),
        (["server.base_url=http://bücher.example/v1"], "server.base_url"),
        (["server.base_url=localhost:8000"], "http://"),
        (["server.base_url=http://me:secret@localhost:8000/v1"], "server.api_key_env"),
        (["compare=[pld]"], "speculation: ngram_simple"),
        (["compare=[{speculation: mtp}]"], "base_url"),
        (["compare=[{speculation: mtp, base_ulr: x}]"], "base_url"),
        (["measure=phases"], "phases"),
        (["record=states"], "record"),
        (["model.template=plain"], "model.template"),
        (["dataset.special_tokens=text"], "dataset.special_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_to_type(tmp_path, extra, says):
    with serving() as (url, _), pytest.raises(ConfigurationError) as error:
        extra = [word.replace("URL", url) for word in extra]
        run(tmp_path / "r", f"server.base_url={url}", *extra)
    assert says in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a text\n", r"begins with b'a te'"),
        (b"", r"begins with b''"),
        (None, "No such file"),
        ("folder", "Is a directory"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["gguf", "draft_gguf"])
def test_a_file_that_is_no_model_is_refused_with_what_to_type(tmp_path, key, content, says):
    path = tmp_path / "model.gguf"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    extra = ["runner=serve", "server=llamacpp", f"server.{key}={path}", "server.speculation=draft"]
    if key == "gguf":
        extra.append(f"server.draft_gguf={path}")
    with pytest.raises(ConfigurationError, match=rf"server\.{key} .*FILE.*{says}"):
        execute(compose([*extra, f"output_dir={tmp_path / 'r'}"]), Invocation(tuple(extra)))


def test_no_server_is_said_before_anything_is_written(tmp_path):
    with serving() as (url, _):
        pass
    with pytest.raises(ConfigurationError, match="no server answers"):
        run(tmp_path / "r", f"server.base_url={url}")
    assert not (tmp_path / "r").exists()


def test_a_server_needs_its_runner_and_the_runner_a_server(tmp_path):
    for extra, says in (
        (["runner=serve"], "server=llamacpp"),
        (["server=llamacpp"], "runner=serve"),
    ):
        cfg = compose([*extra, f"output_dir={tmp_path / 'r'}"])
        with pytest.raises(ConfigurationError, match=says):
            execute(cfg, Invocation(tuple(extra)))
