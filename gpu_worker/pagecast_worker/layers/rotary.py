"""The table of rotary angles (RoFormer, Su et al. 2021), scaled where the model was trained so."""

import math

import torch
from torch import Tensor

from pagecast_worker.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float64 [D / 2]: radians per token of each pair."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_factors:
        frequencies = frequencies / torch.tensor(config.rope_factors, dtype=torch.float64)
    return _scaled(frequencies, config.rope_scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """linear: all divided by factor. llama3 (Llama 3.1): long waves divided, short ones kept, a ramp in between."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "default":
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def cos_sin_table(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """float32 [max_positions, D]: cosines in the first half of a row, sines in the second. Angles are computed in float64."""
    angles = torch.arange(max_positions, dtype=torch.float64).unsqueeze(1) * inverse_frequencies(config)
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)
