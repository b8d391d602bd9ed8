"""Engines of one process load their models at the same time, each in its own thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from arctic_core.models.factory import load_causal_lm


def test_models_with_tied_weights_can_be_loaded_from_several_threads(tiny_tied_model):
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: load_causal_lm(tiny_tied_model, dtype="float32", device="cpu"), range(12)))
    for model in models:
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
