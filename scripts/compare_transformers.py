#!/usr/bin/env python3
"""Compares onescale with transformers and PyTorch: prints every figure beside its limit, exits 1 if one is broken.

1. transformers -> onescale: models that save_pretrained wrote, in several shapes and settings.
2. onescale -> transformers: the newest checkpoint of a run as it lies, and its bfloat16 export, on rows of its data.
   Both compare logits, loss, gradient norm and every gradient with PyTorch in float64 on the same weights.
3. The whole gradient in bfloat16 at each instruction level of the processor, and of PyTorch's autocast, both against
   float64: ours must not be farther.
4. 500 steps of training from the same weights on the same rows with the same recipe: OUT/loss_curves.png.

Any python3 >= 3.11 starts it; what it imports goes into .venv/ at the first start. The program must be built and the
data of scripts/quickstart.sh prepared. OUT/files/tensors.txt lists every tensor, the table the worst ones.
"""

import argparse
import functools
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["torch==2.13.0", "transformers==5.23.0", "safetensors", "numpy", "matplotlib"]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, type=Path)
    add("--onescale", default=ROOT / "build/release/onescale", help="the program")
    add("--run", default=ROOT / "runs/quickstart", help="run directory; without a checkpoint a tiny run is made")
    add("--data", default=ROOT / "runs/quickstart-data", help="directory that onescale prepare wrote")
    add("--out", default=ROOT / "runs/compare", help="where models, runs and the picture go")
    add("--venv", help="a ready virtual environment instead of .venv/")
    return parser.parse_args()


def fail(sentence):
    sys.exit(f"compare_transformers.py: {sentence}")


def enter_environment(ready):
    """Goes on inside the virtual environment, which is made first when it is ours and lacks something."""
    venv = (ready or ROOT / ".venv").resolve()
    python, filled = venv / "bin/python", venv / "compare_transformers.txt"
    if Path(sys.prefix).resolve() == venv:
        return
    if ready and not python.exists():
        fail(f"{venv} is no virtual environment; give another --venv, or none to have one made")
    if not ready and not (filled.exists() and filled.read_text().split() == PACKAGES):
        print(f"installing {' '.join(PACKAGES)} into {venv}", flush=True)
        for command in ([sys.executable, "-m", "venv", venv], [python, "-m", "pip", "install", "--quiet", *PACKAGES]):
            if subprocess.run(command).returncode:
                fail(f"{venv} cannot be made (Debian: apt-get install python3-venv); or name a ready one with --venv")
        filled.write_text(" ".join(PACKAGES))
    os.execv(python, [str(python), *sys.argv])


ARGS = parse_arguments()
enter_environment(ARGS.venv)
FILES = ARGS.out / "files"  # models, batches and runs, made anew each time
# Threads that wait asleep, here and in the program, so that a busy machine slows neither by more than its share.
os.environ.update(MPLBACKEND="Agg", OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM, logging  # noqa: E402

IGNORED = -100
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None}  # transformers' own lie outside of small vocabularies
LIMIT = 1e-5  # float32 against float64: rounding leaves about 1e-6 in a tensor, a wrong term more than 1e-4
SEQ_LEN, ROWS, STEPS, SEED = 256, 8, 500, 1  # of the loss curve
SHAPE = {"n_positions": SEQ_LEN, "n_embd": 128, "n_layer": 4, "n_head": 4, **NO_SPECIAL}
RECIPE = {"steps": STEPS, "warmup_steps": 50, "lr": 2e-3, "min_lr": 2e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
          "weight_decay": 0.1, "clip_norm": 1.0, "seed": SEED}
CURVES = ("onescale", "PyTorch float32", "PyTorch float64")
# Rounding, 1e-7 in the first step, grows through the weights: the largest gap was 4e-5 to PyTorch's float32 and 5e-6 to
# its float64, 4e-5 between those two; in the warm-up 2e-6, 2e-7 and 2e-6. Limits are five times the measured or more,
# since another processor rounds otherwise.
# Mistakes are far above: decaying biases too gives 4e-4 in the warm-up and 1e-2 in all, a schedule one step late 2e-2.
WARM, GAP_LIMIT, WEIGHT_LIMIT = 50, 2e-4, 2.5e-3
WARM_LIMITS = {"PyTorch float32": 1e-5, "PyTorch float64": 2.5e-6}
BROKEN = []  # what passed its limit
logging.disable_progress_bar()


