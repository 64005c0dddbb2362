#!/usr/bin/env python3
"""Generation by a Llama of Hugging Face transformers with random weights: libattn beside sdpa and eager.

    python bench/generate_hf.py                       tokens in float32, then time per token in bf16 at 8k of context
    python bench/generate_hf.py --model 8b            a larger model (1b without it); --context, --new say the lengths
    python bench/generate_hf.py --cases static        only cases whose names have one of the words
    python bench/generate_hf.py --device cpu --quick  does it work at all? In float32

First a small model generates in float32 with eager attention and with libattn, from prompts with and without padding on the
left, into a cache that grows and into a static one: the tokens must be the same, and how far apart the two largest logits
of eager were at least is printed. Exit status 1 means that they are not.

Then model.generate is timed as it is: from one token's arrival to the next one's, the first one apart (which is the
prefill's). The implementations take turns, with the same weights; of all tokens of an implementation the median counts.
With --compile there are static caches with transformers' compiled decode, too. How many calls of attention went
which way is counted.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
import time

import torch
import transformers
from measure import Report, add_common_arguments, finish_arguments, libattn, turns

importlib.import_module("libattn.transformers")  # of the libattn that measure has found

SIZES = {  # width, width of the MLP, layers, heads, KV heads, vocabulary
    "tiny": (64, 96, 2, 4, 2, 97),
    "1b": (2048, 8192, 16, 32, 8, 32000),
    "8b": (4096, 14336, 32, 32, 8, 32000),
}
# name: batch, cache, left padding. growing: libattn's GrowingCache, for sdpa too
CASES = {
    "dynamic b1": (1, "dynamic", False),
    "dynamic b8": (8, "dynamic", False),
    "growing b1": (1, "growing", False),
    "growing b8": (8, "growing", False),
    "static b1": (1, "static", False),
    "static b8 padded": (8, "static", True),
    "dynamic b8 padded": (8, "dynamic", True),
}


def config_of(size, positions, **rest):
    width, mlp, layers, heads, heads_kv, vocab = SIZES[size]
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        vocab_size=vocab,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **rest,
    )


def make(config, dtype, device, implementation):
    torch.manual_seed(1)
    config = copy.deepcopy(config)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype).eval()


def prompts(batch, length, vocab, padded, device):
    """Of the same length; padded: the n-th has lost n of 2 batch parts of it, on the left."""
    ids = torch.randint(2, vocab, (batch, length), device=device)
    mask = torch.ones_like(ids)
    for n in range(batch if padded else 0):
        mask[n, : length * n // (2 * batch)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


# ---- the same tokens ----


def tokens_of(model, inputs, cache, count):
    made = model.generate(
        **inputs,
        max_new_tokens=count,
        do_sample=False,
        disable_compile=True,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    largest = torch.stack(made.logits).float().topk(2, dim=-1).values
    return made.sequences[:, inputs["input_ids"].shape[1] :], (largest[..., 0] - largest[..., 1]).min().item()


def check(arguments, report):
    """Whether eager and libattn give the same tokens in float32."""
    length, count = (24, 8) if arguments.quick else (300, 64)
    size, spread = ("tiny", 0.3) if arguments.quick else ("1b", 0.05)
    config = config_of(size, length + count, initializer_range=spread)
    config.num_hidden_layers = min(config.num_hidden_layers, 4)
    eager, ours = (make(config, torch.float32, arguments.device, name) for name in ("eager", "libattn"))
    ours.load_state_dict(eager.state_dict())
    right = True
    for cache in ("dynamic", "static"):
        for padded in (False, True):
            inputs = prompts(4, length, config.vocab_size, padded, arguments.device)
            (wanted, margin), (found, _) = (tokens_of(model, inputs, cache, count) for model in (eager, ours))
            same = torch.equal(wanted, found)
            right = right and same
            title = f"float32, {cache} cache{', padded' if padded else ''}: 4 x {count} tokens"
            verdict = "the same as" if same else "DIFFER from"
            print(f"{title} {verdict} eager's; the two largest logits at least {margin:.2g} apart", flush=True)
            report.write({"case": "tokens", "cache": cache, "padded": padded, "same": same, "margin": margin})
    return right


# ---- time ----


class Clock:
    """Notes when tokens come, as a streamer of transformers, whose first call brings the prompt; waits for the device."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        tokens.tolist()
        self.times.append(time.perf_counter())

    def end(self):
        pass


