"""On a GPU only: every family's greedy tokens, in graphs and beside others, are among the best by the CPU's logits."""

import json

import pytest
import torch
from safetensors.torch import save_file
from worker.hidden_states import all_hidden_states
from worker.plan_driver import Driver, Job

from pagecast_wire.sampling import SamplingParams
from pagecast_worker.config import WorkerConfig
from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.models.architecture import SMALL
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.models.registry import architectures
from pagecast_worker.parallel import Ranks
from pagecast_worker.torch_executor import TorchExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_BLOCKS, SEQS, LONGEST = 200, 8, 120
SIZES = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3}
"""Over the examples' sizes, as tensor-core tiles want them; families with sizes of their own keep those."""


def write_checkpoint(name: str, folder) -> None:
    """A random checkpoint of a family's example, made without transformers."""
    family = architectures()[name]
    values = {**SMALL, **SIZES, **family.example.get("text_config", family.example)}
    if "text_config" in family.example:
        values = {**family.example, "text_config": values}
    values |= {"architectures": [name], "model_type": family.model_type}
    (folder / "config.json").write_text(json.dumps(values))
    config = read_config(folder)[0]
    model = Decoder(config, family.names, Ranks(), torch.device("meta"), torch.float32, LONGEST)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for source in model.sources():
        centre = 1.0 if len(source.shape) == 1 and "norm" in source.name and not config.norm_offset else 0.0
        tensors[source.name] = torch.normal(centre, 0.15, source.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")


def load(folder, device: str) -> TorchExecutor:
    config = WorkerConfig(
        run_dir="/unused", model=str(folder), device=device, dtype="float32", num_blocks=NUM_BLOCKS, max_num_seqs=SEQS,
        max_model_len=LONGEST,
    )
    executor = TorchExecutor(config)
    executor.load(lambda progress: None)
    return executor


def generate(executor: TorchExecutor) -> list[Job]:
    """Five sequences of different lengths: four together, one of them in chunks beside decoding ones, and one alone."""
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=SEQS, max_model_len=LONGEST)
    jobs = [Job([(7 * i + 11 * n) % 150 + 3 for i in range(5 + 17 * n)], 20, SamplingParams(temperature=0.0)) for n in range(5)]
    for job in jobs[:3]:
        driver.admit(job)
        driver.chunk(job)
    driver.plan()
    driver.admit(jobs[3])
    while jobs[3].computed < jobs[3].known:
        driver.chunk(jobs[3], 16)
        driver.plan()
    driver.finish()
    driver.admit(jobs[4])
    driver.chunk(jobs[4])
    driver.finish()
    return jobs


def cpu_logits(executor: TorchExecutor, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), V], in one prefill."""
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=SEQS, max_model_len=LONGEST)
    job = Job(tokens, 1)
    driver.admit(job)
    driver.chunk(job)
    with all_hidden_states(executor) as seen:
        driver.plan()
    with torch.inference_mode():
        return executor.model.logits(executor.ops, seen[0])


@pytest.mark.parametrize("name", sorted(architectures()))
def test_greedy_tokens_are_the_best_by_the_cpu(tmp_path, name):
    """Sums are in another order: a token may lose a near tie, and a near tie of two experts may change a token altogether."""
    torch.backends.cuda.matmul.allow_tf32 = False
    write_checkpoint(name, tmp_path)
    executor = load(tmp_path, "cuda")
    jobs = generate(executor)
    executor.close()
    judge = load(tmp_path, "cpu")
    behind = []
    for job in jobs:
        logits = cpu_logits(judge, job.prompt + job.output)[len(job.prompt) - 1 : -1]
        behind.append(logits.max(1).values - logits.gather(1, torch.tensor(job.output)[:, None])[:, 0])
    behind = torch.cat(behind)
    assert len(behind) == 100
    assert float((behind > 0.03).float().mean()) <= 0.03, behind.topk(8).values
