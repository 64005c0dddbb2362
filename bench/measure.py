"""What the scripts of this folder share: how attention is called, how it is timed, and how results are held together.

Everything of one case runs in one process and takes turns, so that clock, temperature and power are the same for each. A
turn is a batch of launches, some 2 ms of them, with a CUDA event before and one after; nobody waits for the GPU in between.
Batches are CUDA graphs if everything in the case can be captured, so that no host has to keep up with kernels of 50 us;
otherwise all of it is launched one by one ("with launch" in the output), into a queue that fills while the GPU is busy.
The time of a run is the median over batches, each divided by its launches. Inputs are larger than the L2 cache, and nobody
finds more of them there than the others do.

On the host (--device cpu) a turn is one run, by the clock on the wall; or, with turn_ms, as many as that takes, after a
pause in which the threads of the one before go to sleep, and a run that wakes those of this one. Each run takes the next
set of inputs.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
try:
    import libattn
except ImportError:  # not installed: the one of this checkout
    sys.path.insert(0, str(ROOT / "python"))
    import libattn
from libattn import _core, _lib, _torch  # noqa: E402

Options = _core.Options  # for the other scripts: this one knows where libattn is

BATCH_MS = 2.0
MOST_LAUNCHES = 48
LEAST_ROUNDS = 8
ROUNDS_BETWEEN_WAITS = 4
LEAST_LONG_ROUNDS = 3  # of turns with several runs each
PAUSE = 0.025  # seconds: OpenMP's threads spin for up to 20 ms before they sleep
CYCLES_PER_LAUNCH = 100_000  # some 50 us: more than a host takes to queue one

# Relative RMS of the difference of two results that are both as good as tests/test_accuracy.c asks (2.3e-3 in bf16): the
# sum of their errors. Single rows of good kernels are off by up to 3.3e-3 in 4096 rows of 4096 keys; with a hundred times
# the rows, and rows of few keys, two of them stay within twice the sum of that, and one wrong tile is far beyond.
RMS_LIMIT = {torch.bfloat16: 4.6e-3, torch.float16: 4.6e-3, torch.float32: 3e-6}
ROW_LIMIT = {torch.bfloat16: 1.3e-2, torch.float16: 1.3e-2, torch.float32: 2e-5}


# ---- the command line ----


def add_arguments(parser, seconds):
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where (default cuda)")
    parser.add_argument("--no-graphs", action="store_true", help="launch one by one, whatever can be captured")
    add_common_arguments(parser, seconds)


def add_common_arguments(parser, seconds):
    """Those that a script for the host has as well."""
    parser.add_argument("--quick", action="store_true", help="small sizes, few runs: does it work at all?")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of measuring in a case (default {seconds})")
    parser.add_argument("--json", metavar="FILE", help="write lines of JSON there, too")


def finish_arguments(arguments):
    """What follows from them; ends the program where the device is not there."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: torch sees no GPU here; --device cpu --quick tries it out without")
    if arguments.quick:
        arguments.seconds = min(arguments.seconds, 0.02)
    return arguments


def commit():
    """Of this checkout; ATTN_COMMIT where the sources came without their history."""
    if "ATTN_COMMIT" in os.environ:
        return os.environ["ATTN_COMMIT"]
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Report:
    """The first line, which says what ran where, and lines of JSON for who asked for them."""

    def __init__(self, arguments, **facts):
        gpu = arguments.device == "cuda"
        header = {
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "torch": torch.__version__,
            **({"cudnn": torch.backends.cudnn.version()} if gpu else {}),
            "libattn": libattn.__version__,
            "commit": commit(),
            **facts,
            **({"seconds": arguments.seconds} if hasattr(arguments, "seconds") else {}),
        }
        print(", ".join(f"{key} {value}" for key, value in header.items()))
        self.file = open(arguments.json, "w") if arguments.json else None
        self.write(header)

    def write(self, line):
        if self.file:
            print(json.dumps(line), file=self.file, flush=True)


# ---- attention ----


def libattn_run(q, k, v, options, backend=None):
    """A function that runs attention as a C program would, attn_run on a plan, and returns o; and its kernel's name."""
    call = _core.Call(_torch, _lib.FORWARD, q, k, v, options)
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty(_core.lse_shape(q.shape), device=q.device)
    call.buffers.o, call.buffers.lse = _core.tensor(call.keep(o)), call.keep(lse).address
    return plan_run(call, q, o, backend)


def libattn_backward_run(q, k, v, d_o, options, backend=None, unordered=False):
    """The same for the backward pass; it returns (d_q, d_k, d_v)."""
    o, lse, _ = _core.forward(_torch, q, k, v, options)
    call = _core.Call(_torch, _lib.BACKWARD, q, k, v, options)
    call.problem.flags |= _lib.UNORDERED if unordered else 0
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    for name, x in zip(("o", "d_o", "d_q", "d_k", "d_v"), (o, d_o, *gradients)):
        setattr(call.buffers, name, _core.tensor(call.keep(x)))
    call.buffers.lse = call.keep(lse).address
    return plan_run(call, q, gradients, backend)


def plan_run(call, q, result, backend):
    """A function that runs what the call says and returns the result; and its kernel's name."""
    context = _lib.context_of(backend) if backend else _torch.place(q).context
    plan = _lib.Plan(context, call.problem)
    space = torch.empty(plan.workspace + 64, dtype=torch.uint8, device=q.device)
    address = space.data_ptr()
    call.buffers.workspace, call.buffers.workspace_size = address + -address % 64, plan.workspace
    buffers = ctypes.byref(call.buffers)

    def run(kept=(call, space)):
        stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None  # another one while it is captured
        _lib.check(_lib.library.attn_run(plan.handle, buffers, stream))
        return result

    return run, plan.kernel


