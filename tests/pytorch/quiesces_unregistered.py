"""Quiesces without having said that it knows about rounds, and tells what the agent says. Needs no PyTorch."""

import harness

harness.report_start()

import signal

import elastic_agent

# Its agent stops it as the round forms: it lives long enough to hear why it may not quiesce.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    elastic_agent.quiesce(1, timeout=60)
except elastic_agent.AgentError as error:
    harness.trace("refused", error=str(error), is_runtime_error=isinstance(error, RuntimeError))
harness.exit_now()
