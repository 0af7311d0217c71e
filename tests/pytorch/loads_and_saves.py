"""A worker with a DataLoader. On SIGTERM it takes ten more batches, writes `saved-RANK` into TEST_DIR, and ends."""

import os
import signal
from pathlib import Path

from torch.utils.data import DataLoader

folder, rank = Path(os.environ["TEST_DIR"]), os.environ["RANK"]
asked = []


def main():
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    left = 10
    for _ in DataLoader(range(10**9), batch_size=4, num_workers=2):
        (folder / f"loads-{rank}").touch()
        left -= len(asked)
        if left == 0:
            break
    (folder / f"saved-{rank}").touch()


if __name__ == "__main__":
    main()
