"""Functions that draw random numbers, called once for each course that they can take.

A uniform number stands for an interval: where it is compared with a threshold, the interval splits,
and each part is tried in a run of its own. The probabilities of all runs add up to 1, and each is
exact up to rounding. Numbers may be compared as often as wanted, indexed, moved, given a factor,
and searched for in a cumulative sum; anything else raises `NotEnumerable`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch

from specbench.errors import SpecBenchError

T = TypeVar("T")
_DUST = 1e-15  # a cell this narrow is a rounding error of its borders


class NotEnumerable(SpecBenchError):
    """A random number is used in a way that leaves no finite number of cases."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} cannot be enumerated: numbers may be compared, indexed, multiplied by a "
            "factor and searched for. Sample it: --draws 20000."
        )


class Chance:
    """Uniform numbers as intervals: a comparison splits one, and each part is tried in a run.

    Attributes:
        probability: of all that happened in this run so far.
    """

    probability: float = 1.0

    def runs(self, function: Callable[[], T]) -> Iterator[tuple[float, T]]:
        """Call ``function`` once for each course that it can take; the probability of each."""
        # Of each split on the way: its cells, as probability and number, and the one taken.
        self._splits: list[tuple[list[tuple[float, float, int]], int]] = []
        while True:
            self._at, self.probability = 0, 1.0
            self._bounds: list[tuple[float, float]] = []
            result = function()
            yield self.probability, result
            while self._splits and self._splits[-1][1] + 1 == len(self._splits[-1][0]):
                self._splits.pop()
            if not self._splits:
                return
            cells, taken = self._splits.pop()
            self._splits.append((cells, taken + 1))

    def uniform(self) -> Number:
        """A number in (0, 1] that no other one depends on."""
        return Number(self, self.fresh(1)[0])

    def choice(self, weights: Any) -> int:
        """An index, by weights that need not add up to 1."""
        return self.cell(self.fresh(1)[0], _edges(weights))

    def torch(self) -> AbstractContextManager[None]:
        """Inside, torch draws its random numbers here."""
        return _torch_from(self)

    def fresh(self, count: int) -> list[int]:
        self._bounds += [(0.0, 1.0)] * count
        return list(range(len(self._bounds) - count, len(self._bounds)))

    def cell(self, number: int, edges: Sequence[float]) -> int:
        """Which ``(edges[k - 1], edges[k]]`` the number lies in; ``edges`` ascend."""
        low, high = self._bounds[number]
        if self._at == len(self._splits):
            if any(math.isnan(edge) for edge in edges):
                raise ValueError("the verifier compares a random number with NaN")
            borders = [low, *(min(max(float(edge), low), high) for edge in edges), high]
            parts = [(a, b, k) for k, (a, b) in enumerate(itertools.pairwise(borders))]
            self._splits.append(([part for part in parts if part[1] - part[0] > _DUST], 0))
        cells, taken = self._splits[self._at]
        self._at += 1
        lower, upper, k = cells[taken]
        self.probability *= (upper - lower) / (high - low)
        self._bounds[number] = (lower, upper)
        return k

    def below(self, number: int, threshold: float) -> bool:
        return self.cell(number, [threshold]) == 0


