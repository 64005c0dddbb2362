"""The package as it is installed: what it imports, what it says when the library is missing, `python -m libattn`."""

import ast
import os
import pathlib
import subprocess
import sys

import libattn
import pytest


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Blocked())
import libattn
"""


def test_imports_without_torch_and_numpy():
    done = python(
        WITHOUT_TORCH.format(blocked=("torch", "numpy", "ml_dtypes", "transformers")) + "print(libattn.__version__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == libattn.__version__


def test_numpy_without_torch_and_ml_dtypes():
    code = WITHOUT_TORCH.format(blocked=("torch", "ml_dtypes")) + (
        "import numpy as np; q = np.ones((1, 3, 2, 8), np.float32); print(libattn.flash_attn_func(q, q, q).sum())"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "48.0"


def test_import_is_light():
    done = python("import sys, libattn; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_library_says_what_to_do(tmp_path):
    done = python("import libattn", LIBATTN_LIBRARY=str(tmp_path / "none.so"))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: libattn: the shared library is missing")
    for word in (str(tmp_path / "none.so"), "pip install .", "make", "LIBATTN_LIBRARY"):
        assert word in last


def test_wrong_library_is_named(tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_text("not a library")
    done = python("import libattn", LIBATTN_LIBRARY=str(wrong))
    assert "ImportError" in done.stderr and str(wrong) in done.stderr


def test_module_prints_versions_backends_and_kernels():
    done = subprocess.run([sys.executable, "-m", "libattn"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for word in (libattn.__version__, "backends      ref cpu", "fwd_ref_f64", "bwd_c_f32", "numpy"):
        assert word in done.stdout


def test_threads_and_backend_are_chosen():
    from libattn import _lib

    before = dict(_lib._choice)
    try:
        libattn.set_num_threads(3)
        assert _lib.library.attn_context_threads(_lib.host_context()) == 3
        libattn.set_backend("ref")
        assert _lib.library.attn_context_backend(_lib.host_context()) == b"ref"
    finally:
        _lib._choice.update(before)
    for wrong in ("cuda", "auto", ""):
        try:
            libattn.set_backend(wrong)
        except ValueError as error:
            assert repr(wrong) in str(error)
        else:
            raise AssertionError(wrong)


SOURCES = sorted(pathlib.Path(libattn.__file__).parent.rglob("*.py"))


def unions(tree):
    """Lines with X | Y as a type, which Python 3.9 cannot evaluate; torch evaluates the annotations of operators."""
    annotations = [
        node.returns if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else node.annotation
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.AnnAssign))
    ]
    parts = [part for annotation in annotations if annotation for part in ast.walk(annotation)]
    return [part.lineno for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_is_python_3_9(source):
    tree = ast.parse(source.read_text(), str(source), feature_version=(3, 9))
    assert not unions(tree)
    assert not [node.lineno for node in ast.walk(tree) if type(node).__name__ == "Match"]


def test_finds_what_python_3_9_does_not_know():
    assert unions(ast.parse("def f(x: int | None, *y: str) -> 'a': pass")) == [1]
    assert unions(ast.parse("x: list[int | str] = []\nx = 1 | 2")) == [1]
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass", feature_version=(3, 9))
