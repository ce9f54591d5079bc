"""The table of rotary angles (RoFormer, Su et al. 2021), scaled where the model was trained so."""

import math

import torch
from torch import Tensor

from pagecast_worker.models.config import ModelConfig, RopeScaling


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling, max_positions: int, factors: tuple[float, ...] = ()) -> Tensor:
    """float64 [dim / 2]: radians per token of each pair. max_positions: the longest sequence that will be served, in tokens."""
    if scaling.kind == "dynamic":
        theta *= _ntk_growth(scaling, max_positions) ** (dim / (dim - 2))
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if factors:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64)
    return _scaled(frequencies, theta, scaling)


def _ntk_growth(scaling: RopeScaling, max_positions: int) -> float:
    """By how much dynamic NTK scaling raises the base. It is settled once, for the longest sequence: keys that are in the cache
    already could not be rotated again when a sequence grows past the original length."""
    length = max(max_positions, scaling.original_max_position)
    return scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)


def _scaled(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """linear: all divided by factor. llama3 (Llama 3.1) and yarn (Peng et al. 2023): long waves divided, short ones kept, a ramp
    in between; over full turns within the original context, or over the number of the frequency."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif scaling.kind == "yarn":
        kept = 1.0 - _yarn_ramp(2 * len(frequencies), theta, scaling)
    else:
        return frequencies
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """float64 [dim / 2]: 0 for frequencies that are kept, 1 for those divided by factor."""

    def number(turns: float) -> float:
        return dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = number(scaling.beta_fast), number(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)


def cos_sin_table(config: ModelConfig, max_positions: int, device: torch.device, local: bool = False) -> Tensor:
    """float32 [max_positions, D]: cosines in the first half of a row, sines in the second. Angles are computed in float64.

    local: for layers with a window. Where only a part of a head is rotated, the other pairs have angle 0 (see weights.rotary_order).
    """
    dim = config.latent.rope_dim if config.latent is not None else config.head_dim
    scaling = RopeScaling() if local else config.rope_scaling
    theta = config.local_rope_theta if local else config.rope_theta
    frequencies = inverse_frequencies(config.rotary_dim or dim, theta, scaling, max_positions, () if local else config.rope_factors)
    angles = torch.arange(max_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    cos, sin = angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor
    rest = dim // 2 - len(frequencies)
    if rest:
        cos, sin = (torch.nn.functional.pad(part, (0, rest), value=fill) for part, fill in ((cos, 1.0), (sin, 0.0)))
    return torch.cat((cos, sin), -1).float().to(device)
