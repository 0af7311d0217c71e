"""What the script of a session asks of all ranks besides steps: sums, rows, and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import collectives
from .evaluation import Evaluation
from .group import Group, GroupLost
from .loop import Elastic


class Asking(Elastic):
    """A loop in whose steps ranks may be asked for more."""

    model: torch.nn.Module

    def evaluate(self, loader: DataLoader, measure: Callable[[Any], Any]) -> torch.Tensor | None:
        """The sum of what `measure` gives for each batch, over all batches of a loader: each is read by one rank. Every
        rank calls this after the same step, as with `aside`, and gets the same sum, in double precision. If the group
        changes meanwhile or just before, and before its first step, each rank reads all batches. None if there is none.

        ::

            correct, samples = session.evaluate(loader, lambda batch: torch.stack(count(model, batch)))

        measure: returns a number, or a tensor of a few: sums over the samples of its batch. The model is in the mode for
        evaluation, and nothing has a gradient. Of a sharded model each replica reads a part.
        """
        self._training.seed_for("evaluation")
        found = Evaluation(self.model, loader, measure)
        with self._aside(agree=found.add_up, alone=lambda: found.part(0, 1)) as together:
            found.part(*(self._members.group.rank, self._members.group.size) if together else (0, 1))
        return found.total

    def step_scheduler(self, metric: float) -> None:
        """For a scheduler that follows a metric (ReduceLROnPlateau): the next step begins with `scheduler.step(metric)`
        on all ranks. Those that have evaluated the model call this. Workers that have joined meanwhile follow it, too."""
        self._training.follow(float(metric))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks' tensors, in the order of ranks: those of the step's samples. Gradients go back to the
        ranks that the rows are from: so a loss of all rows, which every rank computes, has the gradient of the global
        batch. Every rank calls this once for a tensor between a batch and `backward`.

        ::

            images, texts = session.gather(of_images(batch)), session.gather(of_texts(batch))
            session.backward(contrastive_loss(images, texts))

        Raises RuntimeError if a rank has several batches in the step: their rows would never meet."""
        several = len(self._step.batches) > 1 and (
            "session.gather needs a rank's part of a step in one batch: give the sampler no micro_batch, or one of "
            "global_batch divided by the fewest ranks"
        )
        # A batch that only keeps step has samples of others.
        rows = tensor[:0] if self._step.batches == [0] else tensor
        return self._ask(lambda group: collectives.gather(group, rows, several or ""), tensor)

    def _ask_all(self, operation: Callable[[Group], Any], own: Any) -> Any:
        step = self._step
        if step.lost is None and step.done < len(step.batches) and len(step.batches) > 1:
            raise RuntimeError(
                "ranks may have different numbers of batches in a step: ask them when session.step_is_complete, or when "
                "session.step() has returned True"
            )
        return self._ask(operation, own)

    def _ask(self, operation: Callable[[Group], Any], own: Any) -> Any:
        """A lost peer is not the script's matter: the step is done again, or if it is applied, the loop continues in the
        next group. Workers that have joined since the last step are not where this one is."""
        if self._replica.mesh is not None:
            raise ValueError("a session of a sharded model has no sums for the script: `evaluate` gives some")
        self._close_loop()
        if self._is_aside or not (self._begun or self._members.completed):
            raise RuntimeError(
                "ask other ranks in the loop of session.steps or after it, and not in session.aside: workers that join "
                "later do only that, too"
            )
        step = self._step
        if step.moved or step.ended or step.lost is not None or self._members.completed:
            return own
        try:
            self._members.meet_in_first_step()
            return operation(self._members.group)
        except GroupLost as lost:
            step.lost, step.settled = str(lost), False
            return own
