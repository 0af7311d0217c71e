"""Imports modules once, and forks workers that have them: `elastic-agent --preload`. The agent's guard starts it, as
`python -m elastic_agent.nursery MODULE,... PYTHON -u SCRIPT ...`, and orders each worker (agent/src/guard/nursery.rs). The
words after the modules are a worker's command line."""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import sys
import time
import traceback
import types
import warnings

_PR_SET_PDEATHSIG = 1

# How far a worker's start came when it failed, as the guard counts it.
_PREPARE, _DIRECTORY, _CPUS = 0, 1, 3


def main() -> None:
    modules, words = sys.argv[1].split(","), sys.argv[4:]
    guard = os.getppid()
    channel = socket.socket(fileno=os.dup(0))
    channel.setblocking(True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _look_beside(words)
    with open("/proc/self/environ", "rb") as environ:
        given = _variables(environ.read().split(b"\0")[:-1])
    why = _import(modules, channel)
    # Each import would make these changes in a worker too.
    changed = {name: value for name, value in os.environb.items() if given.get(name) != value}
    # Else each worker would print what C has in its buffers.
    ctypes.CDLL(None).fflush(None)
    # What is imported stays, and a collection in a worker would copy the memory of all of it.
    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"Refused": why[:400]} if why else "Ready").encode())
    while True:
        order, descriptors, _, _ = socket.recv_fds(channel, 4096, 5)
        if not order:
            return
        if _forked(guard, descriptors[1]):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    channel.close()
    command, variables = _become(json.loads(order), *descriptors)
    variables.update({name: value for name, value in changed.items() if variables.get(name) == given.get(name)})
    _set_variables(variables)
    _run(command)


def _import(modules: list[str], channel: socket.socket) -> str:
    """Imports the modules. Returns why no worker can be forked afterwards, if none can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return f"importing {module} failed: {traceback.format_exception_only(type(error), error)[-1].strip()}"
        if kept := _unshareable(channel):
            return f"importing {module} {kept}, which no forked worker can use: leave {module} out"
    return ""


def _unshareable(channel: socket.socket) -> str:
    """What this process has that a forked one would lack, or would share with its siblings."""
    if len(os.listdir("/proc/self/task")) > 1:
        # Threads of a library that knows about forks end with the first one, as OpenBLAS's do.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = os.fork()
        if not first:
            os._exit(0)
        os.waitpid(first, 0)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"started {threads - 1} thread(s)"
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        if children.read().split():
            return "started a process"
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith("socket:") and number > 2 and number != channel.fileno():
            return "opened a connection"
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            return "opened a GPU"
    return ""


def _forked(guard: int, start: int) -> bool:
    """Forks a worker. True in the worker, once it is a child of the guard, which knows it."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # The guard may have died before the line above. Then the signal will never come.
    if os.getppid() != guard:
        os._exit(127)
    os.set_blocking(start, True)
    try:
        os.write(start, struct.pack("=i", os.getpid()))
        if os.read(start, 1):
            return True
    except OSError:
        pass
    # The guard has given the order up.
    os._exit(127)


def _become(order: dict, body: int, start: int, *streams: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Gives the worker its session, streams, processors and folder. Returns its command line and variables."""
    strings = os.pread(body, os.fstat(body).st_size, 0).split(b"\0")[:-1]
    step = _PREPARE
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        step = _CPUS
        if cpus := {64 * n + bit for n, word in enumerate(order["cpus"]) for bit in range(64) if word >> bit & 1}:
            os.sched_setaffinity(0, cpus)
        step = _DIRECTORY
        os.chdir(strings[0])
    except OSError as error:
        os.write(start, struct.pack("=Bi", step, error.errno))
        os._exit(127)
    for descriptor in (body, start, *streams):
        os.close(descriptor)
    # Made again, because what it read from was no standard input.
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)
    # Python's own generator does this by itself.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    end = 1 + order["arguments"]
    return strings[1:end], _variables(strings[end:])


def _variables(strings: list[bytes]) -> dict[bytes, bytes]:
    return dict(string.split(b"=", 1) for string in strings if b"=" in string[1:])


def _set_variables(wanted: dict[bytes, bytes]) -> None:
    for name in [name for name in os.environb if name and name not in wanted]:
        del os.environb[name]
    os.environb.update({name: value for name, value in wanted.items() if name})


def _look_beside(words: list[str]) -> None:
    """Makes the first place to import from what it is for a Python with this command line."""
    if getattr(sys.flags, "safe_path", False):
        return
    if words[0] in ("-c", "-m"):
        sys.path[0] = "" if words[0] == "-c" else os.getcwd()
    else:
        script = os.path.realpath(words[0])
        sys.path[0] = script if os.path.isdir(script) else os.path.dirname(script)


def _run(command: list[bytes]) -> None:
    """Runs a command line `python -u ...` as Python does."""
    _show(command)
    argv = [os.fsdecode(word) for word in command]
    sys.orig_argv = argv
    words = argv[2:]
    _look_beside(words)
    module = types.ModuleType("__main__")
    module.__builtins__ = builtins
    sys.modules["__main__"] = module
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec", dont_inherit=True), module.__dict__)
        else:
            sys.argv = words
            _run_script(words[0], module)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # The frames of this file are no part of the script.
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == main.__code__.co_filename:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run_script(script: str, module: types.ModuleType) -> None:
    path = os.path.join(os.getcwd(), script)
    if pkgutil.get_importer(path) is not None:
        # A folder or an archive that has a `__main__`.
        sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [path]
        runpy._run_module_as_main("__main__", False)
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    module.__file__, module.__cached__ = path, None
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _show(command: list[bytes]) -> None:
    """Makes `ps` show a worker's command line. Its text takes the place of this process's, which is longer."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(") ")[2].split()
    first, end = int(fields[45]), int(fields[46])
    if 0 < first < end:
        ctypes.memmove(first, b"\0".join(command)[: end - first - 1].ljust(end - first, b"\0"), end - first)


if __name__ == "__main__":
    main()
