"""The order of an epoch: each sample once, as good as random, and the same for those who know the seed. Needs only the
standard library."""

import collections
import sys
import unittest

from elastic_agent.order import Permutation


def spread(counts, expected):
    """Chi squared."""
    return sum((count - expected) ** 2 / expected for count in counts)


class Orders(unittest.TestCase):
    def test_each_number_has_one_place(self):
        for length in [*range(40), 97, 1000, 4096, 4097, 65_536]:
            permutation = Permutation(length, f"key {length}")
            self.assertEqual(len(permutation), length)
            self.assertEqual(sorted(permutation), list(range(length)), length)

    def test_it_is_the_same_everywhere(self):
        # Known answers: another version, Python or machine must not come to others, or a job reads samples twice.
        self.assertEqual(list(Permutation(10, "7 0")), [5, 3, 9, 0, 4, 1, 6, 2, 7, 8])
        billion = Permutation(10**9, "7 3")
        self.assertEqual([billion[place] for place in (0, 1, 2, 10**9 - 1)], [612984998, 463832892, 78200408, 202932457])

    def test_a_billion_samples_need_no_memory(self):
        billion = Permutation(10**9, "7 0")
        self.assertLess(sys.getsizeof(billion) + sum(map(sys.getsizeof, vars(billion).values())), 2000)
        for place in (-1, 10**9):
            with self.assertRaises(IndexError):
                billion[place]

    def test_any_number_may_be_at_any_place(self):
        # Over many seeds: 100 places of 100 numbers, each about as often.
        length, seeds = 100, 1000
        counts = collections.Counter()
        for seed in range(seeds):
            permutation = Permutation(length, f"{seed} 0")
            counts.update((place, permutation[place]) for place in range(0, length, 4))
        found = spread([counts[place, number] for place in range(0, length, 4) for number in range(length)], seeds / length)
        # 25 * 99 degrees of freedom: 2475, and five standard deviations are 352.
        self.assertLess(abs(found - 2475), 352)

    def test_neighbours_are_no_neighbours(self):
        # Of a large order: numbers, and the distances from each to the next, fall evenly into 64 parts. So do pairs.
        length, count, parts = 10**9, 20_000, 64
        permutation = Permutation(length, "5 1")
        numbers = [permutation[place] for place in range(123_456_789, 123_456_789 + count)]
        distances = [(after - before) % length for before, after in zip(numbers, numbers[1:])]
        # As large as the digits that the places are taken apart into: with too few rounds, neighbours share much of one.
        root = 31_623
        for values, end in ((numbers, length), (distances, length), ([one % root for one in distances], root)):
            found = spread(collections.Counter(value * parts // end for value in values).values(), len(values) / parts)
            self.assertLess(found, 63 + 5 * (2 * 63) ** 0.5)
        pairs = collections.Counter((a * 16 // length, b * 16 // length) for a, b in zip(numbers, numbers[1:]))
        self.assertEqual(len(pairs), 256)
        self.assertLess(spread(pairs.values(), (count - 1) / 256), 255 + 5 * (2 * 255) ** 0.5)

    def test_keys_have_nothing_in_common(self):
        # Two epochs of 1000 samples agree in about one place.
        first, second = list(Permutation(1000, "1 0")), list(Permutation(1000, "1 1"))
        self.assertLess(sum(a == b for a, b in zip(first, second)), 8)


if __name__ == "__main__":
    unittest.main()
