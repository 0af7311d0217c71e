"""What is run on a machine with a GPU, in this order: part 1 answers whether it works and how fast it is, part 2 what
takes a closer look. run.py runs it."""

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from kernel_times import find_ncu, tool

HERE = Path(__file__).resolve().parent
# Tests of the kernels, as `make gpu` runs them, without those that only measure.
KERNELS = ["kernels::", "bf16::", "models::"]
TIMED = "timed"


@dataclass(frozen=True)
class Setting:
    """What steps are made of."""

    kit: Path
    # Small sizes, and no GPU.
    dry: bool = False
    # Stand-ins for the libraries, in a dry run.
    libraries: Tuple[Path, ...] = ()
    nccl_library: str = ""

    def has_device(self) -> bool:
        """A GPU, or its stand-in."""
        return not self.dry or bool(self.libraries)


@dataclass(frozen=True)
class Step:
    """A command with a limit."""

    part: int
    name: str
    what: str
    seconds: float
    command: List[str]
    # Variables of its own. None: the variable must not be set.
    variables: Dict[str, Optional[str]] = field(default_factory=dict)
    # Why it is not run here.
    left_out: str = ""


def steps(setting: Setting) -> "List[Step]":
    """All steps of both parts."""
    kit, dry = setting.kit, setting.dry
    trainer, agent = str(kit / "elastic-trainer"), str(kit / "elastic-agent")
    size, device = ("small" if dry else "whole"), ("cuda" if setting.has_device() else "cpu")
    on_device = "cuda:0" if setting.has_device() else "cpu"
    digits = [trainer, *f"digits --epochs 2 --snapshot-every 0 --device {on_device}".split()]
    tested = {"ELASTIC_TEST_GPU": "small" if dry else "1"}
    no_device = "" if setting.has_device() else "it needs a GPU"
    no_gpu = "it needs a GPU" if dry else ""
    no_torch = "" if importlib.util.find_spec("torch") else f"{sys.executable} has no torch"

    sanitizer = tool("compute-sanitizer", "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    no_ncu = no_gpu or ("" if find_ncu() else "there is no ncu here; kernels-timed has times by the clock")
    no_sanitizer = no_gpu or ("" if sanitizer else "there is no compute-sanitizer here")

    def script(name: str, *arguments: str) -> "List[str]":
        return [sys.executable, str(HERE / name), *arguments]

    def tests(*arguments: str) -> "List[str]":
        programs = ",".join(str(kit / name) for name in ["cuda-tests", "gpu-tests"])
        return script("rust_tests.py", programs, *arguments)

    def sanitized(tool: str) -> "List[str]":
        # A test of what is refused calls no CUDA, and that is no error.
        under = f"{sanitizer or 'compute-sanitizer'} --tool {tool} --error-exitcode 9 --require-cuda-init no"
        return tests(*KERNELS, "--skip", "sizes", "--jobs", "6", "--limit", "80", "--under", under)

    nowhere: "Dict[str, Optional[str]]" = {
        name: None for name in ["LD_LIBRARY_PATH", "ELASTIC_CUDA_LIBRARIES", "VIRTUAL_ENV", "CONDA_PREFIX"]
    }
    speed = [sys.executable, str(kit / "pytorch/bench_gpu.py"), trainer, "--turns", "1"]
    speed += ["--device", "cpu"] if dry else ["--only", "gpt-bf16,gpt-f32,digits", "--shards", "1"]
    nccl = [trainer, agent, "--device", device, *(["--small"] if dry else [])]
    nccl += ["--nccl-library", setting.nccl_library] if setting.nccl_library else []
    in_torch = ["--device", "cpu", "--small"] if dry else []
    no_nccl = "" if not setting.libraries or setting.nccl_library else "it needs a stand-in for NCCL (--nccl-library)"
    return [
        Step(1, "libraries", "the GPU, and which libraries are found and which are shadowed", 60, script("libraries.py")),
        Step(1, "check", "each GPU multiplies, and multiplies right: elastic-trainer check-gpus", 60,
             [trainer, "check-gpus"], {}, no_device),
        Step(1, "trainer", "digits on GPU 0, with the libraries of this Python", 60, digits),
        Step(1, "no-path", "the same with no library path set and in no Python environment", 45, digits,
             {} if setting.libraries else nowhere),
        Step(1, "environment", "the same in this Python's environment, with no library path set", 45, digits,
             {} if setting.libraries else {**nowhere, "VIRTUAL_ENV": sys.prefix}),
        Step(1, "kernels", "each kernel and a model's pass beside references, also at GPT-2's sizes", 150,
             tests(*KERNELS, "--skip", TIMED, "--jobs", "4", "--limit", "120"), tested, no_device),
        Step(1, "products", "products of numbers rounded to bf16", 60,
             tests("products::", "--jobs", "4"), tested, no_device),
        Step(1, "graphs", "launches captured and replayed, and copies of the state in the same run", 60,
             tests("graphs::", "state::", "--jobs", "4"), tested, no_device),
        Step(1, "losses", "three steps of GPT-2 on the CPU, and on the GPU in f32 and bf16: losses compared", 180,
             script("losses.py", trainer, device, size)),
        Step(1, "speed", "tokens a second beside PyTorch's, eager and compiled", 300, speed, {}, no_torch),
        Step(2, "nccl", "NCCL between three processes on this GPU: sums, a death, a return, a stop", 270,
             script("nccl.py", *nccl), {}, no_nccl),
        Step(2, "session", "sessions in PyTorch that sum over NCCL: a death, a return; and what a session costs", 150,
             script("session.py", agent, str(kit / "pytorch/trains_by_nccl.py"), *in_torch),
             {"PYTHONPATH": f"{kit}:{kit / 'pytorch'}"}, no_torch),
        Step(2, "snapshots-timed", "what snapshots of GPT-2 cost; aims: 40 GB/s, and 10 ms at the 99th percentile", 60,
             tests("snapshots::timed"), tested, no_gpu),
        Step(2, "kernels-timed", "time of each product and of attention, by the clock", 60,
             tests("kernels::sizes::kernels_are_timed"), tested, no_gpu),
        Step(2, "ncu", "time of each kernel of a step, by Nsight Compute", 100,
             script("kernel_times.py", "ncu", trainer, size, on_device), {}, no_ncu),
        Step(2, "choices", "what cuBLASLt chooses for each product of GPT-2", 80,
             script("kernel_times.py", "choices", trainer, size, on_device), {}, no_gpu),
        Step(2, "memcheck", "memory errors in kernels, by compute-sanitizer", 100, sanitized("memcheck"),
             {"ELASTIC_TEST_GPU": "small"}, no_sanitizer),
        Step(2, "racecheck", "races in shared memory, by compute-sanitizer", 100, sanitized("racecheck"),
             {"ELASTIC_TEST_GPU": "small"}, no_sanitizer),
    ]


# Their names.
STEPS = [step.name for step in steps(Setting(Path()))]
