"""SSD ("Spacelike"): drafts what most often followed the last tokens in earlier requests.

Source: "Using caching for fast speculative decoding", a company's blog post (Takeoff engine) that
    was reproduced in September 2025. There is no paper, no code and no table of parameters.
Stated there: finished requests, prompt and output, go into one circular buffer of tokens; a
    suffix array over it is rebuilt in the background at intervals; the last tokens of the text are
    looked up with decreasing length until one matches; the most frequent continuation of the
    matches is the draft, one chain; a bounded number of matches is looked at.
Our choices where the post gives none:
    - A separator between requests, so that no draft crosses from one to the next, and the buffer
      unrolled before sorting, so that none crosses the write position.
    - Its sizes: 2^20 tokens, a rebuild after every request, 1000 matches, taken evenly over the
      range (the first 1000 would be those whose continuation sorts first). Ties go to the most
      recent continuation. A draft ends with an end token.
    - Without a match nothing is drafted (the blog: perhaps a random continuation).
    - A multi-turn case is several requests: the second turn's prompt repeats the first turn.
    - The turn's record waits for a rebuild under way, outside the clock: else other methods, which
      take turns with this one, would pay for it. So a rebuild costs no decoding time, as on a
      server with cores to spare, and drafts depend on the order of requests alone.
    - ``rebuild: sync`` builds the array where the request ends, and its time counts as decoding.
    - ``warm_start`` begins with the requests of an earlier run, without which the first requests
      of a run draft nothing.
The present request is not searched before it ends, so it gets no prompt lookup.
Example: finished requests hold "a b c", "a b d e" and "a b d e": after "x a b" the draft is "d e".
State kept: all requests of a run (``state_scope: run``; with ``prompt`` only the turns of a case
    before the present one are used), at most ``buffer_tokens``: 12 bytes each, and as many again
    while an array is being built. A run keeps the buffer in its folder and goes on from there when
    it is resumed.
Recorded for each turn (``drafter`` in the records), as it was when the turn began: the tokens that
    could be searched, and what the array lacked (requests, tokens, its age in seconds).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Lt

from specbench.arrays import Array
from specbench.artifacts.corpora import recorded_turns
from specbench.config.schema import NotNegative, Positive
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import (
    Artifact,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
)
from specbench.draft_structures.suffix_array import (
    SEPARATOR,
    build_suffix_array,
    frequent_continuation,
)
from specbench.errors import ArtifactError, first_line


@dataclass(kw_only=True, eq=False)
class Spacelike(Drafter):
    """SSD, "Spacelike": drafts what most often followed the last tokens in finished requests.

    Attributes:
        max_query: tokens looked up first.
        min_query: tokens looked up last.
        draft_len: tokens drafted at most.
        max_matches: matches looked at (K), evenly spaced over all.
        buffer_tokens: tokens kept of finished requests; older ones are overwritten.
        rebuild: ``background`` (a thread) or ``sync`` (when a request ends; decoding time).
        rebuild_requests: rebuild the array when so many requests finished since; None never.
        rebuild_seconds: rebuild it when it is so old and a request finished since; None never.
        warm_start: ``cases.jsonl`` of an earlier run whose requests are there from the start.
    """

    name: str = "ssd"
    version: int = 3
    state_scope: Scope = "run"
    paper_scope: Scope = "run"
    max_query: int = 10
    min_query: Positive = 1
    draft_len: Positive = 10
    max_matches: Positive = 1000
    buffer_tokens: Annotated[int, Ge(1), Lt(2**31)] = 2**20
    rebuild: Literal["background", "sync"] = "background"
    rebuild_requests: Positive | None = 1
    rebuild_seconds: NotNegative | None = None
    warm_start: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        longer = self.max_query >= self.min_query
        self._require(longer, "max_query", f"at least min_query={self.min_query}")
        rebuilt = self.rebuild_requests is not None or self.rebuild_seconds is not None
        self._require(rebuilt, "rebuild_requests", "a number where rebuild_seconds is null")
        self._index: RingIndex | None = None
        self._at_begin = (0, Staleness(0, 0, 0.0))  # searched tokens, and what they lack

    @property
    def needs(self) -> Needs:
        run = Artifact(
            name="warm_start",
            builder="",
            command="python run.py (its run folder holds a cases.jsonl)",
            path=self.warm_start,
        )
        files = () if self.warm_start is None else (run,)
        return Needs(artifacts=files, max_nodes=self.draft_len)

    @property
    def staleness(self) -> Staleness:
        """Requests, tokens and seconds by which the suffix array lags at present."""
        return self._opened.staleness

    def setup(self, context: DraftContext) -> None:
        self.close()
        self._index = RingIndex(
            self.buffer_tokens,
            background=self.rebuild == "background",
            every_requests=self.rebuild_requests,
            every_seconds=self.rebuild_seconds,
        )
        self._index.start_with(self._earlier_requests(context))
        self._ends = np.array(sorted(context.eos_ids), dtype=np.int64)
        self._draft = np.empty(self.draft_len, dtype=np.int64)
        # Compiles, or loads what was compiled before, outside any clock.
        self.propose(DecodeState(np.zeros(4, dtype=np.int64), 1))

    def _earlier_requests(self, context: DraftContext) -> Iterator[np.ndarray]:
        if self.warm_start is None:
            return
        path = Path(context.artifacts["warm_start"])
        for prompt, answer in recorded_turns(path, context.tokenizer_hash or None):
            text = np.concatenate((prompt, answer))
            if len(text) and (text.min() < 0 or text.max() >= context.vocab_size):
                raise ArtifactError(
                    f"{path} holds ids outside this model's vocabulary of {context.vocab_size}; "
                    "name a run of this model."
                )
            yield text

    @property
    def _opened(self) -> RingIndex:
        assert self._index is not None, "setup comes first"
        return self._index

    def reset(self) -> None:
        self._opened.clear()

    def begin(self, state: DecodeState) -> None:
        self._opened.refresh()
        self._at_begin = (len(self._opened.current.tokens), self._opened.staleness)

    def propose(self, state: DecodeState) -> DraftTree:
        built = self._opened.current
        size, _ = frequent_continuation(
            built.tokens,
            built.suffixes,
            state.buffer,
            state.length,
            self.max_query,
            self.min_query,
            self.draft_len,
            self.max_matches,
            self._ends,
            self._draft,
        )
        return DraftTree.chain(self._draft[:size].copy()) if size else DraftTree.empty()

    def end(self, state: DecodeState) -> None:
        self._opened.add(state.tokens)

    def report(self) -> Mapping[str, ReportValue]:
        self.wait()
        searched, stale = self._at_begin
        return {
            "searched_tokens": searched,
            "stale_requests": stale.requests,
            "stale_tokens": stale.tokens,
            "stale_s": stale.seconds,
            "failed_rebuilds": self._opened.failures,
        }

    def wait(self) -> None:
        """Return when no rebuild is under way."""
        self._opened.wait()

    def close(self) -> None:
        if self._index is not None:
            self._index.wait()


log = logging.getLogger(__name__)


class Staleness(NamedTuple):
    """Finished requests that the suffix array lacks.

    Attributes:
        requests: how many.
        tokens: written since its build started.
        seconds: since its build started, 0 if nothing is missing.
    """

    requests: int
    tokens: int
    seconds: float


class BuiltArray(NamedTuple):
    """A suffix array over ``tokens [n]`` int32, and what was stored when its build started."""

    tokens: Array
    suffixes: Array
    requests: int
    written: int
    started_at: float


class RingIndex:
    """The newest tokens of finished requests, and a suffix array that is updated later.

    A request is stored at once; the array is rebuilt now and then, in a thread, and replaced in one
    assignment. So look-ups never wait, and see what was stored some time ago.

    Args:
        capacity: tokens stored at most, a separator after each request included.
        background: rebuild in a thread; False rebuilds where the request is added, which makes
            every draft reproducible and costs decoding time.
        every_requests: rebuild when so many finished requests are missing; None for never.
        every_seconds: rebuild when the array is so old and something is missing, which is looked
            at when a request begins or ends; None for never.

    Attributes:
        current: the array in use.
        failures: rebuilds that failed.
    """

    def __init__(
        self,
        capacity: int,
        *,
        background: bool = True,
        every_requests: int | None = 1,
        every_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        build: Callable[[Array], Array] = build_suffix_array,
    ) -> None:
        self._capacity, self._background = capacity, background
        self._every_requests, self._every_seconds = every_requests, every_seconds
        self._clock, self._build = clock, build
        self._tokens: Array = np.empty(0, dtype=np.int32)  # replaced, never written to
        self._requests = self._written = self.failures = 0
        self._attempt = (0, clock())  # requests and time of the last rebuild, failed or not
        self._epoch = 0  # raised by `clear`, so that a rebuild under way is thrown away
        self.current = self._start = BuiltArray(self._tokens, self._tokens, 0, 0, 0.0)
        self._lock = threading.Lock()
        self._job: threading.Thread | None = None

    @property
    def staleness(self) -> Staleness:
        built = self.current
        missing = self._requests - built.requests
        seconds = self._clock() - built.started_at if missing else 0.0
        return Staleness(missing, self._written - built.written, seconds)

    def add(self, tokens: Array) -> None:
        """Store a finished request's tokens and rebuild the array if it is time."""
        self._store(tokens)
        self.refresh()

    def start_with(self, requests: Iterable[Array]) -> None:
        """Store requests, build the array, and make `clear` go back to this state."""
        for tokens in requests:
            self._store(tokens)
        self._rebuild()
        self._start = self.current

    def refresh(self) -> None:
        """Rebuild the array if it is time: here, or in a thread."""
        if not self._due():
            return
        if not self._background:
            self._rebuild()
        elif self._job is None or not self._job.is_alive():
            # A thread for each rebuild, which ends with it. The sorting opens an OpenMP team, which
            # lives as long as its thread, and OpenMP lets the threads of all teams sleep while they
            # are more than the cores: every pass of every label was 1.5 times slower.
            self._job = threading.Thread(target=self._rebuild_until_fresh, name="suffix-array")
            self._job.start()

    def wait(self) -> None:
        if self._job is not None:
            self._job.join()

    def clear(self) -> None:
        with self._lock:
            self._epoch += 1
            self._tokens, self._requests = self._start.tokens, self._start.requests
            self._written = len(self._tokens)
            self.current = self._start._replace(written=self._written, started_at=self._clock())
            self._attempt = (self._requests, self.current.started_at)

    def _store(self, tokens: Array) -> None:
        text = np.append(np.asarray(tokens, dtype=np.int32), np.int32(SEPARATOR))
        with self._lock:
            self._tokens = np.concatenate((self._tokens, text))[-self._capacity :]
            self._requests += 1
            self._written += min(len(text), self._capacity)

    def _due(self) -> bool:
        requests, started_at = self._attempt
        missing = self._requests - requests
        if missing <= 0:
            return False
        by_requests = self._every_requests is not None and missing >= self._every_requests
        age = self._clock() - started_at
        return by_requests or (self._every_seconds is not None and age >= self._every_seconds)

    def _rebuild_until_fresh(self) -> None:
        while self._due():
            self._rebuild()

    def _rebuild(self) -> None:
        with self._lock:
            tokens, epoch, started_at = self._tokens, self._epoch, self._clock()
            requests, written = self._requests, self._written
            self._attempt = (requests, started_at)
        try:
            suffixes = self._build(tokens)
        except Exception as error:  # drafting continues with the older array
            self.failures += 1
            log.warning(
                "rebuilding the suffix array over %d tokens failed (%s); drafts go on with the "
                "array of %d tokens",
                len(tokens),
                first_line(error),
                len(self.current.tokens),
            )
            return
        with self._lock:
            if epoch == self._epoch:
                self.current = BuiltArray(tokens, suffixes, requests, written, started_at)