def is_portable(kernel, device):
    """Whether a GPU of compute capability 9.0 runs a kernel that is not made for it."""
    return device == "cuda" and torch.cuda.get_device_capability() == (9, 0) and "_sm90_" not in kernel and not kernel.startswith("decode_")


def kernel_note(kernel, device):
    return kernel + ("  NOT A HOPPER KERNEL" if is_portable(kernel, device) else "")


# ---- results ----


def difference(found, wanted):
    """(relative RMS of the difference, the same of the worst row); NaN anywhere makes both NaN."""
    found, wanted = found.float(), wanted.float()
    gap = found - wanted
    rms = gap.square().mean().sqrt() / wanted.square().mean().sqrt()
    rows = gap.square().sum(-1).sqrt() / wanted.square().sum(-1).sqrt().clamp_min(1e-30)
    return rms.item(), rows.max().item()


def agree(errors, dtype):
    return errors[0] <= RMS_LIMIT[dtype] and errors[1] <= ROW_LIMIT[dtype]


def geometric_mean(numbers):
    return math.exp(statistics.fmean(map(math.log, numbers)))


# ---- timing ----


class Times(NamedTuple):
    ms: dict  # of one run, by name
    rounds: int  # turns that each had
    how: str  # "graph", "with launch" or "host"


def measure(runners, arguments):
    """Times of {name: one function for each set of inputs}."""
    return measure_gpu(runners, arguments) if arguments.device == "cuda" else measure_host(runners, arguments)


def turns(names, count):
    """Who comes after whom in round `count`: nobody always follows the same one."""
    order = names[count % len(names) :] + names[: count % len(names)]
    return order if count % 2 else order[::-1]


def host_turn(runs, done, turn_ms):
    """Times of the runs of one turn; `done` runs went before it, of whomever, and took the sets before these."""
    times, spent = [], 0.0
    if turn_ms:
        time.sleep(PAUSE)
    while not times or spent < turn_ms:
        start = time.perf_counter()
        runs[(done + len(times)) % len(runs)]()
        times.append(1e3 * (time.perf_counter() - start))
        spent += times[-1]
    return times


def measure_host(runners, arguments):
    times = {name: [] for name in runners}
    for runs in runners.values():
        runs[0]()
    turn_ms = getattr(arguments, "turn_ms", 0)
    least = 2 if arguments.quick else LEAST_LONG_ROUNDS if turn_ms else LEAST_ROUNDS
    began, rounds, done = time.monotonic(), 0, 0
    while rounds < least or time.monotonic() - began < arguments.seconds:
        for name in turns(list(runners), rounds):
            found = host_turn(runners[name], done, turn_ms)
            times[name] += found[1:] or found  # the first one has woken the threads
            done += len(found)
        rounds += 1
    typical = min if getattr(arguments, "fastest", False) else statistics.median
    return Times({name: typical(t) for name, t in times.items()}, rounds, "host")


def mark():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def launches_for(runs):
    """So many runs take BATCH_MS. All sets of inputs come up equally often."""
    for _ in range(2):
        for run in runs:
            run()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES_PER_LAUNCH * len(runs))
    begin = mark()
    for run in runs:
        run()
    end = mark()
    torch.cuda.synchronize()
    whole = math.ceil(BATCH_MS / begin.elapsed_time(end))  # times through all sets
    return min(whole, max(1, MOST_LAUNCHES // len(runs))) * len(runs)


def batch_of(runs, launches):
    def batch():
        for n in range(launches):
            runs[n % len(runs)]()

    return batch


def captured(batch):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch()
    return graph.replay


def capture_all(batches):
    """The same batches as graphs, or None if one of them cannot be captured."""
    try:
        return {name: captured(batch) for name, batch in batches.items()}
    except (RuntimeError, ValueError) as error:  # those of torch and of libattn
        torch.cuda.synchronize()
        print(f"no graphs: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def measure_gpu(runners, arguments):
    launches = {name: launches_for(runs) for name, runs in runners.items()}
    batches = {name: batch_of(runs, launches[name]) for name, runs in runners.items()}
    graphs = None if arguments.no_graphs else capture_all(batches)
    pause = CYCLES_PER_LAUNCH * (len(runners) if graphs else sum(launches.values()))
    for batch in (graphs or batches).values():
        batch()
    torch.cuda.synchronize()
    marks = {name: [] for name in runners}
    began, rounds = time.monotonic(), 0
    while rounds < LEAST_ROUNDS or time.monotonic() - began < arguments.seconds:
        if graphs is None or rounds % ROUNDS_BETWEEN_WAITS == 0:  # from here to the next wait the queue is never empty
            torch.cuda.synchronize()
            torch.cuda._sleep(pause)
        for name in turns(list(runners), rounds):
            begin = mark()
            (graphs or batches)[name]()
            marks[name].append((begin, mark()))
        rounds += 1
    torch.cuda.synchronize()
    ms = {
        name: statistics.median(begin.elapsed_time(end) for begin, end in marks[name]) / launches[name] for name in runners
    }
    return Times(ms, rounds, "graph" if graphs else "with launch")
