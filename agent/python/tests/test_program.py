"""How Python starts the program: which one, under what name, with what. Needs the standard library alone."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent.parent
MODULES = HERE / "compat/elastic_agent_compat/modules"
# Tells how it was called. `exec -a` is not in every shell, but argv[0] is in /proc.
STAND_IN = '#!/bin/sh\ntr "\\0" "\\n" < /proc/$$/cmdline\necho "PYTHON_EXEC=$PYTHON_EXEC"\n'


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bin = pathlib.Path(folder.name)

    def put(self):
        program = self.bin / "elastic-agent"
        program.write_text(STAND_IN)
        program.chmod(0o755)
        return program

    def run_python(self, *arguments, paths=(), **more):
        env = {name: value for name, value in os.environ.items() if name != "PYTHON_EXEC"}
        path = os.pathsep.join(map(str, [HERE, HERE / "compat", *paths]))
        env.update(PATH=f"{self.bin}:/usr/bin:/bin", PYTHONPATH=path, **more)
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=60)

    def test_each_module_becomes_the_program(self):
        program = self.put()
        for module in ["elastic_agent", "elastic_agent.run", "torchelastic.distributed.launch", "bagua.distributed.run"]:
            with self.subTest(module):
                done = self.run_python("-m", module, "--nnodes=2", "a b", "--", "", paths=[MODULES])
                # The kernel replaces a script's own name by the script's path.
                said = ["/bin/sh", str(program), "--nnodes=2", "a b", "--", "", f"PYTHON_EXEC={sys.executable}"]
                self.assertEqual(done.stdout.split("\n")[:-1], said, done.stderr)

    def test_workers_python_can_be_named(self):
        self.put()
        done = self.run_python("-m", "elastic_agent", PYTHON_EXEC="/opt/python")
        self.assertIn("PYTHON_EXEC=/opt/python\n", done.stdout)

    def test_a_program_that_is_missing_is_named_in_one_line(self):
        done = self.run_python("-m", "elastic_agent.run")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"\Aelastic-agent: the program elastic-agent is neither in .* nor on PATH: .*\n\Z")


if __name__ == "__main__":
    unittest.main()
