"""On a GPU, real or pretended: whole runs, and the parts of the project that ask for the device."""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from methods.sps import Sps
from methods.token_recycling import TokenRecycling
from runners.measure import device_lock
from runners.measure.blocks import BlockRunner
from runners.measure.session import make_target
from scripts import bench
from specbench.config.compose import compose
from specbench.config.schema import MeasureConfig, ModelConfig, RunConfig
from specbench.decoding.device import seconds
from specbench.errors import ConfigurationError, DeviceLost
from specbench.kernels import cuda_graphs
from specbench.models import loading
from specbench.models.batch_target import free_bytes
from specbench.models.loading import choose_device
from specbench.models.restore import restored_on_exit
from specbench.system import bandwidth, environment
from specbench.system.clock import CudaClock, TorchEvents, make_clock
from tests.conftest import quick_first
from tests.fake_cuda import decoders
from tests.fake_cuda.decoders import DEVICE, SECOND
from tests.runners.test_replay_heads import with_heads  # noqa: F401 (a fixture)
from tests.small_run import run_here


def answers(folder):
    (file,) = folder.glob("**/cases.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return {(r["label"], r["case_id"], r["turn"]): r["output_ids"] for r in records}


@contextmanager
def graphs_in_warm_up():
    """List the graphs captured within; fail if one is captured after a warm-up."""
    warm_up = BlockRunner.warm_up

    def watched(self, rounds):
        warm_up(self, rounds)
        ready.append(len(graphs))

    ready: list[int] = []
    with mock.patch.object(BlockRunner, "warm_up", watched), decoders.recorded_graphs() as graphs:
        yield graphs
    assert ready and not graphs[ready[-1] :]


@pytest.mark.slow  # over a second
def test_a_run_gives_what_it_gives_on_the_cpu(with_heads, tmp_path, gpu):  # noqa: F811
    head = "{method: eagle3, total: 9, depth: 2, top_k: 3}"  # its files say which layers it reads
    typed = [f"compare=[token_recycling, {head}]", "dataset.limit=1", "measure.warmup=1"]
    for device in ("cpu", DEVICE):
        folder = tmp_path / device
        with graphs_in_warm_up() as graphs:
            run = [*typed, f"model.device={device}", f"output_dir={folder}"]
            assert run_here(with_heads, *run) == 0
    assert {name.split(",")[0] for _, name in graphs} > {"reading", "drafting", "the tree"}
    assert answers(tmp_path / "cpu").items() <= answers(tmp_path / DEVICE).items()
    manifest = json.loads((tmp_path / DEVICE / "manifest.json").read_text())
    assert manifest["cuda_settings"]["cudnn_attention"] is False


@pytest.mark.slow  # over a second
def test_no_graph_is_captured_after_the_warm_up(small, tmp_path, gpu):
    """The audit's sequences exceed short outputs, and graphs of grown buffers are replaced."""
    (questions := tmp_path / "single.jsonl").write_text(
        json.dumps({"question_id": 1, "category": "qa", "turns": ["water " * 212]}) + "\n"
    )  # with 16 tokens of a warm-up in 256 keys, with the audit's 32 not
    typed = ["model.dtype=bfloat16", "model.context_length=600", f"dataset.path={questions}"]
    typed += ["generation.max_new_tokens=4", "measure.warmup=1", f"model.device={DEVICE}"]
    typed += [f"output_dir={tmp_path}/run"]
    with graphs_in_warm_up() as graphs:
        assert run_here(small, *typed) == 0
    assert graphs


@pytest.mark.slow  # over a second
def test_a_lost_gpu_ends_the_run_with_the_first_error(small, tmp_path, pretended, monkeypatch):
    calls, propose = [], TokenRecycling.propose

    def lost(self, state):
        calls.append(1)
        pretended.lost = "CUDA error: an illegal memory access was encountered"
        return propose(self, state)

    monkeypatch.setattr(TokenRecycling, "propose", lost)
    typed = ["compare=[token_recycling]", f"model.device={DEVICE}"]
    for warm_ups, where, before in (
        (1, "the warm-up of token_recycling", "the warm-up of pld"),
        (0, r"81, turn 0, token_recycling", "81, turn 0, (ar|pld|ar_eager)"),
    ):
        pretended.lost, calls[:] = None, []
        message = f"since {where} failed with .*illegal memory access.* Before it ran {before}"
        with pytest.raises(DeviceLost, match=message):
            run_here(
                small, *typed, f"measure.warmup={warm_ups}", f"output_dir={tmp_path}/{warm_ups}"
            )
        assert len(calls) == 1


@pytest.mark.slow  # over a second
def test_a_lost_gpu_of_a_draft_model_ends_the_run(small, tmp_path, pretended, monkeypatch):
    def fails(self, state):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Sps, "propose", fails)
    monkeypatch.setattr(cuda_graphs, "device_lives", lambda device: str(device) != SECOND)
    typed = ["pair=random_draft", f"pair.draft.device={SECOND}", "compare=[sps]"]
    with pytest.raises(DeviceLost, match=rf"{SECOND} answers no more since .*turn 0, sps failed"):
        run_here(small, *typed, f"model.device={DEVICE}", f"output_dir={tmp_path}/run")


