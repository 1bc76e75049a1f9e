#!/usr/bin/env python3
"""Speed of layouts over ranks against one process at equal total work: tokens/s ratios, then the collectives of each layout.

Every core is used either way: one process with a thread a core, or as many ranks with one thread each. Each round runs every layout once, in turn;
the fastest step of all rounds counts. scripts/bench.sh --layouts builds what is needed and calls this.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "164M MQA T=256": dict(n_layer=20, n_head=12, n_embd=768, vocab_size=49152, multi_query=1, seq_len=256),
    "10M MQA T=256": dict(n_layer=6, n_head=6, n_embd=384, vocab_size=8192, multi_query=1, seq_len=256),
}
LAYOUTS = {
    "zero 0": dict(zero=0),
    "zero 1": dict(zero=1),
    "zero 2": dict(zero=2),
    "zero 3": dict(zero=3),
    "zero 1 reduce_scatter": dict(zero=1, reduction=1),
    "zero 0 all_reduce": dict(zero=0, reduction=2),
    "sp": dict(sp=0),
    "sp gather_kv": dict(sp=0, gather_kv=1),
    "sp zero 3": dict(sp=0, zero=3),
    "tp": dict(tp=0),
}


def arguments(values):
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=os.cpu_count(), help="ranks of every layout (default: the cores)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step over all ranks (default 2)")
    parser.add_argument("--shape", default="164M MQA T=256", help="one of: " + ", ".join(SHAPES))
    parser.add_argument("--layout", default="", help="a part of the layouts' names; all by default: " + ", ".join(LAYOUTS))
    parser.add_argument("--steps", type=int, default=4, help="measured steps a run (default 4)")
    parser.add_argument("--rounds", type=int, default=2, help="how often every layout runs (default 2)")
    parser.add_argument("--step-bench", type=Path, default=ROOT / "build/release/step_bench", help="the program")
    options = parser.parse_args()
    common = arguments(dict(SHAPES[options.shape], rows=options.rows, steps=options.steps))

    def run(command, threads):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_PROC_BIND="true" if threads > 1 else "false")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"bench_layouts.py: {' '.join(map(str, command))} fails: {done.stderr.strip()}")
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))), done.stderr

    layouts = {name: sizes for name, sizes in LAYOUTS.items() if options.layout in name}
    one, best, tables, losses = 0.0, dict.fromkeys(layouts, 0.0), {}, {}
    for _ in range(options.rounds):
        result, _ = run([options.step_bench, *common, "--threads", str(options.ranks)], options.ranks)
        one, losses["one process"] = max(one, result["tokens_per_s_max"]), result["loss_last"]
        for name, sizes in layouts.items():
            sizes = {key: value or options.ranks if key in ("sp", "tp") else value for key, value in sizes.items()}
            command = ["mpirun", "--allow-run-as-root", "--bind-to", "core", "-n", str(options.ranks), options.step_bench]
            result, table = run([*command, *common, *arguments(sizes), "--threads", "1", "--profile", "1"], 1)
            losses[name] = result["loss_last"]
            if result["tokens_per_s_max"] > best[name]:
                best[name], tables[name] = result["tokens_per_s_max"], table

    print(f"{options.shape}, {options.rows} rows a step: {options.ranks} ranks of 1 thread against 1 process of {options.ranks} threads")
    print(f"{'layout':<24} {'tokens/s':>10} {'ratio':>7} {'loss':>12}")
    print(f"{'one process':<24} {one:>10.0f} {1:>7.3f} {losses['one process']:>12.7f}")
    for name, rate in best.items():
        print(f"{name:<24} {rate:>10.0f} {rate / one:>7.3f} {losses[name]:>12.7f}")
    for name, table in tables.items():
        at = table.find("group ")
        print(f"\n{name}, a step of rank 0\n{table[at:].rstrip()}")


main()
