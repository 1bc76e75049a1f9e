#!/usr/bin/env python3
"""Compares onescale with transformers and PyTorch: prints every figure beside its limit, exits 1 if one is broken.

1. transformers -> onescale: models that save_pretrained wrote, in several shapes and settings.
2. onescale -> transformers: the newest checkpoint of a run as it lies, and its bfloat16 export, on rows of its data.
   Both compare logits, loss, gradient norm and every gradient with PyTorch in float64 on the same weights.
3. 500 steps of training from the same weights on the same rows, in float32 on both sides: OUT/loss_curves.png.

Any python3 >= 3.11 starts it; what it imports goes into .venv/ at the first start. The program must be built, and the
data of scripts/quickstart.sh prepared. OUT/tensors.txt lists the figures of each tensor, where the table shows the worst.
"""

import argparse
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"torch": "2.13.0", "transformers": "5.23.0", "safetensors": None, "numpy": None, "matplotlib": None}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("--onescale", "build/release/onescale", "the program"),
        ("--run", "runs/quickstart", "run directory whose checkpoint is loaded; a tiny run is made where there is none"),
        ("--data", "runs/quickstart-data", "directory that onescale prepare wrote"),
        ("--out", "runs/compare", "where models, runs and the picture go"),
        ("--venv", None, "a ready virtual environment to use instead of .venv/"),
    ):
        shown = f"{text} (default: {default})" if default else text
        parser.add_argument(name, type=Path, default=ROOT / default if default else None, metavar="PATH", help=shown)
    return parser.parse_args()


def fail(sentence):
    sys.exit(f"compare_transformers.py: {sentence}")


def enter_environment(ready):
    """Goes on inside the virtual environment, made and filled when it is ours and needs it."""
    venv = (ready or ROOT / ".venv").resolve()
    if Path(sys.prefix).resolve() != venv:
        if not (venv / "bin/python").exists():
            if ready:
                fail(f"{venv} is no virtual environment; give another --venv, or none to have one made")
            if subprocess.run([sys.executable, "-m", "venv", venv]).returncode:
                shutil.rmtree(venv, ignore_errors=True)
                fail(f"{venv} cannot be made; on Debian: apt-get install python3-venv")
        os.execv(venv / "bin/python", [str(venv / "bin/python"), *sys.argv])
    missing = []
    for name, version in PACKAGES.items():
        try:
            if version in (None, importlib.metadata.version(name).partition("+")[0]):
                continue
        except importlib.metadata.PackageNotFoundError:
            pass
        missing.append(f"{name}=={version}" if version else name)
    if missing and ready:
        fail(f"{venv} lacks {' '.join(missing)}; install them there, or leave --venv out")
    if missing:
        print(f"installing {' '.join(missing)} into {venv}", flush=True)
        if subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing]).returncode:
            fail(f"pip cannot install {' '.join(missing)} into {venv}; give a ready one with --venv")
        importlib.invalidate_caches()


ARGS = parse_arguments()
enter_environment(ARGS.venv)
os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM, logging  # noqa: E402

matplotlib.use("Agg")
logging.disable_progress_bar()
from matplotlib import pyplot  # noqa: E402

IGNORED = -100


class Table:
    """The figures, each with the limit that it must stay below; printed as they come."""

    def __init__(self):
        self.broken = 0
        print(f"\n{'':4s}{'what':60s}{'figure':>12s}{'limit':>10s}", flush=True)

    def section(self, title):
        print(f"\n{title}", flush=True)

    def row(self, what, figure, limit=None, note=""):
        good = limit is None or (figure <= limit and math.isfinite(figure))
        self.broken += not good
        number = f"{figure:.2e}" if isinstance(figure, float) else str(figure)
        shown = "" if limit is None else f"{limit:g}"
        print(f"{'' if good else ' ! ':4s}{what:60s}{number:>12s}{shown:>10s}  {note}".rstrip(), flush=True)


def onescale(*arguments):
    done = subprocess.run([str(a) for a in (ARGS.onescale, *arguments)], capture_output=True, text=True)
    if done.returncode:
        fail(f"`{' '.join(map(str, done.args))}` ended with {done.returncode}: {done.stderr.strip()}")


