"""The trained methods against slow references in plain loops, their published sizes and costs, masks against removal, and
their losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import tokenmerge as tm
from tests.contract.table import batch, build
from tokenmerge.core.matching import InputView
from tokenmerge.core.state import Update
from tokenmerge.core.tokens import KeyMask
from tokenmerge.engine.forward import method_modules
from tokenmerge.engine.patch import plan_of
from tokenmerge.methods.avit import halting_prior, ponder
from tokenmerge.methods.dynamicvit import EPSILON
from tokenmerge.methods.iared2 import Interpreter
from tokenmerge.methods.learning import TrainingStep
from tokenmerge.training.passes import run_with


def modules_of(model: nn.Module) -> nn.ModuleDict:
    modules = method_modules(model)
    assert modules is not None
    return modules


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in modules_of(model).parameters())


# Published sizes and costs.


def test_published_parameters_and_gmacs_of_deit_s() -> None:
    model, x = timm.create_model("deit_small_patch16_224").eval(), torch.randn(1, 3, 224, 224)
    tm.apply(model, tm.DynamicViT(0.7, last_layer="full"))
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(x)
    assert parameters(model) == 723_750
    assert t.cost().gmacs == pytest.approx(2.981, abs=5e-4)
    assert t.cost().gmacs - t.cost().matching_gmacs == pytest.approx(2.878, abs=5e-4)
    assert [int(n[0]) - 1 for n in t.tokens][3::3] == [137, 96, 67]
    assert parameters(tm.apply(model, tm.IARED2())) == 1_330_560
    assert method_modules(tm.apply(model, tm.AViT())) is None
    pooled = tm.apply(timm.create_model("deit_small_patch16_224", global_pool="avg").eval(), tm.EvoViT())
    with torch.inference_mode(), tm.trace(pooled, detail=False) as t:
        pooled(x)
    assert t.cost().gmacs == pytest.approx(3.033, abs=7e-4)
    assert parameters(pooled) == 385_768, "while training"
    assert [int(n[0]) for n in t.tokens] == [197] * 4 + [99] * 8


# Slow references: one image, one token after the other.


def attend(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n,C] after the attention half of a timm block, and the attention of the first token summed over heads, [n]."""
    attn = block.attn
    n, c = x.shape
    d = c // attn.num_heads
    qkv = attn.qkv(block.norm1(x))
    out, row = torch.zeros(n, c), torch.zeros(n)
    for h in range(attn.num_heads):
        q, k, v = (qkv[:, part * c + h * d : part * c + (h + 1) * d] for part in range(3))
        for i in range(n):
            weights = torch.stack([q[i] @ k[j] / math.sqrt(d) for j in range(n)]).softmax(0)
            out[i, h * d : (h + 1) * d] = sum((weights[j] * v[j] for j in range(n)), torch.zeros(d))
            if i == 0:
                row += weights
    return x + attn.proj(out), row


def feed(block: Any, x: Tensor) -> Tensor:
    return x + block.mlp(block.norm2(x))


def embed(model: Any, image: Tensor) -> Tensor:
    tokens: Tensor = model._pos_embed(model.patch_embed(image[None]))[0]
    return tokens