def row(what, figure, limit="", note=""):
    """One line of the table: a figure, and the limit that it must not pass."""
    good = limit == "" or figure <= limit  # a NaN is not
    if not good:
        BROKEN.append(what)
    figure, limit = (f"{x:.2e}" if isinstance(x, float) else x for x in (figure, limit))
    print(f"{'  ' if good else '! '}{what:66s}{figure:>10}{limit:>10}  {note}".rstrip(), flush=True)


def onescale(command, **options):
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run([ARGS.onescale, command, *words], capture_output=True, text=True)
    if done.returncode:
        fail(f"`onescale {command} {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")


def load(directory, dtype="auto"):
    """A Hugging Face directory, and the number of keys that were missing, left over or of another shape."""
    model, info = GPTBigCodeForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa", output_loading_info=True)
    return model, sum(len(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def newest_checkpoint(run):
    return max(run.glob("checkpoints/step-*"), default=None)


def errors(found, exact):
    """Relative L2 distance, and how far the ratio <found, exact> / <exact, exact> is from 1."""
    found, exact = found.double().flatten(), exact.double().flatten()
    square = exact.dot(exact)
    return ((found - exact).norm() / square.sqrt()).item(), abs((found.dot(exact) / square).item() - 1)


def compare(title, directory, ids, labels):
    """Runs `onescale gradients` and PyTorch in float64 on one model directory and batch."""
    print(f"\n{title}: {directory}", flush=True)
    model, odd_keys = load(directory)
    row("keys missing, left over or of another shape in transformers", odd_keys, 0)
    logits = model.double().eval()(input_ids=ids, use_cache=False).logits
    good = int((labels != IGNORED).sum())
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / good
    loss.backward()
    exact = {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in exact.values()]).norm()
    batch, result = FILES / "batch.safetensors", FILES / "result.safetensors"
    save_file({"input_ids": ids.contiguous(), "labels": labels.contiguous()}, batch)
    onescale("gradients", model=directory, batch=batch, out=result, logits="true")
    found = load_file(result)
    names = {name for name in found if name.startswith("grad.")}
    row(f"gradients that one side lacks, of {len(exact)}", len(names ^ exact.keys()), 0)
    row(f"good tokens: {good} of {labels.numel()}, difference", abs(found["good_tokens"].item() - good), 0)
    for name, reference in (("loss", loss), ("grad_norm", norm)):
        row(f"{name} {reference.item():.9f}, relative difference", abs(found[name] / reference - 1).item(), LIMIT)
    figures = {name: errors(found[name], exact[name]) for name in sorted(names & exact.keys())}
    figures["logits"] = errors(found["logits"], logits.detach())
    for which, text in enumerate(("relative L2", "|ratio - 1|")):
        row(f"logits, {text}", figures["logits"][which], LIMIT)
        worst = max(names & exact.keys(), key=lambda name: figures[name][which])
        row(f"worst of {len(exact)} gradients, {text}", figures[worst][which], LIMIT, worst.removeprefix("grad."))
    with open(FILES / "tensors.txt", "a") as file:
        lines = (f"{l2:.2e} {ratio:.2e} {name}\n" for name, (l2, ratio) in figures.items())
        file.writelines([f"# {title}: relative L2, |ratio - 1|, tensor\n", *lines])


def backpropagated(model, ids, labels, autocast=False):
    """Every gradient of the mean loss, in float64."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, use_cache=False).logits
        cross_entropy((logits.float() if autocast else logits).flatten(0, 1), labels.flatten()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def bfloat16():
    shapes = [
        {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 1024, "n_positions": 128},
        {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": 2048, "n_positions": 128, "multi_query": False},
        {"n_embd": 256, "n_layer": 12, "n_head": 4, "vocab_size": 512, "n_positions": 256},
    ]
    levels = ["v3"] + ["v4"] * ("avx512vl" in Path("/proc/cpuinfo").read_text())
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    directory, batch, result = (FILES / name for name in ("bfloat16-model", "batch.safetensors", "result.safetensors"))
    for number, (shape, uneven) in enumerate(itertools.product(shapes, (False, True)), 1):
        torch.manual_seed(number)
        model = GPTBigCodeForCausalLM(GPTBigCodeConfig(attn_implementation="sdpa", **shape, **no_dropout, **NO_SPECIAL))
        if uneven:
            blur(model, 0.5, 0.1)
        model.save_pretrained(directory)
        stream = torch.randint(shape["vocab_size"], (4, shape["n_positions"] + 1))
        ids, labels = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
        save_file({"input_ids": ids, "labels": labels}, batch)
        autocast = backpropagated(model, ids, labels, autocast=True)
        exact = backpropagated(model.double(), ids, labels)
        together = torch.cat([g.flatten() for g in exact.values()])
        error = lambda gradients: errors(torch.cat([gradients[name].flatten() for name in exact]), together)[0]
        print(f"\n3.{number} bfloat16, {'uneven' if uneven else 'initial'} weights: {shape}", flush=True)
        for level in levels:
            onescale("gradients", model=directory, batch=batch, out=result, dtype="bfloat16", isa=level)
            found = load_file(result)
            row(f"whole gradient, relative L2 at {level}; the limit is autocast's",
                error({name: found[f"grad.{name}"].double() for name in exact}), error(autocast))


def blur(model, product_scale, other_scale):
    """Biases and LayerNorm away from 0 and 1, weights that make attention uneven."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            product = p.ndim == 2 and ".wte." not in name and ".wpe." not in name
            p.add_(torch.randn_like(p) * (product_scale / math.sqrt(p.shape[1]) if product else other_scale))


def from_transformers():
    """Odd sizes, so that no tail of a loop goes unseen, and every setting that changes numbers."""
    odd = {"vocab_size": 211, "n_positions": 61, "n_embd": 60, "n_layer": 3, "n_inner": 77, **NO_SPECIAL}
    erf, many = {"activation_function": "gelu"}, {"multi_query": False}
    cases = [
        ("multi-query, tanh GELU", {"n_head": 5}),
        ("multi-head, erf GELU, no n_inner", {"n_head": 4, "n_inner": None, "layer_norm_epsilon": 1e-3, **many, **erf}),
        ("multi-query, erf GELU, scores not scaled", {"n_head": 3, **erf, "scale_attn_weights": False}),
        ("multi-head, head not tied, in several files", {"n_head": 6, **many, "tie_word_embeddings": False}),
    ]
    for number, (title, settings) in enumerate(cases, 1):
        torch.manual_seed(number)
        model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**{**odd, **settings}))
        blur(model, 0.7, 0.25)
        directory = FILES / f"transformers-{number}"
        model.save_pretrained(directory, max_shard_size="200KB" if "several" in title else "1GB")
        stream = torch.randint(odd["vocab_size"], (4, 38))
        ids, labels = stream[:, :-1], stream[:, 1:].clone()
        labels[torch.rand(labels.shape) < 0.3] = IGNORED
        labels[0, :17] = labels[-1] = IGNORED  # a prompt, and a row without any target
        compare(f"1.{number} transformers -> onescale, {title}", directory, ids, labels)


