"""Plain transformers `generate` as `--peer transformers`: one static batch, padded on the left, decoded to the longest answer."""

from typing import Any

from pagecast.bench.peer_loop import Run, serve


def start(settings: dict[str, Any]) -> Run:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(settings["folder"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = loader.from_config(config, dtype=dtype).eval()

    def run(prompts: list[list[int]], counts: list[int]) -> int:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(counts), min_new_tokens=max(counts), do_sample=True, temperature=1.0, top_k=0,
                pad_token_id=0,
            )
        if out.shape[1] != width + max(counts):
            raise RuntimeError(f"generate produced {out.shape[1] - width} tokens, not {max(counts)}")
        return sum(counts)  # only what was asked for counts; the padding decoded beyond it is the cost of a static batch

    return run


if __name__ == "__main__":
    serve(start)
