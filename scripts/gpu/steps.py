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


class Commands:
    """What steps run."""

    def __init__(self, setting: Setting) -> None:
        kit, dry = setting.kit, setting.dry
        self.kit, self.setting = kit, setting
        self.trainer, self.agent = str(kit / "elastic-trainer"), str(kit / "elastic-agent")
        self.size, self.device = ("small" if dry else "whole"), ("cuda" if setting.has_device() else "cpu")
        self.on_device = "cuda:0" if setting.has_device() else "cpu"
        self.digits = [self.trainer, *f"digits --epochs 2 --snapshot-every 0 --device {self.on_device}".split()]
        self.sanitizer = tool("compute-sanitizer", "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
        self.tested: "Dict[str, Optional[str]]" = {"ELASTIC_TEST_GPU": "small" if dry else "1"}
        # Why a step is left out.
        self.no_device = "" if setting.has_device() else "it needs a GPU"
        self.no_gpu = "it needs a GPU" if dry else ""
        self.no_torch = "" if importlib.util.find_spec("torch") else f"{sys.executable} has no torch"

    def script(self, name: str, *arguments: str) -> "List[str]":
        return [sys.executable, str(HERE / name), *arguments]

    def tests(self, *arguments: str) -> "List[str]":
        programs = f"{self.kit / 'cuda-tests'},{self.kit / 'gpu-tests'}"
        return self.script("rust_tests.py", programs, *arguments)

    def sanitized(self, tool: str) -> "List[str]":
        # A test of what is refused calls no CUDA, and that is no error.
        under = f"{self.sanitizer or 'compute-sanitizer'} --tool {tool} --error-exitcode 9 --require-cuda-init no"
        return self.tests(*KERNELS, "--skip", "sizes", "--jobs", "6", "--limit", "80", "--under", under)


def steps(setting: Setting) -> "List[Step]":
    """All steps of both parts."""
    commands = Commands(setting)
    return _first_part(commands) + _second_part(commands)


def _first_part(run: Commands) -> "List[Step]":
    dry, libraries = run.setting.dry, run.setting.libraries
    nowhere: "Dict[str, Optional[str]]" = {
        name: None for name in ["LD_LIBRARY_PATH", "ELASTIC_CUDA_LIBRARIES", "VIRTUAL_ENV", "CONDA_PREFIX"]
    }
    speed = [sys.executable, str(run.kit / "pytorch/bench_gpu.py"), run.trainer, "--turns", "1"]
    speed += ["--device", "cpu"] if dry else ["--only", "gpt-bf16,gpt-f32,digits", "--shards", "1"]
    return [
        Step(1, "libraries", "the GPU, and which libraries are found and which are shadowed", 60,
             run.script("libraries.py")),
        Step(1, "check", "each GPU multiplies, and multiplies right: elastic-trainer check-gpus", 60,
             [run.trainer, "check-gpus"], {}, run.no_device),
        Step(1, "trainer", "digits on GPU 0, with the libraries of this Python", 60, run.digits),
        Step(1, "no-path", "the same with no library path set and in no Python environment", 45, run.digits,
             {} if libraries else nowhere),
        Step(1, "environment", "the same in this Python's environment, with no library path set", 45, run.digits,
             {} if libraries else {**nowhere, "VIRTUAL_ENV": sys.prefix}),
        Step(1, "kernels", "each kernel and a model's pass beside references, also at GPT-2's sizes", 150,
             run.tests(*KERNELS, "--skip", TIMED, "--jobs", "4", "--limit", "120"), run.tested, run.no_device),
        Step(1, "products", "products of numbers rounded to bf16", 60,
             run.tests("products::", "--jobs", "4"), run.tested, run.no_device),
        Step(1, "graphs", "launches captured and replayed, and copies of the state in the same run", 60,
             run.tests("graphs::", "state::", "--jobs", "4"), run.tested, run.no_device),
        Step(1, "losses", "three steps of GPT-2 on the CPU, and on the GPU in f32 and bf16: losses compared", 180,
             run.script("losses.py", run.trainer, run.device, run.size)),
        Step(1, "speed", "tokens a second beside PyTorch's, eager and compiled", 300, speed, {}, run.no_torch),
    ]


def _second_part(run: Commands) -> "List[Step]":
    dry, nccl_library = run.setting.dry, run.setting.nccl_library
    nccl = [run.trainer, run.agent, "--device", run.device, *(["--small"] if dry else [])]
    nccl += ["--nccl-library", nccl_library] if nccl_library else []
    in_torch = ["--device", "cpu", "--small"] if dry else []
    no_nccl = "" if not run.setting.libraries or nccl_library else "it needs a stand-in for NCCL (--nccl-library)"
    no_ncu = run.no_gpu or ("" if find_ncu() else "there is no ncu here; kernels-timed has times by the clock")
    no_sanitizer = run.no_gpu or ("" if run.sanitizer else "there is no compute-sanitizer here")
    return [
        Step(2, "nccl", "NCCL between three processes on this GPU: sums, a death, a return, a stop", 270,
             run.script("nccl.py", *nccl), {}, no_nccl),
        Step(2, "session", "sessions in PyTorch that sum over NCCL: a death, a return; and what a session costs", 150,
             run.script("session.py", run.agent, str(run.kit / "pytorch/trains_by_nccl.py"), *in_torch),
             {"PYTHONPATH": f"{run.kit}:{run.kit / 'pytorch'}"}, run.no_torch),
        Step(2, "snapshots-timed", "what snapshots of GPT-2 cost; aims: 40 GB/s, and 10 ms at the 99th percentile", 60,
             run.tests("snapshots::timed"), run.tested, run.no_gpu),
        Step(2, "kernels-timed", "time of each product and of attention, by the clock", 60,
             run.tests("kernels::sizes::kernels_are_timed"), run.tested, run.no_gpu),
        Step(2, "ncu", "time of each kernel of a step, by Nsight Compute", 100,
             run.script("kernel_times.py", "ncu", run.trainer, run.size, run.on_device), {}, no_ncu),
        Step(2, "choices", "what cuBLASLt chooses for each product of GPT-2", 80,
             run.script("kernel_times.py", "choices", run.trainer, run.size, run.on_device), {}, run.no_gpu),
        Step(2, "memcheck", "memory errors in kernels, by compute-sanitizer", 100, run.sanitized("memcheck"),
             {"ELASTIC_TEST_GPU": "small"}, no_sanitizer),
        Step(2, "racecheck", "races in shared memory, by compute-sanitizer", 100, run.sanitized("racecheck"),
             {"ELASTIC_TEST_GPU": "small"}, no_sanitizer),
    ]


# Their names.
STEPS = [step.name for step in steps(Setting(Path()))]
