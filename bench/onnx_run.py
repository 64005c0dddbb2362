"""ONNX Runtime's attention on the host, as a peer: models of one node, made in memory, on torch's tensors without copies.

Two of its operators compute attention. GroupQueryAttention is causal, has fewer heads for keys and values, and a cache
[batch][head][row][dim] that it writes the new rows into, which here is the memory that everybody reads. MultiHeadAttention
has as many heads for all of them, no cache, and both masks. What they do not have for a dtype ONNX Runtime says itself.
"""

from __future__ import annotations

import functools

import onnxruntime
import torch
from onnx import TensorProto, helper

TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
}
VERSION = onnxruntime.__version__


class Refused(Exception):
    """An operator does not have this case."""


@functools.lru_cache(maxsize=4)  # for the sets of inputs of a case; each has threads of its own
def session_of(operator, arguments, results, shapes, attributes, dtype, threads):
    """A session for one node. Arguments and results are names ("": left out), shapes those of the tensors among them."""
    shapes = dict(shapes)

    def values(names):
        kinds = {name: (TYPES[dtype], shapes[name]) if name in shapes else (TensorProto.INT32, None) for name in names}
        return [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items() if name]

    node = helper.make_node(operator, arguments, results, domain="com.microsoft", **dict(attributes))
    graph = helper.make_graph([node], "attention", values(arguments), values(results))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Its threads spin while it runs, as they do by default, but not on when others have their turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # those of ONNX Runtime have no class in common but this one
        raise Refused(str(error).splitlines()[0]) from None


def bound_run(session, tensors, result):
    """A function that runs on these tensors, by name, inputs and outputs, and returns the result."""
    binding = session.io_binding()

    def memory(name, x):
        shape, kind = tuple(x.shape), TYPES[x.dtype]
        return dict(name=name, device_type="cpu", device_id=0, element_type=kind, shape=shape, buffer_ptr=x.data_ptr())

    for name in (x.name for x in session.get_inputs()):
        binding.bind_input(**memory(name, tensors[name]))
    for name in (x.name for x in session.get_outputs()):
        binding.bind_output(**memory(name, tensors[name]))

    def run(kept=(binding, tensors)):
        session.run_with_iobinding(binding)
        return result

    return run


def flat(x):
    """[batch][row][head x dim]"""
    return x.reshape(*x.shape[:2], -1)


def shapes_of(tensors):
    return tuple((name, tuple(x.shape)) for name, x in tensors.items())


def mha_run(q, k, v, causal, threads):
    """MultiHeadAttention on [batch][row][head][dim]."""
    if q.shape[2] != k.shape[2]:
        raise Refused("MultiHeadAttention has as many heads for keys as for queries")
    if causal and q.shape[1] != k.shape[1]:
        raise Refused("MultiHeadAttention's causal mask begins at the first key")
    o = torch.empty_like(q)
    tensors = {"q": flat(q), "k": flat(k), "v": flat(v), "o": flat(o)}
    attributes = (("num_heads", q.shape[2]), ("unidirectional", int(causal)))
    names = ("q", "k", "v"), ("o",)
    session = session_of("MultiHeadAttention", *names, shapes_of(tensors), attributes, q.dtype, threads)
    return bound_run(session, tensors, o)


def gqa_run(q, k, v, causal, threads):
    """GroupQueryAttention on [batch][row][head][dim]; with more keys than queries, k and v are a cache, and hold these rows."""
    batch, rows, heads, dim = q.shape
    keys = k.shape[1]
    if not causal and rows > 1:
        raise Refused("GroupQueryAttention is causal")
    if rows > 1 and keys > rows and batch > 1:
        raise Refused("GroupQueryAttention appends several rows to one sequence only")
    o = torch.empty_like(q)
    new_k, new_v = (x[:, keys - rows :].contiguous() for x in (k, v))
    tensors = {"q": flat(q), "k": flat(new_k), "v": flat(new_v), "o": flat(o)}
    past = ("", "")
    if keys > rows:
        cache = k.transpose(1, 2), v.transpose(1, 2)
        if not all(x.is_contiguous() for x in cache):
            raise Refused("GroupQueryAttention wants a cache [batch][head][row][dim]")
        past = ("past_k", "past_v")
        tensors |= dict(zip(past, cache))
    else:
        cache = [torch.empty(batch, k.shape[2], keys, dim, dtype=q.dtype) for _ in range(2)]
    tensors |= dict(zip(("next_k", "next_v"), cache))
    attributes = (("num_heads", heads), ("kv_num_heads", k.shape[2]))
    names = ("q", "k", "v", *past, "last", "total"), ("o", "next_k", "next_v")
    session = session_of("GroupQueryAttention", *names, shapes_of(tensors), attributes, q.dtype, threads)
    tensors["last"] = torch.full((batch,), keys - 1, dtype=torch.int32)
    tensors["total"] = torch.tensor([keys], dtype=torch.int32)
    return bound_run(session, tensors, o)


OPERATORS = {"gqa": gqa_run, "mha": mha_run}
