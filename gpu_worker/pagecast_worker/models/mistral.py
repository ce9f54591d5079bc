"""Mistral (Jiang et al. 2023): Llama, with a window over which attention looks back in every layer of the earlier ones."""

from pagecast_worker.models.architecture import Architecture, dense
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    layers, window = fields.integer("num_hidden_layers"), fields.integer("sliding_window", 0, least=0)
    return dense(fields, windows=fields.layer_windows(layers, window, [window > 0] * layers))


ARCHITECTURE = Architecture("MistralForCausalLM", "mistral", read, example={"sliding_window": 24})
