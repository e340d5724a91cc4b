"""Tensors as bytes: which ones can be captured, and how their bytes are reached without a copy."""

from __future__ import annotations

import ctypes
import math
from typing import cast

import torch
from torch import Tensor, nn

from hotswarm.errors import CaptureError, Incompatible
from hotswarm.snapshot.dtypes import ITEMSIZE
from hotswarm.snapshot.tree import Path, TensorSpec, show_path

NAME_OF_DTYPE: dict[torch.dtype, str] = {
    dtype: name for name in ITEMSIZE if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The dtypes that can be captured: those whose tensors are nothing but their bytes."""

_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory  # tensors have no buffer interface of their own
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200  # PyBUF_WRITE

_PLAIN = frozenset({Tensor, nn.Parameter})
_SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPYABLE = frozenset({torch.complex32, torch.complex64, torch.complex128})


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name; Incompatible when this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Incompatible(f"torch {torch.__version__} has no dtype {name!r}; use the version that took the snapshot")
    return dtype


def spec_of(tensor: Tensor, path: Path) -> TensorSpec:
    """Dtype and shape. CaptureError, naming path and type, for what is more than strided bytes."""
    kind = type(tensor)
    what = None
    if kind not in _PLAIN:
        what = f"a {kind.__module__}.{kind.__qualname__}, a tensor subclass that it does not know"
    elif tensor.layout is not torch.strided:
        what = f"a sparse tensor ({tensor.layout})"
    elif tensor.is_quantized or tensor.dtype not in NAME_OF_DTYPE:
        what = f"a tensor of {tensor.dtype}"
    elif tensor.device.type == "meta":
        what = "a tensor on the meta device, which has no data"
    if what is not None:
        raise CaptureError(
            f"{show_path(path)} is {what}; only plain strided tensors can be captured: convert it or leave it out"
        )
    return TensorSpec(NAME_OF_DTYPE[tensor.dtype], tuple(tensor.shape))


def is_flat(tensor: Tensor) -> bool:
    """Whether its bytes in memory are those of the packed form: on the CPU, contiguous, nothing lazily negated."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def has_shared_elements(tensor: Tensor) -> bool:
    """Whether two indexes may reach one element (an expanded tensor): it cannot be written element by element."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def bytes_of(tensor: Tensor) -> memoryview:
    """The live bytes of a flat tensor, writable. The tensor must outlive the view."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return cast("memoryview", _view_of_memory(tensor.data_ptr(), nbytes, _WRITABLE))


def copy_elements(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` of equal dtype and shape, for dtypes too that have no copy kernel; exact in every bit."""
    with torch.no_grad():
        lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
        if lazy or source.dtype in _COPYABLE:
            target.detach().copy_(source.detach())
        else:
            integer = _SAME_SIZE_INT[source.element_size()]
            target.detach().view(integer).copy_(source.detach().view(integer))


def new_tensor(spec: TensorSpec, device: torch.device | str = "cpu", like: Tensor | None = None) -> Tensor:
    """An uninitialised tensor; with the strides of `like` where shapes agree. Incompatible when memory is short."""
    dtype = dtype_of(spec.dtype)
    if dtype is torch.complex32:  # torch warns when it makes one, and has done so already where this one came from
        return torch.empty(spec.shape, dtype=torch.int32, device=device).view(dtype)
    try:
        if like is not None and tuple(like.shape) == spec.shape and like.layout is torch.strided:
            return torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
        return torch.empty(spec.shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        nbytes = math.prod(spec.shape) * ITEMSIZE[spec.dtype]
        raise Incompatible(f"no memory for a tensor of {nbytes >> 20} MiB on {device}: {error}") from error


def matches(tensor: object, spec: TensorSpec) -> bool:
    """Whether the bytes of such a tensor can be read straight into this one."""
    return (
        type(tensor) in _PLAIN
        and (live := cast("Tensor", tensor)).layout is torch.strided
        and NAME_OF_DTYPE.get(live.dtype) == spec.dtype
        and tuple(live.shape) == spec.shape
        and not has_shared_elements(live)
    )
