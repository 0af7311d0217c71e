import json
import os
import socket
import tempfile
import threading
import unittest
from unittest import mock

from elastic_agent import worker


def answers(server: socket.socket, answer: dict) -> None:
    """An agent that answers each request with this, or with nothing."""
    connection, _ = server.accept()
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            asked = json.loads(line)
            if "id" in asked and answer:
                lines.write(json.dumps({**answer, "id": asked["id"]}) + "\n")
                lines.flush()


class Errors(unittest.TestCase):
    def asked(self, answer: dict, timeout: float | None = 20) -> worker.AgentError:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/agent")
            server.listen()
            threading.Thread(target=answers, args=(server, answer), daemon=True).start()
            with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
                agent = worker._Agent(f"{folder}/agent")
            with self.assertRaises(worker.AgentError) as raised:
                agent.ask({"type": "commit"}, timeout)
            agent._socket.shutdown(socket.SHUT_RDWR)
            return raised.exception

    def test_they_say_whether_the_same_may_succeed_later(self) -> None:
        error = {"type": "error", "message": "the store is away"}
        self.assertTrue(self.asked({**error, "again": True}).again)
        self.assertFalse(self.asked({**error, "again": False}).again)
        # Agents leave it out where it is false.
        self.assertFalse(self.asked(error).again)
        self.assertEqual(str(self.asked(error)), "the store is away")

    def test_an_answer_that_does_not_come_may_come_later(self) -> None:
        self.assertTrue(self.asked({}, timeout=0.1).again)


if __name__ == "__main__":
    unittest.main()
