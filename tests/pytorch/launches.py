"""Launches functions and a program from Python, without PyTorch, and prints the result of each as a line of JSON."""

import io
import json
import os
import signal
import sys
import threading
import time
import types

from elastic_agent.launch import LaunchError, elastic_launch


def config(**more):
    endpoint = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "job"}
    return types.SimpleNamespace(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=0, **endpoint, **more)


def work(factor, plus=0):
    # In one write: workers share the agent's output.
    sys.stdout.write(f"rank {os.environ['RANK']} works\n")
    return factor * int(os.environ["RANK"]) + plus


def fails():
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is not a number")


def works_at_the_second_try(folder):
    path = os.path.join(folder, os.environ["RANK"])
    if not os.path.exists(path):
        open(path, "w").close()
        if os.environ["RANK"] == "0":
            # It fails when the other has begun, whose second try is then this round's too.
            until = time.monotonic() + 30
            while not os.path.exists(os.path.join(folder, "1")) and time.monotonic() < until:
                time.sleep(0.01)
            sys.exit(3)
        return "first"
    return "second"


def never_ends(path):
    open(path, "w").close()
    signal.pause()


def tell(what, value):
    print(json.dumps({what: value}), flush=True)


def main(folder):
    # Of a command line; the agent would refuse it beside the call's own.
    os.environ["PET_NO_PYTHON"] = "1"
    tell("returned", elastic_launch(config(), work)(10, plus=1))
    try:
        elastic_launch(config(), fails)()
    except LaunchError as error:
        tell("failed", str(error))
    tries = os.path.join(folder, "tries")
    os.mkdir(tries)
    again = config()
    again.max_restarts = 1
    tell("again", elastic_launch(again, works_at_the_second_try)(tries))

    # As in a notebook, whose output goes elsewhere
    cell = io.StringIO()
    sys.stdout = cell
    try:
        elastic_launch(config(), work)(1)
        elastic_launch(config(), "/bin/echo")("a program")
    finally:
        sys.stdout = sys.__stdout__
    tell("cell", cell.getvalue())

    # and whose cell is interrupted
    began = os.path.join(folder, "began")

    def interrupt():
        while not os.path.exists(began):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        elastic_launch(config(), never_ends)(began)
    except KeyboardInterrupt:
        tell("interrupted", True)


if __name__ == "__main__":
    main(sys.argv[1])
