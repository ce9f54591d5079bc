"""Kernels compile ahead of a model's start, without a GPU, and the parts that processes share out are all of them."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from worker.tiny_model import write_config

from pagecast_worker.loading.random import RandomWeights

pytest.importorskip("triton")

COUNT = """
import json, sys
from pagecast_worker import precompile
request = json.loads(sys.argv[1])
compiled = precompile.compile_every(request["part"], request["parts"], request["arch"], request["processors"])
precompile.launch_all(request)
print(json.dumps(sorted({kernel.metadata.name for kernel in compiled})))
"""


@pytest.mark.parametrize(
    ("head_dim", "ranks", "quantization", "own"),
    [
        (32, 1, None, {"_paged_prefill", "_gemv", "_decode_flat", "_list_tiles"}),
        (128, 2, None, {"_paged_prefill_hopper", "_gemv", "_decode_flat", "_list_tiles"}),
        (32, 1, "int4", {"_paged_prefill", "_packed_product", "_gemv", "_paged_decode"}),
        (32, 1, "fp8", {"_paged_prefill", "_scaled_product", "_quantize_rows", "_gemv", "_paged_decode"}),
    ],
)
def test_parts_compile_every_kernel_between_them(tmp_path, head_dim, ranks, quantization, own):
    shape = RandomWeights(write_config(tmp_path / "shape", head_dim=head_dim), torch.device("cpu")).config
    request = {
        "shape": dataclasses.asdict(shape) | {"num_layers": 2 if quantization == "fp8" else 1}, "dtype": "bfloat16",
        "max_blocks": 16, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "arch": 90, "processors": 132, "parts": 2,
        "ranks": ranks, "quantization": quantization, "scheme": None, "kv_cache_dtype": "fp8" if quantization else "auto",
        "batch_invariant": False,
    }
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    names: set[str] = set()
    for part in range(2):
        command = [sys.executable, "-c", COUNT, json.dumps(request | {"part": part})]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        names |= set(json.loads(done.stdout))
    assert names - {"_best_of_shard"} == {
        "_bound", "_choose", "_copy_blocks", "_embedding", "_finish_rows", "_gate_mul", "_gather_rows", "_narrow",
         "_rms_norm", "_rope_and_write_kv", "_finish_open_rows",
        "_adjust_logits", "_forbid_tokens", "_note_tokens", "_top_logprobs",
    } - ({"_gate_mul"} if quantization == "int4" else set()) | own
    assert ("_best_of_shard" in names) == (ranks > 1)
    assert list((tmp_path / "cache").glob("*/*.cubin"))