class Counter:
    """How calls of libattn's attention went: without torch's dispatcher, or by the operator."""

    def __init__(self):
        self.calls = {"quick": 0, "operator": 0}
        self.forward = libattn.transformers._quick.forward

    def __enter__(self):
        libattn.transformers._quick.forward = self
        return self

    def __exit__(self, *_):
        libattn.transformers._quick.forward = self.forward

    def __call__(self, *arguments, **options):
        o = self.forward(*arguments, **options)
        self.calls["operator" if o is None else "quick"] += 1
        return o


def run(model, name, inputs, cache, compiled, count):
    """Seconds of the prefill, and of each token after it."""
    model.set_attn_implementation(name)
    clock = Clock()
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    if cache == "growing":
        options["past_key_values"] = libattn.transformers.GrowingCache(config=model.config)
    else:
        options["cache_implementation"] = cache
    began = time.perf_counter()
    if inputs["input_ids"].shape[0] == 1:
        model.generate(**inputs, **options, streamer=clock, disable_compile=not compiled)
        return clock.times[1] - clock.times[0], [b - a for a, b in zip(clock.times[1:], clock.times[2:])]
    # Streamers take one sequence alone: the same loop with the clock in what chooses the tokens.
    times = transformers.LogitsProcessorList([lambda ids, scores: clock.put(scores[:, 0]) or scores])
    model.generate(**inputs, **options, logits_processor=times, disable_compile=not compiled)
    return clock.times[0] - began, [b - a for a, b in zip(clock.times, clock.times[1:])]


def bench(model, title, case, compiled, arguments, report):
    batch, cache, padded = case
    inputs = prompts(batch, arguments.context, model.config.vocab_size, padded, arguments.device)
    count = arguments.new
    names = ["libattn", "sdpa"]
    first, rest = ({name: [] for name in names} for _ in range(2))
    with Counter() as counter:
        for name in names:
            run(model, name, inputs, cache, compiled, min(count, 8))
        began, rounds = time.monotonic(), 0
        while rounds < 2 or time.monotonic() - began < arguments.seconds:
            for name in turns(names, rounds):
                prefill, tokens = run(model, name, inputs, cache, compiled, count)
                first[name].append(1e3 * prefill)
                rest[name] += [1e3 * t for t in tokens]
            rounds += 1
    prefill, token = ({name: statistics.median(t[name]) for name in names} for t in (first, rest))
    for what, ms in (("per token", token), ("to the first", prefill)):
        ratio = ms["sdpa"] / ms["libattn"]
        print(f"{title:24} ms {what:12} libattn {ms['libattn']:9.3f}  sdpa {ms['sdpa']:9.3f}  ({ratio:.3f}x)", flush=True)
    print(f"{title:24} {arguments.context} tokens of context, {rounds} rounds, calls {counter.calls}", flush=True)
    report.write(
        {
            "case": title,
            "batch": batch,
            "cache": cache,
            "padded": padded,
            "compiled": compiled,
            "context": arguments.context,
            "ms_per_token": token,
            "ms_to_first": prefill,
            "rounds": rounds,
            "tokens": {name: len(t) for name, t in rest.items()},
            "calls": counter.calls,
        }
    )


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where (default cuda)")
    parser.add_argument("--model", default="1b", choices=list(SIZES), help="size of the one that is timed (default 1b)")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="tokens of a prompt (default 8192)")
    parser.add_argument("--new", type=int, default=33, metavar="N", help="tokens to generate in a turn (default 33)")
    parser.add_argument("--cases", nargs="*", metavar="WORD", help="only those whose names have one of the words")
    parser.add_argument("--compile", action="store_true", help="static caches with compiled decoding, besides")
    parser.add_argument("--no-check", action="store_true", help="only time")
    add_common_arguments(parser, seconds=3.0)
    arguments = finish_arguments(parser.parse_args(words))
    if arguments.quick:
        arguments.model, arguments.context, arguments.new = "tiny", 40, 5
    torch.set_float32_matmul_precision("highest")
    transformers.logging.set_verbosity_error()
    libattn.transformers.register()
    report = Report(arguments, transformers=transformers.__version__, model=arguments.model, context=arguments.context)
    right = arguments.no_check or check(arguments, report)
    config = config_of(arguments.model, arguments.context + arguments.new)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32  # not every CPU multiplies in bf16
    model = make(config, dtype, arguments.device, "sdpa")
    for name, case in CASES.items():
        for compiled in (False, True) if arguments.compile and case[1] == "static" else (False,):
            title = name + (" compiled" if compiled else "")
            if not arguments.cases or any(word in title for word in arguments.cases):
                bench(model, title, case, compiled, arguments, report)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
