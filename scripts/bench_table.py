#!/usr/bin/env python3
"""Runs our training step and PyTorch's in turn and prints a table of tokens/s, ratios and peak memory.

Both sides train the same model on one random batch: AdamW, clip 1.0, no dropout, every core, float32 or bfloat16 (PyTorch's autocast).
Each round runs every setting once; the fastest step of all rounds counts. PyTorch's settings: "default" is plain python, "best" the faster
of tcmalloc with the MKL override, eager and compiled. With --isa v3 PyTorch is held to AVX2 as we are. scripts/bench.sh builds what is
needed and calls this.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch==2.13.0", "transformers==5.23.0")

GPT2 = dict(n_layer=12, n_head=12, n_embd=768, vocab=50304, multi_query=0)
MQA = dict(n_layer=20, n_head=12, n_embd=768, vocab=49152, multi_query=1)
SMALL = dict(n_layer=6, n_head=6, n_embd=384, vocab=8192, multi_query=1)
# With a cache of its own: torch.compile takes code from one whatever the level, and fails.
HELD_TO_AVX2 = dict(ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2", ONEDNN_MAX_CPU_ISA="AVX2",
                    TORCHINDUCTOR_CACHE_DIR=str(ROOT / "build/bench/inductor-avx2"))
# name: model, sequence, rows, steps a run
SHAPES = {
    "124M T=64 B=4": (GPT2, 64, 4, 6),
    "124M T=256 B=4": (GPT2, 256, 4, 4),
    "124M T=1024 B=1": (GPT2, 1024, 1, 4),
    "164M MQA T=256 B=2": (MQA, 256, 2, 4),
    "10M MQA T=256 B=8": (SMALL, 256, 8, 10),
}


def fail(sentence):
    sys.exit(f"bench_table.py: {sentence}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often every setting runs (default 3)")
    parser.add_argument("--shape", default="", help="a part of the shapes' names to run; all by default: " + ", ".join(SHAPES))
    parser.add_argument("--venv", type=Path, help="a ready virtual environment to use in place of .venv/")
    parser.add_argument("--step-bench", type=Path, default=ROOT / "build/release/step_bench", help="our program")
    parser.add_argument("--isa", choices=("auto", "v3", "v4"), default="auto", help="instruction level of both sides")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 also runs ours in float32")
    parser.add_argument("--no-peer", action="store_true", help="our side alone")
    parser.add_argument("--profile", action="store_true", help="also the table of our operations, per shape")
    return parser.parse_args()


def environment(ready):
    """The python of a virtual environment that holds PACKAGES; ours is made and filled when it is missing."""
    venv = ready or ROOT / ".venv"
    python = venv / "bin/python"
    if not python.exists():
        if ready:
            fail(f"{venv} is no virtual environment; give another --venv, or none to have one made")
        if subprocess.run([sys.executable, "-m", "venv", venv]).returncode:
            shutil.rmtree(venv, ignore_errors=True)
            fail(f"{venv} cannot be made; on Debian: apt-get install python3-venv")
    wanted = "import importlib.metadata as m\nfor p in %r: n, v = p.split('=='); assert m.version(n).partition('+')[0] == v"
    if subprocess.run([python, "-c", wanted % (PACKAGES,)], stderr=subprocess.DEVNULL).returncode:
        if ready:
            fail(f"{venv} lacks {' '.join(PACKAGES)}; install them there, or leave --venv out")
        print(f"installing {' '.join(PACKAGES)} into {venv}", flush=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES]).returncode:
            fail(f"pip cannot install {' '.join(PACKAGES)} into {venv}; its message is above")
    return python


def preload():
    """What LD_PRELOAD holds in PyTorch's fastest setting: MKL's choice of kernels for Intel on any CPU, and tcmalloc."""
    out = ROOT / "build/bench"
    out.mkdir(parents=True, exist_ok=True)
    source, library = out / "mkl_intel.c", out / "libmklintel.so"
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    if subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source]).returncode:
        fail("gcc cannot build the MKL override; its message is above")
    return f"{library}:libtcmalloc_minimal.so.4"


def run(command, env=None, show_errors=False):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "OMP_", "MKL_", "GOTO_"))}
    done = subprocess.run([str(c) for c in command], env=clean | (env or {}), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        fail(f"{' '.join(str(c) for c in command)} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    if show_errors:
        print(done.stderr, flush=True)
    return json.loads(lines[-1])


def ours_command(args, shape, dtype):
    model, seq, rows, steps = shape
    return [args.step_bench, "--vocab_size", model["vocab"], "--n_layer", model["n_layer"], "--n_head", model["n_head"], "--n_embd",
            model["n_embd"], "--multi_query", model["multi_query"], "--seq_len", seq, "--rows", rows, "--steps", steps,
            "--profile", 1, "--bfloat16", int(dtype == "bfloat16"), "--isa", {"auto": 0, "v3": 3, "v4": 4}[args.isa]]


def peer_command(args, python, shape, compiled):
    model, seq, rows, steps = shape
    return [python, ROOT / "scripts/pytorch_step.py", "--n-layer", model["n_layer"], "--n-head", model["n_head"], "--n-embd",
            model["n_embd"], "--vocab", model["vocab"], "--multi-query", model["multi_query"], "--batch", rows, "--seq", seq, "--steps",
            steps, "--warmup", 2, "--sgemm", 0, "--compile", int(compiled), "--dtype", args.dtype]


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def main():
    args = parse_arguments()
    shapes = {name: shape for name, shape in SHAPES.items() if args.shape in name}
    if not shapes:
        fail(f"--shape {args.shape} is part of none of {', '.join(SHAPES)}")
    if not args.step_bench.exists():
        fail(f"{args.step_bench} is not built; bash scripts/bench.sh builds it")
    settings = {"ours": args.dtype} | ({"float32": "float32"} if args.dtype == "bfloat16" else {})
    if not args.no_peer:
        held = HELD_TO_AVX2 if args.isa == "v3" else {}
        python, fast = environment(args.venv), {"LD_PRELOAD": preload()} | held
        settings |= {"eager": (False, fast), "compiled": (True, fast), "default": (False, held)}
    print(f"{args.dtype}, isa {args.isa}; tokens/s of the fastest step, {args.rounds} rounds; limit: the ratio if each of our operations took what its\n"
          "FLOPs take at the measured peak, or its bytes at the measured bandwidth; MiB: peak resident memory, PyTorch's the smallest of its settings")
    float32 = f"{'float32':>9}{'ratio':>6}" if "float32" in settings else ""
    print(f"{'shape':<20}{'ours':>8}{float32}{'PyTorch':>9} {'its setting':<12}{'ratio':>6}{'limit':>6}{'default':>9}{'ratio':>6}{'ours MiB':>10}{'MiB':>7}",
          flush=True)
    ratios = {"against the default setting": [], "against float32": [], "": []}
    for name, shape in shapes.items():
        results = {setting: [] for setting in settings}
        for i in range(args.rounds):
            for setting, how in settings.items():
                if isinstance(how, str):
                    show = args.profile and i == 0 and setting == "ours"
                    results[setting].append(run(ours_command(args, shape, how), show_errors=show))
                # Compiling helps short batches alone, and takes a minute.
                elif not how[0] or shape[1] * shape[2] <= 256:
                    results[setting].append(run(peer_command(args, python, shape, how[0]), how[1]))
        speed = {s: max(r["tokens_per_s_max"] for r in rs) for s, rs in results.items() if rs}
        memory = {s: min(r["peak_rss_mib"] for r in rs) for s, rs in results.items() if rs}
        ours, ours_memory = speed.pop("ours"), max(r["peak_rss_mib"] for r in results["ours"])
        line = f"{name:<20}{ours:>8.0f}"
        if "float32" in speed:
            ratios["against float32"].append(ours / speed["float32"])
            line += f"{speed.pop('float32'):>9.0f}{ratios['against float32'][-1]:>6.2f}"
        if args.no_peer:
            print(f"{line}{'':>49}{ours_memory:>10}", flush=True)
            continue
        best = max(speed, key=speed.get)
        ratios[""].append(ours / speed[best])
        ratios["against the default setting"].append(ours / speed["default"])
        limit = shape[1] * shape[2] / min(r["bound_s"] for r in results["ours"]) / speed[best]
        smallest = min(memory[s] for s in speed)
        print(f"{line}{speed[best]:>9.0f} {best:<12}{ratios[''][-1]:>6.2f}{limit:>6.2f}{speed['default']:>9.0f}"
              f"{ratios['against the default setting'][-1]:>6.2f}{ours_memory:>10}{smallest:>7}", flush=True)
    for what, values in ratios.items():
        if values:
            print(" ".join(f"geometric mean {what}".split()), f"{geometric_mean(values):.2f}")


if __name__ == "__main__":
    main()
