"""Kernels compile ahead of a model's start, without a GPU, and the parts that processes share out are all of them."""

import dataclasses
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from worker.tiny_model import write_config

from pagecast.bench import model_shapes
from pagecast_worker.compilers import Compilers, start_early
from pagecast_worker.loading.random import RandomWeights

pytest.importorskip("triton")

LIMIT_S = 240.0


@pytest.mark.parametrize(
    ("head_dim", "ranks", "quantization", "own"),
    [
        (32, 1, None, {"_paged_prefill", "_gemv", "_decode_flat", "_list_tiles"}),
        (128, 2, None, {"_paged_prefill_hopper", "_gemv", "_decode_hopper", "_list_tiles"}),
        (32, 1, "int4", {"_paged_prefill", "_packed_product", "_packed_gemv", "_paged_decode"}),
        (
            128, 1, "fp8",
            {"_paged_prefill", "_scaled_product", "_scaled_gemv", "_quantize_rows", "_gemv", "_decode_hopper_bytes", "_list_tiles"},
        ),
    ],
)
def test_parts_compile_every_kernel_between_them(tmp_path, monkeypatch, head_dim, ranks, quantization, own):
    shape = RandomWeights(write_config(tmp_path / "shape", head_dim=head_dim), torch.device("cpu")).config
    request = {
        "shape": dataclasses.asdict(shape) | {"num_layers": 2 if quantization == "fp8" else 1}, "dtype": "bfloat16",
        "max_blocks": 16, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "arch": 90, "processors": 132, "parts": 2,
        "ranks": ranks, "quantization": quantization, "scheme": None, "kv_cache_dtype": "fp8" if quantization else "auto",
        "batch_invariant": False, "fold_norms": True, "device_name": "NVIDIA H200",
    }
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compilers = Compilers()
    compilers.begin(json.dumps(request))
    assert compilers.end(LIMIT_S)
    names = {path.stem for path in (tmp_path / "cache").glob("*/*.cubin")}
    assert names - {"_best_of_shard"} == {
        "_bound", "_choose", "_copy_blocks", "_embedding", "_finish_rows", "_gate_mul", "_gather_padded", "_gather_rows", "_narrow",
        "_pick", "_rms_norm", "_rope_and_write_kv", "_finish_open_rows",
        "_adjust_logits", "_forbid_tokens", "_note_tokens", "_top_logprobs",
    } - ({"_gate_mul"} if quantization == "int4" else set()) | own
    assert ("_best_of_shard" in names) == (ranks > 1)


def test_what_cannot_be_compiled_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilers = Compilers()
    compilers.begin(json.dumps({"parts": 1, "arch": 90, "processors": 132}))
    assert not compilers.end(LIMIT_S)


def test_compilers_that_are_not_needed_are_gone():
    compilers = Compilers()
    compilers.dismiss()
    assert not compilers.end(0.0)


def test_nothing_gets_ready_where_there_is_no_gpu_or_a_full_cache(tmp_path, monkeypatch):
    started, woken = [], threading.Event()
    monkeypatch.setattr("pagecast_worker.compilers._wake_driver", woken.set)
    monkeypatch.setattr("pagecast_worker.compilers.Compilers", lambda: started.append(1))
    monkeypatch.setattr("pagecast_worker.compilers.os.cpu_count", lambda: 16)
    monkeypatch.setattr("pagecast_worker.compilers.DRIVER", tmp_path / "driver")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    start_early("auto")
    (tmp_path / "driver").touch()
    start_early("cpu")
    assert not started and not woken.is_set()
    start_early("cuda:1")
    assert started == [1] and woken.wait(30.0)
    (tmp_path / "pagecast-1").touch()
    start_early("auto")
    assert started == [1]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 2, 128)])
def test_every_kernel_that_a_worker_launches_is_compiled_ahead(tmp_path, heads, kv_heads, head_dim):
    """Of an H200's, with requests of every kind: in other words, serving waits for no compiler."""
    write_config(
        tmp_path, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=128256, num_hidden_layers=3,
        max_position_embeddings=2048,
    )  # fmt: skip
    assert not_compiled_ahead(tmp_path) == []


PRODUCTS_AHEAD = """
import json, sys
from pathlib import Path
from pagecast_kernels import product_table
from pagecast_worker.precompile import launch_all, note_launches

product_table.FOLDER = Path(sys.argv[1])
noted = note_launches(90, 132)
launch_all(json.loads(sys.argv[2]))
ours = [each for each in noted if each.args[0].__name__ == "_few_rows"]
names = [parameter.name for parameter in ours[0].args[0].params]
fields = [names.index(name) for name in ("PARTS", "ADD", "GATED", "HIDDEN")]
print(json.dumps(sorted([int(each.args[1:][field]) for field in fields] for each in ours)))
"""


def test_products_that_the_table_gives_to_our_own_kernel_are_compiled_ahead(tmp_path):
    """For every number of rows that the table has, of weights that this model has."""
    shape = RandomWeights(write_config(tmp_path / "shape", head_dim=32, intermediate_size=1024), torch.device("cpu")).config
    hidden, inner = shape.hidden_size, shape.intermediate_size
    products = {
        f"bfloat16 {2 * inner} {hidden}": {"4": {"few_rows": {}}, "128": {"few_rows": {"turn": 11}}},
        f"bfloat16 {hidden} {inner}": {"64": {"few_rows": {}}, "128": None},
        "bfloat16 4096 4096": {"128": {"few_rows": {}}},
    }
    gated = {f"bfloat16 {2 * inner} {hidden}": {"16": {"few_rows": {}}, "128": {"few_rows": {}}}}
    (tmp_path / "products_test_gpu.json").write_text(json.dumps({"library": 1, "products": products, "gated": gated}))
    request = {
        "shape": dataclasses.asdict(shape) | {"num_layers": 1}, "dtype": "bfloat16", "max_blocks": 16, "block_size": 16, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "ranks": 1, "quantization": None, "scheme": None, "kv_cache_dtype": "auto", "batch_invariant": False,
        "fold_norms": True, "device_name": "Test GPU",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", PRODUCTS_AHEAD, str(tmp_path), json.dumps(request)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    plain, gated = [[1, 0, 0, 0], [1, 1, 0, 0], [2, 0, 0, 0]], [[1, 0, 1, hidden], [2, 0, 1, hidden]]
    assert json.loads(ended.stdout) == sorted(plain + gated)


def test_every_kernel_of_latents_and_experts_is_compiled_ahead(tmp_path):
    """The same of DeepSeek-V2-Lite, all sizes cut but those that choose its kernels."""
    small = {
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 128256, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(model_shapes.SHAPES["deepseek-v2-lite"] | small))
    assert not_compiled_ahead(tmp_path) == []


def not_compiled_ahead(folder):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "worker.launched_variants", str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["launched"] > 40
    return told["missing"]
