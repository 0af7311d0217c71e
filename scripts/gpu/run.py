"""Runs the steps of one part on a machine with a GPU: run.py --part 1|2. Each step has its own time limit and its own
log, and none stops the next. After each step it writes partN.json, partN.txt (for people) and partN-logs.txt into
--out, so that what was learned is there whatever happens next. Needs Python's standard library alone."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Callable

from libraries import driver_folder, python_folders
from steps import STEPS, Setting, Step, steps

HERE = Path(__file__).resolve().parent
# Seconds for a part. A machine may allow a command ten minutes, and files have to be copied back.
SECONDS = 525.0
# With fewer seconds left no step is started.
TOO_LITTLE = 5.0
# Bytes of a step's log that are kept: half from its beginning, half from its end.
KEPT = 1 << 20
# Lines of each kind that the report shows of it.
SHOWN = 12
# A variable in the environment of all processes that a step starts.
MARK = "ELASTIC_GPU_STEP"


def environment(setting: Setting, kept: Path) -> "dict[str, str]":
    """The environment of steps: the caller's, with NVIDIA's libraries of this Python, and new folders."""
    folders = setting.libraries or python_folders()
    changed = {
        "ELASTIC_CUDA_LIBRARIES": ":".join(map(str, folders)),
        "HOME": str(kept),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(kept),
        "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"),
        "XDG_CACHE_HOME": str(kept / "cache"),
    }
    hidden = None if setting.libraries else driver_folder()
    if hidden is not None:
        print(f"gpu: the loader does not find the driver; {hidden}, where it is, is put on LD_LIBRARY_PATH", flush=True)
        changed["LD_LIBRARY_PATH"] = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(hidden)]))
    return {**os.environ, **changed}


def end_all(mark: str) -> int:
    """Kills all processes with this mark, in any group and session. Returns how many there were."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for _ in range(20):
        fresh = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, wanted)]
        if not fresh:
            break
        for pid in fresh:
            found.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.05)
    return len(found)


def _has(pid: int, wanted: bytes) -> bool:
    try:
        if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        # Dead processes keep an entry until their parent has waited for them.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def run(step: Step, surroundings: "dict[str, str]", kept: Path, seconds: float) -> "tuple[dict, str]":
    """A step's result, and its log."""
    path, mark = kept / f"{step.name}.log", uuid.uuid4().hex
    variables = {**surroundings, **step.variables, MARK: mark}
    variables = {name: value for name, value in variables.items() if value is not None}
    began = time.monotonic()
    with open(path, "w") as log:
        try:
            child = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=kept,
                start_new_session=True,
            )
        except OSError as error:
            return {"outcome": f"cannot be started: {error}", "seconds": 0.0}, ""
        try:
            code = child.wait(seconds)
            outcome = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"ended at its limit of {seconds:.0f} s"
        took = time.monotonic() - began
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
    left = end_all(mark)
    if left and outcome == "ok":
        outcome = f"left {left} processes behind"
    text = path.read_text(errors="replace")
    return {"outcome": outcome, "seconds": round(took, 1), **read(text, outcome == "ok")}, text


def read(text: str, well: bool) -> dict:
    """A log's figures (lines of JSON behind `result: `), its warnings, and its end if the step failed."""
    lines, figures = text.splitlines(), []
    for line in lines:
        if line.startswith("result: "):
            try:
                figure = json.loads(line[len("result: ") :])
            except ValueError:
                figure = None
            figures.append(figure if isinstance(figure, dict) else {"unreadable": line})

    def those_with(*words: str) -> "list[str]":
        found = [line.strip()[:400] for line in lines if any(word in line for word in words)]
        return list(dict.fromkeys(found))[:SHOWN]

    # The lines that say which GPU and which libraries the trainer took are shown too.
    libraries, warnings = those_with("INFO computes on", "INFO NCCL "), those_with(" WARN ", " ERROR ")
    told = {"figures": figures, "libraries": libraries, "warnings": warnings}
    return told if well else {**told, "last": [line[:400] for line in lines[-15:]]}


def cut(text: str) -> str:
    if len(text) <= KEPT:
        return text
    return f"{text[: KEPT // 2]}\n[{len(text) - KEPT} characters are left out]\n{text[-KEPT // 2 :]}"


