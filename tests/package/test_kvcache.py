"""flash_attn_with_kvcache and paged varlen attention, against attention in float64 to the keys of each sequence."""

import libattn
import pytest
import torch
from reference import Setting, attend

BATCH, HEADS, HEADS_KV, DIM, CAPACITY = 3, 4, 2, 16, 37
LENGTHS = [0, 11, 30]  # keys in the cache before the call


def ints(values):
    return torch.tensor(list(values), dtype=torch.int32)


def rotate(x, cos, sin, first, interleaved, step=1):
    """x (rows, heads, dim) for the positions first, first + step, ...; in float64."""
    half = cos.shape[1]
    rows = first + step * torch.arange(x.shape[0])
    c, s = cos.double()[rows][:, None], sin.double()[rows][:, None]
    x, y = x.double(), x.double().clone()
    one, two = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    y[..., one], y[..., two] = x[..., one] * c - x[..., two] * s, x[..., one] * s + x[..., two] * c
    return y


def paged(page_size, *caches):
    """The same caches as pages in random order, NaN where they end, and the table that finds the pages."""
    slots, capacity, *rest = caches[0].shape
    pages = -(-capacity // page_size)
    order = torch.randperm(slots * pages)
    stores = []
    for cache in caches:
        padded = torch.full((slots, pages * page_size, *rest), torch.nan)
        padded[:, :capacity] = cache
        stores.append(torch.empty(slots * pages, page_size, *rest))
        stores[-1][order] = padded.reshape(slots * pages, page_size, *rest)
    return *stores, order.reshape(slots, pages).to(torch.int32)


@pytest.mark.parametrize("page_size", [0, 1, 7, 16])
@pytest.mark.parametrize(  # what is not appended is not rotated
    "new, rotary", [(0, None), *((new, rotary) for new in (1, 5) for rotary in (None, "interleaved", "halves"))]
)
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
def test_kvcache(new, page_size, rotary, mask):
    slots = [4, 0, 2]  # of five in the cache
    leftpad = [0, 3, 7]
    q = torch.randn(BATCH, max(new, 2), HEADS, DIM)
    k_cache, v_cache = torch.randn(2, 5, CAPACITY, HEADS_KV, DIM).unbind()
    k_new, v_new = torch.randn(2, BATCH, new, HEADS_KV, DIM).unbind()
    cos, sin = torch.randn(2, 50, 5).unbind()
    options = {"causal": mask == "causal", "window_size": (9, 2) if mask == "local" else (-1, -1), "softcap": 5.0}
    if new:
        options.update(k=k_new, v=v_new)
    if rotary:
        options.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary == "interleaved")
    caches, table = (k_cache.clone(), v_cache.clone()), None
    if page_size:
        *caches, table = paged(page_size, k_cache, v_cache)
        options.update(block_table=table)
    out, lse = libattn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=ints(LENGTHS), cache_batch_idx=ints(slots), cache_leftpad=ints(leftpad),
        return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, (slot, used, pad) in enumerate(zip(slots, LENGTHS, leftpad)):
        keys, values, query = k_cache[slot, :used].double(), v_cache[slot, :used].double(), q[b].double()
        added = k_new[b].double()
        if rotary:
            added = rotate(added, cos, sin, used, rotary == "interleaved")
            query = rotate(query, cos, sin, used, rotary == "interleaved", step=0 if mask == "full" else 1)
        keys, values = torch.cat([keys, added]), torch.cat([values, v_new[b].double()])
        if new:  # what was written
            for x, wanted in zip(caches, (keys, values)):
                for p in range(used, used + new):
                    found = x[table[slot, p // page_size], p % page_size] if page_size else x[slot, p]
                    torch.testing.assert_close(found.double(), wanted[p], rtol=1e-5, atol=1e-6)
        setting = Setting(causal=options["causal"], window=options["window_size"], softcap=5.0)
        wanted, _, rows = attend(query, keys[min(pad, used) :], values[min(pad, used) :], setting)
        torch.testing.assert_close(out[b].double(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), rows, rtol=1e-5, atol=1e-5)
    untouched = [slot for slot in range(5) if slot not in slots]
    if not page_size:
        assert torch.equal(caches[0][untouched], k_cache[untouched])


def test_int_as_length_and_packed_inputs():
    q, k_new, v_new = torch.randn(3, BATCH, 2, HEADS, DIM).unbind()
    first = torch.randn(2, BATCH, CAPACITY, HEADS, DIM)
    second, third = first.clone(), first.clone()
    wanted = libattn.flash_attn_with_kvcache(q, *first, k_new, v_new, cache_seqlens=ints([8] * BATCH), causal=True)
    found = libattn.flash_attn_with_kvcache(q, *second, k_new, v_new, cache_seqlens=8, causal=True)
    cu = ints([0, 2, 4, 6])
    packed = libattn.flash_attn_with_kvcache(
        q.flatten(0, 1), *third, k_new.flatten(0, 1), v_new.flatten(0, 1), cache_seqlens=8, causal=True, cu_seqlens_q=cu,
        cu_seqlens_k_new=cu, max_seqlen_q=2,
    )  # fmt: skip
    assert torch.equal(wanted, found) and torch.equal(wanted, packed.unflatten(0, (BATCH, 2)))
    assert all(map(torch.equal, (*first, *first), (*second, *third)))


def test_rotary_positions_of_their_own():
    q, k, v = torch.randn(3, 1, 1, HEADS, DIM).unbind()
    cos, sin = torch.randn(2, 50, 4).unbind()
    one, two = (torch.zeros(2, 1, CAPACITY, HEADS, DIM) for _ in range(2))
    libattn.flash_attn_with_kvcache(q, *one, k, v, cos, sin, cache_seqlens=3, rotary_seqlens=ints([20]))
    libattn.flash_attn_with_kvcache(q, *two, k, v, cos, sin, cache_seqlens=20)
    assert torch.equal(one[0, 0, 3], two[0, 0, 20])


def test_cache_in_eight_bits():
    q, k, v = torch.randn(3, 1, 3, HEADS, DIM, dtype=torch.bfloat16).unbind()
    scale = torch.tensor(1 / 64)
    caches = torch.zeros(2, 1, 9, HEADS, DIM, dtype=torch.int8).unbind()
    out = libattn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2, k_descale=scale, v_descale=scale)
    assert torch.equal(caches[0][0, 2:5], (k[0].float() * 64).round().clamp(-128, 127).to(torch.int8))
    exact = [(x / 64).bfloat16()[:, :5] for x in caches]
    torch.testing.assert_close(out, libattn.flash_attn_func(q, *exact), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_factors_of_pages(dtype):
    q, k, v = (torch.randn(2, 3, heads, DIM, dtype=torch.bfloat16) for heads in (HEADS, HEADS_KV, HEADS_KV))
    caches = [torch.randn(8, 4, HEADS_KV, DIM).mul(8).round().to(dtype) for _ in range(2)]
    table, lengths = ints([5, 2, 7, 0, 6, 3]).reshape(2, 3), [9, 2]
    factors = [torch.rand(8, HEADS_KV) / 8 + 0.01 for _ in range(2)]
    for x in factors:
        x[[1, 4]] = torch.nan  # in nobody's table
    options = {"block_table": table, "cache_seqlens": ints(lengths), "q_descale": torch.tensor([[0.5, 1], [2, 1]])}
    out = libattn.flash_attn_with_kvcache(
        q, *caches, k, v, k_descale=factors[0], v_descale=factors[1], descale_pages=True, **options
    )
    for b, used in enumerate(lengths):
        pages = table[b].long()
        wide = [(x[pages].float() * y[pages][:, None, :, None]).flatten(0, 1) for x, y in zip(caches, factors)]
        for x, new, y in zip(wide, (k, v), factors):
            step = y[pages][:, None].expand(-1, 4, -1).flatten(0, 1)[used : used + 3, :, None]
            error = (x[used : used + 3] - new[b].float()).abs()
            inside = new[b].float().abs() < 127 * step
            assert inside.any() and (error <= step / 2 + new[b].float().abs() / 15)[inside].all()
        query = q[b].double() * options["q_descale"][b].repeat_interleave(HEADS // HEADS_KV)[None, :, None]
        wanted, _, _ = attend(query, *(x[: used + 3].double() for x in wide), Setting())
        torch.testing.assert_close(out[b].double(), wanted, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="ATTN_DESCALE_PAGES wants"):
        libattn.flash_attn_with_kvcache(q, *caches, descale_pages=True, **{**options, "q_descale": None})
    with pytest.raises(ValueError, match="descale_pages: wants a page_table"):
        libattn.flash_attn_with_kvcache(q, *(x[:2] for x in caches), k_descale=factors[0], descale_pages=True)


def test_varlen_with_pages():
    lengths, rows = [20, 0, 33], [3, 2, 9]
    k, v = torch.randn(2, BATCH, CAPACITY, HEADS_KV, DIM).unbind()
    q = torch.randn(sum(rows), HEADS, DIM)
    k_pages, v_pages, table = paged(8, k, v)
    cu_q, cu_k = ints([0, 3, 5, 14]), ints([0, 20, 20, 53])
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (k, v)]
    wanted = libattn.flash_attn_varlen_func(q, *packed, cu_q, cu_k, 9, 33, causal=True)
    for options in ({"block_table": table}, {"page_table": table, "seqused_k": ints(lengths)}):
        found = libattn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 9, 33, causal=True, **options)
        assert torch.equal(found, wanted)


def test_used_lengths():
    q, k, v = torch.randn(3, BATCH, 9, HEADS, DIM).unbind()
    used_q, used_k = [9, 4, 0], [3, 9, 5]
    out = libattn.flash_attn_varlen_func(q, k, v, None, None, None, None, seqused_q=ints(used_q), seqused_k=ints(used_k))
    for b, (m, n) in enumerate(zip(used_q, used_k)):
        assert torch.equal(out[b, :m], libattn.flash_attn_func(q[b : b + 1, :m], k[b : b + 1, :n], v[b : b + 1, :n])[0])
        assert not out[b, m:].any()


def test_cache_errors():
    q, k, v = torch.randn(3, 2, 1, HEADS, DIM).unbind()
    caches = torch.zeros(2, 2, 9, HEADS, DIM).unbind()
    call = libattn.flash_attn_with_kvcache
    with pytest.raises(ValueError, match="both or neither"):
        call(q, *caches, k, cache_seqlens=0)
    with pytest.raises(ValueError, match="cache_seqlens=None"):
        call(q, *caches, k, v)
    with pytest.raises(ValueError, match=r"used_kv\[0\]=9"):
        call(q, *caches, k, v, cache_seqlens=9)
    with pytest.raises(ValueError, match="rotary_cos"):
        call(q, *caches, rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4), cache_seqlens=3)
    with pytest.raises(TypeError, match="dtype of q"):
        call(q, *caches, k.half(), v.half(), cache_seqlens=3)
    with pytest.raises(ValueError, match="last dim must be contiguous"):
        call(q, *(x.mT.contiguous().mT for x in caches), k, v, cache_seqlens=3)
    assert not any(x.any() for x in caches)


