"""Which of NVIDIA's libraries are found on this machine, where, their versions, and which are shadowed: found in
several places, where only the first counts."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

from report import result

DRIVER = "libcuda.so.1"
# By the names they are asked for, and the function that tells their version, if there is one.
WANTED = {
    DRIVER: "cuDriverGetVersion",
    "libcuda.so": "",
    "libnvidia-ml.so.1": "",
    "libnvrtc.so.13": "nvrtcVersion",
    "libnvrtc.so.12": "nvrtcVersion",
    "libnvrtc-builtins.so.13.0": "",
    "libcublasLt.so.13": "cublasLtGetVersion",
    "libcublasLt.so.12": "cublasLtGetVersion",
    "libnccl.so.2": "ncclGetVersion",
    "libcudart.so.13": "cudaRuntimeGetVersion",
}
# Folders of the driver, where containers get it from the host.
USUAL = ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
USUAL += ["/usr/local/cuda/lib64"]
PROGRAMS = ["nvidia-smi", "nvcc", "ncu", "compute-sanitizer", "cuobjdump"]
# A large library may have to be read from a slow disk.
LOADING = 60


def python_folders() -> "List[Path]":
    """The folders of NVIDIA's libraries in this Python's packages."""
    return [folder for root in sys.path if root for folder in sorted(Path(root).glob("nvidia/*/lib")) if folder.is_dir()]


def ask(*command: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command. One that cannot run, or takes too long, has failed and says why."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LOADING)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, -1, "", f"not told: {error}")


def loads(name: str) -> bool:
    """Whether the loader finds it by itself. A process of its own tries, since a loaded library stays loaded."""
    return ask(sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})").returncode == 0


def driver_folder() -> "Optional[Path]":
    """Where the driver is, if the loader does not find it by itself."""
    found = [Path(folder) for folder in USUAL if (Path(folder) / DRIVER).exists()]
    return found[0] if found and not loads(DRIVER) else None


def from_ldconfig() -> "Dict[str, List[Path]]":
    """What the loader's cache knows by each name."""
    known: Dict[str, List[Path]] = {}
    said = ask(shutil.which("ldconfig") or "/sbin/ldconfig", "-p").stdout
    for name, path in re.findall(r"^\s*(\S+) \([^)]*\) => (\S+)$", said, re.MULTILINE):
        known.setdefault(name, []).append(Path(path))
    return known


def places(name: str, cached: "Dict[str, List[Path]]") -> "List[Dict[str, str]]":
    """Where a library lies, in the order in which the trainer of this run looks."""
    variables = [(variable, os.environ.get(variable, "")) for variable in ["ELASTIC_CUDA_LIBRARIES", "LD_LIBRARY_PATH"]]
    looked = [(variable, Path(folder) / name) for variable, value in variables for folder in value.split(":") if folder]
    looked += [("ldconfig", path) for path in cached.get(name, [])]
    looked += [("this Python", folder / name) for folder in python_folders()]
    looked += [("usual", Path(folder) / name) for folder in USUAL]
    found: "List[Dict[str, str]]" = []
    for by, path in looked:
        if path.exists() and str(path) not in [one["path"] for one in found]:
            found.append({"by": by, "path": str(path), "is": str(path.resolve())})
    return found


def version(path: str, function: str) -> str:
    """The version that a library tells, asked in a process of its own."""
    told = ask(sys.executable, __file__, "--version-of", path, function)
    if told.returncode != 0:
        return "cannot be loaded: " + (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
    return told.stdout.strip()


def tell_version(path: str, function: str) -> None:
    # Libraries that it needs may lie in the same folder.
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if not function:
        return print("loads")
    first, second = ctypes.c_int(), ctypes.c_int()
    if function == "cublasLtGetVersion":
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return print(library.cublasLtGetVersion())
    if function == "nvrtcVersion":
        library.nvrtcVersion(ctypes.byref(first), ctypes.byref(second))
        return print(f"{first.value}.{second.value}")
    getattr(library, function)(ctypes.byref(first))
    print(first.value)


def asked(*command: str) -> str:
    told = ask(*command)
    return (told.stdout + told.stderr).strip()


def main() -> int:
    fields = "name,driver_version,memory.total,compute_mode,mig.mode.current,clocks.max.sm,pci.bus_id"
    result(gpu=asked("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"))
    print(asked("nvidia-smi"))
    result(kernel=" ".join(os.uname()[2:]), cpus=os.cpu_count(), libc=os.confstr("CS_GNU_LIBC_VERSION"))
    result(**{program: shutil.which(program) or "not on PATH" for program in PROGRAMS})
    variables = ["LD_LIBRARY_PATH", "ELASTIC_CUDA_LIBRARIES", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES"]
    result(**{name: os.environ.get(name, "not set") for name in variables})
    names = "torch triton numpy nvidia-cublas nvidia-cuda-nvrtc nvidia-nccl-cu13 nvidia-cuda-runtime"
    code = f"""
from importlib.metadata import PackageNotFoundError, version
for name in {names.split()!r}:
    try: print(name, version(name), end=', ')
    except PackageNotFoundError: print(name, 'is missing', end=', ')"""
    result(python=sys.executable, packages=asked(sys.executable, "-c", code).rstrip(", "))
    cached, lacking = from_ldconfig(), []
    for name, function in WANTED.items():
        found = places(name, cached)
        if not found:
            lacking.append(name)
            continue
        first, others = found[0], [one for one in found[1:] if one["is"] != found[0]["is"]]
        told, loader = version(first["path"], function), "finds one" if loads(name) else "finds none"
        result(library=name, version=told, path=first["path"], by=first["by"], loader=loader)
        for one in others:
            result(library=name, shadowed=one["path"], by=one["by"], version=version(one["path"], function))
    result(nowhere=" ".join(lacking) or "none")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--version-of"]:
        tell_version(*sys.argv[2:4])
    else:
        sys.exit(main())
