"""Small random models of transformers give the same with attn_implementation="libattn" as with "eager"."""

import copy

import libattn.transformers
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

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


@pytest.mark.parametrize("beams", [1, 3])
def test_growing_cache(models, batch, beams):
    """The tokens of transformers' own cache, with another's attention too, past the end of the first room."""
    options = {"max_new_tokens": 24, "do_sample": False, "num_beams": beams}
    for model in models:
        wanted = model.eval().generate(**batch, **options)
        cache = libattn.transformers.GrowingCache(config=model.config)
        assert torch.equal(model.generate(**batch, **options, past_key_values=cache), wanted)
        kinds = {type(layer).__name__ for layer in cache.layers}
        assert kinds <= {"GrowingLayer", "DynamicSlidingWindowLayer"}


@torch.no_grad()
def test_growing_layer():
    """Against DynamicLayer, step by step: what is copied, and what other operations leave behind."""
    grown, plain = libattn.transformers.GrowingLayer(), DynamicLayer()

    def both(act):
        return [act(layer) for layer in (grown, plain)]

    def append(rows, batch=2):
        k, v = torch.randn(batch, 3, rows, 8), torch.randn(batch, 3, rows, 4)
        for mine, wanted in zip(*both(lambda layer: layer.update(k, v))):
            assert torch.equal(mine, wanted)
        assert grown.get_seq_length() == plain.get_seq_length() == grown.keys.shape[2]

    append(5)
    rooms = grown.rooms[:]
    for _ in range(250):
        append(1)
    assert all(mine is room for mine, room in zip(grown.rooms, rooms)) and grown.keys.data_ptr() == rooms[0].data_ptr()
    before = grown.keys.clone(), grown.keys
    append(20)
    assert grown.rooms[0] is not rooms[0] and torch.equal(*before)  # moved on; who holds the old keys, keeps them
    held = grown.keys
    before = held.clone()
    both(lambda layer: layer.crop(-7))
    append(3)
    assert torch.equal(held, before)
    both(lambda layer: layer.reorder_cache(torch.tensor([1, 1])))
    append(1)
    both(lambda layer: layer.batch_repeat_interleave(2))
    append(2, batch=4)
    both(lambda layer: layer.batch_select_indices(torch.tensor([0, 3])))
    append(2)
    both(lambda layer: layer.reset())
    append(4)
    copied = copy.deepcopy(grown)
    append(1)
    copied.update(torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 4))
    assert grown.keys[:, :, -1].any() and not copied.keys[:, :, -1].any()
    with pytest.raises(RuntimeError):  # not stretched to the batch that is there
        grown.update(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 4))
    weight = torch.ones(8, requires_grad=True)
    with torch.enable_grad():
        keys, _ = grown.update(torch.randn(2, 3, 1, 8) * weight, torch.randn(2, 3, 1, 4))
        keys.sum().backward()
    assert weight.grad.any()
    append_to = libattn.transformers.GrowingLayer()
    with torch.inference_mode():
        append_to.update(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 4))
    keys, _ = append_to.update(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 4))  # in a room of its own
    assert keys.sum() == 16


def test_growing_cache_begins_with_data_and_with_gradients():
    data = [(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))]
    assert libattn.transformers.GrowingCache(data).get_seq_length() == 5
    layer = libattn.transformers.GrowingLayer()
    query = torch.ones(8, requires_grad=True)
    keys, _ = layer.update(*data[0])
    score = (keys * query).sum()  # remembers keys
    layer.update(*data[0])
    score.backward()
    with torch.no_grad():
        assert torch.equal(layer.update(*data[0])[0], torch.cat([data[0][0]] * 3, 2))


def test_mask_of_models_that_combine_it():
    """They say that a square is wanted, and add their own to it."""
    for padding in (None, torch.ones(2, 6, dtype=torch.bool), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]).bool()):
        mask = libattn.transformers.attention_mask(2, 6, 6, attention_mask=padding, allow_is_causal_skip=False)
        assert mask.shape[-2:] == (6, 6) and mask.dtype == torch.bool and not mask[0, 0, 0, 1:].any()


def test_traced_mask_is_not_that_of_one_batch():
    def seen(padding):
        mask = libattn.transformers.attention_mask(2, 6, 6, attention_mask=padding)
        return torch.ones(1) if mask is None else mask

    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    traced = torch.jit.trace(seen, torch.ones(2, 6, dtype=torch.long), check_trace=False)
    assert traced(padded).shape == (2, 1, 6, 1) and not traced(padded)[0, 0, 0, 0]