def test_the_clock_of_a_gpu_counts_events(gpu):
    clock = make_clock("cuda", phases=True)
    assert isinstance(clock, CudaClock)
    clock.begin(2100)
    with mock.patch.object(TorchEvents, "new_event") as new_event:
        clock.prefill_done()
        clock.setup_done()
        for _ in range(2100):  # more marks than events were made at first
            clock.phase("draft")
            clock.step_done()
        clock.finish_begin()
        times = clock.end()
    assert not new_event.called  # thousands at once would take a step as long as ten others
    assert len(times.step_s) == 2100
    assert all(step > 0 for step in times.step_s)


def test_bandwidth_is_measured_with_events(gpu):
    device = torch.device(DEVICE)
    read = bandwidth.FastestRead(device, 1)
    read.measure()
    read.measure_between()
    assert read.bytes_per_s > 0
    assert seconds(lambda: torch.ones(4, device=device), device) > 0


@pytest.mark.slow  # over a second
def test_a_shared_gpu_has_no_floor(small, tmp_path, pretended):
    run = [f"model.device={DEVICE}", "dataset.limit=1", f"output_dir={tmp_path}/run"]
    assert run_here(small, *run, "measure.exclusive=false") == 0
    model = json.loads((tmp_path / "run" / "manifest.json").read_text())["model"]
    assert "read_bytes_per_s" not in model


def test_devices_are_chosen_named_and_refused(gpu, tmp_path):
    assert str(choose_device("auto")) == DEVICE
    with pytest.raises(ConfigurationError, match=r"cuda:77 is not there: this machine has"):
        choose_device("cuda:77")
    config = RunConfig(
        model=ModelConfig(device=DEVICE), measure=MeasureConfig(), cache_dir=str(tmp_path)
    )
    (name,) = device_lock.names(SimpleNamespace(config=config))
    assert name.startswith("GPU-")
    assert free_bytes(torch.device(DEVICE)) > 1 << 20
    config.model.device_map = "auto"
    assert len(device_lock.names(SimpleNamespace(config=config))) == torch.cuda.device_count()
    environment._gpus.cache_clear()
    assert environment.gpus()


def test_a_gpu_that_torch_does_not_see_is_not_passed_over(monkeypatch):
    """An old driver had meant a silent run of a 7B model on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "gpus", lambda: [{"name": "H100", "driver": "525.1"}])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigurationError, match=r"H100, driver 525.1.*sees none.*device=cpu"):
        choose_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert str(choose_device("auto")) == str(choose_device("cpu")) == "cpu"


def test_weights_that_a_gpu_has_no_room_for(small, gpu, monkeypatch):
    def full(network, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ConfigurationError, match=r"no room for the weights.*GiB in float64.*Type"):
        loading.load_model(compose([*small, f"model.device={DEVICE}"]))


@pytest.mark.parametrize("kind", ["gptq", "awq", "bitsandbytes"])
def test_quantised_weights_are_refused_by_name(small, checkpoint, tmp_path, kind):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": kind, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=rf"quantised \({kind}\).*or type"):
        loading.load_model(compose([*small, f"model.path={folder}"]))


def test_a_draft_models_passes_for_a_batch_are_not_captured(gpu):
    config = compose(["batch.size=2", f"model.device={DEVICE}"])
    targets = [
        make_target(decoders.model(), config, max_len=64, max_nodes=8, drafts=drafts)
        for drafts in (False, True)
    ]
    assert targets[0].graphs and "batch" in targets[1].describe()["reason"]


def test_a_model_is_given_back_with_the_random_state_of_its_device(gpu):
    model = decoders.model()
    with restored_on_exit(model):
        torch.nn.init.zeros_(torch.empty(2, device=DEVICE))
    assert model.device.type == "cuda"


PARTS = ["loops", "bandwidth", "passes", "heads"]


@pytest.mark.parametrize("part", quick_first(PARTS, ["bandwidth"]))
def test_parts_of_the_check_of_a_gpu(gpu, part, monkeypatch):
    monkeypatch.setattr(bandwidth, "_READ_BYTES", (1 << 18, 1 << 18))
    monkeypatch.setattr(bench, "random_model", lambda _: decoders.model(vocab_size=256))
    monkeypatch.setattr(bench, "PROMPT", 20)
    options = SimpleNamespace(part=part, overrides=["model.device=auto"], repeats=1, trial=True)
    *_, results = bench.gpu(options)
    assert results["cuda_settings"]
    if part == "loops":
        assert not results["failed"] and all(results["described"]["graphs"])
        assert all(row["tokens_per_s"] for row in results["rows"].values())
