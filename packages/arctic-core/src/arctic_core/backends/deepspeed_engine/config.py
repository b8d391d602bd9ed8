"""DeepSpeed's configuration from ours. What Arctic does itself (schedule, clipping, normalisation) is switched off there."""

from __future__ import annotations

from typing import Any

from arctic_core.backends.base import RankSpec


def training_config(spec: RankSpec) -> dict[str, Any]:
    """Settings of the trainer.

    Gradient accumulation is unmanaged: every ``backward`` adds to the gradient and ``step`` is the boundary, however many
    micro-batches came before. Gradients are added up in float32 and cross between ranks in float32.
    """
    training = spec.config.training
    zero: dict[str, Any] = {"stage": training.zero_stage}
    if training.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": spec.device == "cuda"}
    config = _common(spec) | {
        "zero_optimization": zero,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # set for each step; DeepSpeed's default is 1.0
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW works on host memory too, and needs no compiler
    }
    if spec.dtype == "bfloat16":
        config["bf16"]["check_grad_overflow"] = True  # no step where the gradient is not finite
        if training.zero_stage:  # DeepSpeed refuses it for stage 0; see DeepSpeedTrainer._build
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def frozen_config(spec: RankSpec) -> dict[str, Any]:
    """Settings of a model that is only scored with."""
    return _common(spec) | {"zero_optimization": {"stage": spec.config.log_prob.zero_stage}}


def _common(spec: RankSpec) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, and without effect here
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**62,
        "bf16": {"enabled": spec.dtype == "bfloat16"},
    }
