"""What a session refuses by name: what would fail at the first step, or train each rank in its own way without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..batches import ElasticBatchSampler
from .replica import Replica, has_foreign_group
from .streams import Streams

# These sum gradients, too: over a group that ends with its first lost worker.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


def check(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValueError for what no session trains."""
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        raise ValueError("LBFGS computes a loss several times in a step: a session computes it once, for all ranks")
    for name, one in model.named_parameters():
        if one.is_complex() and one.requires_grad:
            raise ValueError(f"the parameter {name!r} is complex: keep it as real numbers")
    for name, one in model.named_modules():
        if isinstance(one, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and one.sparse:
            raise ValueError(f"the gradient of {name!r} would be sparse: give the layer sparse=False")
        # By its name: the import of FSDP takes a second.
        if type(one).__name__ in _WRAPPERS:
            raise ValueError(
                f"{repr(name) if name else 'the model'} is wrapped in {type(one).__name__}, which would sum its "
                "gradients a second time, over a group that ends with its first lost worker: pass the model inside, such "
                "as model.module"
            )


def check_loader(loader: Any, sampler: ElasticBatchSampler | Streams) -> None:
    """Raises ValueError for a loader whose batches are not the session's."""
    if isinstance(sampler, Streams):
        if loader is not sampler:
            raise ValueError(
                "a session reads its streams by itself, because what a DataLoader has read ahead is no position to save: "
                "call session.steps(streams), and have `open` return a DataLoader of one source for processes to read it"
            )
    elif getattr(loader, "batch_sampler", None) is not sampler:
        raise ValueError("the loader must have the session's sampler: DataLoader(dataset, batch_sampler=sampler)")


def fit(sampler: ElasticBatchSampler | Streams, model: torch.nn.Module, replica: Replica, same_bits: bool) -> None:
    """Has the sampler cut steps as the model needs them. Raises ValueError if it cannot."""
    if isinstance(sampler, Streams):
        _fit_streams(model, replica, same_bits)
        return
    for name, one in model.named_modules():
        if isinstance(one, torch.nn.BatchNorm1d) and sampler.last_step() == 1:
            raise ValueError(
                f"{name!r} is a BatchNorm1d, which cannot train on one sample, and the last step of each epoch has one: "
                "give the sampler drop_last=True or another global_batch"
            )
        if isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and sampler.micro_batch > 1:
            sampler.least = 2
    if replica.mesh is not None:
        sampler.alike = True
    if replica.stages > 1:
        _fit_pipeline(sampler, replica.readers)
    if not same_bits:
        return
    if replica.mesh is not None:
        raise ValueError("same_bits is for models that every rank holds as a whole, not for sharded ones")
    if sampler.rank_batch is not None or sampler.micro_batch >= sampler.global_batch:
        raise ValueError(
            "same_bits needs a sampler with a global_batch, and a smaller micro_batch: such as global_batch "
            "divided by the most ranks there will be"
        )
    sampler.in_pieces = True


def _fit_pipeline(sampler: ElasticBatchSampler, readers: int) -> None:
    """Its stages send each other what has the same shape in all batches. What several ranks of a stage compute is mixed
    before the batch's share of the step can be counted: so it is the same for all of them."""
    size, step = sampler.micro_batch, (sampler.rank_batch or 0) * readers or sampler.global_batch
    if step % (size * readers) or (sampler.length % (size * readers) and not sampler.drop_last):
        times = f" times the {readers} shards of a stage" if readers > 1 else ""
        raise ValueError(
            f"all batches of a pipeline have one size: give the sampler a micro_batch, now {size}{times}, that divides "
            f"the {step} samples of a step, and drop_last=True or a number of samples that it divides, now "
            f"{sampler.length}"
        )
    sampler.in_pieces, sampler.least, sampler.in_a_row = True, size, readers


def _fit_streams(model: torch.nn.Module, replica: Replica, same_bits: bool) -> None:
    if replica.mesh is not None or same_bits:
        raise ValueError("streams are for a model that every rank holds as a whole, and without same_bits")
    for name, one in model.named_modules():
        if isinstance(one, torch.nn.BatchNorm1d):
            raise ValueError(
                f"{name!r} is a BatchNorm1d, which cannot train on one sample, and at the end of a stream there may be "
                "one: take GroupNorm or LayerNorm"
            )


def check_local(steps: int | None, outer: Any, replica: Replica, scaler: Any, same_bits: bool) -> None:
    """Raises ValueError for what does not go with `local_steps`."""
    if steps is None and outer is not None:
        raise ValueError("an outer optimizer needs local_steps, the number of steps from one of its steps to the next")
    if steps is not None and (replica.mesh is not None or scaler is not None or same_bits):
        raise ValueError("local_steps goes neither with a sharded model, nor with a GradScaler or same_bits")


def check_group(model: torch.nn.Module, replica: Replica) -> None:
    """Raises ValueError for what needs torch.distributed's default group, or has made it."""
    if has_foreign_group():
        raise ValueError(
            "torch.distributed.init_process_group has made a group of this job's workers. It ends with the first worker "
            "that is lost, and no later worker can join it: leave it out, a session has groups of its own"
        )
    if replica.mesh is not None and replica.stages == 1:
        return
    for name, one in model.named_modules():
        if isinstance(one, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"{name!r} is a SyncBatchNorm, and torch.distributed's default group is not of the ranks that have this "
                "layer: take BatchNorm, whose statistics are each rank's own, or GroupNorm"
            )


class Trained:
    """The parameters that a session trains. They have to stay the same as long as it does."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], replica: Replica) -> None:
        """Raises ValueError if an optimizer changes others."""
        self._model, self._optimizers = model, optimizers
        # With these objects their ids stay theirs.
        self._begun = {one: (name, one.requires_grad) for name, one in model.named_parameters()}
        self._trained = {one for one in self._begun if one.requires_grad}
        # FSDP exchanges the parameters of a sharded model while it computes.
        self._places = None if replica.mesh is not None else list(_places(model))
        self._refuse_others()

    def check(self) -> None:
        """Raises ValueError if a parameter has come, gone, or was frozen or unfrozen since: it says which one."""
        if self._places is not None and self._places != (now := list(_places(self._model))):
            self._refuse_changes()
            # A parameter has another place only.
            self._places = now
        self._refuse_others()

    def _refuse_changes(self) -> None:
        found = {one: name for name, one in self._model.named_parameters()}
        changes = [f"{name!r} is new" for one, name in found.items() if one not in self._begun]
        for one, (name, trained) in self._begun.items():
            if one not in found:
                changes.append(f"{name!r} is gone")
            elif one.requires_grad is not trained:
                changes.append(f"{name!r} was {'frozen' if trained else 'unfrozen'}")
        if changes:
            raise ValueError(
                f"the parameter {changes[0]}, and a session trains what the model had when it was made: change the model "
                "before that, or end this session and make another"
            )

    def _refuse_others(self) -> None:
        """Each rank would change them in another way."""
        for group in (group for one in self._optimizers for group in one.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._trained:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that needs a gradient, and "
                        "that the session's model did not have, or had frozen, when the session was made: give the "
                        "session a model that holds all that is trained, such as ModuleList([model, criterion]), and "
                        "unfreeze before"
                    )


def _places(model: torch.nn.Module) -> Iterator[tuple[int, bool]]:
    """Which parameter is in each place of a model, and whether it is trained. A tenth of the time of
    `model.named_parameters`: this runs in each step."""
    left = [model]
    while left:
        module = left.pop()
        left.extend(one for one in module._modules.values() if one is not None)
        for one in module._parameters.values():
            if one is not None:
                yield id(one), one.requires_grad
