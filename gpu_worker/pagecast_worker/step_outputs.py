"""What a step's forward pass and plain draw leave on the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class SampleInputs:
    """What sampling B rows needs. rows int32[B]; scalars int32[8, B] and seeds int64[B] as in BatchState."""

    rows: Tensor
    scalars: Tensor
    seeds: Tensor


@dataclass(slots=True)
class Decoded:
    """What the first part of a step leaves on the device. A graph's next replay overwrites it, and any next step its logits, which all
    steps put into one buffer: what needs them is given to the device before the next step is. out int32[2, B]: tokens and flags of rows
    that have no rules of their own; logits[B, V]; rows: what was sampled for."""

    out: Tensor
    logits: Tensor
    rows: SampleInputs
