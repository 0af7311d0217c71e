"""One replica of bench_kills.py: trains by the means that its first argument names, and tells each step in the file that
its second names, with how many samples the group used in it, and how many replicas there were.

A replica computes as long as a GPU might, and leaves the processor to others meanwhile: it sleeps.
"""

import itertools
import os
import pathlib
import sys
import time

import torch

from models import bench_network

MEANS, STEPS_FILE = sys.argv[1:3]
REPLICAS, BATCH, SECONDS = int(os.environ["REPLICAS"]), 32, float(os.environ["SECONDS"])
SAVE, JOINS = (pathlib.Path(STEPS_FILE).with_name(name) for name in ("saved.pt", "joins"))

torch.set_num_threads(1)
torch.manual_seed(0)
model = bench_network(int(os.environ["WIDTH"]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(REPLICAS * BATCH, 512), torch.randint(1000, (REPLICAS * BATCH,))
steps_file = os.open(STEPS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def tell(step: int, size: int, samples: int) -> None:
    # One write, so that lines of several processes do not mix.
    os.write(steps_file, f"{step} {size} {samples} {os.getpid()} {time.monotonic()}\n".encode())


def loss_of(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    time.sleep(SECONDS * len(wanted) / BATCH)
    return torch.nn.functional.cross_entropy(output, wanted)


def by_session() -> None:
    import elastic_agent
    import elastic_agent.torch as elastic

    sampler = elastic.ElasticBatchSampler(labels, REPLICAS * BATCH, micro_batch=BATCH)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_sampler=sampler)
    ready, joined = time.monotonic(), False
    elastic_agent.ready()
    with elastic.Session(model, optimizer, sampler) as session:
        for some, wanted in session.steps(loader, epochs=1_000_000):
            session.backward(loss_of(model(some), wanted))
            if session.step():
                tell(session.step_number, session.world_size, REPLICAS * BATCH)
                if not joined:
                    joined = True
                    with JOINS.open("a") as file:
                        file.write(f"{time.monotonic() - ready}\n")


def by_torchft() -> None:
    """As torchft's own example, train_ddp.py, has it."""
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica-{os.environ['REPLICA']}",
    )
    wrapped, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    own = slice(int(os.environ["REPLICA"]) * BATCH, (int(os.environ["REPLICA"]) + 1) * BATCH)
    while True:
        before = manager.current_step()
        managed.zero_grad()
        loss_of(wrapped(inputs[own]), labels[own]).backward()
        managed.step()
        if manager.current_step() > before:
            tell(manager.current_step(), manager.num_participants(), manager.num_participants() * BATCH)


def by_restarts() -> None:
    """Plain DistributedDataParallel, which its launcher starts again, from a file of at most ten steps before."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    first = 0
    if SAVE.exists():
        saved = torch.load(SAVE)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    rank = dist.get_rank()
    for step in itertools.count(first + 1):
        optimizer.zero_grad()
        own = slice(rank * BATCH, (rank + 1) * BATCH)
        loss_of(wrapped(inputs[own]), labels[own]).backward()
        optimizer.step()
        tell(step, dist.get_world_size(), REPLICAS * BATCH)
        if rank == 0 and step % 10 == 0:
            torch.save({"model": model.state_dict(), "step": step}, f"{SAVE}.new")
            os.replace(f"{SAVE}.new", SAVE)


{"session": by_session, "torchft": by_torchft, "ddp": by_restarts}[MEANS]()
