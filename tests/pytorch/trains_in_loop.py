"""Trains two models in a loop of its own, and tells each step. It ends with the step that the test names, and compares
the models with those of one process."""

import os
import time

import torch

import elastic_agent
import elastic_agent.torch as elastic
from carries_states import Pair, rows_of

torch.set_num_threads(1)
pair = Pair(int(os.environ["GROUP_RANK"]))
# Under --warm-up the others wait only for what follows.
elastic_agent.ready()

import harness  # noqa: E402

harness.report_start()


def total(one):
    return float(one.end().abs().sum())


state = elastic.State(models=pair.models, optimizers=pair.optimizers, until=1)
with elastic.Loop(state, snapshot_every=1) as loop:
    while loop.step_number < state.until:
        with loop.step():
            state.until = loop.agree(harness.wanted("until"))
            rows = rows_of(loop.step_number, loop.rank, loop.world_size)
            for which in (0, 1):
                pair.learn(which, rows, loop.mean_gradients)
        # The environment follows the rounds. The harness has read it once.
        harness.ROUND, harness.RANK, harness.WORLD_SIZE = int(os.environ["ELASTIC_ROUND"]), loop.rank, loop.world_size
        harness.trace("applied", step=loop.step_number, pid=os.getpid(), sum=total(pair))
        if not harness.is_set("until"):
            time.sleep(0.05)
undisturbed = Pair(0)
for step in range(loop.step_number):
    for which in (0, 1):
        undisturbed.learn(which, rows_of(step, 0, 1), lambda model: None)
harness.trace("end", step=loop.step_number, sum=total(pair), undisturbed=total(undisturbed))
harness.exit_now()
