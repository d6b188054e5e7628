"""The methods with a draft model, run as users run them: files, records, bad input."""

import json
import shutil

import pytest

from specbench.errors import ConfigurationError, NeedsNotMet
from specbench.models import loading
from specbench.models.draft import model as draft_model
from specbench.results import records
from specbench.storage import jsonl
from tests.contract import driver
from tests.small_run import interrupted_after, run_here

# Shorter drafts than the papers'; a method that is not here runs with its yaml's own values.
KNOBS = {
    "opt_tree": "nodes: 12",
    "card": "k: 6, r: 3, max_depth: 12",
    "pearl": "gamma: 3",
    "ouroboros": "gamma: 3, ngram: 3, window: 4, guesses: 4",
}
BESIDE_SPS = [name for name in driver.with_draft_model() if name != "sps"]
ENTRIES = [f"{{method: {m}, {KNOBS[m]}}}" if m in KNOBS else m for m in BESIDE_SPS]
WARM = f"{{method: ouroboros, label: warm, {KNOBS['ouroboros']}, state_scope: run}}"
METHODS = f"compare=[{', '.join([*ENTRIES, WARM])}]"
LABELS = ("sps", *BESIDE_SPS, "warm")


@pytest.fixture
def execute(small, checkpoint, tmp_path):
    """Let the tiny model draft for itself; return exit code, records and manifest."""

    def run(*overrides, name="run"):
        extra = [
            "method=sps",
            METHODS,
            f"pair.draft.path={checkpoint}",
            f"output_dir={tmp_path}/{name}",
        ]
        code = run_here([*small, *extra, "measure.warmup=0"], *overrides)
        folder = tmp_path / name
        manifest = jsonl.read_json(folder / records.MANIFEST)
        return code, records.read_records(folder)[0], manifest

    return run


def steps(turns):
    return {r.key: (r.output_ids, r.committed_per_step, r.drafter) for r in turns}


def test_all_of_them_run_and_say_what_they_took(execute):
    """Overlapped, then in serial emulation with the clock inside the steps: the same steps."""
    code, turns, manifest = execute()
    assert code == 0
    assert {r.label for r in turns} == {"ar", *LABELS}
    assert {r.lossless.verdict for r in turns} == {"equal"}
    for record in turns:
        if record.label in LABELS and record.n_target_passes > 1:
            assert {"devices": 1, "devices_asked": 1}.items() <= record.drafter.items()
            assert 0 < record.drafter["draft_forwards"] <= record.drafter["draft_tokens"]
            assert record.n_drafted > 0
    card = [r.drafter for r in turns if r.label == "card"]
    assert sum(counts["hits"] for counts in card) > 0
    assert {"misses", "k", "r", "target_params_x_new", "draft_params_x_new"} <= card[0].keys()

    model = manifest["model"]
    assert model["overlap"] == "thread"
    assert set(model["drafts"]) == set(LABELS)
    weights = model["parameters"] * 8
    assert set(model["memory"]["ar"]) == {"target"} and model["memory"]["ar"]["target"] > weights
    needed = {label: model["memory"][label]["draft"] for label in LABELS}
    assert weights < needed["sps"] < needed["card"]  # a chain, and 12 layers of 6

    code, phased, manifest = execute("measure=phases", "measure.warmup=0", name="phases")
    assert code == 0
    assert manifest["model"]["overlap"] == "serial"
    assert steps(phased) == steps(turns)
    for label in LABELS:
        drafted = [r for r in phased if r.label == label and r.n_target_passes > 1]
        assert all(0 < r.phase_s["draft"] < r.decode_s for r in drafted)


@pytest.mark.slow  # over a second
def test_who_drafted_during_the_pass_is_said_where_the_clock_cannot_tell(execute):
    card = f"compare=[{{method: card, {KNOBS['card']}}}]"
    _, _, manifest = execute(card, "measure=phases", "engine.overlap=thread", "dataset.limit=1")
    assert manifest["model"]["overlapping"] == ["card"]
    _, _, manifest = execute(card, "measure=phases", "dataset.limit=1", name="serial")
    assert "overlapping" not in manifest["model"]


@pytest.mark.slow  # over a second
def test_at_a_temperature_all_but_the_ratio_test_repeat_plain_sampling(execute):
    code, turns, _ = execute("generation=sampling", "generation.max_new_tokens=16")
    assert code == 0
    assert {r.verifier for r in turns} == {"rejection"}
    plain = {(r.case_id, r.turn): r.output_ids for r in turns if r.label == "ar"}
    by_ratio = [r for r in turns if r.label in ("sps", "pearl")]
    for record in turns:
        if record not in by_ratio:
            assert record.output_ids == plain[record.case_id, record.turn]
    assert any(r.output_ids != plain[r.case_id, r.turn] for r in by_ratio)
    # The draft is the target: the ratio test accepts whatever it draws.
    assert all(len(set(r.committed_per_step[:-1])) <= 1 for r in by_ratio if r.label == "sps")


