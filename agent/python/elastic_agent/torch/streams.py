"""Sources whose lengths are not known, such as files that end where they end, or other programs' output: each rank reads
some of them, and where all ranks are in theirs belongs to the state.

    each rank: the samples of a step ──▶ where it is then, told with the step's votes ──▶ the step is applied: so it is
                                                              └──▶ it is not: the samples are given out again
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate

from .. import order
from . import draws, tree

# Where a source begins: how many samples were given out, how many of them come after the state, and the state.
_FIRST = [0, 0, None]


class Streams:
    """Samples in sources that are read from their beginnings, and end at a place that is not known before.

    ::

        streams = elastic.Streams(paths, open=lambda path: read(path), rank_batch=64)
        with elastic.Session(model, optimizer, streams) as session:
            for images, labels in session.steps(streams, epochs=10):
                session.backward(loss_of(model(images), labels))
                session.step()

    Each rank reads one source, or `lanes` of them in turns; of one that ends the next one that no rank has begun takes
    the place. An epoch ends when all sources have. Where fewer samples are left than a batch has, the step has fewer, and
    its gradient is their mean; a rank without any computes on a sample that does not count.

    Each sample belongs to exactly one step of an epoch that is applied. After a change of the group, sources are opened
    where the ranks were after the last step.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        open: Callable[[Any], Iterable[Any]],
        rank_batch: int | None = None,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        lanes: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """sources: what `open` takes; in the same order on every rank.
        open: the samples of a source. If these, or their iterator, have `state_dict` and `load_state_dict`, a position is
        that state: plain values, and a few. Else it is a number of samples, which are read and skipped. What has `close`
        is closed after use.
        rank_batch or global_batch: the most samples of a step, on each rank or in the whole group, where each rank has
        one. micro_batch: a rank gets more of them in several batches, whose gradients add up.
        lanes: how many sources a rank reads in turns, a sample of each.
        shuffle: each epoch has its own order of sources, which depends on `seed`. Samples are not mixed within a source.
        collate_fn: makes a batch of samples, as a DataLoader's does."""
        if (rank_batch is None) == (global_batch is None):
            raise ValueError("give rank_batch, the most samples of a step on a rank, or global_batch, those of the group")
        if any(one is not None and one < 1 for one in (rank_batch, global_batch, micro_batch, lanes)):
            raise ValueError("rank_batch, global_batch, micro_batch and lanes are 1 or more")
        if not sources:
            raise ValueError("there are no sources")
        self.rank_batch, self._fixed = rank_batch, global_batch
        self.micro_batch = micro_batch or global_batch or rank_batch or 1
        self._sources, self._open, self._collate = list(sources), open, collate_fn
        self._lanes, self._shuffle, self._seed = lanes, shuffle, seed
        self.rank, self.world_size, self.epoch = 0, 1, 0
        # The number of samples that the steps of the epoch have had, and the lanes' places after these.
        self.position = 0
        self._begun = _Begun()
        self._at: dict[int, tuple[int, list[Any]]] = {}
        # What is open here, by its place in the epoch's order; what the ranks have reported of the step under way; the
        # batches that this rank has read of it; and a sample for a step in which it has none.
        self._readers: dict[int, _Reader] = {}
        self._told: list[dict[str, Any]] = []
        self._batches: collections.deque[list[Any]] = collections.deque()
        self._own: dict[str, Any] = {}
        self._spare: list[Any] = []
        self._words = ""

    def facts(self) -> dict[str, int]:
        """What must be the same wherever this state is loaded: else places would be those of other sources."""
        return {"sources": len(self._sources), "seed": self._seed, "shuffle": int(self._shuffle)}

    def set_place(self, rank: int, world_size: int, absent: Collection[int] = ()) -> None:
        """From the next step, reads this rank's lanes. None is absent: every rank reads its own."""
        self.rank, self.world_size = rank, world_size

    def first_place(self) -> int:
        """Where this rank's part of a full step begins."""
        return self._part()[0]

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks are. It is the same on every rank."""
        at = [[lane, *place] for lane, place in self._at.items()]
        begun = {"before": self._begun.before, "beyond": sorted(self._begun.beyond)}
        return {"epoch": self.epoch, "position": self.position, **begun, "at": at, **self.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a group was, whatever its size. Raises ValueError for a state of other sources."""
        for name, here in self.facts().items():
            if state.get(name) != here:
                was = state.get(name)
                raise ValueError(f"the state to continue from is of streams with {name} {was}, here it is {here}")
        if state["epoch"] != self.epoch:
            self.close()
        self.epoch, self.position = state["epoch"], state["position"]
        self._begun = _Begun(state["before"], state["beyond"])
        self._at = {lane: (place, where) for lane, place, where in state["at"]}

    def read_for(self, words: str) -> Iterator[Any]:
        """This rank's batches, each after `micro_batches` has read those of its step. words: what random numbers depend
        on, besides the sample."""
        self._words = words
        return (self._collate(self._batches.popleft()) for _ in itertools.count())

    def micro_batches(self) -> list[int]:
        """Reads this rank's samples of the step. Returns the sizes of its batches: 0 for one that does not count."""
        with draws.kept(None, self._words):
            samples = self._read(self._part()[1])
            if not (samples or self._spare):
                self._spare = self._any_sample()
        self._spare = samples[:1] or self._spare
        cuts = range(0, max(len(samples), 1), self.micro_batch)
        self._batches = collections.deque(samples[at : at + self.micro_batch] or self._spare for at in cuts)
        return [len(samples[at : at + self.micro_batch]) for at in cuts]

    def report(self) -> str:
        """Where this rank is after the step that it has read."""
        return json.dumps(self._own)

    def hear(self, reports: Sequence[str]) -> None:
        """What all ranks have reported of the step under way."""
        self._told = [json.loads(one) for one in reports]

    def advance(self) -> None:
        """The step is applied: the ranks are where they have reported. After the last of an epoch the next begins."""
        told, self._told = self._told, []
        self.position += sum(one["samples"] for one in told)
        self._at = {lane: (place, where) for one in told for lane, place, where in one["at"]}
        self._begun.add(itertools.chain.from_iterable(one["begun"] for one in told))
        own = [place for _, place, _ in self._own["at"]]
        for place, reader in list(self._readers.items()):
            reader.settle()
            if place not in own:
                self._readers.pop(place).close()
        if not self._at and self._begun.before >= len(self._sources):
            self.epoch, self.position, self._begun = self.epoch + 1, 0, _Begun()

    def close(self) -> None:
        """Closes what is open. It is opened again where the ranks are."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _part(self) -> tuple[int, int]:
        """Where this rank's part of a full step begins, and its size."""
        if self._fixed is None:
            return self.rank * self.rank_batch, self.rank_batch
        first, end = (self._fixed * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return first, max(end - first, 1)

    def _read(self, most: int) -> list[Any]:
        """The next samples of this rank's lanes. Notes where these are then."""
        of_lane = {lane: self._reader(*at) for lane, at in sorted(self._at.items()) if lane % self.world_size == self.rank}
        # Sources that no rank has begun are dealt by turns, for each step again.
        unread = itertools.islice(self._begun.left(len(self._sources)), self.rank, None, self.world_size)
        lanes, begun, samples = range(self.rank, self.world_size * self._lanes, self.world_size), [], []

        def fill() -> None:
            """Gives each lane that has ended the next source that has a sample."""
            for lane in lanes:
                while lane not in of_lane and (place := next(unread, None)) is not None:
                    begun.append(place)
                    reader = self._reader(place, _FIRST)
                    if not reader.is_over():
                        of_lane[lane] = reader

        fill()
        while of_lane and len(samples) < most:
            for lane in sorted(of_lane)[: most - len(samples)]:
                if of_lane[lane].is_over():
                    del of_lane[lane]
                else:
                    samples.append(of_lane[lane].next())
            fill()
        # A position is that before the look at the next sample. All ranks must know after this step whether there is one.
        where = {reader.place: reader.where() for reader in of_lane.values()}
        for lane in [lane for lane, reader in of_lane.items() if reader.is_over()]:
            del of_lane[lane]
        fill()
        at = [[lane, reader.place, where.get(reader.place, _FIRST)] for lane, reader in of_lane.items()]
        self._own = {"at": at, "begun": begun, "samples": len(samples)}
        return samples

    def _reader(self, place: int, where: list[Any]) -> _Reader:
        """What reads a source from this position."""
        reader = self._readers.get(place)
        if reader is None or not reader.rewind(where):
            if reader is not None:
                self._readers.pop(place).close()
            self._readers[place] = reader = self._opened(place, where)
        return reader

    def _opened(self, place: int, where: list[Any]) -> _Reader:
        number = order.of_epoch(len(self._sources), self._seed, self.epoch)[place] if self._shuffle else place
        seed = f"{self._words} {number}"
        return _Reader(place, self._sources[number], self._open, lambda sample: draws.set_to(f"{seed} {sample}"), where)

    def _any_sample(self) -> list[Any]:
        """Of the first source that has one."""
        for place in range(len(self._sources)):
            reader = self._opened(place, _FIRST)
            found = [] if reader.is_over() else [reader.next()]
            reader.close()
            if found:
                return found
        raise ValueError(f"none of the {len(self._sources)} sources has a sample")


class _Begun:
    """Which places of an epoch's order were begun: all before one, and some beyond it."""

    def __init__(self, before: int = 0, beyond: Iterable[int] = ()) -> None:
        self.before, self.beyond = before, set(beyond)

    def add(self, places: Iterable[int]) -> None:
        """These were begun."""
        self.beyond.update(places)
        while self.before in self.beyond:
            self.beyond.remove(self.before)
            self.before += 1

    def left(self, count: int) -> Iterator[int]:
        """The others below `count`."""
        return (place for place in range(self.before, count) if place not in self.beyond)


class _Reader:
    """A source that is open here."""

    def __init__(
        self, place: int, source: Any, open: Callable[[Any], Any], seed: Callable[[int], None], where: list[Any]
    ) -> None:
        """seed: sets the random numbers for a sample. where: what `where` returned. Raises RuntimeError if it cannot be
        read from there."""
        self.place, self._source, self._seed = place, source, seed
        # Samples that were read and not given out, and those given out since the last applied step.
        self._ahead: collections.deque[Any] = collections.deque()
        self._since: list[Any] = []
        self._given, skip, state = where
        # The newest state, and how many samples had been given out then.
        self._mark = self._given - skip, state
        seed(self._mark[0])
        try:
            self._iterable = self._holder = open(source)
            if not _has_state(self._iterable):
                self._holder = self._iterator = iter(self._iterable)
            if state is not None:
                self._holder.load_state_dict(tree.put_together(state, []))
            if self._holder is self._iterable:
                self._iterator = iter(self._iterable)
        except Exception as error:
            raise RuntimeError(f"the source {source!r} does not open: {type(error).__name__}: {error}") from error
        for number in range(self._mark[0], self._given):
            try:
                self._read(number)
            except StopIteration:
                raise RuntimeError(
                    f"the source {source!r} ends after {number} samples, and had {self._given} before: it must give the "
                    "same samples whenever it is opened"
                ) from None

    def next(self) -> Any:
        """The next sample. To be called where `is_over` is false."""
        self._since.append(self._ahead.popleft())
        self._given += 1
        return self._since[-1]

    def is_over(self) -> bool:
        """Whether there is no other sample. Reads one to see that."""
        if not self._ahead:
            try:
                self._ahead.append(self._read(self._given))
            except StopIteration:
                return True
        return False

    def where(self) -> list[Any]:
        """The position after what was given out. Raises TypeError for a state that is not made of plain values."""
        if not self._ahead and _has_state(self._holder):
            what = f"the position in the source {self._source!r}"
            described, tensors = tree.take_apart(self._holder.state_dict(), what)
            if tensors:
                raise TypeError(f"{what} has a tensor: its state_dict is sent with each step, and has plain values only")
            self._mark = self._given, described
        return [self._given, self._given - self._mark[0], self._mark[1]]

    def settle(self) -> None:
        """The step that has what was given out is applied."""
        self._since.clear()

    def rewind(self, where: list[Any]) -> bool:
        """Goes back to an earlier position, if no step applied since has had the samples after it. Returns whether it
        did."""
        given, skip, state = where
        if not 0 <= self._given - given <= len(self._since):
            return False
        while self._given > given:
            self._ahead.appendleft(self._since.pop())
            self._given -= 1
        self._mark = given - skip, state
        return True

    def close(self) -> None:
        """Closes it, if it can be closed."""
        for one in (self._iterator, self._iterable):
            if hasattr(one, "close"):
                one.close()
                return

    def _read(self, number: int) -> Any:
        self._seed(number)
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            raise RuntimeError(
                f"the source {self._source!r} fails after {number} samples: {type(error).__name__}: {error}"
            ) from error


def _has_state(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
