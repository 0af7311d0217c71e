"""Has PyTorch's file-based timer watch its steps. In the first attempt the second step of rank 1 takes for ever, and
rank 0 waits for it."""

import story

story.begin()

import os
import time

from torch.distributed.elastic import timer

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    story.tell("in time", attempt=attempt)
if attempt == 0:
    if story.RANK == 1:
        story.wait_for("in-time-0")
        with timer.expires(after=1):
            time.sleep(1000)
    (story.DIR / "in-time-0").touch()
    time.sleep(1000)
story.tell("done", attempt=attempt)
story.leave()
