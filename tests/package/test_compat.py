"""libattn.compat: programs that import flash_attn get libattn, with the very signatures of flash_attn 2.8.

Those that import flash_attn_interface get it with the signatures of FlashAttention-3.
"""

import inspect

import libattn
import libattn.compat
import pytest
import torch

COMMON = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False"
)
SIGNATURES = {  # what may be given by place: names and defaults, as in flash_attn 2.8
    "flash_attn_func": f"q k v {COMMON} return_attn_probs=False",
    "flash_attn_kvpacked_func": f"q kv {COMMON} return_attn_probs=False",
    "flash_attn_qkvpacked_func": f"qkv {COMMON} return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"{COMMON} return_attn_probs=False block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"{COMMON} return_attn_probs=False",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {COMMON} return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "bert_padding.unpad_input": "hidden_states attention_mask unused_mask=None",
    "bert_padding.pad_input": "hidden_states indices batch seqlen",
    "bert_padding.index_first_axis": "input indices",
    "layers.rotary.apply_rotary_emb": "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None "
    "max_seqlen=None",
    "layers.rotary.apply_rotary_emb_qkv_": "qkv cos sin cos_k=None sin_k=None interleaved=False seqlen_offsets=0 "
    "num_heads_q=None",
    "layers.rotary.apply_rotary_emb_kv_": "kv cos sin interleaved=False seqlen_offsets=0",
    "layers.rotary.RotaryEmbedding": "dim base=10000.0 interleaved=False scale_base=None device=None",
}
DESCALES = "q_descale=None k_descale=None v_descale=None"
LATER = f"qv=None {DESCALES} window_size=(-1, -1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None"
SIGNATURES |= {  # as in FlashAttention-3
    "interface3.flash_attn_func": f"q k v softmax_scale=None causal=False {LATER} deterministic=False sm_margin=0 "
    "return_attn_probs=False",
    "interface3.flash_attn_qkvpacked_func": f"qkv softmax_scale=None causal=False {DESCALES} window_size=(-1, -1) "
    "attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    "interface3.flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None "
    f"seqused_k=None softmax_scale=None causal=False {LATER} deterministic=False sm_margin=0 return_attn_probs=False",
    "interface3.flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
    f"max_seqlen_q=None rotary_seqlens=None {DESCALES} softmax_scale=None causal=False window_size=(-1, -1) "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
    "interface3.flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    import libattn.bert_padding
    import libattn.interface3
    import libattn.layers.rotary

    thing = libattn
    for part in name.split("."):
        thing = getattr(thing, part)
    words = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            words.append(parameter.name + default)
    assert " ".join(words) == SIGNATURES[name]


@pytest.fixture
def installed():
    libattn.compat.install()
    yield
    libattn.compat.uninstall()


def test_flash_attn_is_libattn(installed):
    import flash_attn
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    assert flash_attn.__version__ == "2.8.3"
    assert flash_attn_func is libattn.flash_attn_func
    assert flash_attn_varlen_func is libattn.flash_attn_varlen_func
    assert all(map(callable, (pad_input, unpad_input, RotaryEmbedding, apply_rotary_emb)))
    q = torch.randn(1, 5, 2, 8)
    assert torch.equal(flash_attn_func(q, q, q, causal=True), libattn.flash_attn_func(q, q, q, causal=True))


def test_flash_attn_interface_is_flash_attention_3(installed):
    import flash_attn_interface as fa3

    q, k, v = torch.randn(3, 2, 20, 2, 16, dtype=torch.float64).unbind()
    wanted, lse, _ = libattn.flash_attn_func(q, k, v, softmax_scale=0.1, causal=True, return_attn_probs=True)
    out, found_lse = fa3.flash_attn_func(q, k, v, 0.1, True, return_attn_probs=True)  # by place
    assert torch.equal(out, wanted) and torch.equal(found_lse, lse)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), 0.1, True), wanted)
    cu, used = torch.tensor([0, 20, 40], dtype=torch.int32), torch.tensor([20, 20], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out = fa3.flash_attn_varlen_func(*packed, cu, cu, 20, 20, used, used, 0.1, True)
    assert torch.equal(out, wanted.flatten(0, 1))
    metadata = fa3.get_scheduler_metadata(2, 20, 20, 2, 2, 16, used)
    options = {"cache_seqlens": used, "softmax_scale": 0.1, "causal": True, "scheduler_metadata": metadata}
    out, found_lse = fa3.flash_attn_with_kvcache(q, k, v, **options, return_softmax_lse=True)
    assert torch.equal(out, wanted) and torch.equal(found_lse, lse)
    parts = [fa3.flash_attn_func(q, k[:, j : j + 10], v[:, j : j + 10], 0.1, return_attn_probs=True) for j in (0, 10)]
    out, _ = fa3.flash_attn_combine(*(torch.stack(x) for x in ([p[0] for p in parts], [p[1].mT for p in parts])))
    torch.testing.assert_close(out, fa3.flash_attn_func(q, k, v, 0.1))
    with pytest.raises(TypeError, match="dropout"):
        fa3.flash_attn_func(q, k, v, dropout=0.1)
    with pytest.raises(NotImplementedError, match="qv"):
        fa3.flash_attn_func(q, k, v, None, False, q)


def test_other_names_are_left_alone(installed):
    with pytest.raises(ModuleNotFoundError):
        import flash_attn.losses  # noqa: F401


def test_uninstalled_again():
    with pytest.raises(ModuleNotFoundError):
        import flash_attn  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import flash_attn_interface  # noqa: F401


def test_a_real_flash_attn_is_not_replaced(monkeypatch):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    with pytest.raises(RuntimeError, match="already imported"):
        libattn.compat.install()
