"""What the check of a script says of its runs, by tables of notes. It imports no PyTorch."""

import importlib
import pathlib
import sys
import types
import unittest

# As a package of its own: importing elastic_agent.torch would import torch.
package = types.ModuleType("check")
package.__path__ = [str(pathlib.Path(__file__).parent.parent / "elastic_agent/torch/check")]
sys.modules["check"] = package
compare = importlib.import_module("check.compare")
findings = importlib.import_module("check.findings")


def run(steps, ranks=1, *, rank=0, loss=1.0, weight=6, samples=3, nodes=(), **entered):
    """A run whose only parameter has these numbers after each step, from step 0 on."""
    facts = {"kind": "Session", "fixed": True, "samples": samples, "short": True, "eps": 1e-7, "bits": False}
    notes = [{"event": "enters", "at": 0, **facts, **entered}]
    for step, number in enumerate(steps):
        place = {"which": 0, "round": 1, "rank": rank, "node": f"node-{rank + 1}", "at": step}
        notes.append({"event": "step" if step else "begins", "step": step, "sums": {"w": [number]}, **place})
        if step:
            notes[-1].update(epoch=step - 1, loss=loss, losses=loss, weight=weight, samples=list(range(3)))
    return compare.Run(f"{ranks} ranks", ranks, notes, {"node-1": 0}, 1.0)


def said(one, **named):
    return [(found.what, found.where) for found in findings.of_run(one, named.get("leaving"), 15.0)]


class Compares(unittest.TestCase):
    def test_where_two_runs_are_apart(self):
        for steps, bits, eps, expected in [
            ([0.0, 1.0, 2.0], True, 1e-7, None),
            ([0.0, 1.0, 2.0000001], False, 1e-7, None),
            ([0.0, 1.0, 2.0000001], True, 1e-7, 2),
            ([0.0, 1.1, 2.0], False, 1e-7, 1),
            ([0.0, 1.1, 2.0], False, 0.0078, None),
            ([0.0, float("nan"), 2.0], False, 1e-7, 1),
        ]:
            found = findings.apart(run(steps, bits=bits, eps=eps), run([0.0, 1.0, 2.0], bits=True))
            self.assertEqual(found and (found.step, found.parameter), expected and (expected, "w"), steps)

    def test_a_loss_that_is_a_sum(self):
        whole = run([0.0, 1.0], loss=12.0, weight=24)
        for losses, expected in [((4.0, 8.0), True), ((12.0, 12.0), False)]:
            parts = run([0.0, 1.0], 2, loss=losses[0], weight=12)
            parts.notes += run([0.0, 1.0], 2, rank=1, loss=losses[1], weight=12).notes[1:]
            self.assertEqual(compare.is_a_sum(parts, whole), expected)


class Finds(unittest.TestCase):
    def test_a_good_run_has_no_finding(self):
        self.assertEqual(said(run([0.0, 1.0, 2.0])), [])

    def test_each_kind_by_its_note(self):
        for notes, expected in [
            ([{"event": "error", "message": "ValueError: no", "where": "a.py:3"}], ("by ValueError: no", "a.py:3")),
            ([{"event": "outside", "what": "ema", "type": "E", "argument": "", "where": "a.py:4"}], ("ema (E", "a.py:4")),
            ([{"event": "gradient", "step": 1, "where": "a.py:5"}], ("gradient is changed", "a.py:5")),
            ([{"event": "own step", "where": "a.py:6"}], ("optimizer's step() itself", "a.py:6")),
            ([{"event": "pause", "seconds": 16.0, "step": 2, "where": "a.py:7"}], ("16 s passed", "a.py:7")),
            ([{"event": "starts", "pid": 1}, {"event": "starts", "pid": 2}], ("lost its process", "")),
        ]:
            one = run([0.0, 1.0])
            one.notes += [{"node": "node-1", "at": 9, **note} for note in notes]
            found = said(one)
            self.assertEqual(len(found), 1, found)
            self.assertIn(expected[0], found[0][0])
            self.assertEqual(found[0][1], expected[1])

    def test_a_process_that_the_check_has_killed_is_not_lost(self):
        one = run([0.0, 1.0])
        one.notes += [{"event": event, "pid": pid, "node": "node-1", "at": 9} for event, pid in
                      [("starts", 1), ("dies", 1), ("starts", 2)]]
        self.assertEqual(said(one), [])

    def test_ranks_samples_steps_and_ends(self):
        other = [{**note, "samples": []} for note in run([0.0, 1.5], rank=1).notes[1:]]
        self.assertIn("the workers of node-1 and node-2 have", self.first(lambda one: one.notes.extend(other)))
        self.assertIn("used sample 0 more than once", self.first(lambda one: one.notes[2]["samples"].append(0)))
        self.assertIn("used 2 samples of 3", self.first(lambda one: one.notes[2]["samples"].pop()))
        again = {**run([0.0]).notes[1], "round": 2, "at": 9}
        self.assertIn("continued from step 0", self.first(lambda one: one.notes.append(again)))
        twice = {**run([0.0, 1.0]).notes[2], "round": 2, "samples": []}
        self.assertIn("step 1 was applied 2 times", self.first(lambda one: one.notes.append(twice)))
        self.assertIn("exit code 5", self.first(lambda one: one.codes.update({"node-1": 5})))
        self.assertIn("had not ended after 1 s", self.first(lambda one: one.stuck.update({"node-1": "a.py:8"})))
        self.assertIn("is nan on rank 0", self.first(lambda one: one.notes[2].update(loss=float("nan"))))
        self.assertIn("neither an elastic.Session nor", self.first(lambda one: one.notes.clear()))

    def first(self, spoil):
        one = run([0.0, 1.0])
        spoil(one)
        return said(one)[0][0]

    def test_a_node_that_is_asked_to_leave_has_left(self):
        one = run([0.0, 1.0])
        one.codes["node-2"] = 3
        self.assertEqual(said(one, leaving="node-2"), [])
        self.assertIn("node-2's agent", said(one)[0][0])


if __name__ == "__main__":
    unittest.main()