@pytest.mark.slow  # over a second
def test_entries_may_have_verifiers_of_their_own(execute):
    """Side by side each decides as it does in a run by itself; ``match`` is plain sampling."""
    sampled = ["generation=sampling", "generation.temperature=0.9", "verifier=rejection"]
    names = ("block", "match")
    entries = ", ".join(f"{{method: sps, label: {name}, verifier: {name}}}" for name in names)
    code, turns, _ = execute(*sampled, f"compare=[{entries}]")
    assert code == 0
    outputs = {}
    for record in turns:
        expected = record.label if record.label in names else "rejection"
        assert record.verifier == expected
        outputs.setdefault(record.label, {})[record.key[:3]] = record.output_ids
    assert outputs["match"] == outputs["ar"]
    assert outputs["sps"] != outputs["ar"] != outputs["block"]
    separate = {r.key[:3]: r.output_ids for r in execute(
        *sampled[:2], "verifier=block", "compare=[]", "baseline=false", name="alone"
    )[1]}  # fmt: skip
    assert outputs["block"] == separate


@pytest.mark.slow  # over a second
def test_one_device_where_two_were_asked_for_stands_in_every_record(execute, caplog):
    code, turns, _ = execute("pair.draft.device=cuda:7", "dataset.limit=1")
    assert code == 0
    assert "pair.draft.device=cuda:7 is not there" in caplog.text
    devices = [(r.drafter["devices"], r.drafter["devices_asked"]) for r in turns if r.label != "ar"]
    assert set(devices) == {(1, 2)}


@pytest.mark.slow  # over a second
def test_a_resumed_run_goes_on_with_what_its_first_start_measured(execute, monkeypatch, tmp_path):
    """r and gamma would come out otherwise at every start; a run has one of each."""
    methods = "compare=[{method: card, k: 6, r: auto, max_depth: 12}, {method: pearl, gamma: auto}]"
    seconds = iter([2, 1, 3, 1, 5, 1])  # of the target and of the draft, in turns
    measured = []
    monkeypatch.setattr(draft_model, "median", lambda _: measured.append(1) or next(seconds))
    with interrupted_after(2):
        execute(methods)
    measured = jsonl.read_json(tmp_path / "run" / records.MANIFEST)["model"]["measured"]
    assert measured == {"card": {"r": 2}, "pearl": {"gamma": 3}}
    code, done, manifest = execute(methods)
    assert code == 0
    assert len(measured) == 4
    assert manifest["model"]["measured"] == measured
    assert {r.drafter["r"] for r in done if r.label == "card"} == {2}
    assert {r.drafter["gamma"] for r in done if r.label == "pearl"} == {3}


def test_another_tokenizer_is_refused_before_weights_load(
    execute, checkpoint, tmp_path, monkeypatch
):
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["ship"], vocabulary["harbour"] = vocabulary["harbour"], vocabulary["ship"]
    file.write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(loading, "load_model", lambda *a: pytest.fail("weights were loaded"))
    message = r"another tokenizer than the target: id \d+ is 'harbour' there and 'ship' here"
    with pytest.raises(NeedsNotMet, match=message):
        execute(f"pair.draft.path={folder}")
    with pytest.raises(NeedsNotMet, match=message):  # the assistant of transformers' own loop
        execute(
            f"pair.draft.path={folder}", "method=pld", "compare=[]", "runner=hf", name="assisted"
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pair.draft.path=nowhere"], r"pair\.draft\.path=.*no such folder"),
        (["pair=none", "pair.draft.path=null"], "pair=random_draft"),
        (["compare=[{method: card, r: 0}]"], r"`method\.r` must be at least 1"),
        (["compare=[{method: card, k: 0}]"], r"`method\.k` must be at least 1"),
        (["compare=[{method: card, k: few}]"], r"method\.k"),
        (["compare=[{method: pearl, gamma: 0}]"], r"`method\.gamma` must be"),
        (["compare=[{method: union, drafters: [sps, card]}]"], "cannot hold sps and card together"),
    ],
)
def test_bad_input_is_refused_before_weights_load(execute, overrides, message, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigurationError, match=message) as refused:
        execute(*overrides)
    assert refused.value.exit_code == 2
