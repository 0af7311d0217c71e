"""What holds for snapshots in one process: what a state comes back as, that a torn or damaged copy never counts, and
which one ranks choose. Needs no agent."""

import io
import mmap
import os
import sys
import threading
import unittest
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import elastic_agent.torch as elastic
from elastic_agent import worker
from elastic_agent.torch import tree
from elastic_agent.torch.choice import Choice, Offer, choose
from elastic_agent.torch.keeper import Keeper
from elastic_agent.torch.neighbours import neighbours_of
from elastic_agent.torch.boxes import Box, Layout, box_of, overlap
from elastic_agent.torch.slots import Plan, Slots

FACTS = {"of": "a test"}


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right


def filled(memory, step, state, complete=True):
    plan, into = Plan(state, FACTS, (0, 1)), Slots(memory)
    place = into.begin(None)
    into.fill(place, step, 1, plan, plan.tensors, {})
    if complete:
        into.complete(place)


class States(unittest.TestCase):
    def test_a_state_comes_back_as_it_was(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        odd = torch.arange(12.0).view(3, 4).t()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "more": [1, 2.5, float("inf"), None, True, "é", b"\0\xff", (1, (2,)), {3: {"a": ()}, "3": [], None: 1}],
            "tensors": [odd, odd.bfloat16(), torch.tensor(7), torch.empty(0, 5), torch.tensor([True, False])],
        }
        memory = mmap.mmap(-1, Plan(state, FACTS, (0, 1)).memory_bytes())
        filled(memory, 9, state)
        (one,) = Slots(memory).whole()
        one.check()
        back = one.copy()
        self.assertTrue(equal(dict(state, model=dict(state["model"])), dict(back, model=dict(back["model"]))))
        self.assertEqual(back["model"]._metadata, state["model"]._metadata)
        self.assertIsInstance(back["model"], OrderedDict)
        optimizer.load_state_dict(back["optimizer"])
        # As it goes to disk: without the wrapping of other tensors' memory, and readable without running code.
        for to_disk in (one.state(), back):
            file = io.BytesIO()
            torch.save(to_disk, file)
            self.assertLess(len(file.getvalue()), 20_000)
            file.seek(0)
            self.assertTrue(equal(dict(back, model=None), dict(torch.load(file, weights_only=True), model=None)))

    def test_what_cannot_be_kept_is_named(self):
        with self.assertRaisesRegex(TypeError, r"state\['a'\]\[1\] is a builtins\.frozenset"):
            tree.take_apart({"a": [0, frozenset({1})]})
        with self.assertRaisesRegex(TypeError, r"state\['b'\] is a sparse or quantized tensor"):
            tree.take_apart({"b": torch.eye(2).to_sparse()})

    def test_a_torn_copy_leaves_the_one_before(self):
        big = [{"a": torch.full((1000,), float(step)), "step": step} for step in range(5)]
        memory = mmap.mmap(-1, Plan(big[0], FACTS, (0, 1)).memory_bytes())
        for step in (1, 2):
            filled(memory, step, big[step])
        self.assertEqual([one.step for one in Slots(memory).whole()], [2, 1])
        # The process dies in the midst of the third: it has the place of the first.
        filled(memory, 3, big[3], complete=False)
        (left,) = Slots(memory).whole()
        left.check()
        self.assertTrue(equal(left.copy(), big[2]))
        # The next worker fills the torn one, not the whole one.
        filled(memory, 4, big[4])
        self.assertEqual([one.step for one in Slots(memory).whole()], [4, 2])

    def test_damage_is_found(self):
        memory = mmap.mmap(-1, Plan({"a": torch.zeros(100)}, FACTS, (0, 1)).memory_bytes())
        filled(memory, 1, {"a": torch.zeros(100)})
        (one,) = Slots(memory).whole()
        one.raw()[17] = 1
        with self.assertRaisesRegex(ValueError, "tensor 0 of the snapshot of step 1 is damaged"):
            one.check()
        # In the description, even one that is still JSON.
        at = memory.find(b'"place":[0')
        memory[at + 9 : at + 10] = b"7"
        self.assertEqual(Slots(memory).whole(), [])

    def test_a_slot_that_is_written_to_disk_is_let_be(self):
        state = {"a": torch.zeros(100)}
        for written in (0, 1):
            memory = mmap.mmap(-1, Plan(state, FACTS, (0, 1)).memory_bytes())
            for step in (1, 2):
                filled(memory, step, state)
            kept = Slots(memory).whole()[written]
            self.assertNotEqual(Slots(memory).begin(kept)[0], kept.at)
            self.assertIn(kept.step, [one.step for one in Slots(memory).whole()])


