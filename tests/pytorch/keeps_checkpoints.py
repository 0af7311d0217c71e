"""What holds for states on disk in one process: what ranks write of a sharded one, what is not whole or was damaged, and
where a training begins. Needs no agent."""

import copy
import math
import pathlib
import resource
import tempfile
import unittest

import numpy as np
import torch
import torch.distributed.checkpoint

from elastic_agent.torch import checkpoints, dcp, tree
from elastic_agent.torch.beginning import Beginning, Refused
from elastic_agent.torch.boxes import Layout, box_in, redescribe
from keeps_snapshots import equal, run


class Folders(unittest.TestCase):
    """What ranks write of a sharded state, each its part, one after the other."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.state = {
            "step": 7,
            "model": {
                "odd": torch.arange(35.0).view(5, 7),
                "short": torch.arange(3).bfloat16(),
                "buffer": torch.tensor(4),
            },
            "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "groups": [{"lr": 0.1}]},
            "empty": torch.empty(0, 3),
        }

    def write(self, mesh, over, skip=(), folder=None):
        for rank in range(math.prod(mesh)):
            layout = Layout(mesh, tuple(int(one) for one in np.unravel_index(rank, mesh)), over)
            if rank not in skip and layout.writes:
                dcp.write_part(folder or self.folder, layout, *divided(self.state, layout))
        return layout.parts

    def test_all_parts_are_one_state(self):
        for mesh, over in [((2,), (0,)), ((4,), (0,)), ((2, 3), (1,)), ((3, 2), (0,))]:
            folder = self.folder / str(mesh)
            manifest, _ = dcp.join(folder, self.write(mesh, over, folder=folder), 0)
            self.assertTrue(equal(dcp.read(manifest, None, None), self.state))
            # As PyTorch alone reads it
            model = {"odd": torch.zeros(5, 7), "short": torch.zeros(3).bfloat16(), "buffer": torch.tensor(0)}
            torch.distributed.checkpoint.load({"model": model}, checkpoint_id=folder, no_dist=True)
            self.assertTrue(equal(model, self.state["model"]))

    def test_each_part_is_written_once(self):
        for replicas in (1, 2, 3):
            layouts = [Layout((replicas, 4), (rank // 4, rank % 4), (1,)) for rank in range(4 * replicas)]
            self.assertEqual(sorted(one.part for one in layouts if one.writes), [0, 1, 2, 3])
            self.assertEqual(len({one.coordinate[0] for one in layouts if one.writes}), replicas)

    def test_what_is_not_there_is_named(self):
        parts = self.write((3,), (0,), skip=[1])
        with self.assertRaisesRegex(TimeoutError, "part-1 of 3 did not come within 0 s: do all nodes see"):
            dcp.join(self.folder, parts, 0)
        self.assertFalse((self.folder / dcp.MANIFEST).exists())
        # A part of another layout
        other = Layout((5,), (1,), (0,))
        dcp.write_part(self.folder, other, *divided(self.state, other))
        with self.assertRaisesRegex(ValueError, "of model.odd the parts hold 28 of 35 numbers"):
            dcp.join(self.folder, parts, 0)

    def test_damage_is_found(self):
        for name in ("part-1.distcp", ".metadata"):
            manifest, _ = dcp.join(self.folder, self.write((2,), (0,)), 0)
            damaged = bytearray((self.folder / name).read_bytes())
            damaged[len(damaged) // 2] ^= 1
            (self.folder / name).write_bytes(damaged)
            with self.assertRaisesRegex(ValueError, f"{name} is not the checkpoint that was committed"):
                dcp.read(manifest, None, None)

    def test_the_newest_stay(self):
        folder = checkpoints.Folder(self.folder, every=1, keep=2, timeout=0, writers="ab")
        layout = Layout((1,), (0,), (0,))
        (self.folder / "step-0000000002-round-1-torn").mkdir()
        for step in (1, 3, 4, 5):
            checkpoints.save_part(folder, layout, divided(self.state, layout), step, 1, leads=True)
        left = sorted(one.name for one in self.folder.iterdir())
        self.assertEqual(left, ["step-0000000004-round-1-ab", "step-0000000005-round-1-ab"])

    def test_a_whole_checkpoint_is_not_taken_for_parts(self):
        path = self.folder / "step.pt"
        committed = {"path": str(path), "digest": checkpoints.write(path, self.state)}
        self.assertTrue(equal(checkpoints.read(committed), self.state))
        with self.assertRaisesRegex(ValueError, "is of a whole model, and this one is sharded"):
            checkpoints.read(committed, Layout((2,), (1,), (0,)))

    def test_a_full_disk_keeps_nothing_of_what_failed(self):
        folder = checkpoints.Folder(self.folder, every=1, keep=2, timeout=0)
        killed, at_work = (self.folder / f"step-000000000{name}.pt.part" for name in ("2-round-1", "3-round-1-rank-1"))
        killed.touch(), at_work.touch()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        with self.assertRaisesRegex(OSError, "File too large"):
            checkpoints.save(folder, {"much": torch.zeros(1 << 16)}, 3, 1)
        self.assertEqual(list(self.folder.iterdir()), [at_work])

    def begins(self, folder, resume="auto", job="job", is_first=True):
        """The step that a training begins after, or what it is refused with."""
        try:
            found = Beginning(folder, resume).look(job, is_first=is_first)
        except Refused as error:
            return str(error)
        return found.where["step"] if found else 0

    def saved(self, folder, step, round_=1):
        path = folder / f"{checkpoints.name_of(step, round_)}.pt"
        checkpoints.write(path, {**self.state, "step": step})
        return path

    def test_a_folder_with_checkpoints_is_begun_from_or_refused(self):
        own, other = self.folder / "own", self.folder / "other"
        self.assertEqual(self.begins(own), 0)
        self.assertEqual((own / "job").read_text(), "job\n")
        self.assertEqual(self.begins(own, "never"), 0)
        for round_, step in ((9, 10), (10, 20), (2, 20)):
            self.saved(own, step, round_)
        sharded, layout = checkpoints.Folder(other, 1, 9, 0, "ab"), Layout((1,), (0,), (0,))
        for step in (15, 25):
            checkpoints.save_part(sharded, layout, divided({**self.state, "step": step}, layout), step, 3, leads=True)
        self.assertEqual((self.begins(own), self.begins(other)), (20, 25))
        self.assertIn("belongs to job job, and holds step 20", self.begins(own, job="another"))
        # Without an agent
        self.assertEqual(self.begins(own, job=""), 20)
        self.assertIn("holds step 20", self.begins(own, "never"))
        self.assertEqual(self.begins(own, "never", is_first=False), 20)
        for resume in (other, f"{own}@10"):
            self.assertIn("would leave behind and write over", self.begins(own, resume))
        self.assertEqual(self.begins(own, own, job="another"), 20)
        self.assertEqual((own / "job").read_text(), "another\n")
        new = self.folder / "new"
        self.assertEqual([self.begins(new, one) for one in (other, f"{other}@15")], [25, 15])
        (one,) = own.glob("*20-round-10.pt")
        self.assertEqual(self.begins(None, one), 20)
        self.assertIn("no checkpoint of step 16 is there", self.begins(new, f"{other}@16"))
        self.assertIn("no checkpoint is there", self.begins(new, self.folder / "nowhere"))
        # A later start has its own
        self.assertEqual(self.begins(own, other, "another", is_first=False), 20)
        for wrong in ("", "auto@3"):
            self.assertRaisesRegex(ValueError, "give 'auto', 'never'", Beginning, own, wrong)

    def test_what_cannot_be_read_is_no_beginning(self):
        older, newer = self.saved(self.folder, 10), self.saved(self.folder, 20)
        newer.write_bytes(newer.read_bytes()[:-50])
        self.assertEqual(self.begins(self.folder), 10)
        older.write_bytes(b"")
        self.assertRegex(self.begins(self.folder), "20-round-1.pt cannot be read: .*to begin at step 0, move step-")
        # A file of a sharded state that another rank needs
        folder = self.folder / "step-0000000030-round-1-ab"
        dcp.join(folder, self.write((2,), (0,), folder=folder), 0)
        self.assertEqual(self.begins(self.folder), self.state["step"])
        (folder / "part-1.distcp").write_bytes(b"")
        with self.assertRaisesRegex(Refused, "part-1.distcp is not the checkpoint that was committed"):
            Beginning(self.folder, "auto").look("job", is_first=True, layout=Layout((2,), (0,), (0,)))

    def test_names(self):
        with self.assertRaisesRegex(ValueError, "have one name"):
            tree.names_of(tree.take_apart({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})[0])


def divided(state, layout):
    """The part of a state that a rank would hold, if what has several numbers were sharded."""
    description, tensors = tree.take_apart(copy.deepcopy(state))
    for one in tree.tensors_of(description):
        tensor = tensors[one["tensor"]]
        if tensor.dim():
            placements = ["S(0)" if number in layout.over else "R" for number in range(len(layout.mesh))]
            one["sharded"] = {"shape": one["shape"], "stride": list(tensor.stride()), "placements": placements}
            redescribe(one, layout)
            (begin, *_), (length, *_) = box_in(one)
            tensors[one["tensor"]] = tensor.narrow(0, begin, length)
    return description, tensors


if __name__ == "__main__":
    run()
