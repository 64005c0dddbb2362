"""Which framework an argument belongs to. Neither torch nor numpy is imported before an array of it comes along."""

from __future__ import annotations

import sys


def operations(x):
    """_torch for torch tensors, _numpy for numpy arrays and what has __dlpack__: two modules with the same functions."""
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        from . import _torch

        return _torch
    if hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        from . import _numpy

        return _numpy
    raise TypeError(f"{type(x).__name__}: want a torch tensor, a numpy array, or an array with __dlpack__")