def as_text(report: dict) -> str:
    """The report as people read it: a table of steps, then what each found."""
    results = report["steps"]
    width = max(map(len, results), default=0)
    lines = [f"part {report['part']}, {report['machine']}, {report['date']}, {report['seconds']:.0f} s"]
    lines += [report["dry"]] if report["dry"] else []
    lines += [f"  {name:{width}}  {one['seconds']:6.1f} s  {one['outcome']}" for name, one in results.items()]
    for name, one in results.items():
        lines += ["", f"{name}: {one['what']}"]
        figures = one.get("figures", [])
        lines += ["    " + ", ".join(f"{key} {value}" for key, value in found.items()) for found in figures]
        lines += [f"    said: {line}" for line in one.get("libraries", [])]
        lines += [f"    warned: {line}" for line in one.get("warnings", [])]
        lines += [f"    | {line}" for line in one.get("last", [])]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a file so that it is complete at any time, since this run may be killed."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def run_all(
    chosen: "list[Step]",
    surroundings_in: "Callable[[Path], dict[str, str]]",
    report: dict,
    out: Path,
    seconds: float = SECONDS,
) -> bool:
    """Runs the steps one after the other. Returns whether all went well."""
    name, logs, began = f"part{report['part']}", "", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        kept = Path(folder)
        surroundings = surroundings_in(kept)
        for step in chosen:
            left, text = seconds - (time.monotonic() - began), ""
            if step.left_out:
                result = {"outcome": f"left out: {step.left_out}", "seconds": 0.0}
            elif left < TOO_LITTLE:
                result = {"outcome": "not begun: the part's time is over", "seconds": 0.0}
            else:
                print(f"gpu: {step.name}: {step.what}", flush=True)
                result, text = run(step, surroundings, kept, min(step.seconds, left))
            print(f"gpu: {step.name}: {result['outcome']}, {result['seconds']} s", flush=True)
            report["steps"][step.name] = {"what": step.what, **result}
            report["seconds"] = round(time.monotonic() - began, 1)
            logs += f"==== {step.name}: {result['outcome']}\n{cut(text)}\n"
            write(out / f"{name}.json", json.dumps(report, indent=1))
            write(out / f"{name}.txt", as_text(report))
            write(out / f"{name}-logs.txt", logs)
    outcomes = [one["outcome"] for one in report["steps"].values()]
    return all(outcome == "ok" or report["dry"] and outcome.startswith("left out") for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    kit = "the folder that `make gpu-kit` made [default: the one that this lies in]"
    parser.add_argument("--prebuilt", type=Path, default=HERE.parent, help=kit)
    parser.add_argument("--part", type=int, choices=[1, 2], required=True)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="where results go [default: gpu-results]")
    parser.add_argument("--only", default="", help="names of steps, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that the part may take [default: {SECONDS:.0f}]")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, and what runs without a GPU")
    parser.add_argument("--libraries", default="", help="with --dry-run: folders of stand-ins for CUDA's libraries")
    parser.add_argument("--nccl-library", default="", help="with --dry-run: a stand-in for NCCL's")
    arguments = parser.parse_args()
    if not arguments.dry_run:
        if arguments.libraries or arguments.nccl_library:
            parser.error("--libraries and --nccl-library are for --dry-run")
        if not any(Path("/dev").glob("nvidia*")):
            why = "this machine shows no NVIDIA GPU (no /dev/nvidia…); --dry-run runs what needs none"
            print(f"gpu: {why}", file=sys.stderr)
            return 2
    kit, out = arguments.prebuilt.resolve(), arguments.out.resolve()
    for program in ["elastic-trainer", "elastic-agent", "cuda-tests", "gpu-tests"]:
        if not os.access(kit / program, os.X_OK):
            print(f"gpu: {kit} has no program {program}: make it with `make gpu-kit`", file=sys.stderr)
            return 2
    only = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in only if name not in STEPS]
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}, but {', '.join(STEPS)}")
    setting = Setting(
        kit=kit,
        dry=arguments.dry_run,
        libraries=tuple(Path(folder).resolve() for folder in arguments.libraries.split(":") if folder),
        nccl_library=arguments.nccl_library,
    )
    out.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps(setting) if step.part == arguments.part and (not only or step.name in only)]
    report = {
        "part": arguments.part,
        "machine": " ".join(os.uname()[1:3]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": f"{sys.executable} {sys.version.split()[0]}",
        "kit": json.loads((kit / "kit.json").read_text()) if (kit / "kit.json").exists() else {},
        "dry": "a dry run: small sizes, and no GPU; these are no results" if setting.dry else "",
        "seconds": 0.0,
        "steps": {},
    }
    well = run_all(chosen, lambda kept: environment(setting, kept), report, out, arguments.seconds)
    print(as_text(report), end="")
    print(f"gpu: results are in {out}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
