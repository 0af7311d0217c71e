"""What `record` leaves for the agent. Needs the standard library alone."""

import faulthandler
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import elastic_agent

SCRIPT = """
import sys
from elastic_agent import record

@record
def main():
    {body}

print("returned", main())
"""


class Record(unittest.TestCase):
    def run_script(self, body, error_file=True):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "error.json"
            env = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
            if error_file:
                env["TORCHELASTIC_ERROR_FILE"] = str(path) if error_file is True else error_file
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT.format(body=body)], env=env, capture_output=True, text=True, timeout=60
            )
            return done, json.loads(path.read_text()) if path.exists() else None

    def test_an_exception_is_written_and_raised_again(self):
        done, report = self.run_script("raise ValueError('lost \u00fc')")
        self.assertEqual(done.returncode, 1)
        self.assertIn("ValueError: lost", done.stderr)
        self.assertEqual(report["message"]["message"], "ValueError: lost \u00fc")
        extra = report["message"]["extraInfo"]
        self.assertTrue(extra["py_callstack"].startswith("Traceback (most recent call last)"), extra)
        self.assertIn("in main", extra["py_callstack"])
        self.assertGreater(int(extra["timestamp"]), 1_600_000_000)

    def test_exits_are_not_written(self):
        for body, code, printed in [
            ("sys.exit(0)", 0, "returned None\n"),
            ("sys.exit(3)", 3, ""),
            ("return 7", 0, "returned 7\n"),
            ("raise KeyboardInterrupt", -2, ""),
        ]:
            with self.subTest(body):
                done, report = self.run_script(body)
                self.assertEqual((done.returncode, done.stdout, report), (code, printed, None), done.stderr)

    def test_without_an_agent_nothing_is_written(self):
        done, report = self.run_script("raise ValueError", error_file=False)
        self.assertEqual((done.returncode, report), (1, None))

    def test_a_file_that_cannot_be_written_hides_no_exception(self):
        done, _ = self.run_script("raise ValueError('lost')", error_file="/nowhere/error.json")
        self.assertEqual(done.returncode, 1)
        self.assertIn("could not be written to TORCHELASTIC_ERROR_FILE=/nowhere/error.json", done.stderr)
        self.assertTrue(done.stderr.rstrip().endswith("ValueError: lost"), done.stderr)

    def test_fatal_signals_leave_a_traceback(self):
        done, _ = self.run_script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        self.assertEqual(done.returncode, -11)
        self.assertIn("Fatal Python error: Segmentation fault", done.stderr)

    def test_the_function_stays_itself(self):
        @elastic_agent.record
        def main(a, *, b):
            """Trains."""
            return a, b

        was = faulthandler.is_enabled()
        self.assertEqual((main(1, b=2), main.__name__, main.__doc__), ((1, 2), "main", "Trains."))
        self.assertTrue(faulthandler.is_enabled())
        if not was:
            faulthandler.disable()


if __name__ == "__main__":
    unittest.main()
