"""Tensors that say ``cuda``: ordinary tensors whose memory is listed as a device's.

Two modes of torch do it. The one over functions answers what a tensor's device is and turns
``device="cuda"`` into a note; the one over operations sees every kernel, and what it reads and
writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.memory import (
    APART,
    CAPTURE,
    PAGEABLE,
    Block,
    RuleBroken,
    World,
    site,
    tensors_of,
)

_HOST = -1  # in place of a device's number
# Composite operations that are one kernel on CUDA, such as attention and norms.
_ONE_KERNEL = {"scaled_dot_product_attention", "rms_norm", "layer_norm", "linear", "matmul"}
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
          "unique_consecutive", "equal", "bincount"}  # fmt: skip
_RANDOM = {"uniform_", "normal_", "bernoulli", "multinomial", "rand", "randn", "randint",
           "rand_like", "exponential_", "randperm"}  # fmt: skip
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_",
              "resize_", "lift_fresh", "detach"}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Kernels(TorchDispatchMode):
    """Every operation on memory, in the order in which streams get them."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._composite: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func not in self._composite:
            made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(
                func.name(), "CompositeImplicitAutograd"
            )
            self._composite[func] = made_of_others and name not in _ONE_KERNEL
        with torch._C.DisableTorchFunction():
            if self._composite[func]:
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        world = self._world
        created_on = getattr(world.local, "created_on", None)
        tensors = tensors_of(args, kwargs)
        used = {t: world.block(t) for t in tensors}
        devices = {b.device for b in used.values() if b is not None and b.device is not None}
        if name == "copy_" and (len(devices) > 1 or (devices and self._crosses(args, used))):
            return self._transfer(func, args, kwargs, used)
        if created_on is None and devices:
            self._check(name, args, used, devices)
        before = {t.untyped_storage()._cdata for t in tensors}
        out = func(*args, **kwargs)
        device = created_on if created_on is not None else next(iter(devices), _HOST)
        outs = tensors_of(out)
        new = [t for t in outs if t.untyped_storage()._cdata not in before]
        if device == _HOST:
            for tensor, block in used.items():
                if block is not None and block.device is None:
                    world.host_uses(tensor)
            return out
        writes = _written(func, args, kwargs)
        for tensor in new:
            world.register(tensor, device)
        if name in _WAITS:
            world.wait(name, world.stream(device).clock)
        if new or writes:
            self._launch(func, name, args, kwargs, outs, used, writes, device)
        return out

    def _launch(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        outs: Any,
        used: Any,
        writes: Any,
        device: int,
    ) -> None:
        world = self._world
        stream = world.stream(device)
        if name in _PRODUCTS:
            world.multiply(stream)
        touched: dict[Block, bool] = {}
        for tensor, block in used.items():
            if block is not None and block.device is not None:
                touched[block] = touched.get(block, False) or any(tensor is w for w in writes)
        if world.capturing is not None:  # runs, and is checked, at the replay
            if name in _RANDOM:
                raise RuleBroken(CAPTURE, "random numbers are drawn")
            if stream is not world.stream(world.capturing.device):
                raise RuleBroken(APART, "work for another device is captured")
            world.capturing.record(func, args, kwargs, outs, touched)
            return
        tick = stream.work()
        # Memory without contents is of its stream, whatever it is to be like.
        for block, written in touched.items() if name not in _NO_KERNEL else ():
            world.touch(stream, tick, block, writes=written)
        for tensor in outs:
            block = world.block(tensor)
            if block is not None and block not in touched:
                block.written = (stream, tick)
        if name not in _NO_KERNEL:
            world.counts["launches"] += 1
            world.counts["kernel " + name] += 1

    def _check(self, name: str, args: Any, used: Any, devices: set[int]) -> None:
        if len(devices) > 1:
            raise RuleBroken(APART, f"{name} of tensors on devices {sorted(devices)}")
        world = self._world
        if name in _INDEXED:
            if name != "index" and used[args[2]] is None:
                world.wait("a number of the host", world.stream(world.current).clock)
            for index in args[1]:
                if isinstance(index, torch.Tensor):
                    if index.dtype in (torch.bool, torch.uint8):
                        world.wait("a boolean index", world.stream(world.current).clock)
                    elif used[index] is None and index.dim():
                        world.wait("an index of the host", world.stream(world.current).clock)
            if name == "index":
                return
        for tensor, block in used.items():
            host = block is None or block.device is None
            if host and tensor.dim() and not (name in _INDEXED and tensor is not args[0]):
                raise RuleBroken(APART, f"{name} of a tensor on the host and one on a GPU")

    @staticmethod
    def _crosses(args: Any, used: Any) -> bool:
        to, source = (used[t] if isinstance(t, torch.Tensor) else None for t in args[:2])
        if not isinstance(args[1], torch.Tensor) or (source is None and not args[1].dim()):
            return False  # a number: a kernel fills
        return (to is None or to.device is None) != (source is None or source.device is None)

    def _transfer(self, func: Any, args: Any, kwargs: Any, used: Any) -> torch.Tensor:
        """Copy between two devices, or between one and the host."""
        world, (to, source) = self._world, args[:2]
        queued = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        there, here = used[to], used[source]
        up, down = here is None or here.device is None, there is None or there.device is None
        device = there.device if not down else here.device
        stream = world.stream(device)
        if not up and not down:  # the streams of both wait for each other
            stream = world.stream(here.device)
            other = world.stream(there.device)
            other_before = dict(other.clock)
            stream.follow(other_before)
        tick = stream.work()
        for block, writes in ((here, False), (there, True)):
            if block is not None and block.device is not None:
                world.touch(stream, tick, block, writes=writes)
        if not up and not down:
            other.follow(stream.clock)
            world.counts["copies across"] += 1
            return func(to, source)
        host = here if up else there
        if world.capturing is not None:
            raise RuleBroken(CAPTURE, "a copy from or to the host")
        world.counts["copies up" if up else "copies down"] += 1
        if queued and host is None:
            raise RuleBroken(PAGEABLE, "a copy that shall not wait is of memory that is not pinned")
        if up and queued:
            world.send(source, source.clone(), up=True, device=device)
            return func(to, source)
        if queued:
            world.send(to, source.clone().to(to.dtype).expand_as(to), up=False, device=device)
            return to
        world.wait("a copy " + ("from" if up else "to") + " the host", stream.clock)
        world.host_uses(source if up else to)
        return func(to, source)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    named = _arguments_written(func)
    return tensors_of([kwargs.get(n, args[i] if i < len(args) else None) for i, n in named])


