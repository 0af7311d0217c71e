"""Distributed data parallel training that continues after failures and with other numbers of workers.

    elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 train_ddp.py

Every worker starts this script again in each round, so the script reads the newest checkpoint first. Rank 0 writes one
after each epoch. With several nodes, --folder must be one that all of them see.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(samples: int = 4096) -> TensorDataset:
    """Points in 16 dimensions, and in which of four quarters they lie. Put your own data here."""
    points = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long())


@record  # Tells the agent why a worker failed.
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--batch", type=int, default=64, help="samples a worker takes for a step")
    arguments.add_argument("--folder", default="checkpoints", help="where checkpoints are")
    options = arguments.parse_args()

    # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by the agent.
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler)

    first, path = 0, os.path.join(options.folder, "last.pt")
    if os.path.exists(path):
        saved = torch.load(path, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        if dist.get_rank() == 0:
            print(f"continues with epoch {first}, {dist.get_world_size()} workers", flush=True)

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for points, quarters in loader:
            loss = torch.nn.functional.cross_entropy(model(points.to(device)), quarters.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            os.makedirs(options.folder, exist_ok=True)
            state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            # Under another name first: a checkpoint is there as a whole or not at all.
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
