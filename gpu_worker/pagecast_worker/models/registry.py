"""Which class computes which architecture."""

from pagecast_worker.executor import LoadError
from pagecast_worker.models.llama import Llama

MODELS = {"LlamaForCausalLM": Llama}


def model_class(architecture: str) -> type[Llama]:
    """Raises LoadError for an architecture that nothing here computes."""
    if architecture not in MODELS:
        raise LoadError(f"field architectures names {architecture}; known are {', '.join(MODELS)}")
    return MODELS[architecture]
