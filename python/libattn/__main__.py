"""python -m libattn: versions, backends and kernels of this installation."""

from __future__ import annotations

import importlib.metadata
import platform

from . import __version__, _lib


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    library, context = _lib.library, _lib.host_context()
    rows = _lib.kernels()
    print(f"libattn       {__version__}")
    print(f"library       {_lib.find_library()}")
    print(f"python        {platform.python_version()}")
    for package in ("torch", "numpy", "ml_dtypes", "transformers"):
        print(f"{package:13} {version_of(package)}")
    print(f"backends      {' '.join(dict.fromkeys(row.backend.decode() for row in rows))}")
    print(
        f"host memory   {library.attn_context_backend(context).decode()}, {library.attn_context_threads(context)} threads"
    )
    try:
        _lib.cuda_context()
        print("GPU memory    cuda")
    except (NotImplementedError, RuntimeError) as reason:
        print(f"GPU memory    none: {reason}")
    print(f"cpu           {library.attn_cpu_features().decode()}")
    print(f"\n{'backend':9}{'kernel':18}{'op':10}{'tile':9}{'available':11}needs")
    for row in rows:
        op = ("forward", "backward", "append")[row.op]
        tile = f"{row.rows}x{row.cols}" if row.rows else "-"
        available = "yes" if row.available else "no"
        print(f"{row.backend.decode():9}{row.name.decode():18}{op:10}{tile:9}{available:11}{row.needs.decode() or '-'}")


if __name__ == "__main__":
    main()
