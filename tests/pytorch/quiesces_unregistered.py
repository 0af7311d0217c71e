"""Quiesces without having said that it knows about rounds, and tells what the agent says. Needs no PyTorch."""

import signal

import elastic_agent
import harness

# Its agent stops it as the round forms: it lives long enough to hear why it may not quiesce.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# The next round may form as soon as this one is known to run.
elastic_agent.assignment()
harness.report_start()
try:
    elastic_agent.quiesce(1, timeout=60)
except elastic_agent.AgentError as error:
    harness.trace("refused", error=str(error), is_runtime_error=isinstance(error, RuntimeError))
harness.exit_now()
