"""Does the steps of an optimizer of PyTorch's: optimizers.py DIR STEPS FLAGS…

DIR holds `parameters` and `gradients` (f32), and gets `state`: the parameters, then what the optimizer keeps of each kind.
The flags are the trainer's, and `--group NUMBERS,RATE,DECAY` for each tensor. Prints each step's learning rate."""

import argparse
import os
import pathlib
import sys

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("steps", type=int)
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--weight-decay", type=float)
parser.add_argument("--betas", default="0.9,0.999")
parser.add_argument("--eps", type=float, default=1e-8)
parser.add_argument("--momentum", type=float, default=0)
parser.add_argument("--nesterov", action="store_true")
parser.add_argument("--schedule", default="constant")
parser.add_argument("--lr-min", type=float, default=0)
parser.add_argument("--warmup-steps", type=int, default=0)
parser.add_argument("--group", action="append")
flags = parser.parse_args()


def read(name):
    return torch.frombuffer(bytearray((flags.folder / name).read_bytes()), dtype=torch.float32)


groups = [[float(number) for number in group.split(",")] for group in flags.group]
sizes = [int(size) for size, _, _ in groups]
parameters = [torch.nn.Parameter(part.clone()) for part in read("parameters").split(sizes)]
decay = {"adamw": 0.01, "sgd": 0}[flags.optimizer] if flags.weight_decay is None else flags.weight_decay
of_tensors = [
    {"params": [parameter], "lr": flags.lr * rate, "weight_decay": decay * share}
    for parameter, (_, rate, share) in zip(parameters, groups)
]
if flags.optimizer == "adamw":
    betas = tuple(float(beta) for beta in flags.betas.split(","))
    optimizer, kept = torch.optim.AdamW(of_tensors, betas=betas, eps=flags.eps), ["exp_avg", "exp_avg_sq"]
else:
    optimizer = torch.optim.SGD(of_tensors, momentum=flags.momentum, nesterov=flags.nesterov)
    kept = ["momentum_buffer"] if flags.momentum else []
warmup, falls = flags.warmup_steps, flags.steps - flags.warmup_steps
course = {
    "constant": lambda: ConstantLR(optimizer, 1),
    "cosine": lambda: CosineAnnealingLR(optimizer, falls, flags.lr_min),
    "linear": lambda: LinearLR(optimizer, 1, flags.lr_min / flags.lr, falls),
}[flags.schedule]
if warmup:
    rises = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
    scheduler = SequentialLR(optimizer, [rises, course()], [warmup])
else:
    scheduler = course()
for gradient in read("gradients").split(sum(sizes)):
    print(scheduler.get_last_lr()[0])
    for parameter, part in zip(parameters, gradient.split(sizes)):
        parameter.grad = part.clone()
    optimizer.step()
    scheduler.step()
state = [torch.cat([parameter.detach() for parameter in parameters])]
state += [torch.cat([optimizer.state[parameter][name] for parameter in parameters]) for name in kept]
(flags.folder / "state").write_bytes(b"".join(part.numpy().tobytes() for part in state))
sys.stdout.flush()
# PyTorch's threads may abort the interpreter while it shuts down.
os._exit(0)
