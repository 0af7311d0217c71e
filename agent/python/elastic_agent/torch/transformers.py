"""Transformers' Trainer under elastic-agent: it resumes from the last steps, which the agent's memory holds, else
from the newest checkpoint that is whole. Importing this imports transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import torch
import transformers

from .. import worker
from ..trainer_folder import newest_whole, step_of
from .keeper import say
from .snapshots import FrameworkCallback, Part, Snapshots, fingerprint, folder_for_one_read, from_rank_0

# A snapshot's copy of the log: the whole of it would grow with the training.
_LOGGED = 100


class ElasticCallback(FrameworkCallback, transformers.TrainerCallback):
    """Keeps a Trainer's state in the agent's memory, and reports its progress.

    ::

        elastic = ElasticCallback()
        trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[elastic])
        trainer.train(resume_from_checkpoint=elastic.resume(trainer))

    The Trainer writes its own checkpoints as before. Models that are sharded (FSDP, DeepSpeed) or have PEFT's adapters
    are not kept in memory. Random numbers are not part of a snapshot: dropout takes others after a restart.
    """

    def resume(self, trainer: transformers.Trainer) -> str | None:
        """What `trainer.train(resume_from_checkpoint=...)` is to begin with: the newest state, the same on every
        rank. None if there is none."""
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or hasattr(trainer.model, "peft_config"):
            return _newest_on_disk(trainer)
        self._trainer = trainer
        parts = {
            "model": Part(fingerprint(trainer.model), trainer.model.state_dict),
            "optimizer": Part("optimizer", lambda: trainer.optimizer.state_dict()),
            "scheduler": Part("scheduler", lambda: trainer.lr_scheduler.state_dict()),
            "trainer": Part("trainer", self._state_of_trainer),
        }
        self._snapshots = Snapshots(parts, **self._settings)
        on_disk = _newest_on_disk(trainer)
        resumed = self._snapshots.resume(newer_than=step_of(on_disk) if on_disk else 0)
        if resumed is None:
            return on_disk
        self._restored = _as_checkpoint({name: part.loaded for name, part in parts.items()})
        for part in parts.values():
            part.loaded = None
        return self._restored

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._snapshots:
            self._watch(self._trainer.optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # All of it has been read: random numbers, if there were any, with the first batch.
        self._remove_restored()
        if self._snapshots:
            self._snapshots.take(state.global_step)
        loss = state.log_history[-1].get("loss") if state.log_history else None
        worker.report_progress(
            state.global_step, epoch=int(state.epoch or 0), loss=loss, total_steps=max(state.max_steps, 0) or None
        )

    def _state_of_trainer(self) -> str:
        state = dataclasses.asdict(self._trainer.state)
        state["log_history"] = state["log_history"][-_LOGGED:]
        return json.dumps(state)


def _newest_on_disk(trainer: transformers.Trainer) -> str | None:
    """Rank 0's answer on every rank, and its lines alone: the folder is one for all."""
    first = int(os.environ.get("RANK", "0")) == 0
    return from_rank_0(newest_whole(trainer.args.output_dir, say) if first else None)


def _as_checkpoint(loaded: dict[str, Any]) -> str:
    """A folder as the Trainer reads it, in memory where that is available."""
    folder = folder_for_one_read()
    # By `save_pretrained` only the first rank of a node would write.
    torch.save(loaded["model"], os.path.join(folder, transformers.utils.WEIGHTS_NAME))
    torch.save(loaded["optimizer"], os.path.join(folder, "optimizer.pt"))
    torch.save(loaded["scheduler"], os.path.join(folder, "scheduler.pt"))
    (pathlib.Path(folder) / "trainer_state.json").write_text(loaded["trainer"])
    return folder
