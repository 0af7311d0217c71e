#!/usr/bin/env python3
"""Runs a job that loses a node and whose worker fails, and draws the coordinator's page of it in Chromium, as an operator
sees it: docs/images/coordinator-page.png, for docs/coordinator.md.

    cargo build --locked --workspace --bins; scripts/page-picture.py target/debug
"""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs/images/coordinator-page.png"
WITHIN = 60
WIDTH = 1280
JOB = "resnet50"

# Makes twenty steps a second, continues where it was, and finds a sample that cannot be right when it is to.
WORKER = """
import os, time
from pathlib import Path
import elastic_agent

@elastic_agent.record
def main():
    rank, saved = os.environ["RANK"], Path("step")
    for step in range(int(saved.read_text()), 5000):
        time.sleep(0.05)
        elastic_agent.report_progress(step, epoch=step // 400, loss=2 - step / 4000, total_steps=5000)
        if rank == "0":
            Path("next").write_text(str(step))
            os.replace("next", saved)
        if rank == "1" and os.path.exists("fail"):
            os.remove("fail")
            raise ValueError("sample 33920 has the label -1, and labels begin at 0")

main()
"""


class Page:
    """A tab of Chromium, told over its debugging pipe what to do."""

    def __init__(self, processes, folder):
        (theirs, self.to), (self.by, written) = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4.
        command = ["sh", "-c", f'exec "$0" "$@" 3<&{theirs} 4>&{written}']
        command += ["/usr/bin/chromium", "--headless", "--no-sandbox"]
        command += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"]
        command += [f"--window-size={WIDTH},900", f"--user-data-dir={folder}"]
        start(processes, command, pass_fds=[theirs, written], stderr=subprocess.DEVNULL)
        self.calls, self.session = 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **parameters):
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        os.write(self.to, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            heard = b""
            while not heard.endswith(b"\0"):
                heard += os.read(self.by, 1)
            answer = json.loads(heard[:-1])
            if answer.get("id") == self.calls:
                return answer["result"]

    def value(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self):
        height = self.value("document.documentElement.getElementsByTagName('body')[0].scrollHeight")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])


def start(processes, command, **how):
    """Starts a program that is ended when this one ends."""
    process = subprocess.Popen([str(word) for word in command], start_new_session=True, **how)
    # The last callback is called first.
    processes.callback(process.wait)
    processes.callback(process.terminate)
    return process


def until(what, found):
    """What is found, once it is."""
    for _ in range(WITHIN * 20):
        if value := found():
            return value
        time.sleep(0.05)
    sys.exit(f"page-picture: it does not come that {what}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    programs = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        folder = Path(folder)
        token = [programs / "elasticctl", "token", "olga", "--role", "operate", "-o", "json"]
        made = json.loads(subprocess.run(token, capture_output=True, check=True).stdout)
        (folder / "users").write_text(made["line"] if isinstance(made["line"], str) else json.dumps(made["line"]))
        (folder / "train.py").write_text(WORKER)
        (folder / "step").write_text("900")
        store, log = f"127.0.0.1:{free_port()}", folder / "log"
        command = [programs / "elastic-coordinator", "--embedded", "--listen", store, "--peer-listen", "127.0.0.1:0"]
        with log.open("w") as to:
            start(processes, [*command, "--http", "127.0.0.1:0", "--http-users", folder / "users"], stderr=to)
        [url] = until("the coordinator serves its page", lambda: re.findall(r"http://127\S*\d", log.read_text())[:1])

        environment = os.environ | {"PYTHONPATH": str(ROOT / "agent/python")}
        agents = {}
        for name in ["gpu0", "gpu1", "gpu2"]:
            flags = [f"--rdzv-endpoint={store}", "--rdzv-backend=etcd", f"--rdzv-id={JOB}", f"--node-name={name}"]
            flags += ["--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=5", "train.py"]
            how = {"cwd": folder, "env": environment, "stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            agents[name] = start(processes, [programs / "elastic-agent", *flags], **how)

        page = Page(processes, folder / "profile")
        page.call("Page.navigate", url=url)
        until("the page asks for a token", lambda: page.value("!!document.querySelector('input[type=password]')"))
        page.value(f"sessionStorage.setItem('elastic-token', {json.dumps(made['token'])})")
        page.value(f"location.hash = '{JOB}'; location.reload()")

        def shows(*texts):
            text = page.value("document.body.innerText") or ""
            return all(re.search(one, text) for one in texts)

        until("three nodes train", lambda: shows(r"Nodes\s+3 here", r"Workers\s+3", r"step \d"))
        time.sleep(8)
        agents["gpu2"].send_signal(signal.SIGKILL)
        until("two continue", lambda: shows(r"Round\s+2 ", r"Workers\s+2", r"lost gpu2"))
        time.sleep(4)
        (folder / "fail").touch()
        until("they continue after a failure", lambda: shows(r"Round\s+3 ", r"Restarts\s+1 of 5"))
        # Progress is written every ten seconds.
        time.sleep(14)
        OUT.write_bytes(page.picture())
        print(f"page-picture: {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
