"""cuBLASLt by algorithm: which one a product uses is said by us, where torch takes the library's first guess.

The guess is made from a model of the chip and is often not the fastest for few hundred rows. `candidates` lists what the library would
consider, `Product` runs one of them, and `product_table` holds the ones that were measured. The constants and structures are those of
cublasLt.h (CUDA 12 and 13), by which an algorithm may be kept and used again with the same version of the library.
"""

import ctypes
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20
_COMPUTE_32F, _R_32F, _TRANSPOSED = 68, 0, 1
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_TRANSA, _MAX_WORKSPACE = 3, 1


class BlasError(RuntimeError):
    """cuBLASLt refused a call; holds the call's name and its status."""


Algorithm = tuple[int, ...]
"""The eight words of a cublasLtMatmulAlgo_t. They mean the same to the same version of the library only."""


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]

    @staticmethod
    def of(algorithm: Algorithm) -> "Algo":
        return Algo((c_uint64 * 8)(*algorithm))

    def words(self) -> Algorithm:
        return tuple(self.data)


class _Heuristic(ctypes.Structure):
    _fields_ = [("algo", Algo), ("workspace", c_size_t), ("state", c_int), ("waves", ctypes.c_float), ("reserved", c_int * 4)]


class Library:
    """The cuBLASLt that torch has loaded, with a handle and scratch memory for one device. Used on one stream at a time."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        """library: instead of the one that torch has loaded. Raises OSError where there is none, BlasError where it refuses."""
        self._lib = library or ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        self._lib.cublasLtGetVersion.restype = c_size_t
        self.version = int(self._lib.cublasLtGetVersion())
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise BlasError(f"{name} gave status {status}")

    def made(self, name: str, *arguments: Any) -> c_void_p:
        """What a function of the kind cublasLt…Create makes."""
        pointer = c_void_p()
        self.call(name, byref(pointer), *arguments)
        return pointer


class Problem:
    """y[rows, columns] = x[rows, depth] · weight[columns, depth]ᵀ, all contiguous and of one dtype; sums in float32.

    The library counts columns first, so to it this is yᵀ = weight · xᵀ with weight as a transposed A and x as B.
    """

    def __init__(self, lib: Library, rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
        kind = _TYPES[dtype]
        self._lib, self.shape = lib, (rows, columns, depth)
        self.types = _COMPUTE_32F, _R_32F, kind, kind, kind, kind
        """As the library asks for them: of the sums, of alpha, and of A, B, C and D."""
        self.operation = lib.made("cublasLtMatmulDescCreate", _COMPUTE_32F, _R_32F)
        lib.call("cublasLtMatmulDescSetAttribute", self.operation, _TRANSA, byref(c_int32(_TRANSPOSED)), c_size_t(4))
        self.weight, self.x, self.y = (
            lib.made("cublasLtMatrixLayoutCreate", kind, c_uint64(inner), c_uint64(outer), c_int64(inner))
            for inner, outer in ((depth, columns), (depth, rows), (columns, rows))
        )

    def layouts(self) -> tuple[c_void_p, ...]:
        """Of A, B, C and D."""
        return self.weight, self.x, self.y, self.y

    def candidates(self, most: int) -> list[Algorithm]:
        """What the library would try, best guess first. Raises BlasError where it knows nothing."""
        preference = self._lib.made("cublasLtMatmulPreferenceCreate")
        wanted = c_uint64(WORKSPACE_BYTES)
        self._lib.call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, byref(wanted), c_size_t(8))
        found, count = (_Heuristic * most)(), c_int()
        self._lib.call(
            "cublasLtMatmulAlgoGetHeuristic", self._lib.handle, self.operation, *self.layouts(), preference, most, found, byref(count)
        )
        self._lib.call("cublasLtMatmulPreferenceDestroy", preference)
        return [each.algo.words() for each in found[: count.value] if each.state == 0]

    def algo(self, algorithm: Algorithm) -> Algo | None:
        """The library's own form of it; None where this library or device cannot run it on this problem."""
        algo = Algo.of(algorithm)
        return algo if self.runs(algo) else None

    def runs(self, algo: Algo) -> bool:
        """Whether this library and device can run it on this problem, with the scratch memory there is."""
        checked = _Heuristic()
        try:
            self._lib.call(
                "cublasLtMatmulAlgoCheck", self._lib.handle, self.operation, *self.layouts(), byref(algo), byref(checked)
            )  # fmt: skip
        except BlasError:
            return False
        return checked.workspace <= WORKSPACE_BYTES


class Product:
    """A problem with its algorithm, ready to run: what a step calls. Owns nothing but descriptions."""

    def __init__(self, lib: Library, problem: Problem, algo: Algo, *, add: bool = False) -> None:
        """add: to what the result's place holds, instead of over it."""
        self._run = lib._lib.cublasLtMatmul
        self._problem = problem
        one, kept = ctypes.c_float(1.0), ctypes.c_float(float(add))
        self._scales = one, kept
        self._operation = (lib.handle, problem.operation, byref(one))
        self._algorithm = (byref(algo), c_void_p(lib.workspace.data_ptr()), c_size_t(WORKSPACE_BYTES))

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Into out, on torch's current stream. Raises BlasError, before anything has run."""
        problem, y = self._problem, c_void_p(out.data_ptr())
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._run(
            *self._operation, c_void_p(weight.data_ptr()), problem.weight, c_void_p(x.data_ptr()), problem.x, byref(self._scales[1]),
            y, problem.y, y, problem.y, *self._algorithm, stream,
        )  # fmt: skip
        if status:
            raise BlasError(f"cublasLtMatmul gave status {status}")
