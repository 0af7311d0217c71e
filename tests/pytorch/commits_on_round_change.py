"""Commits a checkpoint when it hears that a round is forming, beside a callback that fails. Needs no PyTorch."""

import harness

harness.report_start()

import signal
import sys
import threading

import elastic_agent

saved = threading.Event()


def fail(round: int, reason: str) -> None:
    raise ValueError(f"a callback failed as round {round} was forming")


def save(round: int, reason: str) -> None:
    checkpoint = harness.DIR / f"checkpoint-{round}"
    checkpoint.write_text("weights")
    elastic_agent.commit_checkpoint(round * 10, checkpoint, timeout=10)
    harness.trace("saved", next=round)
    saved.set()


def stop(*_) -> None:
    # The announcement came before the signal, to another thread.
    saved.wait(15)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
place = elastic_agent.assignment()
if harness.RANK == 0:
    elastic_agent.on_round_change(fail)
    elastic_agent.on_round_change(save)
else:
    saved.set()
harness.trace("placed", checkpoint=place["checkpoint"])
harness.wait_for("finish")
