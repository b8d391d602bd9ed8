"""Kernels for LLM post-training."""
