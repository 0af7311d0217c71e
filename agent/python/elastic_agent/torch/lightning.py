"""Lightning's Trainer under elastic-agent: it resumes from the last steps, which the agent's memory holds, else from the
newest checkpoint that is whole. Importing this imports lightning."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from .. import worker
from .keeper import say
from .snapshots import FrameworkCallback, Part, Snapshots, fingerprint, folder_for_one_read, from_rank_0


class ElasticEnvironment(TorchElasticEnvironment):
    """The agent's environment, whose number of nodes changes: a Trainer with a literal `num_nodes` is not refused after a
    shrink. `ElasticCallback` gives the Trainer the number that there is."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuses what does not fit on a node: the number of nodes is the agent's to say."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_devices != local:
            raise ValueError(
                f"devices={num_devices}, and the agent has started {local} workers on this node: give devices={local}"
            )


class ElasticCallback(FrameworkCallback, Callback):
    """Keeps a Trainer's state in the agent's memory, and reports its progress.

    ::

        elastic = ElasticCallback()
        trainer = Trainer(num_nodes=4, devices=1, strategy="ddp", callbacks=[elastic], plugins=[ElasticEnvironment()])
        trainer.fit(module, data, ckpt_path=elastic.resume(module, "checkpoints"))

    A snapshot holds what `trainer.save_checkpoint` would write. Models that are sharded are not kept in memory.
    """

    # The last step that was seen.
    _step = -1

    def resume(self, module: LightningModule, folder: str | os.PathLike[str] | None = None) -> str | None:
        """What `trainer.fit(ckpt_path=...)` is to begin with: the newest state, the same on every rank. None if there is
        none. folder: where the Trainer's own checkpoints are. Begins `torch.distributed` if there are several ranks,
        as the Trainer would."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        part = Part(fingerprint(module), lambda: self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        self._snapshots = Snapshots({"checkpoint": part}, **self._settings)
        step, on_disk = from_rank_0(newest_whole(folder) if folder else (0, None))
        resumed = self._snapshots.resume(newer_than=step)
        if resumed is None:
            return on_disk
        self._restored = folder_for_one_read()
        path = os.path.join(self._restored, "snapshot.ckpt")
        torch.save(part.loaded, path)
        part.loaded = None
        return path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The samplers and the logs go by it.
        if hasattr(trainer.strategy, "num_nodes") and "GROUP_WORLD_SIZE" in os.environ:
            trainer.strategy.num_nodes = int(os.environ["GROUP_WORLD_SIZE"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_restored()
        self._trainer, self._step = trainer, trainer.global_step
        for optimizer in trainer.optimizers:
            self._watch(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # A batch whose gradient is only added to others'.
        self._step = trainer.global_step
        if self._snapshots:
            self._snapshots.take(trainer.global_step)
        total = trainer.max_steps if trainer.max_steps > 0 else None
        worker.report_progress(trainer.global_step, epoch=trainer.current_epoch, total_steps=total)


def newest_whole(folder: str | os.PathLike[str]) -> tuple[int, str | None]:
    """The step and the path of the newest whole `.ckpt` in or below a folder. 0 and None if there is none."""
    newest: tuple[int, str | None] = (0, None)
    for path in pathlib.Path(folder).rglob("*.ckpt"):
        try:
            # Read as Lightning reads it. Only the parts that are used come from the disk.
            step = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["global_step"]
        except Exception as error:  # noqa: BLE001: whatever is wrong with it, an older one may be whole.
            # Its directory is at its end: a file that was cut off has none.
            say(f"{path} is skipped: {str(error).partition(chr(10))[0] or repr(error)}")
            continue
        newest = max(newest, (step, str(path)), key=lambda one: one[0])
    return newest