class Draws(Chance):
    """Real random numbers, for verifiers that compute with theirs."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        torch.manual_seed(seed)

    def runs(self, function: Callable[[], T]) -> Iterator[tuple[float, T]]:
        yield 1.0, function()

    def uniform(self) -> float:  # type: ignore[override]
        return 1.0 - self._random.random()

    def choice(self, weights: Any) -> int:
        return int(np.searchsorted(_edges(weights), self.uniform()))

    def torch(self) -> AbstractContextManager[None]:
        return nullcontext()


def _edges(weights: Any) -> list[float]:
    mass = np.cumsum(np.asarray(weights, dtype=np.float64))
    if not mass[-1] > 0:
        raise ValueError(f"the verifier draws from the weights {weights}, which add up to nothing")
    return [float(edge) for edge in mass[:-1] / mass[-1]]


@dataclass(frozen=True)
class Number:
    """One of them, for plain Python."""

    chance: Chance
    id: int

    def __le__(self, threshold: float) -> bool:
        return self.chance.below(self.id, float(threshold))

    def __gt__(self, threshold: float) -> bool:
        return not self <= threshold

    __lt__, __ge__ = __le__, __gt__


class Numbers(np.ndarray[Any, Any]):
    """An array of them: their ids, to index and to compare."""

    chance: Chance

    @staticmethod
    def of(chance: Chance, ids: Sequence[int]) -> Numbers:
        made = np.array(ids, dtype=np.int64).view(Numbers)
        made.chance = chance
        return made

    def __array_finalize__(self, made_from: Any) -> None:
        if made_from is not None:
            self.chance = getattr(made_from, "chance", None)  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        ids, threshold = inputs[0], inputs[-1]
        if ufunc not in (np.less, np.less_equal) or not isinstance(ids, Numbers):
            raise NotEnumerable(f"numpy's {ufunc.__name__} of random numbers")
        plain, limits = np.broadcast_arrays(ids.view(np.ndarray), threshold)
        found = [
            self.chance.below(int(i), float(t))
            for i, t in zip(plain.flat, limits.flat, strict=True)
        ]
        return np.array(found, dtype=np.bool_).reshape(plain.shape)


class Drawn:
    """A tensor of them, each times a factor."""

    device = torch.device("cpu")

    def __init__(self, chance: Chance, ids: torch.Tensor, factor: torch.Tensor) -> None:
        self._chance, self._ids, self._factor = chance, ids, factor

    @property
    def shape(self) -> torch.Size:
        return self._ids.shape

    def __len__(self) -> int:
        return len(self._ids)

    def to(self, *_: Any, **__: Any) -> Drawn:
        return self

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
        return Drawn(self._chance, move(self._ids), move(self._factor))

    def __getitem__(self, key: Any) -> Drawn:
        return self._moved(lambda values: values[key])

    def __mul__(self, factor: torch.Tensor) -> Drawn:
        product = self._factor * factor
        return Drawn(self._chance, self._ids.expand(product.shape), product)

    __rmul__ = __mul__

    def __le__(self, threshold: torch.Tensor) -> torch.Tensor:
        ids, factor, limits = torch.broadcast_tensors(
            self._ids, self._factor, torch.as_tensor(threshold)
        )
        edges = (limits.double() / factor).flatten().tolist()
        cases = zip(ids.flatten().tolist(), edges, strict=True)
        found = [self._chance.below(number, limit) for number, limit in cases]
        return torch.tensor(found, dtype=torch.bool).reshape(ids.shape)

    def __gt__(self, threshold: torch.Tensor) -> torch.Tensor:
        return ~(self <= threshold)

    __lt__, __ge__ = __le__, __gt__

    def __getattr__(self, name: str) -> Any:
        if name not in ("unsqueeze", "squeeze", "expand", "view", "reshape", "flatten"):
            raise NotEnumerable(f"torch's {name} of random numbers")
        return lambda *args: self._moved(lambda values: getattr(values, name)(*args))

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, swapped = func.__name__, {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
        if name == "searchsorted" and not kwargs:
            return args[1]._search(args[0])
        plain = name.strip("_")
        if len(args) == 2 and isinstance(args[1], Drawn) and plain in ("mul", "rmul", *swapped):
            return (
                args[1] * args[0]
                if "mul" in plain
                else getattr(args[1], f"__{swapped[plain]}__")(args[0])
            )
        raise NotEnumerable(f"torch's {name} of random numbers")

    def _search(self, ascending: torch.Tensor) -> torch.Tensor:
        rows = ascending.reshape(-1, ascending.shape[-1]).double()
        ids, factors = self._ids.reshape(len(rows), -1), self._factor.reshape(len(rows), -1)
        found = [
            [self._chance.cell(int(i), (row / f).tolist()) for i, f in zip(*of_row, strict=True)]
            for row, *of_row in zip(rows, ids, factors, strict=True)
        ]
        return torch.tensor(found).reshape(self._ids.shape)


@contextmanager
def _torch_from(chance: Chance) -> Iterator[None]:
    as_tensor, from_numpy = torch.as_tensor, torch.from_numpy

    def drawn(ids: Sequence[int], shape: Sequence[int]) -> Drawn:
        made = torch.tensor(ids, dtype=torch.int64).reshape(tuple(shape))
        return Drawn(chance, made, torch.ones(made.shape, dtype=torch.float64))

    def rand(*size: Any, **_: Any) -> Drawn:
        shape = size[0] if size and not isinstance(size[0], int) else size
        return drawn(chance.fresh(math.prod(shape)), shape)

    def converted(plain: Any) -> Any:
        return lambda values, *args, **kwargs: (
            drawn(values.tolist(), values.shape)
            if isinstance(values, Numbers)
            else plain(values, *args, **kwargs)
        )

    def multinomial(weights: torch.Tensor, num_samples: int, *_: Any, **__: Any) -> torch.Tensor:
        if num_samples != 1:
            raise NotEnumerable("torch.multinomial of several samples")
        rows = weights.reshape(-1, weights.shape[-1]).tolist()
        chosen = torch.tensor([[chance.choice(row)] for row in rows])
        return chosen.reshape(*weights.shape[:-1], 1)

    replaced = {
        "rand": rand,
        "rand_like": lambda like, **_: rand(tuple(like.shape)),
        "multinomial": multinomial,
        "as_tensor": converted(as_tensor),
        "from_numpy": converted(from_numpy),
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        yield
