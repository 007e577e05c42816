"""Muon for the matrices of a model, all matrices of one shape at a time (Jordan et al. 2024).

Updates are scaled by 0.2 * sqrt(max(rows, columns)), so that one learning rate serves Muon and
AdamW (Liu et al. 2025, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [n, rows, columns], roughly, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    y: Tensor = x.bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ):
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        groups = [{"params": stack} for stack in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            stack = group["params"]
            grad = torch.stack([parameter.grad for parameter in stack])
            state = self.state[stack[0]]
            buffer = state.setdefault("momentum", torch.zeros_like(grad))
            buffer.lerp_(grad, 1 - group["momentum"])
            update = orthogonalize(grad.lerp(buffer, group["momentum"]))
            scale = group["lr"] * 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(stack, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(stack, list(update.unbind()), alpha=-scale)
