"""Small random models of transformers give the same with attn_implementation="libattn" as with "eager"."""

import copy

import libattn.transformers
import pytest
import torch
import transformers

libattn.transformers.register()
transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,  # larger than usual, so that attention matters
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=8),
    "gemma2": transformers.Gemma2Config(
        **SIZES,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        tie_word_embeddings=False,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def models(request):
    """The same weights with eager attention and with ours."""
    torch.manual_seed(0)
    made = []
    for implementation in ("eager", "libattn"):
        config = copy.deepcopy(CONFIGS[request.param])
        made.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation))
        assert made[-1].config._attn_implementation == implementation
    for name, weight in made[0].named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.fixture
def batch():
    """Three sequences of 20, 15 and 9 tokens, padded on the left."""
    ids = torch.randint(2, 97, (3, 20))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :11] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_logits(models, batch):
    with torch.no_grad():
        eager, ours = (model.eval()(**batch).logits for model in models)
    seen = batch["attention_mask"].bool()
    assert eager[seen].std() > 0.1
    torch.testing.assert_close(ours[seen], eager[seen], rtol=0, atol=1e-4)


def test_logits_without_padding_and_padded_right(models, batch):
    ids = batch["input_ids"][:1]
    right = batch["attention_mask"].flip(1)
    for inputs in ({"input_ids": ids}, {"input_ids": batch["input_ids"].flip(1), "attention_mask": right}):
        with torch.no_grad():
            eager, ours = (model.eval()(**inputs).logits for model in models)
        seen = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(ours[seen], eager[seen], rtol=0, atol=1e-4)


def test_packed_sequences(models, batch):
    """Several sequences in one row, told apart by their positions: a pattern that takes the square mask."""
    ids, positions = batch["input_ids"][:1], torch.tensor([[*range(12), *range(8)]])
    with torch.no_grad():
        eager, ours = (model.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits for model in models)
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(models, batch, cache):
    """64 tokens from a left-padded batch, with a cache."""
    options = {"max_new_tokens": 64, "do_sample": False, "disable_compile": True, "cache_implementation": cache}
    eager, ours = (model.eval().generate(**batch, **options) for model in models)
    assert ours.shape == (3, 84) and torch.equal(ours, eager)
    assert len(set(ours[:, 20:].flatten().tolist())) > 4  # the models have more than one thing to say


def test_training_step(models, batch):
    """Gradients of the loss by every parameter, sinks included."""
    seen = batch["attention_mask"].bool()
    labels = batch["input_ids"].masked_fill(~(seen & seen.roll(1, 1)), -100)  # padding predicts nothing
    grads = []
    for model in models:
        model.train().zero_grad()
        model(**batch, labels=labels).loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, wanted in grads[0].items():
        assert (wanted is None) == (grads[1][name] is None), name
        if wanted is not None:
            torch.testing.assert_close(grads[1][name], wanted, rtol=1e-3, atol=1e-5 + 1e-4 * wanted.abs().max().item())


def test_masks_are_one_number_per_key(models, batch, monkeypatch):
    """No square is made for a padded batch."""
    seen = []
    monkeypatch.setattr(libattn.transformers, "sdpa_mask", lambda *args, **kwargs: pytest.fail("a square mask"))
    forward = libattn.transformers._torch.attention
    monkeypatch.setattr(
        libattn.transformers._torch, "attention", lambda q, k, v, options: seen.append(options) or forward(q, k, v, options)
    )
    with torch.no_grad():
        models[1].eval()(**batch)
    assert len(seen) == 2 and all(options.flashmask.shape == (3, 1, 20, 1) and options.bias is None for options in seen)


def test_dropout_in_training():
    config = copy.deepcopy(CONFIGS["llama"])
    config.attention_dropout = 0.5
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="libattn").train()
    ids = torch.randint(2, 97, (1, 20))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model(input_ids=ids).logits)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_encoder_and_decoder_with_position_bias():
    """T5: bidirectional, causal and cross attention, and a learned bias with a gradient."""
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
    )
    ids, labels, mask = torch.randint(2, 97, (2, 11)), torch.randint(2, 97, (2, 7)), torch.ones(2, 11, dtype=torch.long)
    mask[0, 6:] = 0
    results, state = [], None
    for implementation in ("eager", "libattn"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config), attn_implementation=implementation)
        state = state or model.state_dict()
        model.load_state_dict(state)
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        bias = {n: w.grad for n, w in model.named_parameters() if "relative_attention_bias" in n}
        results.append((out.logits, *bias.values()))
    assert len(results[0]) == 3
    for eager, ours in zip(*results):
        assert eager.any()
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
