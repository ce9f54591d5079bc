"""The folder that a quantized checkpoint is written to: one file for each layer, so that a run that was cut off goes on where it was."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.models.config import ModelConfig

_RUN = "quantize.json"
_COPIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "generation_config.json")


class OutFolder:
    """files: how many there will be. what: everything that the contents depend on, so that another run is not gone on with."""

    def __init__(self, path: Path, files: int, what: dict[str, Any]) -> None:
        self.path, self._files = path, files
        path.mkdir(parents=True, exist_ok=True)
        run = path / _RUN
        if run.is_file():
            if json.loads(run.read_text(encoding="utf-8")) != what:
                raise LoadError(f"{path}: holds the beginning of another run; give another folder, or remove this one")
        elif any(path.iterdir()):
            raise LoadError(f"{path}: is not empty, and no run that could be gone on with")
        else:
            run.write_text(json.dumps(what), encoding="utf-8")

    def _file(self, index: int) -> Path:
        return self.path / f"model-{index + 1:05d}-of-{self._files:05d}.safetensors"

    def read(self, index: int) -> "Shard | None":
        """A file that is there whole."""
        return Shard(self._file(index)) if self._file(index).is_file() else None

    def write(self, index: int, tensors: dict[str, Tensor]) -> None:
        """The file is there whole or not at all."""
        part = self._file(index).with_suffix(".part")
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(self._file(index))

    def finish(self, config: dict[str, Any], source: Path) -> None:
        """The index, what belongs to the tokenizer, and, last of all, config.json."""
        where: dict[str, str] = {}
        total = 0
        for index in range(self._files):
            shard = Shard(self._file(index))
            where |= dict.fromkeys(shard.names(), self._file(index).name)
            total += self._file(index).stat().st_size
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        (self.path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        for pattern in _COPIED if source.is_dir() else ():
            for file in source.glob(pattern):
                shutil.copyfile(file, self.path / file.name)
        (self.path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        (self.path / _RUN).unlink()


class Shard:
    """One file of the folder, as a checkpoint is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._open: Any = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError):
            raise LoadError(f"{path}: cannot be read; remove it to have it made again") from None

    def names(self) -> Iterable[str]:
        return self._open.keys()  # type: ignore[no-any-return]

    def file_of(self, name: str) -> str:
        return str(self._path)

    def raw(self, name: str) -> Tensor:
        return self._open.get_tensor(name)  # type: ignore[no-any-return]


def config_of(source: Path, config: ModelConfig) -> dict[str, Any]:
    """config.json of the source, or one made for a .gguf file. Raises LoadError for a family that .gguf files are not written out of."""
    if source.is_dir():
        values: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
        return values
    if config.architecture != "LlamaForCausalLM" or config.rope_factors or config.rope_scaling.kind != "default":
        raise LoadError(f"{source}: a .gguf file must hold a Llama without scaled positions to be written as a checkpoint folder")
    eos = list(config.eos_token_ids)
    return {
        "architectures": [config.architecture], "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }
