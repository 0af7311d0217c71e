"""That the runner keeps its promises, with steps that need no GPU: python3 -m unittest discover -s scripts/gpu."""

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import kernel_times
import libraries
import run
from steps import Setting, Step, steps

HERE = Path(__file__).resolve().parent


def script(code, **more):
    return Step(1, more.pop("name", "one"), "a step", more.pop("seconds", 20), [sys.executable, "-c", code], **more)


def program(folder, name, code):
    path = Path(folder, name)
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return str(path)


class Steps(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name)

    def run_all(self, *chosen, seconds=60.0, dry=""):
        report = {"part": 1, "machine": "here", "date": "today", "dry": dry, "seconds": 0.0, "steps": {}}
        with mock.patch("builtins.print"):
            well = run.run_all(list(chosen), lambda kept: dict(os.environ), report, self.out, seconds)
        written = json.loads((self.out / "part1.json").read_text())
        self.assertEqual(written["steps"], report["steps"])
        return well, written["steps"], (self.out / "part1.txt").read_text()

    def test_no_step_stops_the_next(self):
        well, found, text = self.run_all(
            script("print('boo'); raise SystemExit(3)", name="fails"),
            Step(1, "lacks", "nothing", 5, ["/no/such/program"]),
            script("print('result: ' + '{\"rate\": 7}')", name="works"),
        )
        self.assertFalse(well)
        self.assertEqual([one["outcome"] for one in found.values()][0], "failed with exit code 3")
        self.assertIn("cannot be started", found["lacks"]["outcome"])
        self.assertEqual((found["works"]["outcome"], found["works"]["figures"]), ("ok", [{"rate": 7}]))
        self.assertEqual(found["fails"]["last"], ["boo"])
        self.assertIn("| boo", text)
        self.assertIn("rate 7", text)
        self.assertIn("boo", (self.out / "part1-logs.txt").read_text())

    def test_a_step_ends_at_its_limit_with_all_that_it_has_started(self):
        # One that leaves the step's process group, as agents' workers do.
        code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        code += "print(p.pid, flush=True); time.sleep(600)"
        began = time.monotonic()
        well, found, _ = self.run_all(script(code, name="hangs", seconds=1), script("pass", name="next"))
        self.assertLess(time.monotonic() - began, 15)
        self.assertFalse(well)
        self.assertEqual((found["hangs"]["outcome"], found["next"]["outcome"]), ("ended at its limit of 1 s", "ok"))
        self.assertFalse(run._has(int(found["hangs"]["last"][0]), b""))

    def test_what_a_step_leaves_behind_is_ended_and_named(self):
        code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
        _, found, _ = self.run_all(script(code))
        self.assertEqual(found["one"]["outcome"], "left 1 processes behind")

    def test_later_steps_get_what_is_left_of_the_parts_time(self):
        wait = "import time; time.sleep(600)"
        with mock.patch.object(run, "TOO_LITTLE", 0.5):
            _, found, _ = self.run_all(script(wait), script("pass", name="late"), seconds=1)
        self.assertEqual(found["one"]["outcome"], "ended at its limit of 1 s")
        self.assertEqual(found["late"]["outcome"], "not begun: the part's time is over")

    def test_warnings_and_figures_are_found_in_logs(self):
        log = "x\n12:00  WARN it falls back\n12:00  WARN it falls back\n12:01  INFO computes on GPU 0\n"
        log += "result: {\"a\": 1}\nresult: {broken\nresult: 7\n"
        found = run.read(log, True)
        self.assertEqual(found["warnings"], ["12:00  WARN it falls back"])
        self.assertEqual(found["libraries"], ["12:01  INFO computes on GPU 0"])
        self.assertEqual(found["figures"], [{"a": 1}, {"unreadable": "result: {broken"}, {"unreadable": "result: 7"}])

    def test_variables_that_must_not_be_set_are_not(self):
        with mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": "/x", "B": "1"}):
            code = "import os; print(os.environ.get('LD_LIBRARY_PATH', 'not set')); raise SystemExit(1)"
            _, found, _ = self.run_all(script(code, variables={"LD_LIBRARY_PATH": None}))
        self.assertEqual(found["one"]["last"], ["not set"])

    def test_what_is_left_out_is_no_failure_of_a_dry_run_alone(self):
        left_out = Step(1, "one", "a step", 5, ["true"], {}, "it needs a GPU")
        self.assertTrue(self.run_all(left_out, dry="dry")[0])
        self.assertFalse(self.run_all(left_out)[0])

    def test_steps_are_named_once_and_each_has_a_limit_within_its_part(self):
        for setting in [Setting(Path("/kit")), Setting(Path("/kit"), dry=True)]:
            names = [step.name for step in steps(setting)]
            self.assertEqual(len(names), len(set(names)))
            self.assertTrue(all(0 < step.seconds < run.SECONDS for step in steps(setting)))

    @unittest.skipIf(any(Path("/dev").glob("nvidia*")), "this is a GPU")
    def test_without_a_gpu_it_says_so(self):
        command = [str(HERE.parent / "gpu.sh"), "--prebuilt", "/nowhere", "--part", "1", "--python", sys.executable]
        told = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(told.returncode, 2)
        self.assertIn("this machine shows no NVIDIA GPU", told.stderr)