class Copies(unittest.TestCase):
    """A keeper whose memory is the test's."""

    def setUp(self):
        self.memory = None

        def lend(size, *, rescue=(), timeout=None):
            if size:
                self.memory = mmap.mmap(-1, size)
            return self.memory

        self.addCleanup(setattr, worker, "memory", worker.memory)
        worker.memory = lend
        self.model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(50))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step(), self.optimizer.zero_grad()
        self.keeper = Keeper(FACTS, optimizers=[self.optimizer], folder=None)

    def tearDown(self):
        self.keeper.close(forget=False)

    def step(self):
        self.model(torch.randn(8, 50)).sum().backward()
        self.optimizer.step()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def held_up(self):
        """Lets the copying wait for an event."""
        go, begun, fill = threading.Event(), threading.Event(), Slots.fill

        def slow(*arguments):
            begun.set()
            assert go.wait(60)
            return fill(*arguments)

        Slots.fill = slow
        self.addCleanup(setattr, Slots, "fill", fill)
        return go, begun

    def test_an_optimizer_waits_and_a_forward_pass_does_not(self):
        go, begun = self.held_up()
        before = {name: {key: one.clone() for key, one in part.items() if torch.is_tensor(one)} for name, part in {
            "model": self.model.state_dict(), "first": self.optimizer.state_dict()["state"][0]}.items()}  # fmt: skip
        self.assertTrue(self.keeper.take(1, 1, self.state(), (0, 1), saves=False))
        assert begun.wait(60)
        # This changes BatchNorm's statistics, which were copied at once, and the gradient.
        self.model(torch.randn(8, 50)).sum().backward()
        self.assertFalse(self.keeper.take(2, 1, self.state(), (0, 1), saves=False), "one at a time")
        stepped = threading.Event()

        def step():
            self.optimizer.step()
            stepped.set()

        thread = threading.Thread(target=step)
        thread.start()
        self.assertFalse(stepped.wait(0.2))
        go.set()
        thread.join(60)
        assert stepped.is_set()
        (one,) = Slots(self.memory).whole()
        back = one.copy()
        self.assertTrue(equal(before["model"], dict(back["model"])))
        self.assertTrue(equal(before["first"], back["optimizer"]["state"][0]))

    def test_a_change_that_nothing_announced_is_found(self):
        go, begun = self.held_up()
        self.keeper.take(1, 1, self.state(), (0, 1), saves=False)
        assert begun.wait(60)
        with torch.no_grad():
            self.model[0].weight.add_(1)
        go.set()
        self.keeper.settle(60)
        self.assertEqual(Slots(self.memory).whole(), [])


