"""Fine-tuning with merging on: the same curve in one process, in two, and after a kill; and what it wins back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.layers import DropPath
from torch import Tensor
from transformers import ViTImageProcessor

import tokenmerge as tm
from tests.contract.table import batch, build
from tests.helpers import cli, kill_after, launch
from tokenmerge.core.matching import TopRule
from tokenmerge.data import embedded
from tokenmerge.engine.patch import plan_of
from tokenmerge.methods.base import Rule
from tokenmerge.training.finetune import _Training
from tokenmerge.training.recipe import MicroBatches, Recipe, training_images
from tokenmerge.training.whole_batch import count_whole_batch, set_plan

METHOD = "ATM(0.95, 0.08, 0.3)"  # r is counted over the whole step: in two processes, by both together
SHORT = ("--epochs", 1, "--batch-size", 24, "--micro-batch", 12, "--lr", 3e-4, "--cpu", "--method", METHOD)


def curve(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()[1:]]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def test_two_processes_follow_one_with_accumulation(tmp_path: Path) -> None:
    """20 steps of 24 images, mixup and cutmix on: two micro-batches one after the other, or one in each process."""
    done = cli("finetune", "embedded", "embedded", *SHORT, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    both = launch("finetune", "embedded", "embedded", *SHORT, "--out", tmp_path / "two", processes=2)
    _, err = both.communicate(timeout=240)
    assert both.returncode == 0, err
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == 20
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-3


@pytest.mark.slow
def test_two_processes_where_a_parameter_is_not_used(tmp_path: Path) -> None:
    """DINOv2's mask token has no part in classification: its gradient never comes."""
    model = build("hf-dinov2")
    assert "embeddings.mask_token" in " ".join(name for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    ViTImageProcessor(size={"height": 40, "width": 40}).save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    for number in range(72):  # three steps: what is missing in one is noticed in the next
        (tmp_path / "images" / str(number % 7)).mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 255, (40, 40, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / str(number % 7) / f"{number}.png")
    args = ("finetune", f"hf:{tmp_path / 'model'}", tmp_path / "images", *SHORT)
    for out, processes in (("one", 1), ("two", 2)):
        run = launch(*args, "--out", tmp_path / out, processes=processes)
        _, err = run.communicate(timeout=240)
        assert run.returncode == 0, err
    assert curve(tmp_path / "one") == pytest.approx(curve(tmp_path / "two"), abs=1e-4)


@pytest.mark.slow
def test_a_killed_run_resumes_on_the_same_curve(tmp_path: Path) -> None:
    args = ("finetune", "embedded", "embedded", *SHORT, "--save-every", 3, "--ema", 0.9)
    run = launch(*args, "--out", tmp_path / "killed")
    kill_after(run, tmp_path / "killed" / "steps.jsonl", 9)
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    (tmp_path / "killed" / "checkpoint-00000012.part").mkdir(exist_ok=True)  # as if killed while it saved
    before = curve(tmp_path / "killed")
    assert 8 <= len(before) < 20
    assert cli(*args, "--out", tmp_path / "killed").returncode == 0
    assert cli(*args, "--out", tmp_path / "whole").returncode == 0
    killed, whole = curve(tmp_path / "killed"), curve(tmp_path / "whole")
    assert killed == pytest.approx(whole, abs=1e-6)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole"))
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-5
    assert [p.name for p in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-00000020"]
    other = cli(*args, "--seed", 5, "--out", tmp_path / "killed")
    assert other.returncode == 2
    assert "a run with another model, recipe" in other.stderr


def test_ema_is_the_moving_average_of_the_weights(tmp_path: Path) -> None:
    """θ̄ ← d·θ̄ + (1 − d)·θ over the steps, from the weights before the first. It is saved next to the weights, as by DeiT's
    script, and the model is left with it if asked for."""
    x, y = torch.randn(8, 3, 40, 40, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 7
    model = build("cls")
    name = "blocks.0.mlp.fc1.weight"
    average = model.state_dict()[name].clone()

    def log(step: int, values: Mapping[str, float]) -> None:
        average.mul_(0.8).add_(model.state_dict()[name], alpha=0.2)

    recipe = Recipe(epochs=4, batch_size=8, micro_batch=8, lr=1e-2, lr_batch=None, mixup=0, cutmix=0, ema=0.8)
    tm.finetune(model, [(x, y)], tm.ToMe(4), tmp_path / "plain", recipe, cpu=True, log=log)
    torch.testing.assert_close(load_file(tmp_path / "plain" / "ema.safetensors")[name], average, atol=1e-6, rtol=1e-5)
    plain = load_file(tmp_path / "plain" / "model.safetensors")[name]
    torch.testing.assert_close(model.state_dict()[name], plain, atol=0, rtol=0)
    assert float((plain - average).abs().max()) > 1e-3
    other = build("cls")
    tm.finetune(other, [(x, y)], tm.ToMe(4), tmp_path / "ema", replace(recipe, use_ema=True), cpu=True)
    torch.testing.assert_close(load_file(tmp_path / "ema" / "model.safetensors")[name], average, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(other.state_dict()[name], average, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [0, 1])
def test_half_of_the_loss_is_won_back(teacher: int, tmp_path: Path) -> None:
    """The config keeps 13 % of the GMACs; 500 embedded images, six epochs."""
    done = cli(
        "finetune", "embedded", "embedded", "--test", "embedded", "--out", tmp_path, "--epochs", 6, "--batch-size", 50,
        "--method", "ATM(0.85, 0.1, 0.1, batch='each')", "--micro-batch", 50, "--lr", 3e-4, "--min-lr", 3e-5,
        "--mixup", 0, "--cutmix", 0, "--ema", 0.95, "--use-ema", "--unscaled-lr", "--drop-path", 0, "--repeats", 1,
        "--teacher", teacher, "--cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    baseline, training_free, tuned = json.loads(done.stdout)
    lost = baseline["top1"] - training_free["top1"]
    assert lost >= 0.03
    assert tuned["top1"] - training_free["top1"] >= lost / 2
    assert tuned["gmacs_ratio"] < 0.2


def test_folders_are_augmented_and_every_micro_batch_has_its_seed(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for kind in "abcdefg":
        (tmp_path / kind).mkdir()
        for i in range(2):
            Image.fromarray((torch.rand(60, 50, 3, generator=generator) * 255).byte().numpy()).save(
                tmp_path / kind / f"{i}.png"
            )
    model = build("cls")
    images = training_images(str(tmp_path), model, "rand-m9-mstd0.5-inc1", 0.25)
    recipe = Recipe(epochs=2, batch_size=7, micro_batch=7, mixup=0, cutmix=0, repeats=1)
    batches = MicroBatches(images, recipe, [(step, 0) for step in range(4)])
    first = [batches[i] for i in range(4)]
    assert all(torch.equal(first[i][0], batches[i][0]) for i in (3, 1))
    assert sorted(torch.cat([y for _, y in first[:2]]).tolist()) == sorted([*range(7)] * 2), "an epoch has every image once"


def test_repeated_augmentation_shows_an_image_three_times_in_other_forms() -> None:
    x = torch.arange(24.0).view(24, 1, 1, 1).expand(24, 3, 4, 4).contiguous()
    recipe = Recipe(batch_size=12, micro_batch=6)
    assert recipe.repeats == 3
    batches = MicroBatches(tm.Images.of([(x, torch.arange(24))]), recipe, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
    seen = [batches[i][1].tolist() for i in range(5)]
    epoch = [*seen[0], *seen[1], *seen[2], *seen[3]]
    assert [epoch[i] for i in range(0, 24, 3)] == [epoch[i + 2] for i in range(0, 24, 3)]
    assert len(set(epoch)) == 8
    assert set(seen[4]) != set(seen[0]), "the next epoch draws other images"


def test_the_copies_of_an_image_are_augmented_differently(tmp_path: Path) -> None:
    for kind in "abcdefg":
        (tmp_path / kind).mkdir()
        pixels = torch.rand(60, 50, 3, generator=torch.Generator().manual_seed(ord(kind)))
        Image.fromarray((pixels * 255).byte().numpy()).save(tmp_path / kind / "0.png")
    images = training_images(str(tmp_path), build("cls"))
    x, y = MicroBatches(images, Recipe(batch_size=6, micro_batch=6), [(0, 0)])[0]
    assert y[:3].tolist() == [int(y[0])] * 3
    assert all(not torch.equal(x[i], x[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_the_learning_rate_is_the_papers_with_deits_scaling() -> None:
    recipe = Recipe(batch_size=1024)
    assert recipe.learning_rate(0) == pytest.approx(2e-5 * 1024 / 512)
    assert recipe.learning_rate(1) == pytest.approx(3e-6)
    assert recipe.learning_rate(0.5) == pytest.approx((4e-5 + 3e-6) / 2)
    assert replace(recipe, lr_batch=None).learning_rate(0) == pytest.approx(2e-5)
    assert Recipe(batch_size=256).learning_rate(0) == pytest.approx(1e-5)


def test_the_recipe_is_deits() -> None:
    """The defaults of DeiT's main.py, but for epochs, warm-up and learning rates, which the paper gives."""
    recipe = Recipe()
    assert (recipe.epochs, recipe.lr, recipe.min_lr) == (30, 2e-5, 3e-6)
    assert (recipe.weight_decay, recipe.mixup, recipe.cutmix, recipe.smoothing) == (0.05, 0.8, 1.0, 0.1)
    assert (recipe.drop_path, recipe.repeats, recipe.ema, recipe.clip) == (0.1, 3, 0.99996, None)


def test_drop_path_is_on_while_training_and_gone_after(tmp_path: Path) -> None:
    x, y = torch.randn(8, 3, 40, 40, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 7
    model: Any = build("cls")
    rates: list[float] = []

    def log(step: int, values: Mapping[str, float]) -> None:
        rates.extend(getattr(block.drop_path2, "drop_prob", 0.0) for block in model.blocks)
        assert values["seconds"] > 0

    recipe = Recipe(epochs=1, batch_size=8, micro_batch=8, repeats=1)
    model.blocks[2].drop_path1 = own = DropPath(0.3)
    tm.finetune(model, [(x, y)], tm.ToMe(4), tmp_path / "drop", recipe, cpu=True, log=log)
    assert rates == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1])
    assert model.blocks[2].drop_path1 is own, "the model's own is restored"
    assert not isinstance(model.blocks[3].drop_path1, DropPath)
    with pytest.warns(UserWarning, match="no stochastic depth"):
        tm.finetune(build("torchvision"), [(x, y)], tm.ToMe(4), tmp_path / "other", recipe, cpu=True)


def test_r_is_that_of_the_whole_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Micro-batches of 4 merge what the batch of 12 does on average, not each what it would by itself."""
    images = batch("cls", 12)
    method = tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2])

    def tokens(model: Any, x: Tensor) -> list[int]:
        with torch.no_grad(), tm.trace(model) as t:
            model(x)
        return [int(layer[0]) for layer in t.tokens[:-1]]

    model = tm.apply(build("cls"), method)
    whole = tokens(model, images)
    alone = [tokens(model, part) for part in images.split(4)]
    assert any(own != whole for own in alone)
    plan = plan_of(model)
    set_plan(model, count_whole_batch(model, plan, images, lambda count: count))
    assert [tokens(model, part) for part in images.split(4)] == [whole] * 3
    assert plan_of(model).rules != plan.rules

    seen: list[tuple[Rule | None, ...]] = []
    backward = _Training._backward

    def spied(self: _Training, *args: Any) -> Tensor:
        seen.append(args[-1][0].rules)
        return backward(self, *args)

    monkeypatch.setattr(_Training, "_backward", spied)
    recipe = Recipe(epochs=1, batch_size=12, micro_batch=4, repeats=1, mixup=0, cutmix=0)
    trained = build("cls")

    def log(step: int, values: Mapping[str, float]) -> None:
        assert plan_of(trained).rules == plan.rules, "what is evaluated between two steps is the method itself"

    tm.finetune(trained, [(images, torch.arange(12) % 7)], method, tmp_path, recipe, cpu=True, log=log)
    assert len(seen) == 3
    assert all(isinstance(rule, TopRule) for rule in seen[0])
    assert seen[0] == seen[1] == seen[2]
    assert plan_of(trained).rules == plan.rules, "the model is left with its own"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 10, "micro_batch": 4}, "cannot be cut into micro-batches of 4"),
        ({"batch_size": 1024, "micro_batch": 64}, "500 images are fewer than one batch of 1024"),
    ],
)
def test_bad_recipes(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        tm.finetune(embedded.load_model(), embedded.load_images("train"), tm.ToMe(4), tmp_path, Recipe(**change), cpu=True)


def test_other_models_learn(tmp_path: Path) -> None:
    """With recomputed activations, in bfloat16, with clipped gradients, odd micro-batches and workers that read."""
    x, y = torch.randn(10, 3, 40, 40, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 7
    images = tm.Images.of([(x, y)])
    for name in ("hf-vit", "cls"):
        losses: list[float] = []
        recipe = Recipe(
            epochs=6, batch_size=10, micro_batch=5, lr=1e-2, lr_batch=None, checkpointing=True, clip=1.0, bf16=True,
            mixup=0.1, drop_path=0, repeats=1,
        )  # fmt: skip
        model = build(name)

        def log(step: int, values: Mapping[str, float], losses: list[float] = losses) -> None:
            assert step == len(losses)
            losses.append(values["loss"])

        tm.finetune(model, images, tm.ToMe(4), tmp_path / name, recipe, workers=2, cpu=True, log=log)
        assert losses[-1] < losses[0]
        assert tm.evaluate(tm.remove(model), images, [tm.ToMe(4)])[1].images == 10
        if name == "hf-vit":
            again = tm.load_model(f"hf:{tmp_path / name}")
            with torch.inference_mode():
                torch.testing.assert_close(again(x).logits, model(x).logits, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="has no gradient checkpointing"):
        tm.finetune(build("torchvision"), images, tm.ToMe(4), tmp_path / "tv", recipe, cpu=True)
    wrong = tm.Images.of([(x, y + 3)])
    with pytest.raises(ValueError, match="label 9 does not fit a model with 7 classes"):
        tm.finetune(build("cls"), wrong, tm.ToMe(4), tmp_path / "wrong", Recipe(batch_size=10, micro_batch=5), cpu=True)
    with pytest.raises(ValueError, match="a run with another model"):
        tm.finetune(build("cls", seed=3), images, tm.ToMe(4), tmp_path / "cls", recipe, cpu=True)
    with pytest.raises(ValueError, match="has no classes to learn"):
        tm.finetune(build("features"), images, tm.ToMe(4), tmp_path / "none", Recipe(batch_size=10, micro_batch=5), cpu=True)
