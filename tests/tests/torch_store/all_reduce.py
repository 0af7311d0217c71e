"""Four gloo ranks that sum their ranks, fail while there are restarts left, and outlive rank 0 in the end."""

import os
import sys
import time

import torch
import torch.distributed as dist

assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
dist.init_process_group("gloo", init_method="env://")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == 10.0, total
store = dist.distributed_c10d._get_default_store()
assert store.add("seen", 1) <= dist.get_world_size(), "a key of another round"
dist.barrier()
print(f"round {os.environ['ELASTIC_ROUND']} rank {rank} sums {total.item()}", flush=True)
if restarts < int(os.environ["ELASTIC_TEST_RESTARTS"]):
    if rank == restarts % 4:
        os._exit(3)
    time.sleep(600)
if rank == 0:
    store.set("pid", str(os.getpid()))
    dist.barrier()
    os._exit(0)
pid = int(store.get("pid"))
dist.barrier()
while os.path.exists(f"/proc/{pid}/exe"):
    time.sleep(0.02)
store.set(f"after/{rank}", "here")
assert [store.get(f"after/{peer}") for peer in (1, 2, 3)] == [b"here"] * 3
print(f"rank {rank} continued without rank 0", flush=True)
os._exit(0)
