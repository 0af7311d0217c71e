"""The command line of a launch. Needs only the standard library; PyTorch's own LaunchConfig is read where it is
installed."""

import json
import pathlib
import pickle
import tempfile
import types
import unittest

from elastic_agent.launch import LaunchError, _failed, flags_of

try:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig
except ImportError:
    LaunchConfig = None


class Flags(unittest.TestCase):
    def test_what_is_given_is_a_flag(self):
        config = types.SimpleNamespace(
            min_nodes=1,
            max_nodes=4,
            nproc_per_node=8,
            run_id="job",
            rdzv_endpoint="",
            rdzv_configs={"timeout": 900, "lease_ttl": 5},
            local_addr=None,
            max_restarts=0,
            duplicate_stdout_filters=["loss", "step"],
            virtual_local_rank=True,
        )
        self.assertEqual(
            flags_of(config),
            [
                "--nnodes=1:4",
                "--nproc-per-node=8",
                "--rdzv-id=job",
                "--max-restarts=0",
                "--rdzv-conf=timeout=900,lease_ttl=5",
                "--duplicate-stdout-filters=loss,step",
                "--virtual-local-rank",
            ],
        )

    @unittest.skipIf(LaunchConfig is None, "PyTorch is not installed")
    def test_pytorchs_own_is_read(self):
        logs = DefaultLogsSpecs(log_dir="/logs", redirects=Std.ALL, tee={0: Std.OUT}, local_ranks_filter={1, 0})
        config = LaunchConfig(2, 2, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint="h:1", logs_specs=logs)
        flags = set(flags_of(config))
        for flag in ("--nnodes=2:2", "--rdzv-conf=timeout=900", "--log-dir=/logs", "--local-ranks-filter=0,1"):
            self.assertIn(flag, flags)
        self.assertLessEqual({"--redirects=3", "--tee=0:1"}, flags)

    @unittest.skipIf(LaunchConfig is None, "PyTorch is not installed")
    def test_a_failed_worker_is_pytorchs_error(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / "error"
        worker = {"rank": 5, "local_rank": 1, "pid": 4711}
        extra = {"py_callstack": "Traceback: here", "timestamp": "1795884530", **worker}
        path.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra, "errorCode": -9}}))
        error = _failed("train", path, 1)
        self.assertIsInstance(error, LaunchError)
        self.assertIsInstance(error, ChildFailedError)
        rank, failure = error.get_first_failure()
        self.assertEqual((rank, failure.local_rank, failure.pid, failure.exitcode), (5, 1, 4711, -9))
        self.assertEqual(failure.message["message"], "ValueError: boom")
        self.assertEqual(str(error), "ValueError: boom\n\nTraceback: here")
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), str(again)), (LaunchError, str(error)))
        # No worker has failed where the agent could not begin.
        self.assertNotIsInstance(_failed("train", path.with_name("none"), 2), ChildFailedError)


if __name__ == "__main__":
    unittest.main()