@pytest.mark.parametrize("padded", [True, False])
def test_compiled_decoding(batch, padded):
    """What transformers compiles on a GPU: a step of decoding into a static cache, in one graph, its mask made outside."""
    tokens, steps = [], []
    for implementation in ("eager", "libattn"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation=implementation).eval()
        mask = batch["attention_mask"] if padded else torch.ones_like(batch["input_ids"])
        options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
        if implementation == "libattn":
            compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
            step = lambda *args, compiled=compiled, **rest: steps.append(1) or compiled(*args, **rest)  # noqa: E731
            model.get_compiled_call = lambda config, step=step: step
            model._valid_auto_compile_criteria = lambda *args: True
        else:
            options["disable_compile"] = True
        tokens.append(model.generate(input_ids=batch["input_ids"], attention_mask=mask, **options))
    assert torch.equal(*tokens) and len(steps) == 11


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


@pytest.fixture
def seen(monkeypatch):
    """The options of each call of attention; a square mask fails."""
    seen = []
    monkeypatch.setattr(libattn.transformers, "sdpa_mask", lambda *args, **kwargs: pytest.fail("a square mask"))
    forward = libattn.transformers._quick.forward
    monkeypatch.setattr(
        libattn.transformers._quick, "forward", lambda q, k, v, o, **rest: seen.append(o) or forward(q, k, v, o, **rest)
    )
    return seen


def kind(options):
    assert options.bias is None and options.causal
    if options.flashmask is not None:
        return "rows"
    return "causal" if options.used_kv is None else "ends"


def test_masks_are_one_number_per_key(models, batch, seen):
    """No square is made for a padded batch: ends where the padding is on the left and no window, otherwise rows."""
    windows = {"llama": 0, "mistral": 2}.get(models[1].config.model_type, 1)  # layers that have one
    with torch.no_grad():
        models[1].eval()(**batch)
        assert sorted(map(kind, seen)) == ["ends"] * (2 - windows) + ["rows"] * windows
        seen.clear()
        models[1](input_ids=batch["input_ids"].flip(1), attention_mask=batch["attention_mask"].flip(1))
        assert list(map(kind, seen)) == ["rows"] * 2
        seen.clear()
        models[1](input_ids=batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]))
        assert sorted(map(kind, seen)) == ["causal"] * (2 - windows) + ["rows"] * windows


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_takes_the_kernels_for_decoding(batch, cache, padded, seen):
    """Which take used lengths and padding on the left, but neither FlashMask nor a bias; nothing is copied."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="libattn").eval()
    mask = batch["attention_mask"] if padded else torch.ones_like(batch["input_ids"])
    options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True, "cache_implementation": cache}
    model.generate(input_ids=batch["input_ids"], attention_mask=mask, **options)
    assert len(seen) == 10 and set(map(kind, seen)) == {"ends" if padded or cache == "static" else "causal"}
    tables = [table for options in seen for table in (options.used_kv, options.leftpad) if table is not None]
    assert all(table.is_contiguous() and table.dtype == torch.int32 for table in tables)


def test_mask_that_stops_early_or_goes_on():
    """A static cache of 9, of which 6 count; eager's mask says what is to be seen."""
    from transformers.masking_utils import sdpa_mask

    left, holes, short, long = [0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1], [1] * 5, [1] * 6 + [0] * 3
    for columns in ([1] * 6, left, left + [1] * 3, holes, short, long):
        for q_offset in (5, torch.tensor(5)):
            given = torch.tensor([columns], dtype=torch.bool)
            made = libattn.transformers.attention_mask(1, 1, 9, q_offset, attention_mask=given)
            wanted = sdpa_mask(1, 1, 9, q_offset, attention_mask=given, allow_is_causal_skip=False)
            if made.dtype == torch.int32:
                begin, end = made.flatten().tolist()
                made = (torch.arange(9) >= begin) & (torch.arange(9) < end)
            assert torch.equal(made.flatten(), wanted.flatten()), columns


def test_masks_of_ends_are_looked_at_anew(monkeypatch):
    """Layers share what was made of their mask: not what is in it, not with another mask, and not with other numbers."""
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    module = torch.nn.Module()

    def same(mask, **numbers):
        found = [libattn.transformers.attention_forward(module, q, k, v, mask, **numbers)[0] for _ in range(2)]
        with monkeypatch.context() as without:
            without.setattr(libattn.transformers._quick, "forward", lambda *_, **__: None)
            wanted = libattn.transformers.attention_forward(module, q, k, v, mask, **numbers)[0]
        return all(torch.equal(x, wanted) for x in found)

    for _ in range(3):  # a new one may lie where the last one was
        mask = libattn.transformers._ends(torch.tensor([0, 3]), torch.randint(10, 30, (2,)), 2, "cpu")
        other = libattn.transformers._ends(1, 4, 2, "cpu")
        assert same(mask) and same(other) and same(mask)
        before = libattn.transformers.attention_forward(module, q, k, v, mask)[0]
        mask[0, 1] = 5
        assert same(mask) and not torch.equal(libattn.transformers.attention_forward(module, q, k, v, mask)[0], before)
        for numbers in ({"scaling": 0.5}, {"scaling": 0.7}, {"softcap": 2.0}, {"sliding_window": 4}, {"is_causal": False}):
            assert same(mask, **numbers) and same(None, **numbers) and same(other, **numbers)
        del mask, other


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
