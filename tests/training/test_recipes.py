"""Published schedules, reductions that grow, and the loss between two reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import tokenmerge as tm
from tests.contract.table import METHODS, build
from tests.helpers import cli, kill_after, launch
from tests.training.test_finetune import curve
from tokenmerge.data import embedded
from tokenmerge.data.load import as_images
from tokenmerge.engine.features import cosine_distances, run_model
from tokenmerge.engine.forward import method_modules
from tokenmerge.engine.patch import plan_of
from tokenmerge.methods import parse
from tokenmerge.training.finetune import _Training
from tokenmerge.training.passes import label_probability
from tokenmerge.training.recipe import RECIPES, Recipe

PLAIN = {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0, "drop_path": 0.0, "repeats": 1, "ema": None, "lr_batch": None}


def test_published_schedules() -> None:
    """Rate of the first step, at half of the run, and at its end; epochs; weight decay (docs/evaluation.md)."""
    rates = {name: [recipe.learning_rate(done) for done in (0, 0.5, 1)] for name, recipe in RECIPES.items()}
    assert rates["atm"] == pytest.approx([4e-5, (4e-5 + 3e-6) / 2, 3e-6])
    assert rates["evit"] == pytest.approx([8e-5, (8e-5 + 2e-6) / 2, 2e-6])
    assert rates["bat"] == pytest.approx([4e-5, (4e-5 + 2e-6) / 2, 2e-6])
    assert rates["tome"] == pytest.approx([1e-6, (1e-3 + 1e-5) / 2, 1e-5])
    assert rates["evit-scratch"] == pytest.approx([1e-6, (2e-3 + 1e-5) / 2, 1e-5])
    assert RECIPES["tome"].learning_rate(2.5 / 300) == pytest.approx((1e-6 + 1e-3) / 2), "half of the warm-up"
    mctf = RECIPES["mctf"]
    assert rates["mctf"] == pytest.approx([3e-5, 1e-6 + 2.9e-5 * (1 + math.cos(math.pi * 20 / 30)) / 2, 1e-6])
    assert mctf.learning_rate(30 / 40) == mctf.learning_rate(0.9) == pytest.approx(1e-6)
    assert {name: recipe.epochs for name, recipe in RECIPES.items() if recipe.epochs != 30} == {
        "tome": 300,
        "evit-scratch": 300,
        "mctf": 40,
        "iared2": 90,
        "evovit": 300,
        "avit": 100,
    }
    assert rates["dynamicvit"] == pytest.approx([0, (1e-3 + 1e-6) / 2, 1e-6])
    assert rates["iared2"] == pytest.approx([4e-5, (4e-5 + 1e-6) / 2, 1e-6])
    assert rates["evovit"] == pytest.approx([1e-6, (1e-3 + 1e-5) / 2, 1e-5])
    assert rates["avit"] == pytest.approx([1e-6, (2.25e-4 + 1e-5) / 2, 1e-5])
    with pytest.raises(ValueError, match="leave none between a warm-up of 5"):
        Recipe(epochs=5, warmup=5)


def test_the_reduction_grows_as_evits_keep_rate_falls() -> None:
    """keep = base + (1 − base)·(1 + cos πt)/2 over 100 epochs from the tenth on."""
    recipe, method = RECIPES["evit-scratch"], tm.EViT(0.7)
    for epoch, keep in ((0, 1.0), (9.9, 1.0), (35, 0.7 + 0.3 * (1 + math.cos(math.pi / 4)) / 2), (60, 0.85), (110, 0.7)):
        assert method.scaled(recipe.reduction(epoch / 300), 12).keep == pytest.approx(keep)
    assert Recipe().reduction(0) == 1


@pytest.mark.parametrize("name", METHODS)
def test_any_reduction_can_be_scaled_or_says_that_it_cannot(name: str) -> None:
    method = METHODS[name]
    if name in ("ats", "diffrate", "iared2", "avit"):
        with pytest.raises(ValueError, match="has no reduction that could be scaled"):
            method.scaled(0.5, 4)
        return
    model, x = build("cls").eval(), torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    left = []
    for fraction in (0.0, 0.5, 1.0):
        with tm.trace(tm.apply(model, method.scaled(fraction, 4))) as t:
            out = model(x)
        left.append(float(t.tokens[-2].double().sum()))
    torch.testing.assert_close(out, tm.apply(model, method)(x), atol=0, rtol=0)
    assert left[0] == 2 * t.tokens_in[0][0]
    assert left[0] >= left[1] >= left[2]
    assert name == "none" or left[0] > left[2]


def test_labels_of_mixed_and_smoothed_images() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    p = logits.softmax(1)
    torch.testing.assert_close(label_probability(logits, torch.tensor([0, 1])), torch.stack((p[0, 0], p[1, 1])))
    mixed = torch.tensor([[0.6, 0.37, 0.03], [0.03, 0.94, 0.03]])
    torch.testing.assert_close(label_probability(logits, mixed), torch.stack((p[0, 0] + p[0, 1], p[1, 1])))


def first_loss(
    recipe: Recipe, method: tm.Method, tmp_path: Path
) -> tuple[float, torch.nn.Module, torch.Tensor, torch.Tensor]:
    x, y = torch.randn(8, 3, 40, 40, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 7
    model = build("cls").eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    losses: list[float] = []
    tm.finetune(model, [(x, y)], method, tmp_path, recipe, cpu=True, log=lambda step, row: losses.append(row["loss"]))
    model.load_state_dict(state)
    return losses[0], tm.remove(model), x, y


def test_the_loss_between_two_reductions(tmp_path: Path) -> None:
    """CE of both, and the squared difference of the features over the images whose label is likely enough."""
    # the weak one is always a quarter of r = 8
    recipe = Recipe(epochs=1, batch_size=8, micro_batch=8, consistency=3.0, weak=(0.25, 0.25), confidence=0.14, **PLAIN)
    found, model, x, y = first_loss(recipe, tm.ToMe(8), tmp_path)
    model.requires_grad_(False)
    strong, weak = (run_model(tm.apply(model, tm.ToMe(r)), x) for r in (8, 2))
    sure = strong.logits.softmax(1)[torch.arange(8), y] > 0.14
    assert 0 < sure.sum() < 8
    miss = ((strong.features - weak.features) ** 2).mean(1)[sure].mean()
    expected = F.cross_entropy(strong.logits, y) + F.cross_entropy(weak.logits, y) + 3 * miss
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert float(miss) > 1e-4


def test_the_loss_without_labels(tmp_path: Path) -> None:
    recipe = Recipe(epochs=1, batch_size=8, micro_batch=8, consistency=2.0, weak=(0.0, 0.0), labels=False, **PLAIN)
    found, model, x, _ = first_loss(recipe, tm.ToMe(8), tmp_path)
    model.requires_grad_(False)
    strong, baseline = run_model(tm.apply(model, tm.ToMe(8)), x), run_model(tm.remove(model), x)
    assert found == pytest.approx(float(2 * ((strong.features - baseline.features) ** 2).mean()), rel=1e-5)
    with pytest.raises(ValueError, match="without labels"):
        Recipe(labels=False)


def test_training_without_labels_brings_the_features_back(tmp_path: Path) -> None:
    """Four epochs of 100 embedded images; 100 others."""
    model = embedded.load_model()
    method = tm.EViT(0.4)
    test = torch.cat([batch.images for batch in embedded.load_images("test", 100).batches(50)])
    with torch.inference_mode():
        baseline = run_model(model, test).features
        before = cosine_distances(run_model(tm.apply(model, method), test).features, baseline).mean()
        images = embedded.load_images("train", 100)
        recipe = Recipe(epochs=4, batch_size=20, micro_batch=20, lr=1e-4, consistency=3.0, labels=False, **PLAIN)
    tm.finetune(tm.remove(model), images, method, tmp_path, recipe, cpu=True)
    with torch.inference_mode():
        after = cosine_distances(run_model(model, test).features, baseline).mean()
    assert after < 0.6 * before


def test_eval_mode_and_schedules_reach_the_model(tmp_path: Path) -> None:
    images = embedded.load_images("train", 8)
    recipe = Recipe(epochs=4, batch_size=4, micro_batch=4, shrink=(0, 2), eval_mode=True, **PLAIN)
    training = _Training(embedded.load_model(), images, tm.ToMe(8), tmp_path, recipe, True)
    assert not training.model.training
    rules = [[getattr(rule, "r", 0) for rule in training._plans(step)[0].rules] for step in (0, 2, 4, 7)]
    assert [set(r) for r in rules] == [{0}, {4}, {8}, {8}]
    assert plan_of(training.model).rules == training._plans(4)[0].rules


def test_unknown_recipes_and_bad_combinations_are_refused(tmp_path: Path) -> None:
    done = cli("finetune", "embedded", "embedded", "--method", "ToMe(4)", "--recipe", "deit", "--out", tmp_path / "a")
    assert done.returncode == 2
    assert "unknown recipe 'deit'; known: atm, tome, evit" in done.stderr
    args = ("finetune", "embedded", "embedded", "--method", "ATS()", "--recipe", "mctf", "--batch-size", 50)
    done = cli(*args, "--micro-batch", 50, "--cpu", "--out", tmp_path / "b")
    assert done.returncode == 2
    assert "ATS has no reduction that could be scaled" in done.stderr
    assert not any((tmp_path / "b").glob("*"))


# The methods that recipes were published for, where others do not run on them.
OWN = {"dynamicvit": "DynamicViT(0.7)", "iared2": "IARED2()", "evovit": "EvoViT()", "avit": "AViT(beta=30)"}


@pytest.mark.parametrize("recipe", OWN)
def test_a_trained_method_is_saved_with_its_modules(recipe: str, tmp_path: Path) -> None:
    """`remove` leaves the model's own weights; `apply` with the saved method gives the same logits again."""
    method = parse(OWN[recipe])
    name = "mae-avg" if recipe == "evovit" else "cls"
    model, x, labels = (
        build(name),
        torch.randn(8, 3, 40, 40, generator=torch.Generator().manual_seed(0)),
        torch.arange(8) % 7,
    )
    keys, before = list(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    short = replace(RECIPES[recipe], epochs=6, warmup=0, batch_size=8, micro_batch=4, lr=1e-2, lr_batch=None, repeats=1)
    trained = tm.finetune(model, [(x, labels)], method, tmp_path, short, cpu=True)
    with torch.inference_mode():
        expected = model(x)
        new = None if method_modules(model) is None else method_modules(tm.apply(build(name), method))
        assert list(tm.remove(model).state_dict()) == keys
        weights = load_file(tmp_path / "model.safetensors")
        assert sorted(weights) == sorted(keys)
        assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
        other = build(name, seed=1)
        other.load_state_dict(weights)
        for config in (trained, tm.load(tmp_path / "method.json")):
            torch.testing.assert_close(tm.apply(other, config)(x), expected, atol=1e-6, rtol=0)
        if new is not None:
            saved = load_file(tmp_path / "method.modules.safetensors")
            assert sorted(saved) == sorted(new.state_dict())
            assert any(not torch.equal(saved[key], value) for key, value in new.state_dict().items())


def test_only_what_a_schedule_names_learns(tmp_path: Path) -> None:
    """DynamicViT: predictors alone for a sixth of the run, then the backbone at a hundredth; the CLS token never."""
    model, x, labels = build("cls"), torch.randn(4, 3, 40, 40, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    recipe = replace(RECIPES["dynamicvit"], epochs=12, warmup=0, batch_size=4, micro_batch=4, repeats=1, mixup=0, cutmix=0)
    states: list[dict[str, Tensor]] = []

    def keep(step: int, values: Mapping[str, float]) -> None:
        states.append({k: v.clone() for k, v in model.state_dict().items()})

    start = {k: v.clone() for k, v in build("cls").state_dict().items()}
    tm.finetune(model, [(x, labels)], tm.DynamicViT(0.7, layers=[2, 3]), tmp_path, recipe, cpu=True, log=keep)
    assert all(torch.equal(states[1][key], value) for key, value in start.items()), "steps 0 and 1 of 12"
    assert not torch.equal(states[2]["blocks.0.attn.qkv.weight"], start["blocks.0.attn.qkv.weight"])
    for key in ("cls_token", "pos_embed"):
        assert torch.equal(states[-1][key], start[key])
    moved = {part: (states[-1][f"{part}.weight"] - states[2][f"{part}.weight"]).abs().mean() for part in (
        "blocks.0.attn.qkv", "tokenmerge_modules.0.in_conv.1")}  # fmt: skip
    ratio = float(moved["blocks.0.attn.qkv"] / moved["tokenmerge_modules.0.in_conv.1"])
    assert 0.003 < ratio < 0.03, "AdamW moves by about the learning rate"
    short = replace(recipe, module_lr=0.1)
    images = as_images([(x, labels)], model)
    slower = _Training(build("cls"), images, tm.DynamicViT(0.7, layers=[2, 3]), tmp_path / "slower", short, True)
    next(slower.steps(0))
    rates = {group["part"]: group["lr"] for group in slower.optimizer.param_groups}
    assert rates == pytest.approx({"predictors": 0.1 * recipe.learning_rate(0), "backbone": 0, "frozen": 0})


@pytest.mark.parametrize("name", ["cls", "hf-vit"])
def test_weight_decay_leaves_out_vectors_and_embeddings(name: str, tmp_path: Path) -> None:
    """As in DeiT's script: no decay for biases, norms, CLS token and position embedding."""
    recipe = Recipe(batch_size=4, micro_batch=4, drop_path=0)
    x = torch.randn(4, 3, 40, 40)
    training = _Training(build(name), as_images([(x, torch.arange(4))], build(name)), tm.ToMe(4), tmp_path, recipe, True)
    decay = {id(p): group["weight_decay"] for group in training.optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(training.model.parameters()))
    for key, parameter in training.model.named_parameters():
        plain = parameter.ndim > 1 and not (name == "cls" and key in ("cls_token", "pos_embed"))
        assert decay[id(parameter)] == (0.05 if plain else 0.0), key


def test_methods_that_learn_from_labels_say_so(tmp_path: Path) -> None:
    images, small = [(torch.randn(4, 3, 40, 40), torch.arange(4))], Recipe(batch_size=4, micro_batch=4)
    with pytest.raises(ValueError, match="DynamicViT does not learn in eval mode"):
        tm.finetune(build("cls"), images, tm.DynamicViT(0.7), tmp_path, replace(small, eval_mode=True), cpu=True)
    model = build("hf-vit")
    with pytest.raises(tm.Unsupported, match="the norm after the last block"):
        tm.finetune(model, images, tm.DynamicViT(0.7), tmp_path, small, cpu=True)
    assert type(model) is type(build("hf-vit")), "refused before anything is changed"
    recipe = Recipe(labels=False, consistency=3.0, batch_size=4, micro_batch=4)
    with pytest.raises(ValueError, match="AViT learns from labels"):
        tm.finetune(build("cls"), torch.randn(4, 3, 40, 40), tm.AViT(), tmp_path, recipe, cpu=True)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_killed_recipe_resumes_on_the_same_curve(recipe: str, tmp_path: Path) -> None:
    """Also in two processes."""
    args = (
        "finetune", "embedded", "embedded", "--recipe", recipe, "--method", OWN.get(recipe, "ToMe(8)"), "--epochs", 6,
        "--cooldown", 0, "--batch-size", 100, "--micro-batch", 50, "--repeats", 1, "--save-every", 4, "--cpu",
    )  # fmt: skip
    run = launch(*args, "--out", tmp_path / "killed")
    kill_after(run, tmp_path / "killed" / "steps.jsonl", 9)
    assert cli(*args, "--out", tmp_path / "killed").returncode == 0
    both = launch(*args, "--out", tmp_path / "two", processes=2)
    _, err = both.communicate(timeout=600)
    assert both.returncode == 0, err
    assert cli(*args, "--out", tmp_path / "whole").returncode == 0
    whole = curve(tmp_path / "whole")
    assert curve(tmp_path / "killed") == pytest.approx(whole, abs=1e-6)
    assert curve(tmp_path / "two") == pytest.approx(whole, abs=1e-3)
