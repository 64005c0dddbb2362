"""libattn.layers.rotary and libattn.bert_padding, against their definitions in torch."""

import libattn
import pytest
import torch
from libattn.bert_padding import index_first_axis, pad_input, unpad_input, unpad_input_for_concatenated_sequences
from libattn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


def rotate(x, cos, sin, interleaved):
    """x (..., rows, heads, dim) with cos, sin (..., rows, half), by complex numbers."""
    half = cos.shape[-1]
    part = x[..., : 2 * half].double()
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin).to(torch.complex128)[..., None, :]
    )
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, x[..., 2 * half :].double()], -1)


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def tables():
    angle = torch.rand(40, 6) * 6.28
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, [0, 7, 20]])
def test_apply_rotary_emb(interleaved, inplace, offsets, tables):
    x = torch.randn(3, 9, 4, 16)
    first = torch.tensor(offsets).expand(3)
    at = first[:, None] + torch.arange(9)
    wanted = rotate(x, tables[0][at], tables[1][at], interleaved)
    y = x.clone()
    given = offsets if isinstance(offsets, int) else torch.tensor(offsets)
    found = apply_rotary_emb(y, *tables, interleaved, inplace, given)
    close(found, wanted)
    assert (found.data_ptr() == y.data_ptr()) == inplace and torch.equal(y, found if inplace else x)


def test_packed(tables):
    x, cu = torch.randn(10, 4, 16), torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    found = apply_rotary_emb(x, *tables, cu_seqlens=cu, max_seqlen=7)
    at = torch.tensor([0, 1, 2, *range(7)])
    close(found, rotate(x, tables[0][at], tables[1][at], False))
    with pytest.raises(ValueError, match="max_seqlen=None"):
        apply_rotary_emb(x, *tables, cu_seqlens=cu)


def test_qkv_and_kv(tables):
    cos, sin = tables[0][:9], tables[1][:9]
    qkv = torch.randn(2, 9, 3, 4, 16)
    before = qkv.clone()
    assert apply_rotary_emb_qkv_(qkv, *tables, sin, cos) is qkv
    for n, (c, s) in enumerate(((cos, sin), (sin, cos))):
        close(qkv[:, :, n], rotate(before[:, :, n], c, s, False))
    assert torch.equal(qkv[:, :, 2], before[:, :, 2])
    grouped = torch.randn(2, 9, 4 + 2 * 2, 16)
    before = grouped.clone()
    apply_rotary_emb_qkv_(grouped, *tables, num_heads_q=4)
    close(grouped[:, :, :6], rotate(before[:, :, :6], cos, sin, False))
    assert torch.equal(grouped[:, :, 6:], before[:, :, 6:])
    kv = torch.randn(2, 9, 2, 4, 16)
    before = kv.clone()
    apply_rotary_emb_kv_(kv, *tables, interleaved=True)
    close(kv[:, :, 0], rotate(before[:, :, 0], cos, sin, True))
    assert torch.equal(kv[:, :, 1], before[:, :, 1])


@pytest.mark.parametrize("scale_base", [None, 512])
def test_module(scale_base):
    layer = RotaryEmbedding(12, base=100.0, scale_base=scale_base)
    qkv = torch.randn(2, 9, 3, 4, 16)
    angle = torch.outer(torch.arange(9.0), 100.0 ** (-torch.arange(0, 12, 2) / 12))
    factor = torch.ones(1, 6)
    if scale_base:
        factor = ((torch.arange(0, 12, 2) + 0.4 * 12) / (1.4 * 12)) ** ((torch.arange(9) - 9 // 2) / scale_base)[:, None]
    found = layer(qkv.clone())
    close(found[:, :, 0], rotate(qkv[:, :, 0], angle.cos() * factor, angle.sin() * factor, False))
    close(found[:, :, 1], rotate(qkv[:, :, 1], angle.cos() / factor, angle.sin() / factor, False))
    q, kv = layer(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())
    assert torch.equal(q, found[:, :, 0]) and torch.equal(kv, found[:, :, 1:])
    if scale_base is None:
        later = layer(qkv[:, 4:].clone(), seqlen_offset=4)
        offsets = torch.tensor([4, 4], dtype=torch.int32)
        assert torch.equal(later, found[:, 4:])
        assert torch.equal(later, layer(qkv[:, 4:].clone(), seqlen_offset=offsets, max_seqlen=9))
    with pytest.raises(ValueError, match="max_seqlen"):
        layer(qkv.clone(), seqlen_offset=torch.tensor([4, 4]))
    assert layer(qkv.bfloat16()).dtype == torch.bfloat16 and not layer.state_dict()


def test_padding_and_back():
    x = torch.randn(3, 7, 4, 5, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0], [1] * 7])
    packed, indices, cu, longest, used = unpad_input(x, mask)
    assert torch.equal(packed, x[mask.bool()]) and longest == 7 and cu.dtype == used.dtype == torch.int32
    assert cu.tolist() == [0, 2, 6, 13] and used.tolist() == [2, 4, 7]
    assert torch.equal(indices, mask.flatten().nonzero().flatten())
    back = pad_input(packed, indices, 3, 7)
    assert torch.equal(back, x * mask[..., None, None])
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], mask[..., None, None].expand_as(x).float())
    assert torch.equal(index_first_axis(x[:, 0], torch.tensor([2, 2])), x[[2, 2], 0])
    unused = torch.zeros_like(mask)
    unused[0, 2] = 1
    packed, _, cu, longest, used = unpad_input(x, mask, unused)
    assert packed.shape[0] == 14 and cu.tolist() == [0, 3, 7, 14] and used.tolist() == [2, 4, 7]


def test_several_sequences_in_a_row():
    x = torch.randn(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(packed, torch.cat([x[0, :5], x[1, :5], x[2]])) and longest == 6
    assert cu.tolist() == [0, 2, 5, 8, 10, 16] and indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]


def test_padded_batch_through_varlen():
    """The usual way: unpad, attend, pad."""
    q = torch.randn(2, 9, 4, 8)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    packed, indices, cu, longest, _ = unpad_input(q, mask)
    out = pad_input(libattn.flash_attn_varlen_func(*[packed] * 3, cu, cu, longest, longest, causal=True), indices, 2, 9)
    assert torch.equal(out[:1], libattn.flash_attn_func(*[q[:1]] * 3, causal=True))
    assert torch.equal(out[1:, :4], libattn.flash_attn_func(*[q[1:, :4]] * 3, causal=True))
