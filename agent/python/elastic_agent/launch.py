"""Runs a function on the workers of an elastic-agent, from Python: what torch.distributed.launcher's `elastic_launch`
does, such as in a notebook. PyTorch is not needed."""

from __future__ import annotations

import ctypes
import json
import multiprocessing.spawn
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from . import program
from .errors import ERROR_FILE_ENV, record

# Seconds in which the agent ends after an interrupt: workers have thirty, the kill takes the rest.
_ENDS_WITHIN = 40.0
_PR_SET_PDEATHSIG = 1


class LaunchError(RuntimeError):
    """The job has failed, or this node could not take part. The message is the job's root cause. If a worker has failed,
    and PyTorch's `ChildFailedError` is imported, it is one of these, too."""


class elastic_launch:
    """Runs a function on `nproc_per_node` workers of this node, as one node of a job.

    ::

        from torch.distributed.launcher.api import LaunchConfig
        from elastic_agent.launch import elastic_launch

        config = LaunchConfig(1, 4, 8, run_id="JOB", rdzv_backend="etcd", rdzv_endpoint="etcd0:2379")
        losses = elastic_launch(config, train)(epochs=10)

    config: PyTorch's `LaunchConfig`, or anything with fields of these names. entrypoint: a function of a module, of the
    running script or, with `cloudpickle`, of a notebook; or the path of a program.

    The call returns what the function returned on this node's workers, by global rank (None for a program). It raises
    LaunchError if the job fails. Ctrl-C, a notebook's interrupt or the end of this process stops the job's node. `PET_*`
    variables count for a command line, not here.
    """

    def __init__(self, config: Any, entrypoint: Callable[..., Any] | str) -> None:
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *arguments: Any, **named: Any) -> dict[int, Any]:
        with tempfile.TemporaryDirectory(prefix="elastic-launch-") as name:
            folder = pathlib.Path(name)
            if callable(self._entrypoint):
                (folder / "call").write_bytes(_call(self._entrypoint, arguments, named))
                worker = ["--module", __name__, name]
            else:
                if named:
                    raise TypeError("a program takes no named arguments")
                worker = ["--no-python", self._entrypoint, *map(str, arguments)]
            code = _run([program.path(), "torchrun-compat", *flags_of(self._config), *worker], folder / "error")
            if code != 0:
                raise _failed(_name(self._entrypoint), folder / "error", code)
            return _results(folder)


def flags_of(config: Any) -> list[str]:
    """The command line that says what a `LaunchConfig` says."""

    def given(name: str) -> Any:
        return getattr(config, name, None)

    flags = [f"--nnodes={config.min_nodes}:{config.max_nodes}", f"--nproc-per-node={config.nproc_per_node}"]
    names = "role rdzv_backend rdzv_endpoint max_restarts monitor_interval local_addr log_line_prefix_template"
    names += " event_log_handler signals_to_handle shutdown_timeout"
    named = {"rdzv-id": given("run_id"), **{name.replace("_", "-"): given(name) for name in names.split()}}
    flags += [f"--{flag}={value}" for flag, value in named.items() if value not in (None, "")]
    settings = ",".join(f"{name}={value}" for name, value in (given("rdzv_configs") or {}).items())
    flags += [f"--rdzv-conf={settings}"] if settings else []
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        flags += [f"--{name.replace('_', '-')}={','.join(given(name))}"] if given(name) else []
    flags += ["--virtual-local-rank"] if given("virtual_local_rank") else []
    logs = given("logs_specs")
    if logs is not None:
        # PyTorch's classes keep these to themselves.
        folder, ranks = getattr(logs, "_root_log_dir", None), getattr(logs, "_local_ranks_filter", None)
        flags += [f"--log-dir={folder}"] if folder else []
        flags += [f"--local-ranks-filter={','.join(map(str, sorted(ranks)))}"] if ranks else []
        flags += [f"--{name}={streams}" for name in ("redirects", "tee") if (streams := _streams(logs, name))]
    return flags


