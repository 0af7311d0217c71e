"""The worker's end of its agent's socket: JSON lines, as docs/protocol.md describes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import pathlib
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SOCKET_ENV = "ELASTIC_AGENT_SOCKET"
WARM_UP_ENV = "ELASTIC_WARM_UP"

# The environment variables that `ready` and `quiesce` set, by the field of the place.
_PLACE_ENV = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "group_rank": "GROUP_RANK",
    "group_world_size": "GROUP_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "round": "ELASTIC_ROUND",
}


class AgentError(Exception):
    """The agent refused the request, is gone, or was never there. It is no RuntimeError, which PyTorch's failed
    collectives raise, and which scripts catch."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        # Whether the same request may succeed later, such as a commit while the store is away.
        self.again = again


class _Reply:
    """The reply that a request waits for."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.message: dict[str, Any] = {}


class _Agent:
    """A connection to the agent. One thread reads it while the script computes. Another calls the script's callbacks,
    which may themselves wait for an answer of the agent."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise AgentError(f"cannot reach the agent at {SOCKET_ENV}={path}: {error}") from error
        self._lock = threading.Lock()
        self._numbers = 0
        self._replies: dict[int, _Reply] = {}
        self._callbacks: list[Callable[[int, str], None]] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[int, str], None], int, str]] = queue.SimpleQueue()
        self._welcome = _Reply()
        self._forming: tuple[int, str] | None = None
        # Seconds that a worker has to quiesce. Older agents do not say.
        self.quiesce_time = 15.0
        self._forms = threading.Event()
        self._next = _Reply()
        self._gone = ""
        # Descriptors that came, in the order of the messages that they belong to.
        self._files: list[int] = []
        # A worker that is started ahead of its round is kept only if it knows about rounds.
        self.register(round_aware=os.environ.get(WARM_UP_ENV) == "1")
        threading.Thread(target=self._read, name="elastic-agent", daemon=True).start()
        threading.Thread(target=self._call, name="elastic-agent-callbacks", daemon=True).start()

    def register(self, round_aware: bool) -> None:
        self.send({"type": "register", "local_rank": local_rank(), "pid": os.getpid(), "round_aware": round_aware})

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps({name: value for name, value in message.items() if value is not None}) + "\n"
        try:
            with self._lock:
                self._socket.sendall(line.encode())
        except OSError as error:
            raise AgentError(f"the agent is gone: {error}") from error

    def ask(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        reply = _Reply()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._replies[number] = reply
            if self._gone:
                reply.came.set()
        self.send({**message, "id": number})
        try:
            return self._wait(reply, timeout, message["type"])
        finally:
            # An answer that comes too late is skipped.
            with self._lock:
                self._replies.pop(number, None)

    def welcome(self, timeout: float | None) -> dict[str, Any]:
        return self._wait(self._welcome, timeout, "register")

    def listen(self, callback: Callable[[int, str], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            if self._forming:
                self._calls.put((callback, *self._forming))

    def forming(self) -> tuple[int, str] | None:
        with self._lock:
            return self._forming

    def quiesce(self, step: int, timeout: float) -> dict[str, Any]:
        if not self._forms.wait(timeout):
            raise AgentError(f"no round is forming, {timeout} s on: ask for one by request_round")
        with self._lock:
            forming, self._next = self._forming, _Reply()
            reply = self._next
            if self._gone:
                reply.came.set()
        if forming:
            self.send({"type": "quiesced", "round": forming[0], "step": step})
        return self._wait(reply, None, "quiesced")

    def forms_within(self, timeout: float) -> bool:
        return self._forms.wait(timeout)

    def _wait(self, reply: _Reply, timeout: float | None, what: str) -> dict[str, Any]:
        if not reply.came.wait(timeout):
            raise AgentError(f"the agent did not answer `{what}` within {timeout} s", again=True)
        if not reply.message:
            raise AgentError(f"the agent is gone: {self._gone}")
        if reply.message["type"] == "error":
            raise AgentError(reply.message["message"], again=reply.message.get("again", False))
        return reply.message

    def _read(self) -> None:
        gone = "it closed the connection"
        try:
            rest = b""
            # By recvmsg: a file in memory comes beside the line that tells of it.
            while came := socket.recv_fds(self._socket, 1 << 16, 4):
                data, files = came[:2]
                self._files += files
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        except (OSError, ValueError) as error:
            gone = str(error)
        with self._lock:
            self._gone = gone
            waiting = [*self._replies.values(), self._welcome, self._next]
        self._forms.set()
        for reply in waiting:
            reply.came.set()

    def _call(self) -> None:
        while True:
            callback, round, reason = self._calls.get()
            try:
                callback(round, reason)
            except BaseException:  # SystemExit too, which would silently end only this thread.
                traceback.print_exc()

    def _take(self, message: dict[str, Any]) -> None:
        kind, number = message.get("type"), message.get("id")
        if kind == "forming":
            with self._lock:
                self._forming = forming = (message["round"], message["reason"])
                self.quiesce_time = message["quiesce_ms"] / 1000
                for callback in self._callbacks:
                    self._calls.put((callback, *forming))
            self._forms.set()
        elif kind == "assignment":
            with self._lock:
                self._forming = None
                self._forms.clear()
                self._welcome.message = message
                self._next.message = message
            self._next.came.set()
        elif number is not None:
            if kind == "memory":
                if not self._files:
                    raise ValueError("it named memory, and no file came with the line")
                message["file"] = self._files.pop(0)
            with self._lock:
                reply = self._replies.pop(number, None)
            if reply:
                reply.message = message
                reply.came.set()
            elif kind == "memory":
                os.close(message["file"])
        elif kind in ("welcome", "error") and not self._welcome.came.is_set():
            self._welcome.message = message
            self._welcome.came.set()
        elif kind == "error":
            # It answers `quiesced`, the only message that has no number.
            with self._lock:
                reply = self._next
            reply.message = message
            reply.came.set()
        # Message types of later versions are ignored.


_lock = threading.Lock()
_agent: _Agent | None = None
_process = 0


def available() -> bool:
    """Whether this process is a worker of an agent."""
    return bool(os.environ.get(SOCKET_ENV))


def local_rank() -> int:
    """This worker's position on its node. Under --virtual-local-rank all have a LOCAL_RANK of 0."""
    return int(os.environ.get("ELASTIC_LOCAL_RANK") or os.environ.get("LOCAL_RANK", "0"))


def _connected() -> _Agent:
    global _agent, _process
    path = os.environ.get(SOCKET_ENV)
    if not path:
        raise AgentError(f"{SOCKET_ENV} is not set: this process was not started by elastic-agent")
    with _lock:
        # A forked process, such as a DataLoader's worker, has the socket but not the thread that reads it.
        if _agent is None or _process != os.getpid():
            _agent, _process = _Agent(path), os.getpid()
        return _agent


def assignment(timeout: float | None = 30) -> dict[str, Any]:
    """The worker's place in its round: `job`, `round`, `rank`, `world_size`, `group_rank`, `group_world_size`,
    `master_addr`, `master_port`, `restart_count` and `checkpoint`, from which all members resume, or None."""
    return _place(_connected().welcome(timeout))


def _place(message: dict[str, Any]) -> dict[str, Any]:
    place = {name: value for name, value in message.items() if name != "type"}
    place.setdefault("checkpoint", None)
    return place


def keep_process() -> None:
    """Tells the agent that this worker knows about rounds: it is not stopped for one, and calls `quiesce` instead.

    The worker promises to agree with its peers on the state to continue from; some of them may have just started. Call
    this before training begins. Without an agent it does nothing.
    """
    if available():
        _connected().register(round_aware=True)


def ready(timeout: float | None = None) -> dict[str, Any]:
    """Tells the agent that this worker could begin at once, and that it knows about rounds, as `keep_process` does.
    Waits for the worker's place, and returns it as `assignment` does.

    With `elastic-agent --warm-up` a worker starts before its node joins, and has no place until then. When this returns,
    `RANK`, `WORLD_SIZE`, `GROUP_RANK`, `GROUP_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RESTART_COUNT` and
    `ELASTIC_ROUND` are set. Call this after the slow imports, and before anything that needs a rank. Without `--warm-up`
    it returns at once.
    """
    keep_process()
    return _entered(assignment(timeout))


def _entered(place: dict[str, Any]) -> dict[str, Any]:
    os.environ.update({name: str(place[key]) for key, name in _PLACE_ENV.items()})
    return place


def forming() -> tuple[int, str] | None:
    """The round that is forming and the reason for it, or None. Call this between two steps, and send the answer to all
    ranks in their next all-reduce: then all quiesce after the same step."""
    return _connected().forming() if available() else None


def quiesce_time() -> float:
    """The seconds in which this worker must quiesce when a round is forming, as the agent last said."""
    return _connected().quiesce_time


def quiesce(step: int, timeout: float = 60) -> dict[str, Any]:
    """Comes to rest after `step` steps, so that the next round can form. Returns this worker's place in that round, as
    `assignment` does. If no round is forming yet, this first waits until one is.

    Leave the old process group before, and join the new one after: the environment then holds the new place, as after
    `ready`. Raises AgentError if the agent refuses or is gone, or if no round is forming within `timeout` seconds. For
    its place it waits as long as its agent waits for other nodes: `join_timeout`, and while an operator has paused the
    job.
    """
    return _entered(_place(_connected().quiesce(step, timeout)))


def forms_within(timeout: float) -> bool:
    """Waits until a round is forming, for `timeout` seconds at most, and says whether one is."""
    return _connected().forms_within(timeout)


def request_round(reason: str, timeout: float | None = 30) -> None:
    """Requests a round, in which all workers meet again in their processes: for a group that is broken although no
    process has died, for example by a failed connection. Then call `quiesce`.

    It costs the job one restart of `--max-restarts`, unless a node turns out to be lost or leaving. The other workers
    hear of the round with `reason`. If one is forming already, nothing follows. This worker must have called
    `keep_process` or `ready`. Raises AgentError if the agent refuses, is gone, or does not answer within `timeout`
    seconds.
    """
    _connected().ask({"type": "request_round", "round": int(os.environ["ELASTIC_ROUND"]), "reason": reason}, timeout)


def memory(size: int, *, rescue: Sequence[str] = (), timeout: float | None = 30) -> mmap.mmap:
    """Memory of this node, of `size` bytes, that the agent keeps when this process ends. A later worker of this local
    rank, in any round of the job's generation, gets it with its contents if it requests the same size, or size 0.

    `rescue` is a command line that the agent runs when no worker of the job is left, to save what is in the memory:
    docs/protocol.md says what it gets and prints. Raises AgentError if there is nothing to get, if the node cannot spare
    so much, or if the agent is gone.
    """
    lent = _connected().ask({"type": "memory", "bytes": size, "rescue": list(rescue) or None}, timeout)
    try:
        return mmap.mmap(lent["file"], lent["bytes"])
    finally:
        os.close(lent["file"])


def forget_memory() -> None:
    """Gives the memory back: no process needs what is in it."""
    _connected().send({"type": "forget"})


def on_round_change(callback: Callable[[int, str], None]) -> None:
    """Calls `callback(round, reason)` when the next round is forming. The stop signal follows, so be brief. A worker
    that has called `keep_process` should quiesce instead.

    One thread runs all callbacks, and nothing else: a callback may wait for the commit of a checkpoint. An exception in a
    callback is printed and has no other effect.
    """
    if available():
        _connected().listen(callback)


def report_progress(
    step: int, *, epoch: int | None = None, loss: float | None = None, total_steps: int | None = None
) -> None:
    """Tells the agent how far this worker is: `step` steps are done, and epochs are counted from 0. Only the newest
    report counts. Without an agent this does nothing."""
    if available():
        # JSON has no word for infinity, nor for a loss that is not a number.
        loss = float(loss) if loss is not None and math.isfinite(loss) else None
        _connected().send(
            {"type": "progress", "step": step, "epoch": epoch, "loss": loss, "total_steps": total_steps}
        )


def steps_done(timeout: float | None = 30) -> int:
    """The furthest step that a worker of the job is known to have reported; 0 before the first. What was done before
    `elastic-agent --fresh` does not count. Raises AgentError if the agent cannot tell."""
    return _connected().ask({"type": "steps_done"}, timeout)["step"]


def running_round(timeout: float = 10) -> dict[str, Any] | None:
    """Before `ready`, in a worker that starts ahead of its place: the `round` that other nodes run, its `master_addr` and
    `master_port`, whose store serves this host, and `left_ms`, milliseconds in which this worker has to call `ready`.
    None if no round runs, or the agent does not say within `timeout` seconds."""
    path = os.environ.get(SOCKET_ENV)
    # To have registered is to be ready.
    if not path or os.environ.get(WARM_UP_ENV) != "1" or _agent is not None:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(timeout)
            agent.connect(path)
            agent.sendall(b'{"type":"running_round","id":1}\n')
            answer = json.loads(agent.makefile().readline())
    except (OSError, ValueError):
        return None
    # An older agent answers by an error.
    running = answer.get("running")
    return running and {**running, "left_ms": answer["left_ms"]}


def training_is_over(finished: bool = True) -> None:
    """Tells the agent that all workers have done the last step: what this one still does, it does by itself. No node is
    admitted to the round then. False: another training begins. Without an agent this does nothing."""
    if available():
        _connected().send({"type": "finished", "finished": finished})


def give_up(reason: str) -> NoReturn:
    """Ends this worker by an error that each restart would meet again, such as a loss that is not a number, or a wrong
    setting. The job ends with it, whatever restarts are left, and `reason` is its root cause. Prints `reason` and raises
    SystemExit, with exit code 1, also without an agent."""
    if available():
        with contextlib.suppress(AgentError):
            _connected().send({"type": "failing", "class": "permanent", "message": reason[:2000]})
    sys.exit(reason)


def digest_of(path: pathlib.Path) -> str:
    """The digest of a file's bytes, as a commit has it."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            sha.update(block)
    return f"sha256:{sha.hexdigest()}"


def barrier(name: str, timeout: float | None = None) -> None:
    """Returns when one worker of each node of the round has called this with the same name. A name can be used once in
    a round. Raises AgentError if the round ends before that, or after `timeout` seconds."""
    _connected().ask({"type": "barrier", "name": name}, timeout)


def commit_checkpoint(
    step: int, path: str | os.PathLike[str], *, digest: str | None = None, timeout: float | None = 600
) -> None:
    """Publishes the checkpoint at `path`, which holds `step` steps, is complete and durable. The job then resumes from
    it.

    `digest` is that of its bytes, as `algorithm:hex`; by default the SHA-256 of the file. Returns when the checkpoint is
    published. Raises AgentError if it never will be, because this node has left the round or a later step is committed;
    and after `timeout` seconds, if the store is away: the agent still tries.
    """
    path = pathlib.Path(path).absolute()
    if digest is None:
        if not path.is_file():
            raise ValueError(f"{path} is no file: give the manifest of the checkpoint, or its digest")
        digest = digest_of(path)
    checkpoint = {"step": step, "path": str(path), "digest": digest}
    _connected().ask({"type": "commit", "checkpoint": checkpoint}, timeout)
