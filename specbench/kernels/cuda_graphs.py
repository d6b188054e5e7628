"""CUDA graphs: work of a fixed shape, recorded once and launched as a whole.

A graph is tied to addresses and shapes. What changes from run to run lies in buffers that it reads,
what it finds out in buffers that its next run overwrites; and so may the run of another graph of
the same recorder, whose graphs have their memory in common.

`device_lives` says whether a GPU can be asked for anything more, `check_device` ends what asks one
that cannot.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from specbench.errors import ConfigurationError, DeviceLost, first_line, message_line

log = logging.getLogger(__name__)

_WARM_UPS = 3  # runs before a capture: libraries choose kernels and allocate on the first ones


def device_lives(device: torch.device) -> bool:
    """Return True if a GPU still answers, or for a CPU. Waits for the GPU."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def check_device(device: torch.device, error: Exception, running: str, before: str) -> None:
    """Return if ``error`` affects only the work that raised it.

    Args:
        running: what raised it; ``before``: what had run before that.

    Raises:
        DeviceLost: no other work can succeed in this process. It names the first error.
    """
    if isinstance(error, DeviceLost):
        raise error
    if not device_lives(device):
        raise DeviceLost(
            f"{device} answers no more since {running} failed with {first_line(error)}. Before "
            f"it ran {before}, whose work may be the cause. What was written is valid, and the "
            "same command continues from there."
        ) from error


def _forget_work_space() -> None:
    """Let go of the memory in which cuBLAS adds up split products, on all streams.

    It belongs to a map of torch's, which others empty, too (graphs of ``torch.compile`` do). A
    graph whose products use what they found there would write to memory that is no longer theirs.
    """
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # builds without CUDA have none
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def isolated() -> Iterator[None]:
    """Isolate a capture: memory that it finds and leaves belongs to its graph."""
    collects = gc.isenabled()
    gc.disable()  # an unreferenced graph would be destroyed in the middle of this one
    _forget_work_space()  # products take it from the graph's pool, which lives as long as the graph
    try:
        yield
    finally:
        _forget_work_space()  # what runs on this stream later takes no memory of the pool
        if collects:
            gc.enable()


class GraphPlace(Protocol):
    """The device and stream on which graphs are recorded."""

    def capture_stream(self) -> torch.cuda.Stream: ...

    def on_device(self) -> AbstractContextManager[Any]: ...


class Recorded:
    """Work on a device, and its graph once it was captured; before, each run launches it again.

    Attributes:
        outputs: of the last run.
    """

    outputs: tuple[torch.Tensor, ...]

    def __init__(self, recorder: GraphPlace) -> None:
        self._recorder = recorder
        self._graph: torch.cuda.CUDAGraph | None = None

    def device_part(self) -> tuple[torch.Tensor, ...]:
        """Compute the outputs from the buffers, without the host: a graph captures it."""
        raise NotImplementedError

    def capture(self, pool: Any) -> None:
        """Record the device's part as a CUDA graph.

        Raises:
            RuntimeError: something in it needs the host (some models read positions there).
        """
        recorder = self._recorder
        # Where a capture's end fails, torch leaves its stream current: the outer context restores.
        with recorder.on_device(), torch.cuda.stream(torch.cuda.current_stream()):
            stream = recorder.capture_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self.device_part()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with isolated(), torch.cuda.graph(graph, pool=pool, stream=stream):
                self.outputs = self.device_part()
        self._graph = graph

    def run(self) -> None:
        with self._recorder.on_device():
            if self._graph is None:
                self.outputs = self.device_part()
            else:
                self._graph.replay()


class RecordedCall(Recorded):
    """A function of tensors whose shapes never change.

    Args:
        function: of ``buffers``; it asks the host for nothing.
        buffers: what it reads, to be written to before each run.
    """

    def __init__(
        self,
        recorder: GraphPlace,
        function: Callable[..., tuple[torch.Tensor, ...]],
        *buffers: torch.Tensor,
    ) -> None:
        super().__init__(recorder)
        self._function, self.buffers = function, buffers

    def device_part(self) -> tuple[torch.Tensor, ...]:
        return self._function(*self.buffers)


class GraphRecorder:
    """Records the graphs of one owner, which have stream and memory in common.

    Attributes:
        reasons: why work runs without a graph, by its name.
        graphs: names of what was captured.
    """

    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin_recording()

    def begin_recording(self) -> None:
        """Forget the graphs there were; the new ones take memory of their own."""
        self.reasons: dict[str, str] = {}
        self.graphs: list[str] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def capture_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def record(self, work: Recorded, name: str) -> bool:
        """Capture ``work``; return False and note a reason where that fails.

        Raises:
            ConfigurationError: the device has no memory left.
            DeviceLost: it answers no more.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.inference_mode():
                work.capture(self._pool)
        except RuntimeError as error:
            graph = f"the CUDA graph of {name}"
            check_device(self.device, error, graph, ", ".join(self.graphs[-1:]) or "no graph")
            # The allocator may still count the old one as being recorded to, and refuse it.
            self._pool = torch.cuda.graph_pool_handle()
            if _no_memory(error):
                raise ConfigurationError(
                    f"the device has no memory left for {graph} "
                    f"({message_line(error)}). Type engine=eager, a smaller "
                    "generation.max_new_tokens, or fewer methods in compare=[...]."
                ) from error
            self.reasons[name] = first_line(error)
            log.warning("no CUDA graph for %s: %s", name, self.reasons[name])
            return False
        self.graphs.append(name)
        return True


def _no_memory(error: RuntimeError) -> bool:
    """Return True if the device was out of memory, by the driver's message if need be.

    cuBLAS has a status of its own.
    """
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in message for word in ("out of memory", "alloc_failed")
    )