def to_transformers():
    run = ARGS.run
    if not newest_checkpoint(run):
        run = FILES / "tiny-run"
        print(f"\n{ARGS.run} has no checkpoint: 20 steps of a tiny model instead", flush=True)
        onescale("train", data=ARGS.data, run_dir=run, n_positions=128, n_embd=60, n_layer=2, n_head=5, steps=20,
                 global_batch=4, micro_batch=2, warmup_steps=5, lr=3e-3, eval_every=0)
    checkpoint = newest_checkpoint(run)
    model, _ = load(checkpoint)
    rows = Rows(ARGS.data, min(256, model.config.n_positions), seed=7)
    if rows.vocab_size > model.config.vocab_size:
        fail(f"{ARGS.data} has more ids than {checkpoint}; give the --data that the --run was trained on")
    ids, labels = rows.batch(0, 2)
    compare("2.1 onescale -> transformers, checkpoint", checkpoint, ids, labels)
    onescale("export", model=run, out=FILES / "bfloat16", dtype="bfloat16")
    compare("2.2 onescale -> transformers, bfloat16 export", FILES / "bfloat16", ids, labels)
    half = dict(load(FILES / "bfloat16")[0].named_parameters())
    wrong = sum(half[name].dtype != torch.bfloat16 or not torch.equal(half[name], p.bfloat16())
                for name, p in model.named_parameters())
    row("tensors that are not the checkpoint's, rounded to bfloat16", wrong, 0)


def philox(counter, key):
    """Word 0 of Philox4x32-10, as kernels/philox.h."""
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
            mask, count = path.with_suffix(".mask"), len(tokens[-1])
            bits = np.fromfile(mask, np.uint8) if mask.exists() else np.zeros(count // 8 + 1, np.uint8)
            masks.append(np.unpackbits(bits, bitorder="little")[:count])
        if not tokens:
            fail(f"{directory} holds no train_*.bin; run scripts/quickstart.sh first, or name prepared --data")
        self.tokens, self.vocab_size = np.concatenate(tokens), int(header[3])
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
    lr, least, warmup = RECIPE["lr"], RECIPE["min_lr"], RECIPE["warmup_steps"]
    if step < warmup:
        return lr * (step + 1) / warmup
    return least + 0.5 * (lr - least) * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))


