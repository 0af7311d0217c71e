"""Writes PyTorch's gradient of a GPT for given parameters: gradients.py VOCABULARY CONTEXT LAYERS HEADS WIDTH TIME DIR.

DIR holds `parameters` (f32), `inputs` and `targets` (i64), and gets `gradient` (f32). Prints the summed loss, then a line
for each parameter: its name and its shape."""

import os
import pathlib
import sys

import torch

from models import Gpt

size, time, folder = [int(word) for word in sys.argv[1:6]], int(sys.argv[6]), pathlib.Path(sys.argv[7])


def read(name, dtype):
    return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=dtype)


torch.set_num_threads(1)
model, flat, place = Gpt(*size), read("parameters", torch.float32), 0
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(flat[place : place + parameter.numel()].view_as(parameter))
        place += parameter.numel()
assert place == len(flat), f"{len(flat)} numbers for {place} parameters"
inputs, targets = (read(name, torch.int64).view(-1, time) for name in ("inputs", "targets"))
loss = model(inputs, targets)
loss.backward()
gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
(folder / "gradient").write_bytes(bytes(gradient.untyped_storage()))
print(loss.item())
for name, parameter in model.named_parameters():
    print(name, list(parameter.shape))
sys.stdout.flush()
# PyTorch's threads may abort the interpreter while it shuts down.
os._exit(0)
