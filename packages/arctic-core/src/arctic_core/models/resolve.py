"""From the name of a model to a local folder: hub ids, folders, and GGUF files, which are converted once.

Needs transformers only where a GGUF file has to be converted, huggingface_hub only for a hub id.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from pathlib import Path

from arctic_core.errors import DeadlineExceeded, MissingExtraError, ModelNotFoundError, UnsupportedModelError
from arctic_core.models.loading import LOADING
from arctic_core.models.quiet import no_progress_bars

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # no pickled weights, no code
_LOCK_SECONDS = 900.0
_LAYOUT = "v2"  # part of the cache key; raised when the converter writes something else


def resolve_model(name: str, *, cache_dir: str | None = None) -> str:
    """The local folder, in Hugging Face layout with safetensors weights, behind a model's name.

    Args:
        name: Local folder, GGUF file, or hub id. What exists on disk wins over the hub.
        cache_dir: Where converted GGUF files are kept; by default ``$XDG_CACHE_HOME/arctic/models``. Hub downloads go to
            Hugging Face's own cache.

    Raises:
        ModelNotFoundError: Nothing of that name; the remedy says what to check.
        UnsupportedModelError: The folder has no safetensors weights, or the GGUF file's architecture is unknown.
        DeadlineExceeded: Another process has been converting the same file for longer than a conversion takes.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{name} is a file but not a GGUF file", remedy="give the model's folder")
        return str(_converted(path.resolve(), _cache_root(cache_dir)))
    if not path.is_dir():
        if name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
            raise ModelNotFoundError(f"no model at {name!r}", remedy="check the path; a hub id looks like 'owner/name'")
        path = _downloaded(name)
    _check_folder(path)
    return str(path)


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"{path} has no config.json", remedy="give a folder written by save_pretrained, or the .gguf file itself"
        )
    if not any(path.glob("*.safetensors")):
        raise UnsupportedModelError(f"{path} has no safetensors weights", remedy="convert pickled weights to safetensors first")


def _downloaded(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"loading {hub_id!r} needs the package {error.name!r}", remedy='pip install "arctic-core[train]"'
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"access to {hub_id!r} is gated", remedy="accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{hub_id!r} is neither a local folder nor in the Hugging Face cache, and the hub cannot be reached",
            remedy="check the spelling of a local path; unset HF_HUB_OFFLINE and check the network for a hub id",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFoundError(
            f"the hub has no model {hub_id!r} for us: {error}", remedy="check the spelling and your access rights"
        ) from error


def _cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arctic" / "models"


def _converted(gguf: Path, root: Path) -> Path:
    """The converted form of a GGUF file, made now unless it exists. Keyed by content, so a moved file is found again."""
    import filelock

    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    target = root / f"{gguf.stem}-{digest}-{_LAYOUT}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(root / f".{target.name}.lock", timeout=_LOCK_SECONDS):
            if not target.is_dir():
                _convert_atomically(gguf, target)
    except filelock.Timeout as error:
        raise DeadlineExceeded(
            f"another process has been converting {gguf.name} for over {_LOCK_SECONDS:.0f} s",
            remedy=f"stop it, or remove {error.lock_file}",
        ) from error
    return target


def _convert_atomically(gguf: Path, target: Path) -> None:
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):  # of a process that died; we hold the lock
        shutil.rmtree(leftover)
    scratch = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex}"
    try:
        _convert(gguf, scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise to float32 safetensors (so that nothing is rounded twice), beside the tokenizer and generation settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        with LOADING, no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        special = _special_tokens(gguf)
    except ImportError as error:
        raise MissingExtraError(
            f"converting {gguf.name} failed: {error}", remedy='pip install "arctic-core[train]" gguf'
        ) from error
    except (ValueError, NotImplementedError, KeyError) as error:
        raise UnsupportedModelError(
            f"transformers cannot read {gguf.name}: {error}", remedy="use the model's safetensors release"
        ) from error
    for role in ("bos", "eos", "pad", "unk"):
        if role in special:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(special[role]))
            setattr(model.config, f"{role}_token_id", special[role])
    ends = list(dict.fromkeys(special[role] for role in ("eos", "eot") if role in special))
    model.generation_config = GenerationConfig(
        bos_token_id=special.get("bos"),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=special.get("pad"),
    )
    with no_progress_bars():
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _special_tokens(gguf: Path) -> dict[str, int]:
    """Ids of the special tokens as the file states them (transformers' reader can mistake the first for the last)."""
    from gguf import GGUFReader

    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}
    fields = GGUFReader(gguf).fields
    found = {role: fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    return {role: int(field.contents()) for role, field in found.items() if field is not None}
