"""Weights leaving the process: as bytes for a carrier, or as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from arctic_core.models.quiet import no_progress_bars

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order on the host, flat; without a copy where it lies so already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def write_hf_folder(
    model: PreTrainedModel, parameters: Mapping[str, torch.Tensor], source: str, directory: Path
) -> tuple[int, int]:
    """Write weights, configuration and tokenizer so that transformers and vLLM load them.

    Args:
        model: Gives configuration and checkpoint names; its own weights are not read.
        parameters: Whole parameters by name, each tied tensor once.
        source: Folder the model was loaded from; its tokenizer files are copied unchanged.
        directory: Target folder, made if absent.

    Returns:
        Number of tensors and bytes written.
    """
    state = {name: value.detach().to("cpu").contiguous() for name, value in parameters.items()}
    with no_progress_bars():
        model.save_pretrained(directory, state_dict=state)
    for pattern in _TOKENIZER_FILES:
        for file in Path(source).glob(pattern):
            shutil.copyfile(file, directory / file.name)
    headers = [_safetensors_header(file) for file in directory.glob("*.safetensors")]
    spans = [entry["data_offsets"] for header in headers for name, entry in header.items() if name != "__metadata__"]
    return len(spans), sum(stop - start for start, stop in spans)


def _safetensors_header(file: Path) -> dict[str, dict]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return json.loads(stream.read(length))
