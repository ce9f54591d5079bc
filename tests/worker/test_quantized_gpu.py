"""On a GPU only: quantized weights and caches give what the CPU makes of the same, whether steps are graphs or not."""

import pytest
import torch
from worker.family_model import write_family
from worker.hidden_states import all_hidden_states
from worker.plan_driver import Driver, Job
from worker.tiny_model import write_model

from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VARIANTS = [{"quantization": "int4"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int4", "kv_cache_dtype": "fp8"}]
PROMPTS = [[(7 * i * i + 13 * i + 5 * n) % 500 + 3 for i in range(20 + 31 * n)] for n in range(6)]
NUM_BLOCKS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def make(folder, device: str, dtype: str, **options) -> TorchExecutor:
    sizes = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 8, "max_model_len": 256}
    config = WorkerConfig(run_dir="/unused", model=str(folder), device=device, dtype=dtype, **sizes, **options)
    executor = TorchExecutor(config)
    executor.load(lambda progress: None)
    return executor


def run(executor: TorchExecutor, output: int = 12) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of all prompts, and the hidden states of their prefill where it ran as Python."""
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=8, max_model_len=256)
    jobs = [Job(prompt, output) for prompt in PROMPTS]
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    with all_hidden_states(executor) as seen:
        while not all(job.done for job in jobs):
            driver.plan()
    return [job.output for job in jobs], seen[0].float().cpu() if seen else torch.zeros(0)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_gpu_computes_what_a_cpu_does(folder, options):
    want = run(make(folder, "cpu", "float32", **options))[1]
    for dtype in ("bfloat16", "float16"):
        eager, graphs = make(folder, "cuda", dtype, enforce_eager=True, **options), make(folder, "cuda", dtype, **options)
        tokens, got = run(eager)
        assert got.shape == want.shape
        # Values in 16 bits that are rounded to 8 again may fall to the other side.
        assert float((got - want).norm() / want.norm()) < (0.12 if options.get("quantization") == "fp8" else 0.06), dtype
        equal = [one == other for one, other in zip(run(graphs)[0], tokens, strict=True)]
        assert sum(equal) >= len(PROMPTS) - 1  # a batch padded to its bucket may settle a tie the other way
        for executor in (eager, graphs):
            executor.close()


MIXTURES = {
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": 128}, "DeepseekV3ForCausalLM": {"moe_intermediate_size": 128, "q_lora_rank": 64},
}  # fmt: skip


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_on_a_gpu_compute_what_they_do_on_a_cpu(tmp_path, name, quantization):
    folder, _ = write_family(name, tmp_path, vocab_size=512, hidden_size=128, max_position_embeddings=256, **MIXTURES[name])
    want = run(make(folder, "cpu", "float32", quantization=quantization))[1]
    eager = make(folder, "cuda", "bfloat16", enforce_eager=True, quantization=quantization)
    graphs = make(folder, "cuda", "bfloat16", quantization=quantization)
    tokens, got = run(eager)
    # A token that rounding sends to another expert is another token from there on: the one in the middle is judged.
    apart = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median()
    assert got.shape == want.shape and float(apart) < (0.3 if quantization == "fp8" else 0.1)
    equal = [one == other for one, other in zip(run(graphs)[0], tokens, strict=True)]
    assert sum(equal) >= len(PROMPTS) - 2
    for executor in (eager, graphs):
        executor.close()
