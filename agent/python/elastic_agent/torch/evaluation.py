"""A sum over the samples of a loader, which the ranks divide among them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .group import Group


class Evaluation:
    """What one rank adds up, with the model in the mode for evaluation and without gradients."""

    def __init__(self, model: torch.nn.Module, loader: DataLoader, measure: Callable[[Any], Any]) -> None:
        """measure: of a batch a number, or a tensor of a few numbers: sums over its samples."""
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            raise ValueError("ranks divide the batches of a loader that has a batch_size, over samples that have numbers")
        self._model, self._loader, self._measure = model, loader, measure
        self.total: torch.Tensor | None = None

    def part(self, rank: int, size: int) -> None:
        """Adds up every `size`th batch, from batch `rank` on. All ranks' loaders give the same batches."""
        loader = self._loader
        if size > 1:
            loader = DataLoader(
                loader.dataset,
                batch_sampler=list(loader.batch_sampler)[rank::size],
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
            )
        self.total = None
        with _evaluating(self._model):
            for batch in loader:
                found = torch.as_tensor(self._measure(batch)).detach().to("cpu", torch.float64)
                self.total = found if self.total is None else self.total + found

    def add_up(self, group: Group) -> None:
        """Adds the sums of all ranks, in their order: with the same bits on each."""
        if group.size == 1:
            return
        told = group.gather_texts(json.dumps(None if self.total is None else self.total.tolist()))
        totals = [torch.tensor(one, dtype=torch.float64) for one in map(json.loads, told) if one is not None]
        self.total = sum(totals[1:], totals[0]) if totals else None


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards each module is in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
