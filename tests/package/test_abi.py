"""The ctypes mirrors of the C structs have the sizes and offsets that a C compiler gives to attn.h."""

import shutil
import subprocess

import pytest
from libattn import _lib

STRUCTS = {
    "attn_config": _lib.Config,
    "attn_problem": _lib.Problem,
    "attn_tensor": _lib.Tensor,
    "attn_matrix": _lib.Matrix,
    "attn_buffers": _lib.Buffers,
    "attn_merge_args": _lib.MergeArgs,
    "attn_rotary_args": _lib.RotaryArgs,
    "attn_kernel_info": _lib.KernelInfo,
}
CONSTANTS = {
    **{f"ATTN_{name}": getattr(_lib, name) for name in ("OK", "INVALID", "UNSUPPORTED", "NO_MEMORY", "SYSTEM", "DEVICE")},
    **{f"ATTN_{name}": getattr(_lib, name) for name in ("F32", "F16", "BF16", "F64", "E4M3", "E5M2", "I8")},
    **{f"ATTN_{name}": getattr(_lib, name) for name in ("FORWARD", "BACKWARD", "KV_APPEND")},
    **{
        f"ATTN_{name}": getattr(_lib, name)
        for name in """CAUSAL WINDOW SCALE ALIBI BIAS SINK VARLEN_Q VARLEN_KV USED_Q USED_KV LEFTPAD BATCH_INDEX APPEND
                       VARLEN_NEW ROTARY ROTARY_INTERLEAVED ROTARY_POS DESCALE""".split()
    },
    **{f"ATTN_BACKEND_{name.upper()}": value for name, value in _lib.BACKENDS.items()},
}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """What a C program prints: "attn_problem.flags 32 4", "ATTN_F32 1"."""
    from conftest import ROOT

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "the comparison with attn.h wants a C compiler"
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu 0\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            size = f"sizeof(({name} *)0)->{field}".replace("sizeof(", "sizeof((", 1) + ")"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), {size});')
    lines += [f'printf("{name} %lld 0\\n", (long long){name});' for name in CONSTANTS]
    folder = tmp_path_factory.mktemp("abi")
    (folder / "abi.c").write_text(
        "#include <attn.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run([compiler, "-I", ROOT / "include", "-o", folder / "abi", folder / "abi.c"], check=True)
    text = subprocess.run([folder / "abi"], check=True, capture_output=True, text=True).stdout
    return {name: (int(a), int(b)) for name, a, b in (line.split() for line in text.splitlines())}


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(numbers, name):
    import ctypes

    struct = STRUCTS[name]
    assert ctypes.sizeof(struct) == numbers[name][0]
    for field, *_ in struct._fields_:
        mirror = getattr(struct, field)
        assert (mirror.offset, mirror.size) == numbers[f"{name}.{field}"], field


def test_constants(numbers):
    assert {name: numbers[name][0] for name in CONSTANTS} == CONSTANTS
