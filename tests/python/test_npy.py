"""The .npy reader and writer, through `attn run`: what numpy writes is read, what is not an array is refused."""

import io
import resource
import signal
import struct

import numpy as np
import pytest

from conftest import call


def header(text, version=1, length=None):
    """A file's beginning with any dict text."""
    text = text.encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text


def dict_text(descr="'<f4'", order="False", shape="(1, 1, 1, 4)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


FOUR = struct.pack("<4f", 1, 2, 3, 4)


@pytest.fixture
def read(files):
    """Uses bytes as q; returns attn's result."""
    files.save(k=np.ones((1, 1, 1, 4), np.float32))

    def with_q(content):
        (files.folder / "q.npy").write_bytes(content)
        return call("run", "--q", "q.npy", "--k", "k.npy", "--v", "k.npy", "--o", "o.npy", cwd=files.folder)

    return with_q


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions(read, version):
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ones((1, 1, 1, 4), np.float32), version=version)
    done = read(out.getvalue())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        dict_text(),
        '{"shape": (1, 1, 1, 4), "fortran_order": False, "descr": "<f4"}',
        dict_text(descr="'=f4'"),
        "{'descr':'<f4','fortran_order':False,'shape':(1,1,1,4)}",
    ],
)
def test_spellings(read, text):
    done = read(header(text) + FOUR)
    assert done.returncode == 0, done.stderr


HOSTILE = {
    "empty": (b"", "not a .npy file"),
    "magic": (b"\x93NUMPZ" + header(dict_text())[6:], "not a .npy file"),
    "version 4": (header(dict_text()).replace(b"NUMPY\x01", b"NUMPY\x04"), "version 4.0"),
    "cut header": (header(dict_text())[:40], "ends inside the header"),
    "huge header": (header(dict_text(), 2, length=1 << 31), "at most 65536"),
    "header past the end": (header(dict_text(), 2, length=60000), "ends inside the header"),
    "no data": (header(dict_text()), "needs 16 bytes of data; the file has 0"),
    "short data": (header(dict_text()) + FOUR[:-1], "the file has 15"),
    "trailing data": (header(dict_text()) + FOUR + b"x", "the file has 17"),
    "overflow": (header(dict_text(shape="(4294967296, 4294967296, 4, 4)")), "overflows"),
    "overflow in bytes": (header(dict_text(shape="(4611686018427387904,)")), "overflows"),
    "huge dimension": (header(dict_text(shape="(99999999999999999999,)")), "64 bits"),
    "huge but promised": (header(dict_text(shape="(1073741824, 64, 64, 64)")) + FOUR, "the file has 16"),
    "negative": (header(dict_text(shape="(-1, 4)")), "a dimension expected"),
    "not a tuple": (header(dict_text(shape="(4)")) + FOUR, "',' expected"),
    "many dimensions": (header(dict_text(shape="(1, 1, 1, 1, 1, 1, 1, 1, 4)")) + FOUR, "more than 8"),
    "object": (header(dict_text(descr="'|O'")), "object arrays"),
    "structured": (header(dict_text(descr="[('a', '<f4')]")), "structured"),
    "big-endian": (header(dict_text(descr="'>f4'")) + FOUR, "big-endian"),
    "complex": (header(dict_text(descr="'<c16'")), "not supported"),
    "fortran": (header(dict_text(order="True")) + FOUR, "Fortran order"),
    "no shape": (header("{'descr': '<f4', 'fortran_order': False, }"), "no 'shape'"),
    "twice": (header("{'shape': (), 'shape': (), }"), "twice"),
    "unknown key": (header("{'evil': 1}"), "unknown key"),
    "code": (header("__import__('os')"), "malformed"),
    "more code": (header(dict_text() + " or 1"), "something follows"),
    "text": (b"\x93NUMPY\x01\x00\x05\x00hello", "malformed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refused(read, name):
    content, message = HOSTILE[name]
    done = read(content)
    assert done.returncode == 2, done.stderr
    assert "q.npy: " in done.stderr and message in done.stderr


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 4, 5), (3, 0, 2, 8)])
def test_round_trip(files, random, dtype, shape):
    """One key gives o = v, bit for bit, so a result is the reader's and the writer's work alone."""
    v = random.standard_normal((shape[0], 1, shape[2], shape[3])).astype(dtype)
    (o,) = files.run({"q": np.ones(shape, dtype), "k": v, "v": v}, outputs=("o",))
    assert o.dtype == v.dtype and o.shape == shape
    np.testing.assert_array_equal(o, np.broadcast_to(v, shape))


def test_writer_aligns_like_numpy(files):
    one = np.ones((1, 1, 1, 4), np.float32)
    files.run({"q": one, "k": one, "v": one}, outputs=("o",))
    assert (files.folder / "o.npy").read_bytes() == (files.folder / "v.npy").read_bytes()


def test_failed_write_leaves_nothing_behind(files):
    """A file-size limit makes the write fail half way: no new file, no temporary one, the old result as it was."""
    one = np.ones((1, 512, 8, 64), np.float32)
    files.save(q=one, k=one[:, :1], v=one[:, :1], o=np.arange(3))
    before = files.names()

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))

    args = ["run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--o", "o.npy"]
    done = call(*args, cwd=files.folder, preexec_fn=limit)
    assert done.returncode == 3 and "o.npy" in done.stderr
    assert files.names() == before
    np.testing.assert_array_equal(files.load("o"), np.arange(3))


def test_devices_and_folders_are_no_files(files):
    one = np.ones((1, 1, 1, 4), np.float32)
    files.save(q=one)
    (files.folder / "folder.npy").mkdir()
    args = ["run", "--q", "q.npy", "--k", "q.npy"]
    assert "not a regular file" in files.refused(*args, "--v", "/dev/zero", "--o", "o.npy")
    assert "not a regular file" in files.refused(*args, "--v", "folder.npy", "--o", "o.npy")
    assert "not a regular file" in files.refused(*args, "--v", "q.npy", "--o", "folder.npy")
