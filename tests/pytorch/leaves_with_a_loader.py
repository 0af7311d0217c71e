"""A worker whose DataLoader has processes is asked to leave. Whichever processes get the signal too, and whenever they
end, the worker saves its last step. What an agent says is simulated."""

import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import checkpoints

torch.set_num_threads(1)


def children():
    tasks = os.listdir("/proc/self/task")
    return [int(pid) for task in tasks for pid in open(f"/proc/self/task/{task}/children").read().split()]


def end_children_in_the_save(write=checkpoints.write):
    """They end while the state is written."""

    def slow(path, state):
        for pid in children():
            # A SIGTERM of their parent is a good end for them.
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            time.sleep(0.01)
        return write(path, state)

    checkpoints.write = slow


def train(folder, ready, reads_slowly, aside):
    os.setpgid(0, 0)
    ranks.Agent(0, 0, 1, 1)
    worker.commit_checkpoint = lambda *_, **__: None
    data = TensorDataset(torch.randn(960, 20), torch.randint(3, (960,)))
    model = torch.nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = elastic.ElasticBatchSampler(data, global_batch=96, seed=1)

    def collate(samples):
        time.sleep(reads_slowly)
        return torch.utils.data.default_collate(samples)

    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, collate_fn=collate)
    with elastic.Session(model, optimizer, sampler, checkpoint_dir=folder, checkpoint_every=10**6) as session:
        for inputs, labels in session.steps(loader, epochs=1000):
            time.sleep(0.02)
            session.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            session.step()
            os.pwrite(ready_steps, str(session.step_number).encode().ljust(9), 0)
            if session.step_number == 5:
                with session.aside() if aside else contextlib.nullcontext():
                    os.write(ready, b"x")
                    time.sleep(60 if aside else 0)


def saves(number, to_group, in_save=False, reads_slowly=0.0, aside=False):
    """How a worker ends that gets this signal."""
    global ready_steps
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as steps:
        folder, (began, ready), ready_steps = pathlib.Path(name), os.pipe(), steps.fileno()
        pid = os.fork()
        if pid == 0:
            os.close(began)
            if in_save:
                end_children_in_the_save()
            try:
                train(folder, ready, reads_slowly, aside)
            except SystemExit as end:
                os._exit(end.code)
            except BaseException as error:
                print(f"{error!r}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        os.close(ready)
        assert os.read(began, 1) == b"x", "it does not come to its fifth step"
        os.close(began)
        (os.killpg if to_group else os.kill)(pid, number)
        until, status = time.monotonic() + 20, None
        while status is None and time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(status) if ended else None
            time.sleep(0.01)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
        told = (number, to_group, in_save, reads_slowly, aside)
        assert status == 128 + number, (told, status)
        saved = [torch.load(one)["step"] for one in folder.glob("*.pt")]
        assert saved == [int(os.pread(ready_steps, 9, 0))], (told, saved)


if __name__ == "__main__":
    saves(signal.SIGTERM, to_group=False)
    saves(signal.SIGTERM, to_group=True)
    saves(signal.SIGTERM, to_group=True, reads_slowly=0.3)
    saves(signal.SIGTERM, to_group=False, in_save=True)
    saves(signal.SIGTERM, to_group=True, aside=True)
    for other in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        saves(other, to_group=True)
