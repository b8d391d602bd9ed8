"""AdamW as DeepSpeed's inner optimizer.

DeepSpeed averages gradients over ranks, and knows no divisor that becomes known only at the step. For all stages and types
there is one place where the reduced float32 gradient passes by: the ``step`` of the optimizer it was given. There it is
multiplied by ``world_size / divisor``, which turns the average over ranks into the sum and divides it, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class ScaledAdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` that multiplies each gradient by :attr:`scale` first.

    DeepSpeed calls ``step`` once for each partition it updates.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(params, fused=True, **settings)
        self.scale = 1.0
        self.hold = True
        """Make missing state, but update nothing. DeepSpeed then drops its gradients and refreshes the weights from the
        float32 copies all the same. Starts true: some of its optimizers take a step while they are built."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters of :attr:`param_groups`, which DeepSpeed sets for each call."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.hold:
            for parameter in parameters:
                self._ensure_state(parameter)
            return
        self._normalise(parameters)
        super().step()

    def set_steps_taken(self, count: int) -> None:
        """Set the count that the bias correction uses; 0 also clears the moments."""
        for state in self.state.values():
            state["step"].fill_(count)
            if count == 0:
                for name in MOMENTS:
                    state[name].zero_()

    @property
    def steps_taken(self) -> int:
        """Number of updates behind the moments."""
        return max((int(state["step"]) for state in self.state.values() if state), default=0)

    def _normalise(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)

    def _ensure_state(self, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter)


class ReplicatedAdamW(ScaledAdamW):
    """For ZeRO 0 in float32, where DeepSpeed puts no optimizer of its own around ours, so that norm and clipping are missing.

    They are here, under the names that DeepSpeed's optimizers use.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.clip_grad = 0.0
        self._global_grad_norm = torch.zeros(())

    def _normalise(self, parameters: list[torch.nn.Parameter]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:  # e.g. an expert no token was routed to: its moments still decay
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(self._global_grad_norm):
            for parameter in parameters:  # AdamW passes over parameters without a gradient
                parameter.grad = None
        elif self.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_grad, self._global_grad_norm)
        super()._normalise(parameters)