@cache
def _arguments_written(func: Any) -> list[tuple[int, str]]:
    """List position and name of each argument that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


class DeviceMoves(TorchFunctionMode):
    """The devices that tensors report, and their moves between devices."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        tensor = torch.Tensor
        self._answers: dict[Any, Any] = {
            tensor.device.__get__: self.device_of,
            tensor.is_cuda.__get__: lambda t: self.device_of(t).type == "cuda",
            tensor.is_cpu.__get__: lambda t: self.device_of(t).type == "cpu",
            tensor.get_device: lambda t: -1 if (p := self.device_of(t)).index is None else p.index,
            tensor.is_pinned: lambda t, *_: (b := world.block(t)) is not None and b.device is None,
            tensor.pin_memory: self._pin,
            tensor.to: self._to,
            tensor.cpu: lambda t, **_: self._move(t, torch.device("cpu")),
            tensor.cuda: lambda t, device=None, non_blocking=False, **_: self._move(
                t, torch.device("cuda", device or 0), queued=non_blocking),
            tensor.type_as: lambda t, o: self._move(t, self.device_of(o), o.dtype),
            tensor.tolist: lambda t: self._move(t, torch.device("cpu")).tolist(),
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
            torch.tensor: self._new(torch.tensor),
            torch.as_tensor: self._new(torch.as_tensor),
            torch.asarray: self._new(torch.asarray),
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if kwargs.get("pin_memory"):
            tensor = func(*args, **{**kwargs, "pin_memory": False})
            return self._pinned(tensor)
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        device = self._full(kwargs["device"])
        if device.type not in ("cuda", "cpu"):
            return func(*args, **kwargs)
        with self._making(device):
            return func(*args, **{**kwargs, "device": torch.device("cpu")})

    @contextmanager
    def _making(self, device: torch.device) -> Iterator[None]:
        local = self._world.local
        before, local.created_on = (
            getattr(local, "created_on", None),
            device.index if device.type == "cuda" else _HOST,
        )
        try:
            yield
        finally:
            local.created_on = before

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        block = (
            self._world.block(tensor)
            if not tensor.is_meta and tensor.layout == torch.strided
            else None
        )
        return (
            tensor.device
            if block is None or block.device is None
            else torch.device("cuda", block.device)
        )

    def _full(self, device: Any) -> torch.device:
        full = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if full.type == "cuda" and full.index is None:
            return torch.device("cuda", self._world.current)
        return full

    def _to(
        self, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        like = args[0] if args else kwargs.get("other")
        if isinstance(like, torch.Tensor):
            queued = bool(kwargs.get("non_blocking", False))
            return self._move(tensor, self.device_of(like), like.dtype, queued=queued, copy=copy)
        device, dtype, queued, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._move(tensor, device and self._full(device), dtype, queued=queued, copy=copy)

    def _move(
        self, tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None,
        *, queued: bool = False, copy: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        here, dtype = self.device_of(tensor), dtype or tensor.dtype
        if device is None or device.type == "meta" or here.type == "meta" or device == here:
            where = device if device is not None and device.type == "meta" else tensor.device
            return tensor.to(where, dtype, copy=copy)
        if here.type == "cuda" and dtype != tensor.dtype:
            tensor, dtype = tensor.to(dtype), dtype  # converted where it is
        with self._making(device):
            moved = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        with torch.no_grad():
            moved.copy_(tensor, non_blocking=queued)
        return moved

    def _pin(self, tensor: torch.Tensor, *_: object) -> torch.Tensor:
        if self.device_of(tensor).type == "cuda":
            raise RuntimeError("cannot pin memory of a GPU")
        if self._world.capturing is not None:
            raise RuleBroken(CAPTURE, "memory is pinned")
        return self._pinned(tensor.clone())

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self._world.register(tensor, None)
        self._world.counts["pinned"] += 1
        return tensor

    def _numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device_of(tensor).type == "cuda":
            raise TypeError(f"can't convert a cuda tensor to numpy: use Tensor.cpu() ({site()})")
        self._world.host_uses(tensor)
        array = tensor.numpy(force=bool(kwargs.get("force")))
        return array.astype(args[0], copy=False) if args and args[0] is not None else array

    def _new(self, make: Any) -> Any:
        def create(values: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            new = make(values, *args, **kwargs)
            return new if device is None else self._move(new, self._full(device))

        return create
