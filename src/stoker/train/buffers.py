"""Copies of a model's buffers, to restore running statistics after a bad batch.

Enters: a model. Leaves: copies of its buffers, and the buffers restored from them, always or depending on a flag
on the device. Costs: one kernel per dtype to copy, two more to restore; nothing if a model has no buffers. The
host never waits for the device, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from stoker.train.activations import LARGEST_CHANGING_BUFFER

Copies = dict[torch.dtype, torch.Tensor]


class Buffers:
    """The buffers of a model. They are looked up at every use: a forward pass may replace them.

    Args:
        model: On its device already.
        most_values: Leave out buffers with more values.
    """

    def __init__(self, model: torch.nn.Module, most_values: int | None = None) -> None:
        seen: set[int] = set()
        self._owners: list[tuple[torch.nn.Module, str]] = []
        for owner in model.modules():
            for name, buffer in owner._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                if (
                    buffer.layout != torch.strided
                ):  # such as the sparse matrix of a graph, a constant
                    continue
                if most_values is None or buffer.numel() <= most_values:
                    self._owners.append((owner, name))

    @classmethod
    def that_change(cls, model: torch.nn.Module) -> Buffers:
        """Return the buffers that a forward pass may change: small ones, such as running statistics."""
        return cls(model, LARGEST_CHANGING_BUFFER)

    def __bool__(self) -> bool:
        return bool(self._owners)

    def copy(self) -> Copies:
        """Return copies of their values, one tensor per dtype."""
        return {
            dtype: torch.cat([buffer.detach().reshape(-1) for buffer in group])
            for dtype, group in self._groups().items()
        }

    @torch.no_grad()
    def put_back(self, copies: Copies, keep_if: torch.Tensor | None = None) -> None:
        """Overwrite the buffers with copies.

        Args:
            copies: From `copy`.
            keep_if: A bool on the device; if it is true, the buffers stay as they are.
        """
        for dtype, group in self._groups().items():
            values, sizes = copies.get(dtype), [buffer.numel() for buffer in group]
            if values is None or sum(sizes) != values.numel():
                continue  # a buffer got its shape in this batch, as in a quantisation observer
            if keep_if is not None:
                now = torch.cat([buffer.detach().reshape(-1) for buffer in group])
                values = torch.where(keep_if, now, values)
            parts = values.split(sizes)
            torch._foreach_copy_(
                group, [part.view(b.shape) for part, b in zip(parts, group, strict=True)]
            )

    def _groups(self) -> dict[torch.dtype, list[torch.Tensor]]:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for owner, name in self._owners:
            buffer = owner._buffers[name]
            assert buffer is not None
            groups.setdefault(buffer.dtype, []).append(buffer)
        return groups
