"""Kernels for LLM post-training. Importing this package imports nothing else; the parts import what they need."""

__version__ = "0.1.0"
