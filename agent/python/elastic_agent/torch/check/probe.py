"""What a checked script gets for `elastic.Session`, `Loop` and `ElasticBatchSampler`: they train as always, and note each
step in a file. An epoch is a few steps long, and training ends after some of them."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch

from ... import worker
from .. import feed
from .. import loop as loops
from .. import session as sessions
from .. import tree
from ..boxes import is_sharded, part_of
from ..state import State
from . import outside

SETTINGS_ENV = "ELASTIC_CHECK"
# Sums of a tensor's numbers that are noted: enough to see how far two tensors are apart.
_SUMS = 8


@dataclass(frozen=True)
class Settings:
    """What the check wants of a worker."""

    # Where notes go, and the run's checkpoints.
    folder: str
    node: str
    # The script, and its own folder.
    script: str
    base: str
    seed: int
    # Seconds that the worker may run.
    limit: float
    # The number of steps to train, and of an epoch.
    steps: int
    epoch_steps: int
    # "given", in "micro-batches", or in "pieces" that give the same bits for any number of ranks.
    cut: str
    # The state that all runs begin with.
    begin: str
    # The step in which this worker dies, and after which steps all wait for what.
    dies_in: int
    holds: dict[str, str]
    # The number of ranks that the run has as a rule.
    ranks: int

    def to_text(self) -> str:
        """For the worker's environment."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_environment() -> Settings:
        """What `to_text` gave."""
        return Settings(**json.loads(os.environ[SETTINGS_ENV]))


class Finished(BaseException):
    """The script asks for more steps than the check wants. It ends the script, and is no error."""


class Notes:
    """The notes of this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        path = pathlib.Path(settings.folder) / f"notes-{settings.node}-{os.getpid()}"
        self._file = path.open("a", buffering=1)

    def tell(self, event: str, **facts: Any) -> None:
        """Adds a note."""
        note = {"event": event, "node": self.settings.node, "pid": os.getpid(), "at": time.time(), **facts}
        self._file.write(json.dumps(note) + "\n")

    def is_own(self, path: str) -> bool:
        """Whether a file is the script, or lies in its folder."""
        foreign = "site-packages" in path or f"{os.sep}elastic_agent{os.sep}" in path
        return path == self.settings.script or (path.startswith(self.settings.base + os.sep) and not foreign)

    def frames(self) -> Iterator[FrameType]:
        """The script's own functions that are being called, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.is_own(os.path.realpath(frame.f_code.co_filename)):
                yield frame
            frame = frame.f_back

    def line(self) -> str:
        """Where the script is."""
        for frame in self.frames():
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        return ""


notes: Notes


