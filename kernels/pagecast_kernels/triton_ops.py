"""Every operator as a Triton launcher, under the names and signatures of `reference`. All may be captured in a CUDA graph:
no launcher tunes, waits for the device, or allocates by value."""

from pagecast_kernels import cache_keys  # noqa: F401  (keys of kernels are the same in all processes from here on)
from pagecast_kernels.decode_flat import StepWorkspace, paged_decode, step_workspace
from pagecast_kernels.elementwise import copy_blocks, embedding, gelu_mul, silu_mul
from pagecast_kernels.experts import experts_workspace, mixture
from pagecast_kernels.latent import latent_decode, latent_prefill, latent_rope_and_write, latent_workspace
from pagecast_kernels.logprobs import top_logprobs
from pagecast_kernels.norms import add_rms_norm, rms_norm
from pagecast_kernels.prefill import paged_prefill
from pagecast_kernels.rope import rope_and_write_kv
from pagecast_kernels.sampling import SampleWorkspace, sample, sample_workspace
from pagecast_kernels.shard_sampling import best_of_shard
from pagecast_kernels.shared_prefix import SharedPrefixes, SharedWorkspace, paged_decode_shared, shared_workspace
from pagecast_kernels.steps import finish_rows, gather_padded, gather_rows
from pagecast_kernels.token_rules import adjust_logits, forbid_tokens, note_tokens

__all__ = [
    "SampleWorkspace",
    "SharedPrefixes",
    "SharedWorkspace",
    "StepWorkspace",
    "add_rms_norm",
    "adjust_logits",
    "best_of_shard",
    "copy_blocks",
    "embedding",
    "experts_workspace",
    "finish_rows",
    "forbid_tokens",
    "gather_padded",
    "gather_rows",
    "gelu_mul",
    "latent_decode",
    "latent_prefill",
    "latent_rope_and_write",
    "latent_workspace",
    "mixture",
    "note_tokens",
    "paged_decode",
    "paged_decode_shared",
    "paged_prefill",
    "rms_norm",
    "rope_and_write_kv",
    "sample",
    "sample_workspace",
    "shared_workspace",
    "silu_mul",
    "step_workspace",
    "top_logprobs",
]
