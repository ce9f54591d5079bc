"""The hyper-parameters of a model as the rest of the worker sees them, whatever file they came from."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. Only `kind` "llama3" uses the three values after factor.

    original_max_position: context length of the original training, in tokens.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder. Sizes count elements; max_position counts tokens.

    rope_factors: what each rotary frequency is divided by (head_dim / 2 values, from a GGUF file), or empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling = RopeScaling()
    rope_factors: tuple[float, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    quantization: str = ""

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return self.head_dim**-0.5