GROUP = 16


def with_shared_prefix(q, prefix, own, used):
    """A step of decoding by sequences that begin with the same keys.

    q (batch, heads, dim); keys and values of the prefix (2, keys, heads_kv, dim), of their own (2, batch, capacity,
    heads_kv, dim). Groups of 16 rows attend to the prefix, each sequence to its own, and that is merged.
    """
    batch = len(q)
    rows = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -batch % GROUP)).unflatten(0, (-1, GROUP))
    slots = torch.zeros(len(rows), dtype=torch.int32, device=q.device)
    keys, values = (x[None] for x in prefix)
    o, lse = libattn.flash_attn_with_kvcache(rows, keys, values, cache_batch_idx=slots, return_softmax_lse=True)
    o, lse = o.flatten(0, 1)[:batch], lse.transpose(1, 2).flatten(0, 1)[:batch]
    o_own, lse_own = libattn.flash_attn_with_kvcache(q[:, None], *own, cache_seqlens=used, return_softmax_lse=True)
    return libattn.flash_attn_combine(
        torch.stack([o, o_own[:, 0]]).float()[:, None], torch.stack([lse, lse_own[..., 0]])[:, None], out_dtype=q.dtype
    )[0][0]


@pytest.mark.parametrize("batch", [1, 3, 16, 21])
def test_shared_prefix(batch):
    prefix, own = torch.randn(2, 70, HEADS_KV, DIM), torch.randn(2, batch, CAPACITY, HEADS_KV, DIM)
    q, used = torch.randn(batch, HEADS, DIM), ints(11 * n % CAPACITY for n in range(batch))
    found = with_shared_prefix(q, prefix, own, used)
    both = torch.cat([prefix[:, None].expand(2, batch, -1, -1, -1), own], 2)
    wanted = libattn.flash_attn_with_kvcache(q[:, None], *both, cache_seqlens=70 + used)[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    last = slice(batch - 1, None)
    assert torch.equal(found[last], with_shared_prefix(q[last], prefix, own[:, last], used[last]))
