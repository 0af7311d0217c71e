"""A worker that keeps its process while its group changes: it tells each assignment that it gets. Needs no PyTorch."""

import os
import time

import elastic_agent

place, step = elastic_agent.ready(), 0

# The harness looks for its rank at once.
import harness  # noqa: E402

harness.report_start()
while True:
    again = elastic_agent.assignment() == place
    harness.trace("placed", place=place, pid=os.getpid(), master_port=os.environ["MASTER_PORT"], again=again)
    while not elastic_agent.forming():
        if harness.is_set("finish"):
            harness.exit_now()
        step += 1
        time.sleep(0.02)
    place = elastic_agent.quiesce(step)