def load(directory, **settings):
    """A Hugging Face directory, and the number of keys that were missing, left over or of another shape."""
    model, info = GPTBigCodeForCausalLM.from_pretrained(directory, attn_implementation="sdpa", output_loading_info=True,
                                                        **settings)
    return model, sum(len(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def errors(found, exact):
    """Relative L2 distance, and how far the ratio <found, exact> / <exact, exact> is from 1."""
    found, exact = found.double().flatten(), exact.double().flatten()
    square = exact.dot(exact)
    return ((found - exact).norm() / square.sqrt()).item(), abs((found.dot(exact) / square).item() - 1)


# --- 1 and 2: logits, loss and gradients ------------------------------------------------------------------------------

LIMIT = 1e-5  # float32 against float64: rounding leaves about 1e-6 in a tensor, a wrong term more than 1e-4


def compare(table, title, directory, ids, labels):
    """Runs `onescale gradients` and PyTorch in float64 on one model directory and batch."""
    table.section(f"{title}: {directory}")
    model, odd_keys = load(directory)
    table.row("keys missing, left over or of another shape in transformers", odd_keys, 0)
    model = model.double().eval()
    logits = model(input_ids=ids, use_cache=False).logits
    good = int((labels != IGNORED).sum())
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / good
    loss.backward()
    exact = {f"grad.{name}": p.grad for name, p in model.named_parameters()}

    batch, result = ARGS.out / "batch.safetensors", ARGS.out / "result.safetensors"
    save_file({"input_ids": ids.contiguous(), "labels": labels.contiguous()}, batch)
    onescale("gradients", "--model", directory, "--batch", batch, "--out", result, "--logits", "true")
    found = load_file(result)
    names = {name for name in found if name.startswith("grad.")}
    table.row(f"gradients that one side lacks, of {len(exact)}", len(names ^ exact.keys()), 0)
    table.row(f"good tokens, distance from {good} of {labels.numel()}", abs(found["good_tokens"].item() - good), 0)
    norm = torch.stack([g.norm() for g in exact.values()]).norm().item()
    for name, value, reference in (("loss", found["loss"], loss), ("gradient norm", found["grad_norm"], norm)):
        table.row(f"{name} {float(reference):.9f}, relative distance", abs(value.item() / float(reference) - 1), LIMIT)
    figures = {name: errors(found[name], exact[name]) for name in sorted(names & exact.keys())}
    figures["logits"] = errors(found["logits"], logits.detach())
    with open(ARGS.out / "tensors.txt", "a") as file:
        file.write(f"# {title}: relative L2, |ratio - 1|, tensor\n")
        file.writelines(f"{l2:.2e} {ratio:.2e} {name}\n" for name, (l2, ratio) in figures.items())
    for which, text in enumerate(("relative L2", "|ratio - 1|")):
        table.row(f"logits, {text}", figures["logits"][which], LIMIT)
        worst = max(exact.keys() & figures.keys(), key=lambda name: figures[name][which])
        table.row(f"worst of {len(exact)} gradients, {text}", figures[worst][which], LIMIT, worst[5:])


def from_transformers(table):
    """Odd sizes, so that no tail of a loop goes unseen, and every setting that changes numbers."""
    odd = {"vocab_size": 211, "n_positions": 61, "n_embd": 60, "n_layer": 3, "n_inner": 77}
    cases = [
        ("multi-query, tanh GELU", 4, {"n_head": 5}),
        ("multi-head, erf GELU, n_inner null", 4, {"n_head": 4, "multi_query": False, "activation_function": "gelu",
                                                   "n_inner": None, "layer_norm_epsilon": 1e-3}),
        ("multi-query, erf GELU, scores not scaled, in several files", 3, {
            "n_head": 3, "activation_function": "gelu", "scale_attn_weights": False}),
        ("multi-head, tanh GELU, head not tied, in several files", 5, {
            "n_head": 6, "multi_query": False, "tie_word_embeddings": False}),
    ]
    for number, (title, rows, settings) in enumerate(cases):
        generator = torch.Generator().manual_seed(number)
        torch.manual_seed(number)
        model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**{**odd, **settings}))
        with torch.no_grad():  # biases and LayerNorm away from 0 and 1, weights that make attention uneven
            for name, p in model.named_parameters():
                width = 0.7 if p.ndim == 2 and "wte" not in name and "wpe" not in name else 0.25
                p.add_(torch.randn(p.shape, generator=generator) * width / (math.sqrt(p.shape[1]) if width == 0.7 else 1))
        directory = ARGS.out / f"transformers-{number + 1}"
        model.save_pretrained(directory, max_shard_size="200KB" if "several" in title else "1GB")
        stream = torch.randint(odd["vocab_size"], (rows, 38), generator=generator)
        ids, labels = stream[:, :-1], stream[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
        labels[0, :17] = IGNORED  # a prompt
        labels[-1] = IGNORED  # a row without any target
        compare(table, f"1.{number + 1} transformers -> onescale, {title}", directory, ids, labels)


def to_transformers(table):
    run = ARGS.run
    if not list(run.glob("checkpoints/step-*")):
        run = ARGS.out / "tiny-run"
        print(f"{ARGS.run} has no checkpoint: 20 steps of a tiny model in {run}", flush=True)
        onescale("train", "--data", ARGS.data, "--run_dir", run, "--steps", 20, "--warmup_steps", 5, "--n_layer", 2,
                 "--n_embd", 60, "--n_head", 5, "--n_positions", 128, "--global_batch", 4, "--micro_batch", 2,
                 "--eval_every", 0, "--lr", 3e-3)
    checkpoint = max(run.glob("checkpoints/step-*"))
    model, _ = load(checkpoint)
    rows = Rows(ARGS.data, min(256, model.config.n_positions), seed=7)
    if rows.vocab_size > model.config.vocab_size:
        fail(f"{ARGS.data} has a vocabulary of {rows.vocab_size}, {checkpoint} of {model.config.vocab_size}; "
             "give the --data that the --run was trained on")
    ids, labels = rows.batch(0, 4)
    compare(table, "2.1 onescale -> transformers, checkpoint", checkpoint, ids, labels)
    exported = ARGS.out / "bfloat16"
    onescale("export", "--model", run, "--out", exported, "--dtype", "bfloat16")
    compare(table, "2.2 onescale -> transformers, bfloat16 export", exported, ids, labels)
    half, _ = load(exported)
    table.row(f"its dtype in transformers is {half.dtype}, weights not", int(half.dtype != torch.bfloat16), 0)
    rounded = dict(half.named_parameters())
    table.row("weights that are not the checkpoint's, rounded to nearest", sum(
        int((rounded[name] != p.to(torch.bfloat16)).sum()) for name, p in model.named_parameters()), 0)


# --- 3: the loss curve ------------------------------------------------------------------------------------------------

SEQ_LEN, ROWS, STEPS, SEED = 256, 8, 500, 1
SHAPE = types.MappingProxyType({"n_positions": SEQ_LEN, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_inner": 512})
RECIPE = types.MappingProxyType({"steps": STEPS, "warmup_steps": 50, "lr": 2e-3, "min_lr": 2e-4, "beta1": 0.9,
                                 "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0, "seed": SEED})


def philox(counter, key):
    """Philox4x32-10, as kernels/philox.h."""
    a, b, c, d = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k0, y & 0xFFFFFFFF, (x >> 32) ^ d ^ k1, x & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a


class Rows:
    """The rows of `onescale train`, read and ordered here a second time (data/shard.h, data/order.h)."""

    def __init__(self, directory, seq_len, seed):
        self.seq_len, self.seed = seq_len, seed
        tokens, masks = [], []
        for path in sorted(directory.glob("train_*.bin")):
            header = np.fromfile(path, "<i4", 256)
            tokens.append(np.fromfile(path, "<u2" if header[0] == 20240520 else "<u4", offset=1024).astype(np.int64))
            mask = path.with_suffix(".mask")
            masks.append(np.unpackbits(np.fromfile(mask, np.uint8), bitorder="little")[: len(tokens[-1])]
                         if mask.exists() else np.zeros(len(tokens[-1]), np.uint8))
        if not tokens:
            fail(f"{directory} holds no train_*.bin; run scripts/quickstart.sh first, or name prepared --data")
        self.vocab_size = int(header[3])
        self.tokens = np.concatenate(tokens)
        self.targets = np.where(np.concatenate(masks), IGNORED, self.tokens)
        self.windows = (len(self.tokens) - 1) // seq_len

    def window(self, sample):
        epoch, x = divmod(sample, self.windows)
        half = ((self.windows - 1).bit_length() + 1) // 2
        low = (1 << half) - 1
        while True:
            left, right = x >> half, x & low
            for turn in range(4):  # a Feistel network, walked until it lands inside
                left, right = right, left ^ (philox((right, epoch, turn, 7), self.seed) & low)
            x = left << half | right
            if x < self.windows:
                return x

    def batch(self, step, rows):
        begins = [self.window(step * rows + row) * self.seq_len for row in range(rows)]
        ids = np.stack([self.tokens[b : b + self.seq_len] for b in begins])
        labels = np.stack([self.targets[b + 1 : b + 1 + self.seq_len] for b in begins])
        return torch.from_numpy(ids), torch.from_numpy(labels)


def learning_rate(step):
    if step < RECIPE["warmup_steps"]:
        return RECIPE["lr"] * (step + 1) / RECIPE["warmup_steps"]
    done = (step - RECIPE["warmup_steps"]) / (RECIPE["steps"] - RECIPE["warmup_steps"])
    return RECIPE["min_lr"] + 0.5 * (RECIPE["lr"] - RECIPE["min_lr"]) * (1 + math.cos(math.pi * done))


def train_pytorch(directory, rows, dtype, threads):
    """Losses, and the weights after the last step."""
    torch.set_num_threads(threads)
    model = load(directory, dtype=dtype)[0].train()
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": RECIPE["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        betas=(RECIPE["beta1"], RECIPE["beta2"]), eps=RECIPE["eps"])
    losses = []
    for step in range(STEPS):
        ids, labels = rows.batch(step, ROWS)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        # clip_grad_norm_ divides by norm + 1e-6, which is one part in a million off the definition.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()
        torch._foreach_mul_([p.grad for p in parameters], min(1.0, RECIPE["clip_norm"] / norm))
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), {name: p.detach() for name, p in model.named_parameters()}


def loss_curve(table):
    rows = Rows(ARGS.data, SEQ_LEN, SEED)
    start, run = ARGS.out / "start", ARGS.out / "run"
    torch.manual_seed(SEED)
    GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=rows.vocab_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                           **SHAPE)).save_pretrained(start)
    table.section(f"3. {STEPS} steps of {ROWS} rows of {SEQ_LEN} tokens: {ARGS.data}")
    # onescale cuts the rows into micro-batches of two, PyTorch does not: the step is the same.
    settings = [word for name, value in RECIPE.items() for word in (f"--{name}", value)]
    begin = time.monotonic()
    onescale("train", "--model", start, "--data", ARGS.data, "--run_dir", run, "--seq_len", SEQ_LEN, "--global_batch", ROWS,
             "--micro_batch", 2, "--eval_every", 0, "--save_every", 0, *settings)
    print(f"onescale: {time.monotonic() - begin:.0f} s", flush=True)
    ours = [json.loads(line) for line in open(run / "metrics.jsonl")]
    ours = np.array([line["loss"] for line in ours if "event" not in line])
    print(ours[:3], ours[-3:])
    threads = torch.get_num_threads()
    for name, dtype, n in [("f32", torch.float32, threads), ("f32-1", torch.float32, 1), ("f64", torch.float64, threads)]:
        begin = time.monotonic()
        losses, weights = train_pytorch(start, rows, dtype, n)
        np.save(f"/tmp/compare/{name}.npy", losses)
        save_file({k: v.contiguous() for k, v in weights.items()}, f"/tmp/compare/{name}.safetensors")
        gap = abs(ours / losses - 1)
        print(name, f"{time.monotonic() - begin:.0f} s", losses[:3], losses[-3:], "gap max", gap.max(), "first", [gap[:k].max() for k in (1, 10, 50, 100, 200)], flush=True)


def main():
    ARGS.out.mkdir(parents=True, exist_ok=True)
    table = Table()
    if len(sys.argv) and os.environ.get("PARTS", "123"):
        parts = os.environ.get("PARTS", "123")
    if "1" in parts: from_transformers(table)
    if "2" in parts: to_transformers(table)
    if "3" in parts: loss_curve(table)
    sys.exit(table.broken > 0)


main()
