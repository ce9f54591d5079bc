"""vLLM through its Python API, random weights, as `--peer vllm`."""

from typing import Any

from pagecast.bench.peer_loop import Run, serve


def start(settings: dict[str, Any]) -> Run:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    given: dict[str, Any] = {}
    if not settings["defaults"]:
        given = {"max_num_seqs": settings["max_num_seqs"], "max_num_batched_tokens": settings["max_num_batched_tokens"]}
    if settings["max_model_len"]:
        given["max_model_len"] = settings["max_model_len"]
    engine = LLM(
        model=settings["folder"], load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=settings["memory_share"],
        enable_prefix_caching=True, disable_log_stats=True, tensor_parallel_size=settings["tensor_parallel_size"], **given,
    )

    def run(prompts: list[list[int]], counts: list[int]) -> int:
        params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts]
        engine.reset_prefix_cache()
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


if __name__ == "__main__":
    serve(start)
