"""Which checkpoint of a Transformers Trainer counts. Needs only the standard library: of what PyTorch writes, only the
shape matters here."""

import json
import pathlib
import struct
import tempfile
import unittest
import zipfile

from elastic_agent.trainer_folder import fault_of, newest_whole


def safetensors(path):
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "data_offsets": [0, 4000]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4000))


def torch_save(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", bytes(3000))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Checkpoints(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def checkpoint(self, step, weights="model.safetensors"):
        path = self.folder / f"checkpoint-{step}"
        path.mkdir()
        safetensors(path / weights)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
            torch_save(path / name)
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return path

    def test_the_newest_whole_one_counts_and_what_is_passed_over_is_named(self):
        for step in (9, 100, 20):
            self.checkpoint(step)
        (self.folder / "checkpoint-best").mkdir()
        (self.folder / "checkpoint-100" / "optimizer.pt").write_bytes(b"")
        said = []
        self.assertEqual(newest_whole(self.folder, said.append), str(self.folder / "checkpoint-20"))
        self.assertEqual(said, [f"{self.folder / 'checkpoint-100'} is skipped: optimizer.pt is empty"])
        self.assertIsNone(newest_whole(self.folder / "nothing", said.append))

    def test_each_file_that_is_torn_is_found(self):
        whole = self.checkpoint(1)
        self.assertIsNone(fault_of(whole))
        for number, (name, change, fault) in enumerate(
            [
                ("model.safetensors", lambda path: path.write_bytes(b""), "model.safetensors is empty"),
                ("model.safetensors", cut, "model.safetensors is cut short"),
                ("model.safetensors", lambda path: path.unlink(), "it has no weights"),
                ("optimizer.pt", cut, "optimizer.pt is cut short"),
                ("rng_state_0.pth", lambda path: path.write_bytes(bytes(3000)), "rng_state_0.pth is cut short"),
                ("trainer_state.json", lambda path: path.unlink(), "it has no trainer_state.json"),
                ("trainer_state.json", cut, "its trainer_state.json cannot be read"),
            ]
        ):
            torn = self.checkpoint(2 + number)
            change(torn / name)
            self.assertTrue((fault_of(torn) or "").startswith(fault), (name, fault_of(torn)))

    def test_weights_in_several_files(self):
        whole = self.checkpoint(1, "model-00001-of-00002.safetensors")
        names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        self.assertEqual(fault_of(whole), f"model.safetensors.index.json names {names['b']}, which is not there")
        safetensors(whole / names["b"])
        self.assertIsNone(fault_of(whole))

    def test_what_frameworks_write_otherwise_is_left_to_them(self):
        divided = self.checkpoint(1, "other")
        self.assertEqual(fault_of(divided), "it has no weights")
        (divided / "pytorch_model_fsdp_0").mkdir()
        (divided / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"numbers")
        self.assertIsNone(fault_of(divided))
        # A checkpoint of weights alone (`save_only_model`)
        (divided / "optimizer.pt").unlink()
        self.assertIsNone(fault_of(divided))


if __name__ == "__main__":
    unittest.main()
