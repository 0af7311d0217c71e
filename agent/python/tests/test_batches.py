"""The batch sampler's promise, over random histories of groups. Needs only the standard library."""

import random
import unittest

from elastic_agent.batches import ElasticBatchSampler


def of_rank(rank, size, *arguments, state=None, **options):
    sampler = ElasticBatchSampler(*arguments, **options)
    sampler.set_place(rank, size)
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


class Histories(unittest.TestCase):
    def test_each_sample_is_in_one_step_on_one_rank(self):
        seed = random.SystemRandom().getrandbits(32)
        choose = random.Random(seed)
        for _ in range(200):
            length, batch, micro = choose.randint(1, 90), choose.randint(1, 40), choose.randint(1, 12)
            drop_last = length >= batch and choose.random() < 0.5
            options = {"micro_batch": micro, "seed": 3, "drop_last": drop_last}
            state, used, sizes = None, [], []
            while state is None or state["epoch"] == 0:
                # A group of some size does some steps, then another one continues.
                size = choose.randint(1, 6)
                samplers = [of_rank(rank, size, length, batch, state=state, **options) for rank in range(size)]
                how = choose.choice([(True, False, 1), (False, True, 1), (True, True, 1), (False, False, min(2, micro))])
                alike, in_pieces, least = how
                # Those that have just come take no part in the first of them.
                absent = [] if alike else choose.sample(range(size), choose.randrange(size))
                for rank, sampler in enumerate(samplers):
                    sampler.alike, sampler.in_pieces, sampler.least = how
                    sampler.set_place(rank, size, absent)
                    self.assertEqual(len(sampler), len(list(sampler)), f"seed {seed}")
                readers = [iter(sampler) for sampler in samplers]
                for _ in range(choose.randint(1, 3)):
                    if samplers[0].epoch:
                        break
                    of_step, pieces = [], []
                    if alike:
                        self.assertEqual(len({len(sampler.micro_batches()) for sampler in samplers}), 1, f"seed {seed}")
                    for rank, (sampler, reader) in enumerate(zip(samplers, readers)):
                        if rank in absent:
                            self.assertEqual(sampler.micro_batches(), [0], f"seed {seed}")
                        else:
                            self.assertEqual(sampler.first_place(), len(of_step), f"seed {seed}")
                        for expected in sampler.micro_batches():
                            places = next(reader)
                            if expected == 0:
                                # It only keeps step with the other ranks.
                                self.assertIn(len(places), (1, least))
                                continue
                            self.assertEqual(len(places), expected)
                            self.assertLessEqual(len(places), micro + least - 1)
                            self.assertGreaterEqual(len(places), min(least, samplers[0].step_size()), f"seed {seed}")
                            of_step += places
                            pieces.append(len(places))
                    self.assertEqual(len(of_step), samplers[0].step_size(), f"seed {seed}")
                    if in_pieces:
                        # As one rank would have them.
                        full, rest = divmod(len(of_step), micro)
                        self.assertEqual(pieces, [micro] * full + [rest] * (rest > 0), f"seed {seed}")
                    used += of_step
                    sizes.append(len(of_step))
                    for sampler in samplers:
                        sampler.advance()
                    absent = []
                state = samplers[choose.randrange(size)].state_dict()
            wanted = length - length % batch if drop_last else length
            self.assertEqual(len(used), wanted, f"seed {seed}")
            self.assertEqual(len(set(used)), wanted, f"seed {seed}")
            self.assertTrue(all(one == batch for one in sizes[:-1]), f"seed {seed}")

    def test_with_a_batch_for_each_rank_a_larger_group_does_larger_steps(self):
        seed = random.SystemRandom().getrandbits(32)
        choose = random.Random(seed)
        for _ in range(100):
            length, batch = choose.randint(1, 90), choose.randint(1, 12)
            state, used = None, []
            while state is None or state["epoch"] == 0:
                size = choose.randint(1, 6)
                samplers = [of_rank(rank, size, length, rank_batch=batch, seed=3, state=state) for rank in range(size)]
                left = length - samplers[0].position
                of_step = [sum(sampler.micro_batches()) for sampler in samplers]
                if left >= batch * size:
                    self.assertEqual(of_step, [batch] * size, f"seed {seed}")
                self.assertEqual(sum(of_step), min(left, batch * size), f"seed {seed}")
                for sampler in samplers:
                    if any(sampler.micro_batches()):
                        used += next(iter(sampler))
                    sampler.advance()
                state = choose.choice(samplers).state_dict()
            self.assertEqual(sorted(used), list(range(length)), f"seed {seed}")

    def test_ranks_of_a_row_have_as_many_batches_of_one_size(self):
        choose = random.Random(seed := random.SystemRandom().getrandbits(32))
        for _ in range(100):
            micro, row, rows, units = (choose.randint(1, most) for most in (3, 3, 4, 6))
            unit = micro * row
            length, size = unit * choose.randint(units, 3 * units), row * rows
            samplers = [of_rank(rank, size, length, unit * units, micro_batch=micro) for rank in range(size)]
            used = []
            while samplers[0].epoch == 0:
                for sampler in samplers:
                    sampler.alike, sampler.in_pieces, sampler.in_a_row = True, True, row
                    sizes, batches = sampler.micro_batches(), iter(sampler)
                    used += [place for batch in sizes for place in next(batches)[: batch or 0]]
                    self.assertEqual(sizes, samplers[sampler.rank // row * row].micro_batches(), f"seed {seed}")
                    self.assertLessEqual(set(sizes), {0, micro}, f"seed {seed}")
                for sampler in samplers:
                    sampler.advance()
            self.assertEqual(sorted(used), list(range(length)), f"seed {seed}")

    def test_a_step_has_one_size(self):
        for wrong in ({}, {"global_batch": 4, "rank_batch": 2}, {"rank_batch": 0}, {"rank_batch": 2, "drop_last": True}):
            with self.assertRaises(ValueError):
                ElasticBatchSampler(9, **wrong)
        with self.assertRaisesRegex(ValueError, "global_batch not given"):
            of_rank(0, 1, 9, global_batch=2, state=of_rank(0, 1, 9, rank_batch=2).state_dict())

    def test_the_order_depends_on_the_epoch_alone(self):
        first = of_rank(0, 1, 30, 7, seed=5)
        again = of_rank(0, 1, 30, 7, seed=5)
        self.assertEqual(list(first), list(again))
        again.epoch = 1
        self.assertNotEqual(list(first), list(again))
        self.assertEqual([place for batch in of_rank(0, 1, 30, 7, shuffle=False) for place in batch], list(range(30)))

    def test_its_length_is_the_number_of_its_batches(self):
        for size in range(1, 5):
            for rank in range(size):
                for length in (50, 54, 9, 5):
                    sampler = of_rank(rank, size, length, 9, micro_batch=2)
                    self.assertEqual(len(sampler), len(list(sampler)))
                    sampler.advance()
                    self.assertEqual(len(sampler), len(list(sampler)))

    def test_a_billion_samples_need_neither_memory_nor_time(self):
        state = of_rank(0, 1, 10**9, 256).state_dict() | {"position": 256 * 10**6}
        sampler = of_rank(2, 4, 10**9, 256, micro_batch=32, state=state)
        self.assertEqual(len(sampler), 2 * (10**9 - 256 * 10**6) // 256)
        batches = iter(sampler)
        self.assertEqual([len(next(batches)) for _ in range(2)], [32, 32])

    def test_another_training_is_refused(self):
        state = of_rank(0, 1, 30, 7).state_dict()
        with self.assertRaisesRegex(ValueError, "global_batch 7, this sampler has 8"):
            of_rank(0, 1, 30, 8).load_state_dict(state)

    def test_sizes_that_make_no_sense_are_refused(self):
        wrong = [((10, 0), {}), ((10, 2), {"micro_batch": 0}), ((0, 2), {}), ((10, 20), {"drop_last": True})]
        for arguments, options in wrong:
            with self.assertRaises(ValueError):
                ElasticBatchSampler(*arguments, **options)


if __name__ == "__main__":
    unittest.main()
