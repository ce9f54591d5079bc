"""The hyper-parameters of a model as the rest of the worker sees them, whatever file they came from."""

from dataclasses import dataclass
from typing import Literal

from pagecast_kernels.routing import Routing

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. "llama3" alone uses low and high_freq_factor, "yarn" alone what follows the context.

    original_max_position: context length of the original training, in tokens. beta_fast and beta_slow: full turns within it from
    which a frequency is kept, and below which it is divided by factor. attention_factor: what cosines and sines are multiplied by.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts. Sizes count elements.

    size: an expert's intermediate size; shared_size: that of the experts which see every token together, 0 without. first: layers
    before it are dense, as are those in dense_layers; of the rest every step-th has experts. bias: a correction per expert counts
    for the choice.
    """

    routing: Routing
    count: int
    size: int
    shared_size: int = 0
    first: int = 0
    step: int = 1
    dense_layers: tuple[int, ...] = ()
    bias: bool = False

    def in_layer(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.first and (layer + 1) % self.step == 0 and layer not in self.dense_layers


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2): K and V of a token are one vector of `rank` and a rotated key of rope_dim.

    query_rank: rank of the query's own compression, 0 without. nope_dim: size of a head's part that is not rotated.
    """

    rank: int
    query_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder. Sizes count elements; max_position counts tokens.

    rope_factors: what each rotary frequency is divided by (rotary_dim / 2 values, from a GGUF file), or empty. rotary_dim: elements
    of a head that are rotated, 0: all. interleaved: the checkpoint pairs elements 2i and 2i + 1. windows: per layer how many tokens
    attention sees, 0: all; empty: all layers do. local_rope_theta: base for layers with a window, unscaled; 0: the same as others.
    attention_scale 0: 1 / sqrt(head_dim). norm_offset is added to every norm weight. post_norms: what attention and feed-forward
    give is normalised before it is added. A softcap of 0 is none.
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
    rotary_dim: int = 0
    interleaved: bool = False
    local_rope_theta: float = 0.0
    windows: tuple[int, ...] = ()
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    post_norms: bool = False
    activation: Activation = "silu"
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    @property
    def softmax_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """How many tokens a layer's attention sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def layers_of_every_kind(self) -> int:
        """How many of the first layers have one of every kind among them."""
        kinds = [(self.window(i), self.experts is not None and self.experts.in_layer(i)) for i in range(self.num_layers)]
        return max(kinds.index(kind) for kind in kinds) + 1

    def kv_shape(self) -> tuple[int, int, int]:
        """Heads of the KV cache, and elements of a token's K and of its V in each. Latent attention keeps one head: the rotated key
        as K, and the latent, which gives both the rest of the key and the value, as V."""
        if self.latent is not None:
            return 1, self.latent.rope_dim, self.latent.rank
        return self.num_kv_heads, self.head_dim, self.head_dim

    def block_bytes(self, block_size: int, itemsize: int, ranks: int = 1) -> int:
        """Bytes of a KV block of so many tokens over all layers, on each of so many ranks. itemsize: bytes of an element of K and V."""
        heads, key, value = self.kv_shape()
        return self.num_layers * max(1, heads // ranks) * block_size * (key + value) * itemsize
