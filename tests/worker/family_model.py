"""A small checkpoint of any family, made by transformers from the family's own example, and a forward pass over it by hand."""

import json
from pathlib import Path

import torch
import transformers

from pagecast_worker.config import WorkerConfig
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.models.architecture import SMALL
from pagecast_worker.models.registry import architectures
from pagecast_worker.torch_executor import TorchExecutor

LENGTH = 60
PROMPT = [(37 * i + 11 * i * i) % 150 + 3 for i in range(LENGTH)]
NUM_BLOCKS = 24


def family_config(name: str, **changes):
    """transformers' configuration of a family's example."""
    family = architectures()[name]
    kind = _class_of(name).config_class
    if "text_config" in family.example:
        values = {**family.example, "text_config": {**SMALL, **family.example["text_config"], **changes}}
    else:
        values = {**SMALL, **family.example, **changes}
    config = kind(**values)
    config.architectures = [name]
    return config


def _class_of(name: str):
    """transformers' class of a family's models."""
    reference = architectures()[name].reference or name
    found = getattr(transformers, reference, None)
    assert found is not None, f"transformers {transformers.__version__} has no {reference}: give ARCHITECTURE a reference, a class of it"
    return found


def write_family(name: str, folder, **changes):
    """The folder of a random checkpoint, and transformers' model."""
    torch.manual_seed(1)
    config = family_config(name, **changes)
    model = _class_of(name)(config).float().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key or "embed_scale" in key:
                continue
            centre = 1.0 if parameter.dim() == 1 and "norm" in key and not name.startswith("Gemma") else 0.0
            parameter.copy_(torch.normal(centre, 0.2 if parameter.dim() > 1 else 0.3, parameter.shape, generator=generator))
    model.save_pretrained(folder)
    if architectures()[name].reference:
        path = Path(folder, "config.json")
        own = {"architectures": [name], "model_type": architectures()[name].model_type}
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder, model


def expected_logits(model, prompt, decodes):
    """Token ids of the prompt and of what transformers would say next, and the logits [T, V] at each of them."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(decodes):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids, model(torch.tensor([ids]), use_cache=False).logits[0]


def executor_for(folder, dtype="float32", **options):
    """A loaded executor of one rank on the CPU. facts: what it reported."""
    config = WorkerConfig(
        run_dir="/unused", model=str(folder), device="cpu", dtype=dtype, num_blocks=NUM_BLOCKS, max_num_seqs=4, max_model_len=96,
        **options,
    )
    executor = TorchExecutor(config)
    executor.facts, _ = executor.load(lambda progress: None)
    return executor


class Forward:
    """One sequence in scattered blocks: logits of each chunk or decode step, straight from the model."""

    @torch.inference_mode()
    def __init__(self, executor):
        self.executor = executor
        size = executor.config.block_size
        self.blocks = [(5 * i) % (NUM_BLOCKS - 1) + 1 for i in range(96 // size)]
        self.table = torch.tensor([[0] * len(self.blocks), self.blocks], dtype=torch.int32)
        self.length = 0
        for part in executor.cache.storage:
            part.zero_()

    def _step(self, count: int, **kind) -> StepInputs:
        positions = torch.arange(self.length, self.length + count, dtype=torch.int32)
        size = self.executor.config.block_size
        slots = torch.tensor([self.blocks[p // size] * size + p % size for p in positions.tolist()])
        self.length += count
        return StepInputs(token_ids=torch.zeros(0), positions=positions, slot_mapping=slots, block_table=self.table, **kind)

    def chunk(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), V]"""
        row, none = torch.tensor([1], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        step = self._step(
            len(ids), num_decodes=0, decode_rows=none, decode_seq_lens=none, num_prefills=1, prefill_rows=row,
            prefill_seq_lens=torch.tensor([self.length + len(ids)], dtype=torch.int32),
            query_start_loc=torch.tensor([0, len(ids)], dtype=torch.int32), max_query_len=len(ids),
        )
        return self._logits(ids, step)

    def decode(self, token: int) -> torch.Tensor:
        """[1, V]"""
        lens = torch.tensor([self.length + 1], dtype=torch.int32)
        step = self._step(1, num_decodes=1, decode_rows=torch.tensor([1], dtype=torch.int32), decode_seq_lens=lens)
        return self._logits([token], step)

    @torch.inference_mode()
    def _logits(self, ids: list[int], step: StepInputs) -> torch.Tensor:
        step.token_ids = torch.tensor(ids, dtype=torch.int32)
        executor = self.executor
        return executor.model.logits(executor.ops, executor.model.forward(executor.ops, step, executor.cache.layers))
