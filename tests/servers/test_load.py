"""A run's report of a server under load, compared with a plain reading of the same events."""

import json
from collections import Counter

import numpy as np
import pytest

from analysis.plots.pictures import by_load, load_picture
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from specbench.servers.client import Client
from tests.servers.fake import serving
from tests.servers.served_run import run


@pytest.fixture
def heard(monkeypatch):
    """Record the times at which text arrived, for every request of the run."""
    answers, stream = [], Client.stream

    def noted(client, path, body):
        times = []
        answers.append((body, times))
        for seconds, event in stream(client, path, body):
            if event.get("choices") and event["choices"][0]["delta"].get("content"):
                times.append(seconds)
            yield seconds, event

    monkeypatch.setattr(Client, "stream", noted)
    return answers


@pytest.mark.parametrize("users", [1, 4])
def test_percentiles_are_those_of_the_events_that_arrived(tmp_path, heard, users):
    overrides = [f"server.concurrency={users}", "dataset.limit=8", "server.limit_ttft_s=1000"]
    with serving(wait_s=0.003) as (url, _):
        code, records, summary = run(tmp_path / "r", f"server.base_url={url}", *overrides)
    assert code == 0
    served = summary["served"][0]
    arrivals = [times for body, times in heard if body.get("max_tokens", 99) > 2 and times]
    turns = arrivals[-len(records) :]  # a warm-up request comes first
    gaps, firsts = [], []
    for times in turns:
        start = times[0]
        firsts.append([now for now in times if now - start <= 1e-3])
        for now in times[1:]:
            if now - start > 1e-3:  # else of the same burst: this client was kept waiting
                gaps.append(now - start)
                start = now
    assert len(gaps) > 50
    expected_s = {
        "ttft": [first[-1] for first in firsts],
        "tpot": [
            (times[-1] - first[-1]) / (len(times) - len(first))
            for times, first in zip(turns, firsts, strict=True)
        ],
        "itl": gaps,
        "e2e": [times[-1] for times in turns],
    }
    for name, seconds in expected_s.items():
        for share in (50, 95, 99):
            expected = pytest.approx(np.percentile(seconds, share), abs=2e-6)
            assert served["latency"][name][f"p{share}"] == expected
    batches = {(r.served.batch, r.turn): r.served.batch_s for r in records}
    assert served["good_requests_per_s"] == pytest.approx(len(records) / sum(batches.values()))
    assert served["limits"] == "ttft 1000 s"


def test_tokens_of_a_step_are_one_burst_and_requests_beyond_a_limit_do_not_count(tmp_path):
    def in_one_piece(events):
        """Three words at a time, as a step's accepted ones come."""
        head, tokens, tail = events[0], events[1:-1], events[-1]
        lines = [b"".join(_line(event) for event in tokens[i : i + 3]) for i in range(0, 12, 3)]
        return [head, *lines, tail]

    class Together:
        raw, path, change = None, None, staticmethod(in_one_piece)

    with serving(wait_s=0.003, broken=Together()) as (url, _):
        overrides = [f"server.base_url={url}", "server.limit_tpot_s=1e-6"]
        code, records, summary = run(tmp_path / "r", *overrides)
    assert code == 0
    # A busy machine may split a burst or join two: most answers have one for each step.
    assert Counter(len(r.served.bursts) for r in records).most_common(1)[0][0] == 4
    assert {r.n_new for r in records} == {12}
    assert summary["served"][0]["good_requests_per_s"] == 0


def _line(event):
    return f"data: {json.dumps(event)}\n\n".encode()


@pytest.mark.slow  # over a second
def test_every_point_by_load_is_of_all_users_and_of_whole_batches(tmp_path):
    expected = []
    with (
        serving(wait_s=0.004) as (plain, _),
        serving(accepted=(2, 0, 5), drafted=6, idle=1, wait_s=0.001) as (drafting, _),
    ):
        where = [f"server.base_url={drafting}", f"server.plain_url={plain}", "dataset.limit=6"]
        for users in (1, 2):
            args = [f"server.concurrency={users}", "server.label=mtp", "server.speculation=mtp"]
            _, _, summary = run(tmp_path / str(users), *where, *args)
            speeds = {row["label"]: row["system_tokens_per_s"] for row in summary["served"]}
            expected.append(speeds["mtp"] / speeds["ar"])
    (points,) = by_load(make_comparisons(load_runs([tmp_path])))
    (drawn,) = load_picture(points).axes[0].containers
    assert list(drawn.lines[0].get_ydata()) == pytest.approx(expected)
