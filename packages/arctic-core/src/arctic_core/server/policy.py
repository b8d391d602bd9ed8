"""What clients may ask for: the configuration of a job as this server runs it, and the paths in their requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from arctic_core import protocol as p
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.config.server import ServerConfig
from arctic_core.errors import ConfigError, DataError, PermissionDeniedError

_OWN_RAY = ("cpus_per_rank", "threads_per_rank")
"""Keys of ``ray`` that are about the job; the others are about the server's cluster."""


class Policy:
    """The rules of one server.

    Args:
        config: The server's configuration. Its folders are resolved here, once.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.root = Path(config.data_root).expanduser().resolve()
        self._model_roots = [self.root, *(Path(root).expanduser().resolve() for root in config.model_roots)]

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def job_config(self, values: dict[str, Any], name: str) -> ArcticRLClientConfig:
        """A client's configuration as its job will run here: with this server's engines, cluster and folders.

        Raises:
            ConfigError: A key is unknown or wrong, or has no effect on this server.
            PermissionDeniedError: A setting that clients may not give.
        """
        values = {key: value for key, value in values.items() if key not in ("http", "connect_to")}
        values |= {"comm_protocol": self._config.engines, "job": name}
        given = values.pop("ray", None)
        if self._config.engines == "ray":
            values["ray"] = self._ray(given)
        elif given:
            ArcticRLClientConfig.parse(values | {"ray": given}, where="config")  # says what is wrong with it
        config = ArcticRLClientConfig.parse(values, where="config")
        self._check_code(config)
        sync = config.weight_sync
        if sync.directory is not None:
            sync = sync.model_copy(update={"directory": self.path(sync.directory, "weight_sync.directory")})
        log_prob = config.log_prob
        if log_prob.model_name is not None:
            log_prob = log_prob.model_copy(update={"model_name": self.model(log_prob.model_name, "log_prob.model_name")})
        model = self.model(config.model_name, "model_name")
        return config.model_copy(update={"model_name": model, "weight_sync": sync, "log_prob": log_prob})

    def _ray(self, given: Any) -> dict[str, Any]:
        if given is not None and not isinstance(given, dict):
            raise ConfigError(f"ray: a mapping is wanted (got {given!r})", where="config")
        ours = self._config.ray.model_dump()
        for key, value in (given or {}).items():
            if key in ours and key not in _OWN_RAY and value != ours[key]:
                raise PermissionDeniedError(
                    "the server has its own cluster", where=f"ray.{key}", remedy="leave it out; the operator sets it"
                )
        return ours | (given or {})

    def _check_code(self, config: ArcticRLClientConfig) -> None:
        if config.training.allow_loss_import and not self._config.allow_loss_import:
            raise PermissionDeniedError(
                "losses by import path run code of the client's choice",
                where="training.allow_loss_import",
                remedy="use a named loss or a plugin; the operator can set allow_loss_import",
            )
        refused = sorted(set(config.sampling.vllm) - set(self._config.vllm_arguments))
        if refused:
            raise PermissionDeniedError(
                f"clients may not set {', '.join(refused)}",
                where="sampling.vllm",
                remedy=f"allowed: {', '.join(self._config.vllm_arguments)}; the operator can add to vllm_arguments",
            )

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, request: p.Request) -> p.Request:
        """The request as it may run: itself, or with its path resolved.

        Raises:
            DataError: Its deadline or key is out of range.
            PermissionDeniedError: Its path leads out of the server's folder, or its loss is an import path.
        """
        if not 0 < request.deadline_s <= self._config.max_deadline_s:
            raise DataError(
                f"deadline_s={request.deadline_s:g} must be above 0 and at most {self._config.max_deadline_s:g}",
                where="request.deadline_s",
            )
        operation = request.operation
        if isinstance(operation, p.ForwardBackward) and ":" in operation.loss.name and not self._config.allow_loss_import:
            raise PermissionDeniedError(
                f"the loss {operation.loss.name!r} is an import path",
                where="forward_backward.loss",
                remedy="use a named loss or a plugin; the operator can set allow_loss_import",
            )
        if not isinstance(operation, p.SaveCheckpoint | p.LoadCheckpoint | p.ExportHF):
            return request
        path = self.path(operation.path, f"{operation.op()}.path")
        return msgspec.structs.replace(request, operation=msgspec.structs.replace(operation, path=path))

    def path(self, text: str, where: str) -> str:
        """An absolute path without symbolic links, inside the server's folder.

        Raises:
            PermissionDeniedError: It leads elsewhere.
        """
        return self._inside(text, where, [self.root])

    def model(self, name: str, where: str) -> str:
        """A model's name: a hub id as it is, a path checked like any other."""
        looks_local = name.endswith(".gguf") or name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1
        if not looks_local and not (self.root / name).exists() and not Path(name).exists():
            return name
        if not looks_local and not self._config.unrestricted_paths and not (self.root / name).exists():
            return self._inside(os.path.abspath(name), where, self._model_roots)
        return self._inside(name, where, self._model_roots)

    def _inside(self, text: str, where: str, roots: list[Path]) -> str:
        if not text or "\0" in text:
            raise DataError(f"{text!r} is not a path", where=where)
        if self._config.unrestricted_paths:
            return str(Path(text).expanduser().absolute())
        try:
            path = (self.root / Path(text).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"the path cannot be resolved: {error}", where=where) from None
        if not any(path == root or root in path.parents for root in roots):
            raise PermissionDeniedError(
                f"{text!r} leads out of the folders that clients may use",
                where=where,
                remedy="give a path relative to the server's data_root",
            )
        return str(path)