def train_pytorch(directory, rows, dtype):
    """The loss of each step, and the weights after the last."""
    model = load(directory, dtype)[0].train()
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.ndim == 2], "weight_decay": RECIPE["weight_decay"]},
              {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(RECIPE["beta1"], RECIPE["beta2"]), eps=RECIPE["eps"])
    losses = []
    for step in range(STEPS):
        ids, labels = rows.batch(step, ROWS)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        # clip_grad_norm_ divides by norm + 1e-6, one part in a million off the definition.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()
        for p in parameters:
            p.grad.mul_(min(1.0, RECIPE["clip_norm"] / norm))
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), model


def train_onescale(directory):
    run = FILES / "run"  # in micro-batches of two, where PyTorch takes the eight rows at once: the step is the same
    onescale("train", model=directory, data=ARGS.data, run_dir=run, seq_len=SEQ_LEN, global_batch=ROWS, micro_batch=2,
             eval_every=0, save_every=0, **RECIPE)
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return np.array(losses), load(newest_checkpoint(run))[0]


def weights_of(model):
    """All weights but the keys' biases: their exact gradient is 0, and AdamW makes steps of its rounding."""
    for name, p in model.named_parameters():
        if name.endswith("c_attn.bias"):
            p.data[SHAPE["n_embd"] :][: SHAPE["n_embd"] // SHAPE["n_head"]] = 0
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def draw(losses, gaps):
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 8), layout="constrained")
    for name, width, colour in zip(CURVES[::-1], (6, 2.5, 0.8), ("#dddddd", "#8ab8e6", "#b3261e")):
        above.plot(losses[name], label=name, linewidth=width, color=colour)
    for (name, gap), width, colour in zip(list(gaps.items())[::-1], (3, 1, 0.8), ("#a9cdef", "#e69138", "#b3261e")):
        below.semilogy(gap, label=name, linewidth=width, color=colour)
    below.axhline(GAP_LIMIT, color="black", linestyle="--", label="limit for onescale")
    above.set(ylabel="loss", title=f"{STEPS} steps from the same weights on the same rows")
    below.set(xlabel="step", ylabel="relative gap of the loss", ylim=(1e-11, 1e-3))
    for axes, place in ((above, "upper right"), (below, "lower right")):
        axes.legend(ncols=2, loc=place)
        axes.grid(alpha=0.3)
    figure.savefig(ARGS.out / "loss_curves.png", dpi=120)


def loss_curve():
    print(f"\n4. {STEPS} steps of {ROWS} rows of {SEQ_LEN} tokens: {ARGS.data}", flush=True)
    rows, start = Rows(ARGS.data, SEQ_LEN, SEED), FILES / "start"
    torch.manual_seed(SEED)
    config = GPTBigCodeConfig(vocab_size=rows.vocab_size, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, **SHAPE)
    GPTBigCodeForCausalLM(config).save_pretrained(start)
    losses, weights, gaps = {}, {}, {}
    for name in CURVES:
        begin = time.monotonic()
        losses[name], model = (train_onescale(start) if name == "onescale" else
                               train_pytorch(start, rows, getattr(torch, name.split()[1])))
        weights[name] = weights_of(model)
        note = "loss {:.7f} to {:.7f}".format(*losses[name][[0, -1]])
        row(f"{name}, seconds", round(time.monotonic() - begin), note=note)
    for a, b in itertools.combinations(CURVES, 2):
        gap = gaps[f"{a} to {b}"] = abs(losses[a] / losses[b] - 1)
        limits = (WARM_LIMITS[b], GAP_LIMIT, WEIGHT_LIMIT) if a == "onescale" else ("", "", "")
        row(f"{a} to {b}, largest gap of the loss in {WARM} steps", gap[:WARM].max().item(), limits[0])
        row(f"{a} to {b}, largest gap of the loss", gap.max().item(), limits[1], f"step {gap.argmax()}")
        row(f"{a} to {b}, final weights, relative L2", errors(weights[a], weights[b])[0], limits[2])
    draw(losses, gaps)


def main():
    if not ARGS.onescale.is_file():
        fail(f"{ARGS.onescale} does not exist; build it (scripts/quickstart.sh), or name it with --onescale")
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir(parents=True)
    print(f"  {'what':66s}{'figure':>10s}{'limit':>10s}", flush=True)
    from_transformers()
    to_transformers()
    bfloat16()
    loss_curve()
    print(f"\n{ARGS.out / 'loss_curves.png'} shows the curves; past their limits: {'; '.join(BROKEN) or 'none'}")
    sys.exit(bool(BROKEN))


main()
