"""Slow, plain references, written from the definitions and not from the library."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from tokenmerge.cli import app
from tokenmerge.data import embedded


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return min(1.0, float(a @ b / (a.norm() * b.norm())))


def groups(size: list[float], prefix: int, by_size: bool) -> tuple[list[int], list[int]]:
    """Sources and targets of one image."""
    n = len(size)
    if not by_size:
        patches = range(prefix, n)
        return [i for i in patches if i % 2 == 0], [i for i in patches if i % 2 == 1]
    order = sorted(range(prefix, n), key=lambda i: (size[i], i))
    return order[: len(order) // 2], order[len(order) // 2 :]


def slow_pairs(metric: Tensor, size: list[float], prefix: int, by_size: bool) -> list[tuple[float, int, int]]:
    """(cosine, source, its best target) of one image, in the order of the sources."""
    sources, targets = groups(size, prefix, by_size)
    pairs = []
    for i in sources:
        if targets:
            best = max(targets, key=lambda j: cosine(metric[i], metric[j]))
            pairs.append((cosine(metric[i], metric[best]), i, best))
    return pairs


def slow_merge(
    x: Tensor, metric: Tensor, size: list[float], members: list[list[int]], prefix: int, by_size: bool, r: int
) -> tuple[Tensor, list[float], list[list[int]]]:
    """Merge the r best pairs of one image; `members` are the original tokens of each token."""
    pairs = slow_pairs(metric, size, prefix, by_size)
    sources, targets = groups(size, prefix, by_size)
    best = sorted(pairs, key=lambda p: -p[0])[:r]
    if not best:
        return x, size, members
    joined = {j: [i for _, i, k in best if k == j] for j in targets}
    gone = {i for _, i, _ in best}
    rows, sizes, owners = [], [], []
    for i in [*range(prefix), *(s for s in sources if s not in gone), *targets]:
        group = [i, *joined.get(i, [])]
        total = sum(size[g] for g in group)
        rows.append(sum(x[g].double() * size[g] for g in group) / total)
        sizes.append(total)
        owners.append([m for g in group for m in members[g]])
    return torch.stack(rows).to(x.dtype), sizes, owners


def slow_vit(
    model: nn.Module, image: Tensor, count: Callable[[int, list[float]], int], split_layer: int
) -> tuple[Tensor, list[int]]:
    """A merged ViT on one image, block by block in plain formulas; `count(layer, cosines)` says how many pairs merge."""
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    size, members = [1.0] * len(x), [[i] for i in range(len(x))]
    tokens = []
    for layer, block in enumerate(model.blocks, 1):
        h, d = block.attn.num_heads, block.attn.head_dim
        q, k, v = block.attn.qkv(block.norm1(x)).reshape(len(x), 3, h, d).permute(1, 2, 0, 3)
        logits = q @ k.transpose(1, 2) / math.sqrt(d) + torch.tensor(size).log()
        out = (logits.softmax(-1) @ v).transpose(0, 1).reshape(len(x), h * d)
        x = x + block.attn.proj(out)
        metric, by_size = k.mean(0), layer > split_layer
        r = count(layer, [c for c, _, _ in slow_pairs(metric, size, 1, by_size)])
        x, size, members = slow_merge(x, metric, size, members, 1, by_size, r)
        x = x + block.mlp(block.norm2(x))
        tokens.append(len(x))
    x = model.norm(x)
    if model.global_pool == "avg":  # the mean over all original patches
        weight = torch.tensor(size[1:])
        return model.head(model.fc_norm((x[1:] * weight[:, None]).sum(0) / weight.sum())), tokens
    return model.head(x[0]), tokens


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def cli(*args: object) -> Done:
    """The command line in this process: a new one spends seconds on importing torch. Warnings go to stderr, as there."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("default")
        patch.setattr(warnings, "showwarning", lambda message, *rest, **more: print(message, file=sys.stderr))
        patch.setenv("COLUMNS", "120")
        result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def launch(*args: object, processes: int = 1) -> subprocess.Popen[str]:
    """The command line in a process of its own, or in two that torchrun starts; one thread each."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"] if processes == 2 else [sys.executable]
    command = [*run, "-m", "tokenmerge", *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@contextmanager
def web_page(temporary: Path, *args: str, threads: int = 2) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`tokenmerge web` in a process of its own, which is told to end: its address, and the process."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "tokenmerge", "web", *args, "--port", "0"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        assert run.stdout is not None
        yield run.stdout.readline().strip(), run
    finally:
        run.terminate()
        run.communicate(timeout=60)


def kill_after(run: subprocess.Popen[str], file: Path, lines: int) -> None:
    """SIGKILL as soon as the file that the run writes has so many lines."""
    for _ in range(2400):
        if file.exists() and len(file.read_text().splitlines()) >= lines:
            break
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()


def embedded_class_folders(folder: Path) -> Path:
    """Ten of the embedded images, one per class, in class folders."""
    images = embedded.load_images("test", 200)
    batch = next(images.batches(200))
    assert batch.labels is not None
    for label in range(10):
        index = batch.labels.tolist().index(label)
        pixels = (images.denormalise(batch.images[index])[0] * 255).round().byte()
        (folder / f"class {label}").mkdir(parents=True)
        Image.fromarray(pixels.numpy()).save(folder / f"class {label}" / "image.png")
    return folder