def _streams(logs: Any, name: str) -> str:
    """PyTorch's `Std`, or one for each local rank, as torchrun writes it."""
    streams = getattr(logs, f"_{name}", None)
    if isinstance(streams, dict):
        return ",".join(f"{rank}:{int(std)}" for rank, std in streams.items())
    return str(int(streams)) if streams else ""


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    """A call that another process can do."""
    name = _name(function)
    # How the processes of `multiprocessing` find what a script has defined.
    here = multiprocessing.spawn.get_preparation_data("worker")
    here = {fact: here[fact] for fact in ("sys_path", "init_main_from_name", "init_main_from_path") if fact in here}
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
        can_be_found = here.keys() & {"init_main_from_name", "init_main_from_path"}
        if getattr(function, "__module__", None) == "__main__" and not can_be_found:
            raise LaunchError(
                f"{name} is defined in a notebook or on the command line, where other processes cannot load "
                "it from: pip install cloudpickle, or put it into a module"
            ) from None
    try:
        return pickle.dumps((here, pickler.dumps((function, arguments, named))))
    except Exception as error:
        raise LaunchError(f"{name} and what it is called with cannot be sent to a worker: {error}") from error


def _name(entrypoint: Callable[..., Any] | str) -> str:
    if isinstance(entrypoint, str):
        return entrypoint
    return getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__)


def _run(command: list[str], error_file: pathlib.Path) -> int:
    """The exit code of an agent that ends with this process. Its output goes where this process's own `print` does."""
    elsewhere = sys.stdout is not sys.__stdout__
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if elsewhere else {}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    environment = {**inherited, "PYTHON_EXEC": sys.executable, ERROR_FILE_ENV: str(error_file)}
    prctl = ctypes.CDLL(None).prctl
    agent = subprocess.Popen(
        command,
        env=environment,
        # A terminal, or a notebook, interrupts all processes of a group at once. The agent would take ours for a
        # second time.
        start_new_session=True,
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        errors="replace",
        **streams,
    )
    readers = []
    if elsewhere:
        for source, sink in ((agent.stdout, sys.stdout), (agent.stderr, sys.stderr)):
            readers.append(threading.Thread(target=_copy, args=(source, sink), daemon=True))
            readers[-1].start()
    try:
        code = agent.wait()
    except BaseException:
        agent.send_signal(signal.SIGINT)
        try:
            agent.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
        raise
    finally:
        for reader in readers:
            reader.join()
    return code


def _copy(source: IO[str], sink: Any) -> None:
    with source:
        for line in source:
            sink.write(line)
            sink.flush()


def _failed(name: str, error_file: pathlib.Path, code: int) -> LaunchError:
    """The failure of a launch, as who calls PyTorch's `elastic_launch` expects it."""
    try:
        message = json.loads(error_file.read_text())["message"]
        extra, code = message["extraInfo"], message.get("errorCode", code)
        cause = "\n\n".join(filter(None, (message["message"], extra["py_callstack"])))
    except (OSError, ValueError, KeyError, TypeError):
        return LaunchError(f"elastic-agent ended with exit code {code}: its output says why")
    # Who catches PyTorch's has imported it.
    errors = sys.modules.get("torch.distributed.elastic.multiprocessing.errors")
    if errors is None:
        return LaunchError(cause)

    class ChildFailed(errors.ChildFailedError, LaunchError):
        def __reduce__(self) -> tuple[Any, ...]:
            return LaunchError, self.args

    # What is no worker's failure, such as the loss of a node, has no rank. Older agents name none.
    told = [extra.get(fact) for fact in ("rank", "local_rank", "pid")]
    rank, *worker = [-1 if fact is None else fact for fact in told]
    failed = ChildFailed(name, {rank: errors.ProcessFailure(*worker, code, str(error_file))})
    failed.args = (cause,)
    return failed


def _results(folder: pathlib.Path) -> dict[int, Any]:
    """What the workers of the last round returned."""
    found = {}
    for path in folder.glob("result-*"):
        _, round_, rank = path.name.split("-")
        found[int(round_), int(rank)] = path
    last = max((round_ for round_, _ in found), default=0)
    return {rank: pickle.loads(path.read_bytes()) for (round_, rank), path in sorted(found.items()) if round_ == last}


@record
def main() -> None:
    """A worker: does the call, and leaves what it returned."""
    folder = pathlib.Path(sys.argv[1])
    here, call = pickle.loads((folder / "call").read_bytes())
    multiprocessing.spawn.prepare(here)
    function, arguments, named = pickle.loads(call)
    returned = function(*arguments, **named)
    path = folder / f"result-{os.environ['ELASTIC_ROUND']}-{os.environ['RANK']}"
    part = path.with_name(f".{path.name}")
    part.write_bytes(pickle.dumps(returned))
    part.rename(path)


if __name__ == "__main__":
    main()
