"""flashmask_attention by PaddlePaddle's words, scaled_dot_product_attention and flash_attn_combine by torch's."""

import libattn
import pytest
import torch
from reference import Setting, attend

B, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 33, 41, 4, 2, 16


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def qkv(rows=ROWS, keys=KEYS, grad=True):
    return [torch.randn(B, n, h, DIM, requires_grad=grad) for n, h in ((rows, HEADS), (keys, HEADS_KV), (keys, HEADS_KV))]


def masked_rows(indices, causal, rows):
    """(heads, keys, n) to (heads, rows, keys), straight from the definition."""
    i = torch.arange(rows)[None, :, None]
    v = [indices[..., n][:, None, :] for n in range(indices.shape[-1])]
    if len(v) == 1:
        return i >= v[0]
    if len(v) == 4:
        return ((i >= v[0]) & (i < v[1])) | ((i >= v[2]) & (i < v[3]))
    return (i >= v[0]) & (i < v[1]) if causal else (i >= v[0]) | (i < v[1])


@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
@pytest.mark.parametrize("mask_heads", [1, HEADS_KV])
def test_flashmask(causal, vectors, mask_heads):
    q, k, v = qkv()
    indices = torch.randint(0, ROWS + 1, (B, mask_heads, KEYS, vectors), dtype=torch.int32)
    out, lse = libattn.flashmask_attention(q, k, v, indices, causal=causal, return_softmax_lse=True)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    loss = 0
    for b in range(B):
        masked = masked_rows(indices[b], causal, ROWS).repeat_interleave(HEADS // mask_heads, 0)
        wanted, _, rows = attend(q[b], k[b], v[b], Setting(causal=causal, masked=masked))
        close(out[b], wanted)
        close(lse[b], rows)
        loss = loss + wanted.square().sum()
    for a, b in zip(found, torch.autograd.grad(loss, (q, k, v))):
        close(a, b)


def test_flashmask_windows_and_dropout():
    q, k, v = qkv(keys=ROWS, grad=False)
    for causal, window in ((True, 5), (False, 5), (False, (3, 1))):
        pair = (window, window) if isinstance(window, int) else window
        wanted = libattn.flash_attn_func(q, k, v, causal=causal, window_size=pair)
        assert torch.equal(libattn.flashmask_attention(q, k, v, causal=causal, window_size=window), wanted)
    out, seed = libattn.flashmask_attention(q, k, v, dropout=0.4, return_seed_offset=True)
    assert torch.equal(out, libattn.flashmask_attention(q, k, v, dropout=0.4, fixed_seed_offset=seed))
    plain = libattn.flashmask_attention(q, k, v)
    assert not torch.equal(out, plain)
    assert torch.equal(plain, libattn.flashmask_attention(q, k, v, dropout=0.4, training=False))
    rows = torch.zeros(B, 1, ROWS, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="flashmask_vectors=1"):
        libattn.flashmask_attention(q, k, v, rows)
    with pytest.raises(ValueError, match=r"startend_row_indices.shape=\(2, 3, 33, 1\)"):
        libattn.flashmask_attention(q, k, v, rows.expand(B, 3, ROWS, 1), causal=True)
    with pytest.raises(ValueError, match="window_size"):
        libattn.flashmask_attention(q, k, v, rows, causal=True, window_size=3)
    with pytest.raises(NotImplementedError, match="block_mask"):
        libattn.flashmask_attention(q, k, v, rows, causal=True, block_mask=rows)


SDPA = torch.nn.functional.scaled_dot_product_attention
FULL = torch.rand(B, HEADS, ROWS, KEYS) < 0.7
MASKS = {
    "none": {},
    "scale": {"scale": -0.2},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": FULL},
    "bool rows": {"attn_mask": FULL[:, :1]},
    "bool square": {"attn_mask": FULL[0, 0]},
    "float": {"attn_mask": torch.randn(B, HEADS, ROWS, KEYS)},
    "float heads": {"attn_mask": torch.randn(HEADS, 1, KEYS)},
    "float keys": {"attn_mask": torch.randn(KEYS)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads_kv", [HEADS, HEADS_KV])
def test_scaled_dot_product_attention(name, heads_kv):
    options = dict(MASKS[name], enable_gqa=heads_kv != HEADS)
    mask = options.get("attn_mask")
    inputs = [torch.randn(B, h, n, DIM, requires_grad=True) for h, n in ((HEADS, ROWS), (heads_kv, KEYS), (heads_kv, KEYS))]
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask = mask.clone().requires_grad_()
        inputs.append(mask)
    found, wanted = libattn.scaled_dot_product_attention(*inputs[:3], **options), SDPA(*inputs[:3], **options)
    close(found, wanted)
    weight = torch.randn_like(wanted)
    for a, b in zip(torch.autograd.grad(found, inputs, weight), torch.autograd.grad(wanted, inputs, weight)):
        close(a, b)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("rows, keys", [(5, 9), (9, 5)])
def test_any_number_of_batch_dims(lead, rows, keys):
    q, k, v = torch.randn(*lead, rows, 8), torch.randn(*lead, keys, 8), torch.randn(*lead, keys, 6)
    close(libattn.scaled_dot_product_attention(q, k, v, is_causal=True), SDPA(q, k, v, is_causal=True))
    mask = torch.randn(*lead[-1:], rows, keys)
    close(libattn.scaled_dot_product_attention(q, k, v, mask), SDPA(q, k, v, mask))


def test_sdpa_errors_and_dropout():
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="enable_gqa"):
        libattn.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="is_causal"):
        libattn.scaled_dot_product_attention(q, q, q, torch.ones(5, 5), is_causal=True)
    torch.manual_seed(3)
    one = libattn.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(one, libattn.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert not torch.equal(one, libattn.scaled_dot_product_attention(q, q, q))


def test_a_row_that_sees_nothing_is_zero():
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    out = libattn.scaled_dot_product_attention(q, q, q, mask)
    out.square().sum().backward()
    assert not out[:, :, 1].any() and q.grad.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed):
    """Attention to all keys is what attention to their parts comes to."""
    q, k, v = qkv(grad=False)
    cuts = [0, 7, 7, 30, KEYS]
    parts = [libattn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True) for a, b in zip(cuts, cuts[1:])]
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]).transpose(-1, -2)
    wanted, lse, _ = libattn.flash_attn_func(q, k, v, return_attn_probs=True)
    if packed:
        outs, lses, wanted, lse = outs[:, 0], lses[:, 0], wanted[0], lse[0]
    found, rows = libattn.flash_attn_combine(outs, lses)
    close(found, wanted)
    close(rows, lse.transpose(-1, -2))
    into = torch.empty_like(wanted, dtype=torch.bfloat16)
    again, _ = libattn.flash_attn_combine(outs, lses, out=into)
    assert again is into and torch.equal(into, libattn.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0])


def test_bias_and_sinks_have_gradients():
    q, k, v = qkv()
    bias, sink = torch.randn(1, HEADS, ROWS, KEYS, requires_grad=True), torch.randn(HEADS, requires_grad=True)
    out = libattn.flash_attn_func(q, k, v, causal=True, attn_bias=bias, learnable_sink=sink)
    found = torch.autograd.grad(out.square().sum(), (q, k, v, bias, sink))
    loss = 0
    for b in range(B):
        wanted, _, _ = attend(q[b], k[b], v[b], Setting(causal=True, bias=bias[0], sink=sink))
        close(out[b], wanted)
        loss = loss + wanted.square().sum()
    for a, b in zip(found, torch.autograd.grad(loss, (q, k, v, bias, sink))):
        close(a, b)


def test_probabilities():
    q, k, v = qkv(grad=False)
    out, lse, probs = libattn.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
    for b in range(B):
        wanted, p, rows = attend(q[b], k[b], v[b], Setting(kept=~torch.signbit(probs[b]) / 0.7))
        close(probs[b].abs(), p)
        close(lse[b], rows)
        close(out[b], wanted)
