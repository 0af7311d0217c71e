"""Has PyTorch's file-based timer watch its steps. In the first attempt the second step of rank 1 takes for ever, and
rank 0 waits for it."""

import harness

harness.report_start()

import os
import time

from torch.distributed.elastic import timer

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    harness.trace("in time", attempt=attempt)
if attempt == 0:
    if harness.RANK == 1:
        harness.wait_for("in-time-0")
        with timer.expires(after=1):
            time.sleep(1000)
    (harness.DIR / "in-time-0").touch()
    time.sleep(1000)
harness.trace("done", attempt=attempt)
harness.exit_now()
