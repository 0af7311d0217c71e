"""Meets the other ranks by Accelerate, and says where it is. In the first round rank 1 dies."""

import argparse
import os
import signal

import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--word", required=True)
word = parser.parse_args().word
accelerator = Accelerator(cpu=True)
place = os.environ["ELASTIC_ROUND"]
if place == "1" and accelerator.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1)).item()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}, round {place}, sum {total}: {word}", flush=True)
accelerator.wait_for_everyone()
os._exit(0)