def ranked(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def slow_dynamicvit(model: Any, image: Tensor, method: tm.DynamicViT) -> Tensor:
    x = embed(model, image)
    patches = len(x) - 1
    for layer, block in enumerate(model.blocks, 1):
        if layer in (method.layers or ()):
            stage = sorted(method.layers or ()).index(layer)
            made = modules_of(model)[str(stage)]
            u = [made.in_conv(token) for token in x[1:]]
            half = len(u[0]) // 2
            mean = sum((one[half:] for one in u), torch.zeros(half)) / len(u)
            scores = [float(made.out_conv(torch.cat((one[:half], mean))).log_softmax(0)[0]) for one in u]
            kept = ranked(scores)[: int(patches * method.keep ** (stage + 1))]
            x = torch.stack([x[0], *(x[1 + i] for i in kept)])
        x = feed(block, attend(block, x)[0])
    return model.head(model.norm(x)[0])


def slow_iared2(model: Any, image: Tensor, method: tm.IARED2) -> Tensor:
    x = embed(model, image)
    for layer, block in enumerate(model.blocks, 1):
        if layer in (method.layers or ()):
            made = modules_of(model)[str(sorted(method.layers or ()).index(layer))]
            z = [(t - t.mean()) / (t.var(correction=0) + 1e-5).sqrt() for t in x]
            c, heads = len(x[0]), made.heads
            q, keys = made.qk(z[0])[:c].chunk(heads), [made.qk(one)[c : 2 * c].chunk(heads) for one in z]
            p = [sum(float((q[h] @ k[h] / math.sqrt(c // heads)).sigmoid()) for h in range(heads)) / heads for k in keys]
            x = torch.stack([x[i] for i in range(len(x)) if i == 0 or p[i] > method.threshold])
        x = feed(block, attend(block, x)[0])
    return model.head(model.norm(x)[0])


def slow_evovit(model: Any, image: Tensor, method: tm.EvoViT) -> Tensor:
    """Four blocks: from the second on, each is a stage of its own."""
    x, attention = embed(model, image), [0.0]
    for layer, block in enumerate(model.blocks, 1):
        if layer == 1:
            x, row = attend(block, x)
            attention = row.tolist()
            x = feed(block, x)
            continue
        order = [1 + i for i in ranked(attention[1:])]
        slow, aside = order[: int(len(order) * method.keep)], order[int(len(order) * method.keep) :]
        moving, row = attend(block, torch.stack([x[i] for i in (0, *slow)]))
        attention = [0.5 * (attention[i] + float(a)) for i, a in zip((0, *slow), row, strict=True)] + [
            attention[i] for i in aside
        ]
        x = torch.cat((feed(block, moving), torch.stack([x[i] for i in aside])))
    return model.head(model.norm(x)[0]) if model.global_pool == "token" else model.head(model.fc_norm(x[1:].mean(0)))


def slow_avit(model: Any, image: Tensor, method: tm.AViT) -> Tensor:
    x = embed(model, image)
    n = len(x)
    alive, c, left = [True] * n, [0.0] * n, [1.0] * n
    out = torch.zeros(x.shape[1])
    for layer, block in enumerate(model.blocks, 1):
        now = [i for i in range(n) if alive[i]]
        x[now] = feed(block, attend(block, x[now])[0])
        for i in now:
            h = 1.0 if layer == len(model.blocks) else float(torch.sigmoid(method.gamma * x[i, 0] - method.beta))
            c[i] += h
            if c[i] > 0.99:
                out = out + left[i] * x[i] if i == 0 else out
                alive[i] = False
            else:
                out = out + h * x[i] if i == 0 else out
                left[i] -= h
        if not alive[0]:
            break
    return model.head(model.norm(out))


@pytest.mark.parametrize(
    ("name", "method", "slow"),
    [
        ("cls", tm.DynamicViT(0.7, layers=[2, 4]), slow_dynamicvit),
        ("cls", tm.IARED2(threshold=0.9, layers=[1, 3]), slow_iared2),
        ("cls", tm.EvoViT(0.5), slow_evovit),
        ("mae-avg", tm.EvoViT(0.4), slow_evovit),
        ("cls", tm.AViT(gamma=2.0, beta=2.0), slow_avit),
        ("cls", tm.AViT(gamma=1.0, beta=0.5), slow_avit),
    ],
)
def test_equals_a_slow_reference(name: str, method: tm.Method, slow: Any) -> None:
    model, images = tm.apply(build(name), method), batch(name)
    with torch.no_grad(), tm.trace(model) as t:
        out = model(images)
    assert sum(int(n.sum()) for n in t.tokens[:-1]) < 3 * 26 * 3
    with torch.no_grad():
        for image, logits in zip(images, out, strict=True):
            torch.testing.assert_close(logits, slow(model, image, method), atol=2e-5, rtol=1e-4)


def test_evovit_that_keeps_all_is_the_model() -> None:
    model, x = build("mae-avg"), batch("mae-avg")
    with torch.inference_mode():
        expected = model(x)
        assert torch.equal(tm.apply(model, tm.EvoViT(1.0, last_layer="full"))(x), expected)


def test_parked_tokens_come_back_where_they_were() -> None:
    model, x = build("unpooled"), batch("unpooled")
    tm.apply(model, tm.EvoViT(0.5))
    inputs: list[Tensor] = []
    model.blocks[3].mlp.register_forward_hook(lambda module, args, out: inputs.append(out))
    with torch.inference_mode(), tm.trace(model) as t:
        model(x)
    assert inputs[0].shape[1] == 13, "twelve of 25 patches and the CLS token"
    assert sorted(t.owner[0].tolist()) == list(range(26)), "none joined another, none is lost"


# Masks in training against removal.


@dataclass(frozen=True, repr=False)
class MaskedTopK(tm.DynamicViT):
    """The tokens that DynamicViT would keep, by a mask."""

    def _select(self, view: InputView, number: int) -> Update:
        tokens, prefix = view.tokens, view.prefix
        stays = torch.ones_like(tokens.size) if tokens.mask is None else tokens.mask.weight
        score = view.module(str(number))(tokens.x[:, prefix:], stays[:, prefix:])[..., 0]
        left = int((tokens.original - prefix) * self.keep ** (number + 1))
        best = score.masked_fill(stays[:, prefix:] == 0, -torch.inf).topk(left, 1).indices + prefix
        mask = torch.zeros_like(stays).scatter(1, best, 1.0)
        mask[:, :prefix] = 1
        return Update(mask=KeyMask(mask, EPSILON))


def test_dynamicvit_masked_and_removed_tokens_agree() -> None:
    """Up to ε = 1e-6 of the masked softmax: each masked key gets ε/N of the attention."""
    model, x = build("cls"), batch("cls", 6)[2:]  # (the patches of plain images have equal scores)
    removed = tm.DynamicViT(0.6, layers=[2, 3])
    with torch.inference_mode():
        expected = tm.apply(model, removed)(x)
        masked = tm.apply(model, MaskedTopK(0.6, layers=[2, 3]))(x)
        assert (expected - model.head.bias).abs().max() > 0.1
    torch.testing.assert_close(masked, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_avit_masked_and_dropped_tokens_agree(beta: float) -> None:
    model, x = build("cls"), batch("cls", 5)
    tm.apply(model, tm.AViT(gamma=2.0, beta=beta))
    with torch.no_grad(), tm.trace(model) as t:
        dropped = model.eval()(x)
        masked = model.train()(x)
    assert int(t.tokens[-2][:5].sum()) < 5 * 26
    torch.testing.assert_close(masked, dropped, atol=1e-5, rtol=1e-5)


def test_iared2_masked_and_dropped_tokens_agree() -> None:
    model, x = build("cls"), batch("cls", 5)
    tm.apply(model, tm.IARED2(threshold=0.9, layers=[1, 3]))
    with torch.no_grad():
        torch.testing.assert_close(model.train()(x), model.eval()(x), atol=1e-5, rtol=1e-5)


# Losses.


def step_of(model: Any, x: Tensor, labels: Tensor, method: tm.Method) -> TrainingStep:
    made = run_with(model, x, plan_of(model))
    return TrainingStep(
        task=F.cross_entropy(made.logits, labels), logits=made.logits, labels=labels,
        cross_entropy=lambda logits: F.cross_entropy(logits, labels), notes=made.notes, tokens=made.tokens,
        normed_tokens=None, modules=method_modules(model), teacher_logits=None, teacher_tokens=None, companions=[],
    )  # fmt: skip


def test_dynamicvit_loss_is_the_sum_of_its_four_terms() -> None:
    method, x, labels = tm.DynamicViT(0.6, layers=[2, 3]), batch("cls", 4), torch.arange(4)
    model = tm.apply(build("cls"), method).train()
    torch.manual_seed(3)
    step = step_of(model, x, labels, method)
    teacher, tokens = torch.randn(4, 7), torch.randn(4, 26, step.tokens.shape[-1])  # type: ignore[union-attr]
    assert step.tokens is not None
    loss = method.loss(replace(step, normed_tokens=model.norm(step.tokens), teacher_logits=teacher, teacher_tokens=tokens))
    expected = float(step.task.detach())
    p, q = teacher.softmax(1), step.logits.detach().softmax(1)
    expected += 0.5 * sum(float((p[b] * (p[b] / q[b]).log()).sum()) for b in range(4)) / 4
    first, second = (drawn.detach() for drawn, _ in step.notes)
    assert set(first.unique().tolist()) <= {0.0, 1.0}
    assert bool((second <= first).all()), "what was dropped stays dropped"
    difference = (model.norm(step.tokens) - tokens).detach()
    squares = [float(v) ** 2 for b in range(4) for i in range(25) if second[b, i] for v in difference[b, 1 + i]]
    expected += 0.5 * sum(squares) / len(squares)
    for drawn, ratio in ((first, 0.6), (second, 0.36)):
        expected += 1.0 * sum((float(row.mean()) - ratio) ** 2 for row in drawn) / 4
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    loss.backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in modules_of(model).parameters() if p.grad is not None)
    assert modules_of(model)["0"].out_conv[4].weight.grad is not None, "gradients pass through the drawn masks"


def test_avit_losses() -> None:
    """ρ and the prior, token by token and layer by layer."""
    torch.manual_seed(0)
    notes = [(torch.rand(3, 6) * 0.6,) for _ in range(11)]
    total = 0.0
    for b in range(3):
        for i in range(6):
            c, left = 0.0, 1.0
            for h in [*(float(one[b, i]) for (one,) in notes), 1.0]:
                total += 1
                c += h
                if c > 0.99:
                    total += left
                    break
                left -= h
    assert float(ponder(notes)) == pytest.approx(total / 18, rel=1e-5)
    means = [float(h.mean()) for (h,) in notes] + [1.0]
    shares = [min(max(m / sum(means), 0.01), 0.99) for m in means]
    density = [math.exp(-((i - 8) ** 2) / 2) for i in range(12)]
    target = [d * 0.98 / sum(density[:8]) for d in density]
    expected = sum(t * (math.log(t) - math.log(s)) for t, s in zip(target, shares, strict=True)) / 12
    assert float(halting_prior(notes)) == pytest.approx(expected, rel=1e-4)


def test_avit_learns_to_halt_through_its_scores() -> None:
    method = tm.AViT(gamma=2.0, beta=1.0)
    model = tm.apply(build("cls"), method).train()
    step = step_of(model, batch("cls"), torch.arange(3), method)
    (method.loss(step) - step.task).backward()
    assert float(model.blocks[0].mlp.fc2.weight.grad.abs().sum()) > 0


def test_evovit_has_a_second_head_while_it_trains() -> None:
    method, labels = tm.EvoViT(0.5), torch.arange(3)
    model = tm.apply(build("mae-avg"), method).train()
    step = step_of(model, batch("mae-avg"), labels, method)
    assert step.tokens is not None
    made = modules_of(model)
    other = F.cross_entropy(made["head_cls"](made["norm_cls"](step.tokens[:, 0])), labels)
    assert float(method.loss(step).detach()) == pytest.approx(float((step.task + other).detach()) / 2)
    assert method_modules(tm.apply(build("cls"), method)) is None
    assert method.at(0.5).stage_length == 1, "layer to stage"
    assert method.at(0.7) == method


def test_iared2_reinforce_on_a_bandit() -> None:
    """Two arms: keeping the only patch earns 0 (1 − 1²), dropping it earns 1, and the class is always right."""
    method = tm.IARED2(sample=True)
    logit = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([logit], lr=0.5)
    torch.manual_seed(0)
    logits, labels = torch.tensor([[1.0, 0.0]]).expand(16, 2), torch.zeros(16, dtype=torch.int64)
    alive = torch.ones(16, 2, dtype=torch.bool)
    for _ in range(60):
        p = torch.cat((torch.ones(16, 1), logit.sigmoid().expand(16, 1)), 1)
        drawn, greedy = torch.rand(16, 2) < p.detach(), p.detach() > 0.5
        drawn[:, 0] = greedy[:, 0] = True
        notes, beside = [(p, drawn, alive, 1)], [(p, greedy, alive, 1)]
        step = TrainingStep(
            logits.sum() * 0, logits, labels, F.cross_entropy, notes, None, None, None, None, None,
            [(logits, beside)],
        )  # fmt: skip
        optimizer.zero_grad()
        method.loss(step).backward()
        optimizer.step()
    assert float(logit.detach().sigmoid()) < 0.2
    wrong = method.reward(logits, labels + 1, [(None, drawn, None, 1)])
    assert wrong.tolist() == [-3.0] * 16


def test_new_interpreters_keep_tokens_with_a_probability() -> None:
    z = torch.randn(2, 30, 48, generator=torch.Generator().manual_seed(0))
    for keep in (0.5, 0.9):
        torch.manual_seed(0)
        made = Interpreter(48, 3, keep)
        assert made(z).mean().item() == pytest.approx(keep, abs=0.02)
        made.qk.weight.data.zero_()
        torch.testing.assert_close(made(z), torch.full((2, 30), keep))


def test_iared2_trains_group_by_group() -> None:
    method = tm.IARED2()
    phases = [(method.at(done).groups, method.at(done).sample) for done in (0.0, 0.1, 0.12, 0.34, 0.5, 0.67, 0.99)]
    assert phases == [(1, True), (1, True), (1, False), (2, True), (2, False), (3, True), (3, False)]
    learning = [
        {group for group in ("interpreter 0", "interpreter 1", "backbone") if method.learning_rate_factor(group, done)}
        for done in (0.05, 0.2, 0.36, 0.5)
    ]
    assert learning == [{"interpreter 0"}, {"backbone"}, {"interpreter 1"}, {"backbone"}]
    two = tm.IARED2(layers=[1, 3])
    assert [two.at(done).groups for done in (0.0, 0.49, 0.51, 0.99)] == [1, 1, 2, 2]


# Modules.


def test_modules_are_part_of_the_model_until_removed(tmp_path: Path) -> None:
    model, x = build("cls"), batch("cls")
    keys = list(model.state_dict())
    method = tm.DynamicViT(0.6, layers=[2, 3])
    with torch.inference_mode():
        expected = tm.apply(model, method)(x)
        assert torch.equal(tm.apply(tm.remove(model), method)(x), expected), "new modules are the same each time"
    for p in modules_of(model).parameters():
        p.data.normal_(std=0.3)
    assert len(model.state_dict()) > len(keys)
    assert modules_of(model.double())["0"].in_conv[1].weight.dtype == torch.float64
    model.float()
    save_file(modules_of(model).state_dict(), tmp_path / "trained.safetensors")
    trained = replace(method, weights=str(tmp_path / "trained.safetensors"))
    with torch.inference_mode():
        wanted = model(x)
        assert not torch.equal(wanted, expected)
        assert list(tm.remove(model).state_dict()) == keys
        assert torch.equal(tm.apply(model, trained)(x), wanted)
        (tmp_path / "other").mkdir()
        tm.save(trained, tmp_path / "other" / "method.json")
        loaded = tm.load(tmp_path / "other" / "method.json")
        assert torch.equal(tm.apply(model, loaded)(x), wanted), "the weights are saved with the config"
    assert sorted(p.name for p in (tmp_path / "other").iterdir()) == ["method.json", "method.modules.safetensors"]
    whole = nn.Sequential(model)  # a model inside another one
    tm.remove(whole)
    assert list(model.state_dict()) == keys


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = tm.apply(build("cls"), tm.ToMe(3))
    for name, content in (("broken", b"nothing"), ("absent", None)):
        if content is not None:
            (tmp_path / f"{name}.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="not the weights of a method"):
            tm.apply(model, tm.DynamicViT(0.7, weights=str(tmp_path / f"{name}.safetensors")))
    save_file({"0.x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"0\.in_conv\.0\.bias: missing"):
        tm.apply(model, tm.DynamicViT(0.7, weights=str(tmp_path / "other.safetensors")))
    assert tm.trace(model) is not None
    with torch.inference_mode(), tm.trace(model) as t:  # ToMe is still there
        model(batch("cls"))
    assert int(t.tokens[0][0]) == 23
    with pytest.raises(ValueError, match=r"must name a \.safetensors file"):
        tm.DynamicViT(0.7, weights="predictors.pt")
    text = tm.DynamicViT(0.7, weights="../elsewhere.safetensors").to_json()
    (tmp_path / "method.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="a file in the same folder"):
        tm.load(tmp_path / "method.json")