class Parts(unittest.TestCase):
    def call(self, name, *arguments):
        told = subprocess.run([sys.executable, HERE / name, *arguments], capture_output=True, text=True, timeout=60)
        return told.returncode, run.read(told.stdout, True)["figures"], told.stdout + told.stderr

    def test_each_test_runs_by_itself_and_a_crash_hides_no_other(self):
        with tempfile.TemporaryDirectory() as folder:
            code = """
import os, sys
if "--list" in sys.argv: print("k::good: test\\nk::bad: test\\nk::crash: test\\nk::skipped: test\\nother: test")
elif "k::bad" in sys.argv: print("thread panicked at x.rs:1:\\na warning: it falls back"); sys.exit(101)
elif "k::crash" in sys.argv: os.abort()
else: print("a product: 1.5 ms, 700 TFLOP/s")
"""
            tests = program(folder, "tests", code)
            status, found, said = self.call("rust_tests.py", tests, "k::", "--skip", "skipped", "--jobs", "2")
            self.assertEqual(status, 1, said)
            self.assertIn({"measured": "a product: 1.5 ms, 700 TFLOP/s"}, found)
            self.assertIn({"failed": "k::bad", "why": "a warning: it falls back"}, found)
            self.assertEqual(found[-1], {"tests": 3, "failed": 2})
            self.assertEqual(self.call("rust_tests.py", tests, "k::good")[0], 0)
            self.assertEqual(self.call("rust_tests.py", tests, "nothing::")[0], 1)

    def test_losses_are_compared(self):
        code = """
import json, sys, time
way = "cpu" if sys.argv[sys.argv.index("--device") + 1] == "cpu" else "bf16" if "bf16" in sys.argv else "f32"
off = {"cpu": 0, "f32": OFF, "bf16": 5e-3}[way]
with open(sys.argv[sys.argv.index("--trace") + 1], "w") as trace:
    for step in range(COUNT): trace.write(json.dumps({"event": "step", "loss": 10.0 * (1 + off)}) + "\\n")
time.sleep(60 if COUNT == 3 else 0)
"""
        for off, count, status in [("5e-5", "3", 0), ("5e-4", "3", 1), ("5e-5", "2", 1)]:
            with tempfile.TemporaryDirectory() as folder:
                trainer = program(folder, "trainer", code.replace("OFF", off).replace("COUNT", count))
                found = self.call("losses.py", trainer, "cuda", "small")
                self.assertEqual(found[0], status, found)

    def test_libraries_of_the_same_name_are_shadowed_by_the_first(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = Path(folder, "1"), Path(folder, "2")
            for place in [first, second]:
                place.mkdir()
                (place / "libnccl.so.2").write_text("")
            variables = {"ELASTIC_CUDA_LIBRARIES": str(first), "LD_LIBRARY_PATH": f"{second}:/nowhere"}
            with mock.patch.dict(os.environ, variables):
                found = libraries.places("libnccl.so.2", {})
            self.assertEqual([one["path"] for one in found[:2]], [f"{first}/libnccl.so.2", f"{second}/libnccl.so.2"])

    def test_tools_output_is_summed(self):
        head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
        rows = [f'"{i}","a","gpu__time_duration.sum","ns","1,500"' for i in range(2)]
        rows += ['"2","b","gpu__time_duration.sum","us","9.5"']
        self.assertEqual(kernel_times.summed(["==PROF== x", head, *rows]), [("b", 1, 9.5), ("a", 2, 3.0)])
        line = "[cublasLt][12][Api][cublasLtMatmul] A=0x1 Adesc=[type=R_16BF rows=768] algo=[algoId=66 tile=128x256]"
        counted = kernel_times.chosen([line, line, "[cublasLt][12][Trace][cublasLtCreate] x"])
        self.assertEqual(counted, {"Adesc type=R_16BF rows=768 by algoId=66 tile=128x256": 2})


if __name__ == "__main__":
    unittest.main()
