"""Kernels for serving language models from a paged KV cache: `reference` (plain torch) and `triton_ops` (Triton), with equal signatures.

Importing the package imports neither torch nor triton.
"""
