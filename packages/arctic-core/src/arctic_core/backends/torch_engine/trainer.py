"""The ``torch`` trainer: one rank, plain torch, no runtime around it. The oracle the other engines are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from arctic_core.backends.packed import PackedTrainer
from arctic_core.errors import CheckpointError, UnsupportedOperation
from arctic_core.models.scoring import ScoringModule

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class TorchTrainer(PackedTrainer):
    """Trains with :class:`torch.optim.AdamW`.

    Weights, gradients and moments that are updated are float32. A bfloat16 model computes with a rounded copy of them; its
    gradients are added up in float32, one micro-batch at a time.
    """

    implementation = "torch"

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        always = (
            "forward",
            "forward_backward",
            "backward",
            "step",
            "zero_grad",
            "sync_weights",
            "save_checkpoint",
            "load_checkpoint",
            "export_hf",
        )
        return (*always, "sleep", "wake") if device == "cuda" else always

    # --- model and optimizer ----------------------------------------------------------------------------------------

    def _build(self, module: ScoringModule) -> nn.Module:
        settings = self.spec.config.training.optimizer
        self._parameters = dict(module.model.named_parameters())
        self._masters = {name: _master_of(parameter) for name, parameter in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        return module

    def _build_frozen(self, module: ScoringModule) -> nn.Module:
        return module.requires_grad_(False)

    def stop(self) -> None:
        for name in ("_optimizer", "_masters", "_parameters"):
            if hasattr(self, name):
                delattr(self, name)
        super().stop()

    def _backward(self, scalar: torch.Tensor) -> None:
        scalar.backward()

    def _apply(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        gradients = []
        for master in self._masters.values():
            if master.grad is None:  # e.g. an expert no token was routed to: its moments still decay
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad.div_(divisor))
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm):
            if max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self._masters.values(), max_grad_norm, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._publish_masters()
        self._drop_gradients()
        return norm.item()

    def _drop_gradients(self) -> None:
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)

    def _gather(self, parameters: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._parameters[name].detach() for name in parameters}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_state(self, directory: Path) -> None:
        save_file({name: master.detach().contiguous() for name, master in self._masters.items()}, directory / WEIGHTS_FILE)
        moments = {
            f"{part}.{name}": self._optimizer.state[master][part].contiguous()
            for name, master in self._masters.items()
            if master in self._optimizer.state
            for part in _MOMENTS
        }
        save_file(moments, directory / OPTIMIZER_FILE)

    def _load_state(self, directory: Path, *, weights: bool, optimizer: bool) -> None:
        shapes = {name: master.shape for name, master in self._masters.items()}
        saved = _read(directory / WEIGHTS_FILE, shapes, optional=False) if weights else {}
        expected = {
            f"{part}.{name}": torch.Size(()) if part == "step" else shape for name, shape in shapes.items() for part in _MOMENTS
        }
        moments = _read(directory / OPTIMIZER_FILE, expected, optional=True) if optimizer else {}
        with torch.no_grad():
            for name, value in saved.items():
                self._masters[name].copy_(value)
        self._publish_masters()
        if optimizer:
            self._optimizer.state.clear()
        for key, value in moments.items():
            part, name = key.split(".", 1)
            master = self._masters[name]
            self._optimizer.state[master][part] = value if part == "step" else value.to(master.device)

    # --- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        if level != 1:
            raise UnsupportedOperation(
                "a trainer cannot drop its weights, they exist nowhere else",
                where=self.where,
                remedy="use level 1; save a checkpoint and shut down to free everything",
            )
        self._require_gpu("sleep")
        self._move("cpu")
        torch.cuda.empty_cache()

    def wake(self) -> None:
        self._require_gpu("wake")
        self._move(self.spec.device)

    def _require_gpu(self, op: str) -> None:
        if self.spec.device != "cuda":
            raise self._unsupported(op)

    def _move(self, device: str) -> None:
        """Move weights, gradients and moments; parameters stay the same objects, so the optimizer's state stays theirs."""
        for module in (self.module, self._frozen):
            if module is not None:
                module.to(device)
        for master in self._masters.values():
            master.data = master.data.to(device)
            if master.grad is not None:
                master.grad = master.grad.to(device)
            state = self._optimizer.state.get(master, {})
            for part in _MOMENTS[1:]:
                if part in state:
                    state[part] = state[part].to(device)


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The float32 tensor that the optimizer updates: the parameter itself, or a copy that collects its gradients."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())
    parameter.register_post_accumulate_grad_hook(partial(_collect_gradient, master))
    return master


def _collect_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def _read(file: Path, expected: dict[str, torch.Size], *, optional: bool) -> dict[str, torch.Tensor]:
    """Tensors of a file that has just these shapes, or, where ``optional``, none (saved before the first step)."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file)) from error
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != expected and not (optional and not shapes):
        different = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        raise CheckpointError(f"tensors missing, unexpected or mis-shaped: {', '.join(different[:5])}", where=str(file))
    return tensors
