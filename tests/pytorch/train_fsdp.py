"""Fully sharded training (FSDP2) with distributed checkpoints: each rank holds and writes its shard alone, and a group
of another size reads them all. It trains until the test says `finish`."""

import harness

harness.report_start()

import hashlib
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FOLDER = harness.DIR / "sharded"


def digest(model) -> str:
    """A checksum of all parameters, however they are sharded."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    names = b"".join(whole[name].numpy().tobytes() for name in sorted(whole))
    return hashlib.sha256(names).hexdigest() if names else ""


def newest() -> int:
    """The last step whose checkpoint is whole: its metadata is written last."""
    return max((int(path.parent.name) for path in FOLDER.glob("*/.metadata")), default=0)


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (harness.WORLD_SIZE,))
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    pixels, shown = harness.digits(120)

    # All must read the same one.
    step = torch.tensor([newest()])
    dist.broadcast(step, 0)
    step = int(step)
    if step:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=FOLDER / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    harness.trace("begin", step=step, digest=digest(model))
    finish = False
    while not finish:
        loss = torch.nn.functional.cross_entropy(model(pixels[harness.RANK :: harness.WORLD_SIZE]), shown[harness.RANK :: harness.WORLD_SIZE])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        weights, moments = get_state_dict(model, optimizer)
        # It may be stopped when it has saved, and has not yet told of it.
        harness.trace("saves", step=step, digest=digest(model))
        dcp.save({"weights": weights, "moments": moments}, checkpoint_id=FOLDER / str(step))
        harness.trace("saved", step=step, loss=loss.item())
        time.sleep(0.02)
        word = torch.tensor([int(harness.is_set("finish"))])
        dist.broadcast(word, 0)
        finish = bool(word)
    dist.destroy_process_group()


main()
harness.exit_now()
