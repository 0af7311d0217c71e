"""Parameters that are not trained: whether they are unchanged, so that they need not be copied again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Of a tensor of more numbers each such one is compared.
_ALL, _EACH = 1 << 16, 1021


class Frozen:
    """Parameters without a gradient. PyTorch counts what changes a tensor, but not what does so by its `data`, such as a
    moving average of other parameters: that changes all of it, and a sample shows it."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """parameters: those on a GPU, or divided over ranks, are left out."""
        still = [one for one in parameters if not one.requires_grad and type(one) is torch.nn.Parameter]
        self._parameters = [one for one in still if one.device.type == "cpu" and one.is_contiguous()]
        # Of each: how many changes were seen, its version, and the sample.
        self._seen = [(0, one._version, _sample(one).clone()) for one in self._parameters]

    def changes(self) -> dict[int, int]:
        """By a parameter's place in memory, how many changes of it were seen."""
        for number, (one, (changes, version, before)) in enumerate(zip(self._parameters, self._seen)):
            now = _sample(one)
            if one._version != version or not torch.equal(now, before):
                self._seen[number] = changes + 1, one._version, now.clone()
        return {one.data_ptr(): changes for one, (changes, _, _) in zip(self._parameters, self._seen)}


def _sample(one: torch.Tensor) -> torch.Tensor:
    return one.detach().view(-1)[:: 1 if one.numel() <= _ALL else _EACH]
