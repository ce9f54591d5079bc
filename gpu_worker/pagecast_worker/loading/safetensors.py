"""Folders in Hugging Face layout: config.json and one or more .safetensors files."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.loading import manifest
from pagecast_worker.loading.checkpoint import check_shape, file_sample
from pagecast_worker.loading.hf_config import read_config

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsCheckpoint:
    """One model folder. Files are mapped, so a tensor is read from the page cache when it is asked for.

    Raises LoadError on opening a folder without weights, with a truncated file, or whose index names a file that is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.scheme = read_config(folder)
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        for path in self._paths():
            try:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            except OSError as error:
                raise LoadError(f"{path}: cannot be read ({error.strerror or 'I/O error'})") from None
            except SafetensorError:
                raise LoadError(f"{path}: truncated, or not a safetensors file") from None
            for name in self._files[path].keys():  # noqa: SIM118  (a safetensors file is no mapping)
                if name in self._where:
                    raise LoadError(f"{path}: tensor {name} is also in {self._where[name]}")
                self._where[name] = path

    @property
    def paths(self) -> list[Path]:
        return list(self._files)

    def names(self) -> Iterable[str]:
        return self._where

    def file_of(self, name: str) -> str:
        return str(self._where.get(name, self.folder))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        value, path = self.raw(name), self._where[name]
        check_shape(str(path), name, tuple(value.shape), shape)
        if value.dtype not in FLOATS:
            raise LoadError(f"{path}: tensor {name} is of type {value.dtype}, which is not understood")
        return value

    def raw(self, name: str) -> Tensor:
        path = self._where.get(name)
        if path is None:
            raise LoadError(f"{self.folder}: tensor {name} is missing")
        try:
            value: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError):
            raise LoadError(f"{path}: tensor {name} cannot be read") from None
        return value

    def verify(self) -> None:
        manifest.verify(self.folder, [*self._files, self.folder / "config.json"])

    def identity(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for path in sorted(self._files):
            digest.update(path.name.encode() + file_sample(path))
        return digest.hexdigest()

    def _paths(self) -> list[Path]:
        """The files to open: those that the index names, else every .safetensors file of the folder."""
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            paths = sorted(self.folder.glob("*.safetensors"))
            if not paths:
                raise LoadError(f"{self.folder}: no .safetensors file here")
            return paths
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise LoadError(f"{index}: not an index of safetensors files") from None
        for name in sorted(names):
            if Path(name).name != name or not (self.folder / name).is_file():
                raise LoadError(f"{index}: names the file {name}, which is not in the folder")
        return [self.folder / name for name in sorted(names)]
