"""The sampler's promise, over random histories of groups. Needs only the standard library."""

import collections
import random
import sys
import unittest

from elastic_agent import ElasticDistributedSampler, ElasticSampler


def group(length, size, state=None, **options):
    samplers = [ElasticSampler(length, rank=0, world_size=1, **options) for rank in range(size)]
    for rank, sampler in enumerate(samplers):
        # As in a script that keeps its process.
        sampler.set_place(rank, size)
        if state:
            sampler.load_state_dict(state)
    return samplers


class Histories(unittest.TestCase):
    def run_epoch(self, choose, length, epoch, drop_last):
        """Runs an epoch with groups that change and lose what is in no checkpoint. Returns the samples that count."""
        kept, state, size = [], None, choose.randint(1, 7)
        while True:
            samplers = group(length, size, state, seed=3, drop_last=drop_last)
            for sampler in samplers:
                sampler.set_epoch(epoch)
            shares = [list(sampler) for sampler in samplers]
            self.assertEqual([len(share) for share in shares], [len(sampler) for sampler in samplers])
            self.assertLessEqual(max(map(len, shares)) - min(map(len, shares)), 0 if drop_last else 1)
            if choose.random() < 0.3:
                return kept + sum(shares, [])
            # The ranks train in step on batches, perhaps up to the end of the shortest share. Only a part gets into a
            # checkpoint.
            trained = choose.randint(0, min(map(len, shares)))
            saved = choose.randint(0, trained)
            for sampler in samplers:
                sampler.advance(saved)
            kept += sum((share[:saved] for share in shares), [])
            states = [sampler.state_dict() for sampler in samplers]
            self.assertTrue(all(state == states[0] for state in states))
            state, size = states[0], choose.randint(1, 7)

    def test_each_sample_is_used_once_for_any_members(self):
        for seed in range(400):
            choose = random.Random(seed)
            length, epoch = choose.randint(0, 200), choose.randint(0, 5)
            with self.subTest(seed=seed, length=length):
                used = self.run_epoch(choose, length, epoch, drop_last=False)
                self.assertEqual(sorted(used), list(range(length)))

    def test_none_is_used_twice_when_the_last_are_dropped(self):
        for seed in range(400):
            choose = random.Random(seed)
            length = choose.randint(0, 200)
            with self.subTest(seed=seed, length=length):
                used = self.run_epoch(choose, length, 0, drop_last=True)
                self.assertEqual(max(collections.Counter(used).values(), default=1), 1)
                self.assertLess(length - len(used), 7)

    def test_epochs_differ_and_repeat(self):
        sampler = ElasticSampler(range(50), seed=1)
        first = list(sampler)
        sampler.set_epoch(1)
        self.assertNotEqual(list(sampler), first)
        sampler.set_epoch(0)
        self.assertEqual(list(sampler), first)
        self.assertEqual(list(ElasticSampler(50, shuffle=False)), list(range(50)))

    def test_a_position_of_other_data_is_refused(self):
        state = ElasticSampler(10).state_dict()
        with self.assertRaisesRegex(ValueError, "length 10, this one 11"):
            ElasticSampler(11).load_state_dict(state)
        with self.assertRaisesRegex(ValueError, "rank 2 is not among 2 ranks"):
            ElasticSampler(10, rank=2, world_size=2)

    def test_torchelastics_sampler_gives_each_rank_as_many(self):
        for seed in range(200):
            choose = random.Random(seed)
            length, size, epoch = choose.randint(1, 60), choose.randint(1, 7), choose.randint(0, 3)
            done = choose.randrange(length)
            first = ElasticDistributedSampler(length, num_replicas=1, rank=0)
            first.set_epoch(epoch)
            used = list(first)[:done]
            # Another group continues: by the number of samples that are used, as TorchElastic's scripts keep it.
            samplers = [ElasticDistributedSampler(length, size, rank, start_index=done) for rank in range(size)]
            for sampler in samplers:
                sampler.set_epoch(epoch)
            counts, shares = {len(sampler) for sampler in samplers}, []
            for sampler in samplers:
                shares.append([])
                for sample in sampler:
                    shares[-1].append(sample)
                    # As a loop without workers of its loader does it.
                    sampler.advance(1)
            with self.subTest(seed=seed):
                self.assertEqual({len(share) for share in shares}, counts)
                self.assertEqual({*sum(shares, [])}, set(range(length)) - {*used})
                self.assertLess(sum(map(len, shares)), length - done + size)
                samplers[0].set_epoch(epoch + 1)
                self.assertEqual(samplers[0].position, 0)

    def test_torchelastics_sampler_keeps_what_it_loaded(self):
        sampler = ElasticDistributedSampler(10, 1, 0)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 2, "position": 4})
        sampler.set_epoch(2)
        self.assertEqual(len(sampler), 6)
        with self.assertRaisesRegex(ValueError, "start_index 10 is not below"):
            ElasticDistributedSampler(10, 1, 0, start_index=10)

    def test_pytorch_is_not_imported(self):
        self.assertNotIn("torch", sys.modules)


if __name__ == "__main__":
    unittest.main()
