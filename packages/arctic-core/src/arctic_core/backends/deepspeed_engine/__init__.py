"""Training and scoring with DeepSpeed: ZeRO stages 0 to 3 (Rajbhandari et al., 2020), any number of ranks."""