class Sampler(sessions.ElasticBatchSampler):
    """Notes which samples it gives. Its epochs are short."""

    def __init__(self, dataset: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(dataset, *arguments, **named)
        self.given: collections.deque[list[int]] = collections.deque()
        self.is_short = self._shards is None
        if self.is_short:
            # In all runs alike: of three ranks at most.
            step = self._fixed or 3 * (self.rank_batch or 1)
            # The last step of an epoch is half of one.
            rest = step // 2 if step > 3 and not self.drop_last else 0
            self.length = min(self.length, notes.settings.epoch_steps * step - rest)

    def __iter__(self) -> Iterator[list[int]]:
        self.given.clear()
        for batch in super().__iter__():
            # To take its samples one by one would set this process's random numbers.
            self.given.append(batch[:])
            yield batch

    def cut(self, least: int) -> None:
        """Cuts steps into six batches or more, each of `least` samples or more."""
        if self._fixed is None:
            return
        sizes = (self._fixed, self.last_step() or 0)
        most = range(max(-(-self._fixed // 6), least), self._fixed)
        fits = (size for size in most if least == 1 or all(one % size != 1 for one in sizes))
        self.micro_batch = min(self.micro_batch, next(fits, self._fixed))


class Watched:
    """A session or loop that notes what it does."""

    _kind = ""
    # When the script got a step's end, until it begins the next.
    _left_at = 0.0
    _outside: outside.Outside | None = None
    _made = 0

    def _watch(self) -> None:
        """Before it begins: has it begin as in all runs."""
        Watched._made += 1
        begin = pathlib.Path(f"{notes.settings.begin}-{Watched._made}")
        if any(is_sharded(one) for one in self._training.parameters()):
            return
        if begin.exists():
            self._training.load(torch.load(begin, weights_only=True))
        else:
            torch.save(tree.plain(self._training.value()), begin)

    def __enter__(self) -> Any:
        entered = super().__enter__()
        parameters = list(self._training.parameters())
        trained = [one for one in parameters if one.requires_grad and one.is_floating_point()]
        eps = max((torch.finfo(one.dtype).eps for one in trained), default=0.0)
        notes.tell("enters", kind=self._kind, eps=eps, **self._facts())
        return entered

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is Finished:
            kind = error = trace = None
        super().__exit__(kind, error, trace)
        notes.tell("leaves", step=self.step_number)

    def _facts(self) -> dict[str, Any]:
        return {}

    def _tell_group(self) -> None:
        super()._tell_group()
        self._tell_state("begins")

    def _tell_state(self, event: str, **facts: Any) -> None:
        place = {"rank": self.rank, "ranks": self.world_size, "round": self._members.place["round"]}
        sums = {name: sums_of(one) for name, one in named(self._training._state)}
        notes.tell(event, which=self._which.number, step=self.step_number, sums=sums, **place, **facts)

    def _applied(self, **facts: Any) -> None:
        self._tell_state("step", **facts)
        if notes.settings.ranks == 1:
            self._outside = self._outside or outside.Outside(self._training, sums_of, notes.is_own)
            for one in self._outside.look(notes.frames()):
                notes.tell("outside", **one)
        self._hold(notes.settings.holds.get(str(self.step_number)) if self._which.number == 0 else None)
        self._left_at = time.monotonic()

    def _hold(self, what: str | None) -> None:
        """Waits until a round forms. All ranks of the group do."""
        full = self.world_size == notes.settings.ranks
        if what is None or full is not (what == "leave"):
            return
        notes.tell("waits", what=what, rank=self.rank)
        while worker.forming() is None and not self._members.departure.asked:
            time.sleep(0.01)

    def _is_back(self) -> None:
        """The script begins the next step."""
        if self._left_at:
            notes.tell("pause", seconds=time.monotonic() - self._left_at, where=notes.line(), step=self.step_number)
        self._left_at = 0.0

    @contextlib.contextmanager
    def _aside(self, *arguments: Any, **named_: Any) -> Iterator[None]:
        entered = time.monotonic()
        with super()._aside(*arguments, **named_):
            yield
        self._left_at += time.monotonic() - entered if self._left_at else 0

    def _may_die(self) -> None:
        settings, mark = notes.settings, pathlib.Path(notes.settings.folder) / "killed"
        first = self._which.number == 0 and not mark.exists()
        if settings.dies_in and first and self.step_number + 1 >= settings.dies_in:
            mark.touch()
            notes.tell("dies", step=self.step_number + 1)
            os.kill(os.getpid(), signal.SIGKILL)


class Session(Watched, sessions.Session):
    """A session that notes each step."""

    _kind = "Session"

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        sampler: Any,
        *,
        checkpoint_dir: Any = None,
        same_bits: bool = False,
        **more: Any,
    ) -> None:
        if not isinstance(sampler, Sampler):
            raise ValueError("the check needs the sampler to be an elastic_agent.torch.ElasticBatchSampler itself")
        of_batches = torch.nn.modules.batchnorm._BatchNorm
        norms = [(name, one) for name, one in model.named_modules() if isinstance(one, of_batches)]
        self._norms = [f"{type(one).__name__} {name}" for name, one in norms]
        if notes.settings.cut != "given" and not same_bits:
            sampler.cut(2 if self._norms else 1)
            whole = not any(map(is_sharded, model.parameters()))
            several = sampler.rank_batch is None and sampler.micro_batch < sampler.global_batch
            same_bits = notes.settings.cut == "pieces" and whole and several
        self._same_bits, folder = same_bits, _folder(checkpoint_dir)
        super().__init__(model, optimizer, sampler, checkpoint_dir=folder, same_bits=same_bits, **more)
        self._used: list[tuple[list[int] | None, int, float]] = []
        self._used_in = self._step
        self._random: tuple[Any, Any] | None = None
        # torch's random numbers as a batch finds them, and whether a batch has drawn any.
        self._numbers: torch.Tensor | None = None
        self._draws = False
        self._grads: list[int] = []
        self._stepping = False
        for one in self._training.optimizers:
            one.register_step_pre_hook(self._optimizer_steps)
        self._watch()

    def _facts(self) -> dict[str, Any]:
        one = self.sampler
        facts = {"bits": self._same_bits, "fixed": one.rank_batch is None, "samples": one._end(), "short": one.is_short}
        return {**facts, "norms": self._norms[:1]}

    @property
    def _epochs(self) -> int:
        """The epochs that the check wants."""
        of_epoch = -(-self.sampler._end() // (self.sampler._fixed or self.sampler.global_batch))
        if self.sampler._fixed is None:
            of_epoch = notes.settings.epoch_steps
        return -(-notes.settings.steps // of_epoch)

    def epochs(self, count: int) -> Iterator[Any]:
        return super().epochs(min(count, self._epochs))

    def steps(self, loader: Any, epochs: int = 1) -> Iterator[Any]:
        if self._epochs < epochs and self.epoch >= self._epochs:
            raise Finished
        self._is_back()
        with contextlib.closing(super().steps(loader, min(epochs, self._epochs))) as batches:
            for batch in batches:
                if not self.sampler.is_short and self.step_number >= notes.settings.steps:
                    raise Finished
                self._numbers = None if self._draws else torch.default_generator.get_state()
                yield batch
                self._is_back()
        # What follows is between two steps, too.
        self._left_at = time.monotonic()

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        if self._used_in is not self._step:
            self._used, self._used_in = [], self._step
        size = self._step.batches[self._step.done] if self._step.done < len(self._step.batches) else 0
        given = self.sampler.given.popleft() if self.sampler.given else None
        # A batch without samples only keeps step with other ranks.
        weight = size if count is None or not size else float(count)
        mean = float(loss.detach()) / (1 if count is None else max(weight, 1e-30)) if size else 0.0
        self._used.append((given if size else [], weight, mean))
        self._tell_of_random()
        if self._numbers is not None and not torch.equal(self._numbers, torch.default_generator.get_state()):
            self._draws = True
            notes.tell("draws")
        self._may_die()
        super().backward(loss, count)
        self._grads = self._versions()

    def step(self) -> bool:
        if not self._step.is_complete and self._step.lost is None and self._grads != self._versions():
            notes.tell("gradient", where=notes.line(), step=self.step_number + 1)
        epoch, self._stepping = self.epoch, True
        try:
            applied = super().step()
        finally:
            self._stepping = False
        if applied:
            weights = sum(weight for _, weight, _ in self._used)
            loss = sum(weight * one for _, weight, one in self._used) / (weights or 1)
            given, whole = [one for one, _, _ in self._used], sum(one for _, _, one in self._used)
            samples = None if None in given else [sample for one in given for sample in one]
            self._applied(epoch=epoch, loss=loss, weight=weights, losses=whole, samples=samples)
        return applied

    def _optimizer_steps(self, *_: Any) -> None:
        if not self._stepping:
            notes.tell("own step", where=notes.line())

    def _versions(self) -> list[int]:
        return [-1 if one.grad is None else one.grad._version for one in self.model.parameters()]

    def _tell_of_random(self) -> None:
        """Whether the script draws numbers that are not torch's."""
        numpy = sys.modules.get("numpy")
        now = random.getstate(), numpy and numpy.random.get_state()[1].tobytes()
        if self._random is not None and (drawn := [now[0] != self._random[0], now[1] != self._random[1]]) and any(drawn):
            notes.tell("random", of="Python's random" if drawn[0] else "numpy.random")
        self._random = now


class Loop(Watched, loops.Loop):
    """A loop that notes each step."""

    _kind = "Loop"

    def __init__(self, state: State, *, checkpoint_dir: Any = None, **more: Any) -> None:
        super().__init__(state, checkpoint_dir=_folder(checkpoint_dir), **more)
        self._watch()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        if self.step_number >= notes.settings.steps:
            raise Finished
        self._is_back()
        with super().step():
            yield
            self._may_die()

    def _changes(self) -> bool:
        # After the commit, and before another group begins.
        if self._step.lost is None:
            self._applied()
        return super()._changes()


def _folder(given: Any) -> pathlib.Path | None:
    return None if given is None else pathlib.Path(notes.settings.folder) / "checkpoints"


def named(part: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and tensors that a state holds. Buffers of modules are each rank's own."""
    if isinstance(part, State):
        for key, one in part._parts().items():
            yield from named(one, key if name in ("", "state") else f"{name}.{key}")
    elif type(part) in (list, tuple, dict):
        for key, one in part.items() if isinstance(part, dict) else enumerate(part):
            yield from named(one, f"{name}[{key!r}]")
    elif isinstance(part, torch.nn.Module):
        for key, one in part.named_parameters():
            yield key if name == "model" else f"{name}.{key}", part_of(one)
    elif isinstance(part, torch.Tensor):
        yield name, part


@functools.lru_cache
def _signs(size: int) -> torch.Tensor:
    drawn = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.int8)
    return drawn.mul_(2).sub_(1)


def sums_of(tensor: torch.Tensor) -> list[float]:
    """A few sums over a tensor's numbers, each with a random sign: the squares of the differences of two tensors' sums
    add up to about the square of their distance. Those of equal tensors are equal."""
    flat = tensor.detach().reshape(-1).to("cpu", torch.float64)
    return [float(one.sum()) for one in (flat * _signs(flat.numel())).tensor_split(_SUMS)]


def install(settings: Settings) -> Notes:
    """Has every script of this process train with what notes its steps."""
    import elastic_agent.torch as package

    global notes
    notes = Notes(settings)
    package.Session, package.Loop, package.ElasticBatchSampler = Session, Loop, Sampler
    # All ranks wait for a newcomer between two steps, and nothing heals it there. It would wait for that in vain.
    feed.can_heal = lambda _: False
    seed = settings.seed
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    return notes
