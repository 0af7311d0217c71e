"""Says all that a worker can say to its agent, and writes down the answers. Needs no PyTorch."""

import harness

harness.report_start()

import signal
import sys
import threading

import elastic_agent

forming = threading.Event()


def hear(round: int, reason: str) -> None:
    harness.trace("forming", next=round, reason=reason)
    forming.set()


def stop(*_) -> None:
    # The announcement came before the signal, to another thread.
    forming.wait(10)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
place = elastic_agent.assignment()
elastic_agent.on_round_change(hear)
elastic_agent.report_progress(place["round"] * 10, epoch=0, loss=0.5, total_steps=100)
elastic_agent.barrier("data-ready", timeout=30)
harness.trace("passed", place=place)
if harness.RANK == 0:
    checkpoint = harness.DIR / f"checkpoint-{place['round']}"
    checkpoint.write_text("weights")
    elastic_agent.commit_checkpoint(place["round"] * 10, checkpoint, timeout=30)
    try:
        elastic_agent.commit_checkpoint(place["round"] * 10 - 1, checkpoint, timeout=30)
    except elastic_agent.AgentError as error:
        harness.trace("committed", refused=str(error), again=error.again)
harness.wait_for("finish")
