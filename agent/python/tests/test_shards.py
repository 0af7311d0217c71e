"""Shards are read whole, once, and in runs. Needs only the standard library."""

import pickle
import random
import unittest

from elastic_agent.batches import ElasticBatchSampler
from elastic_agent.shards import Shards, lanes_of


class Files:
    """Shards of numbers, which count what is read of them."""

    def __init__(self, lengths):
        self.lengths, self.read, self.opened, self.closed = lengths, 0, 0, 0

    def open(self, shard):
        self.opened += 1
        try:
            for at in range(self.lengths[shard]):
                self.read += 1
                yield shard, at
        finally:
            self.closed += 1


def shards_of(files):
    return Shards(range(len(files.lengths)), files.lengths, files.open)


def epoch_of(sampler, shards):
    return [shards[sample] for batch in sampler for sample in batch]


class Reading(unittest.TestCase):
    def test_each_sample_is_read_once_whatever_becomes_of_the_group(self):
        seed = random.SystemRandom().getrandbits(32)
        choose = random.Random(seed)
        for _ in range(100):
            lengths = [choose.randint(0, 30) for _ in range(choose.randint(1, 9))]
            batch, shuffle = choose.randint(1, 40), choose.random() < 0.8
            if sum(lengths) == 0:
                continue
            files, state, used = Files(lengths), None, []
            while state is None or state["epoch"] == 0:
                size = choose.randint(1, 5)
                ranks = []
                for rank in range(size):
                    shards = shards_of(files)
                    sampler = ElasticBatchSampler(shards, batch, micro_batch=7, shuffle=shuffle, seed=3)
                    sampler.set_place(rank, size)
                    if state is not None:
                        sampler.load_state_dict(state)
                    ranks.append((sampler, iter(sampler), shards))
                for _ in range(choose.randint(1, 6)):
                    if ranks[0][0].epoch:
                        break
                    for sampler, batches, shards in ranks:
                        for expected in sampler.micro_batches():
                            read = next(batches)
                            taken = [shards[sample] for sample in read]
                            if expected:
                                self.assertEqual(len(read), expected)
                                used += taken
                    for sampler, _, _ in ranks:
                        sampler.advance()
                state = choose.choice(ranks)[0].state_dict()
            wanted = [(shard, at) for shard, length in enumerate(lengths) for at in range(length)]
            self.assertEqual(sorted(used), wanted, f"seed {seed}")

    def test_a_rank_reads_its_shards_from_the_first_to_the_last_sample(self):
        files = Files([12] * 16)
        orders = []
        for rank in range(4):
            shards = shards_of(files)
            sampler = ElasticBatchSampler(shards, 32, seed=1)
            sampler.set_place(rank, 4)
            orders.append(epoch_of(sampler, shards))
        # Sixteen lanes of a shard each would do; there are 32 of half a shard, and the second half is skipped to.
        self.assertEqual(lanes_of(32), 32)
        self.assertEqual(files.opened, 32)
        self.assertLessEqual(files.read, 192 + 16 * 6)
        files = Files([12] * 16)
        shards = shards_of(files)
        sampler = ElasticBatchSampler(shards, 16, seed=1)
        self.assertEqual(len(set(epoch_of(sampler, shards))), 192)
        self.assertEqual((files.opened, files.read, files.closed), (16, 192, 16))

    def test_epochs_differ_by_the_order_of_the_shards_and_without_a_shuffle_do_not(self):
        for shuffle in (True, False):
            shards = shards_of(Files([5] * 9))
            sampler = ElasticBatchSampler(shards, 9, shuffle=shuffle)
            first = epoch_of(sampler, shards)
            self.assertEqual(first, epoch_of(sampler, shards))
            sampler.epoch = 1
            self.assertEqual(first == epoch_of(sampler, shards), not shuffle)

    def test_lanes_share_a_step_evenly(self):
        self.assertEqual([lanes_of(batch) for batch in (1, 97, 256, 512, 768, 257)], [1, 97, 256, 256, 256, 1])

    def test_a_shard_that_ends_too_soon_is_named(self):
        shards = Shards(["a.tar", "b.tar"], [3, 4], lambda name: iter(range(3)))
        self.assertEqual([shards[at] for at in range(6)], [0, 1, 2, 0, 1, 2])
        with self.assertRaisesRegex(ValueError, "b.tar ends before sample 3, and 4 were announced"):
            shards[6]
        with self.assertRaisesRegex(IndexError, "7"):
            shards[7]

    def test_what_cannot_be_read_is_refused(self):
        with self.assertRaisesRegex(ValueError, "2 shards and 1 lengths"):
            Shards(["a", "b"], [1], iter)
        with self.assertRaisesRegex(ValueError, "rank_batch"):
            ElasticBatchSampler(Shards(["a"], [9], iter), rank_batch=3)

    def test_another_process_opens_its_own(self):
        shards = Shards(["ab", "cd"], [2, 2], iter)
        shards[0]
        there = pickle.loads(pickle.dumps(shards))
        self.assertEqual([there[at] for at in range(4)], ["a", "b", "c", "d"])


if __name__ == "__main__":
    unittest.main()