class Choices(unittest.TestCase):
    def test_replicated(self):
        def of(*steps):
            return [Offer(step, 1, False, 0, 2) for step in steps]

        older = "the newest snapshot in memory is of step 4, and a checkpoint is of step 6"
        cases = [
            ([[], []], None, 0, Choice("nothing", why="no rank holds a snapshot")),
            ([[], []], 7, 0, Choice("checkpoint", 7, why="no rank holds a snapshot")),
            ([of(4, 3), of(5, 4)], None, 0, Choice("memory", 5, 1, (1,))),
            ([of(5), of(5)], 5, 0, Choice("memory", 5, 1, (0, 1))),
            ([[], of(4), []], 3, 0, Choice("memory", 4, 1, (1,))),
            ([of(4), []], 6, 0, Choice("checkpoint", 6, why=older)),
            ([of(4), []], 3, 6, Choice("nothing", why=older)),
        ]  # fmt: skip
        for offers, committed, newer_than, expected in cases:
            self.assertEqual(choose(offers, committed, newer_than), expected)

    def test_sharded(self):
        def of(rank, *keys, size=2):
            return [Offer(step, round_, True, rank, size, one_mesh(rank, size)) for step, round_ in keys]

        def among(offers, committed=None):
            return choose(offers, committed, layouts=[one_mesh(rank, len(offers)) for rank in range(len(offers))])

        both = Choice("memory", 4, 1)
        self.assertEqual(among([of(0, (5, 1), (4, 1)), of(1, (4, 1), (3, 1))]), both)
        # The same step of two rounds is not the same step.
        self.assertEqual(among([of(0, (5, 2), (4, 1)), of(1, (5, 1), (4, 1))]), both)
        # A node is lost, whose part its neighbour has: its successor gets it, and a smaller group divides it.
        self.assertEqual(among([of(0, (5, 1)) + of(1, (5, 1)), []]), Choice("memory", 5, 1, senders=(0, 0)))
        three = [of(0, (5, 1), size=3) + of(2, (5, 1), size=3), of(1, (5, 1), size=3) + of(0, (5, 1), size=3)]
        self.assertEqual(among(three), Choice("memory", 5, 1, senders=(0, 1, 0)))
        self.assertEqual(among([of(1, (5, 1)), of(0, (5, 1))]), Choice("memory", 5, 1, senders=(1, 0)))
        # What is whole and older counts more than what is not.
        torn = [of(0, (5, 1), (4, 1), size=3), of(1, (4, 1), size=3) + of(2, (5, 1), (4, 1), size=3)]
        self.assertEqual(among(torn), Choice("memory", 4, 1, senders=(0, 1, 1)))
        for offers, why in [
            ([of(0, (5, 1)), []], "of the snapshot of step 5, no rank holds part 1 of the 2"),
            ([of(0, (5, 1), size=4), of(2, (5, 1), size=4)], "no rank holds part 1, 3 of the 4"),
        ]:
            self.assertEqual(among(offers).source, "nothing")
            self.assertIn(why, among(offers).why)
            self.assertEqual(among(offers, 2).source, "checkpoint")

    def test_replicas_of_shards(self):
        def layouts(replicas):
            return [Layout((replicas, 2), (rank // 2, rank % 2), (1,)) for rank in range(2 * replicas)]

        offers = [[Offer(5, 1, True, rank, 4, one)] for rank, one in enumerate(layouts(2))]
        self.assertEqual(choose(offers, None, layouts=layouts(2)), Choice("memory", 5, 1))
        self.assertEqual(choose(offers[2:], None, layouts=layouts(1)), Choice("memory", 5, 1, senders=(0, 1)))
        joined = choose([*offers, [], []], None, layouts=layouts(3))
        self.assertEqual(joined, Choice("memory", 5, 1, senders=(0, 1)))
        self.assertIn("no rank holds part 1", choose([offers[0], offers[2]], None, layouts=layouts(1)).why)

    def test_several_meshes(self):
        offers = [[Offer(5, 1, True, rank, 2)] for rank in range(2)]
        self.assertEqual(choose(offers, None, layouts=[None, None]), Choice("memory", 5, 1))
        self.assertIn("several device meshes", choose(offers[:1], None, layouts=[None]).why)


def one_mesh(rank, size):
    return Layout((size,), (rank,), (0,))


class Shards(unittest.TestCase):
    def test_parts_are_those_of_chunk(self):
        for length in range(9):
            for ranks in range(1, 6):
                chunks = list(torch.arange(length).chunk(ranks)) if length else []
                for rank in range(ranks):
                    (begin,), (size,) = box_of([length], ["S(0)"], [ranks], [rank])
                    there = chunks[rank].tolist() if rank < len(chunks) else []
                    self.assertEqual(list(range(begin, begin + size)), there)
        self.assertEqual(box_of([4, 6], ["R", "S(1)"], [2, 3], [1, 2]), Box((0, 4), (4, 2)))
        # Twice the same dimension: the pieces of pieces.
        self.assertEqual(box_of([10], ["S(0)", "S(0)"], [2, 2], [1, 1]), Box((8,), (2,)))

    def test_overlap(self):
        self.assertEqual(overlap(Box((0, 2), (4, 4)), Box((3, 0), (4, 4))), Box((3, 2), (1, 2)))
        self.assertIsNone(overlap(Box((0,), (2,)), Box((2,), (2,))))
        self.assertIsNone(overlap(Box((0,), (0,)), Box((0,), (2,))))
        self.assertEqual(overlap(Box((), ()), Box((), ())), Box((), ()))

    def test_what_cannot_be_divided_again(self):
        hsdp = Layout((2, 2), (0, 1), (1,))
        self.assertEqual((hsdp.part, hsdp.parts), (1, 2))
        self.assertEqual(hsdp.placements(["S(1)"]), ["R", "S(1)"])
        self.assertEqual(one_mesh(0, 3).placements(["R", "R"]), ["R"])
        with self.assertRaisesRegex(ValueError, "S\\(0\\) S\\(1\\)"):
            hsdp.placements(["S(0)", "S(1)"])
        with self.assertRaisesRegex(ValueError, "placed as P"):
            box_of([4], ["P"], [2], [0])

    def test_neighbours_are_on_other_nodes(self):
        def ring(nodes, parts=None):
            return [neighbours_of(rank, nodes, parts or range(len(nodes))) for rank in range(len(nodes))]

        self.assertEqual(ring([0, 1, 2]), [(1, 2), (2, 0), (0, 1)])
        for nodes in ([0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [3, 3, 7, 7, 5, 5]):
            for rank, (to, of) in enumerate(ring(nodes)):
                self.assertNotEqual(nodes[rank], nodes[to])
                self.assertEqual(ring(nodes)[to][1], rank)
                self.assertEqual(ring(nodes)[of][0], rank)
        for nodes, parts, why in [
            ([0, 0], None, "one node"),
            ([0, 0, 1], None, "different numbers"),
            ([0, 0, 1, 1], [0, 1, 0, 1], "on several nodes anyway"),
        ]:
            self.assertTrue(all(why in one for one in ring(nodes, parts)))
        # Replicas that lie across nodes, so that a node has both copies of its part.
        self.assertEqual(ring([0, 0, 1, 1], [0, 0, 1, 1]), [(2, 2), (3, 3), (0, 0), (1, 1)])

    def test_a_copy_of_another_memorys_snapshot(self):
        state = {"a": torch.arange(100.0), "b": [1, "two"]}
        size = Plan(state, FACTS, (0, 1)).memory_bytes()
        theirs, ours = mmap.mmap(-1, size), mmap.mmap(-1, 2 * size)
        filled(theirs, 3, state)
        own, copies = Slots(ours, 0, 2), Slots(ours, 1, 2)
        (one,) = Slots(theirs).whole()
        place, room = copies.adopt(one.head)
        room.copy_(one.raw())
        self.assertEqual(copies.whole(), [])
        copies.complete(place)
        (copy,) = copies.whole()
        copy.check()
        self.assertEqual((copy.step, copy.round, own.whole()), (3, 1, []))
        self.assertTrue(equal(copy.copy(), state))
        self.assertIsNone(Slots(mmap.mmap(-1, 1 << 14), 1, 2).adopt(one.head))


class Refusals(unittest.TestCase):
    """What is sharded otherwise than is kept, in a group of one."""

    @classmethod
    def setUpClass(cls):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def test_a_session_refuses_a_sharded_model(self):
        model = fully_shard(torch.nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters())
        with self.assertRaisesRegex(ValueError, "'weight' is sharded, .*elastic_agent.torch.Snapshots"):
            elastic.Session(model, optimizer, elastic.ElasticBatchSampler(8, 4))
        elastic.Snapshots({"model": model, "optimizer": optimizer})
        replicas = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
        two = torch.nn.ModuleList([model, fully_shard(torch.nn.Linear(4, 2), mesh=replicas)])
        with self.assertRaisesRegex(ValueError, "torch.distributed.checkpoint"):
            elastic.Snapshots({"model": two}, checkpoint_dir="here")

    def test_parts_are_not_taken_for_the_whole(self):
        def lend(*_, **__):
            raise AssertionError("memory is asked for")

        self.addCleanup(setattr, worker, "memory", worker.memory)
        worker.memory = lend
        model = fully_shard(torch.nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
        keeper = Keeper(FACTS, optimizers=[], folder=None)
        self.assertFalse(keeper.take(1, 1, {"model": model.state_dict()}, (0, 1), saves=True))

    def test_sums_that_are_not_complete(self):
        of_one = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
        model = torch.nn.Module()
        model.odd = torch.nn.Parameter(of_one)
        with self.assertRaisesRegex(ValueError, "parameter 'odd' cannot be in a snapshot: it is placed as P"):
            elastic.Snapshots({"model": model})
        with self.assertRaisesRegex(TypeError, r"state\['odd'\] cannot be in a snapshot: it is placed as P"):
            tree.take_apart({"odd": of_one})


def run():
    torch.set_num_threads(1)
    ran = unittest.main(exit=False).result
    sys.stderr.flush()
    # PyTorch's threads may abort the interpreter while it shuts down.
    os._exit(not ran.wasSuccessful())


if __name__ == "__main__":
    run()
