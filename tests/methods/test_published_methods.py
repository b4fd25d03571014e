"""Every published method against its formulas in plain loops, on random and on real activations, and its published cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import tokenmerge as tm
from tests.contract.table import batch, build
from tests.methods import references as loops
from tokenmerge.core.attention import merge_map
from tokenmerge.core.matching import View
from tokenmerge.core.schedule import quarters
from tokenmerge.core.tokens import Assignment, merge

Seen = list[tuple[View, Assignment | None]]


def watch(monkeypatch: pytest.MonkeyPatch, model: nn.Module, method: tm.Method, x: Tensor) -> Seen:
    """Run the model, and keep what the method saw and decided in each layer."""
    seen: Seen = []
    decide = type(method).__call__

    def spy(self: tm.Method, view: View) -> Assignment | None:
        move = decide(self, view)
        seen.append((view, move))
        return move

    monkeypatch.setattr(type(method), "__call__", spy)
    with torch.inference_mode():
        tm.apply(model, method)(x)
    monkeypatch.undo()
    assert any(move is not None for _, move in seen)
    return seen


def row_of(view: View, image: int, prop_attn: bool) -> Tensor:
    """Attention of the CLS token to all tokens, [H,N]."""
    if view.q is None:
        with torch.inference_mode():
            return view.attention.cls_row(None, view.k, view.project_q)[image].clone()
    q, k, size = view.q[image], view.k[image], view.tokens.size[image]
    out = []
    for h in range(len(q)):
        logits = [float(q[h, 0] @ k[h, j]) / math.sqrt(q.shape[-1]) for j in range(k.shape[1])]
        if prop_attn:
            logits = [v + math.log(float(s)) for v, s in zip(logits, size, strict=True)]
        powers = [math.exp(v - max(logits)) for v in logits]
        out.append([p / sum(powers) for p in powers])
    return torch.tensor(out)


def same_tokens(view: View, move: Assignment, image: int, expected: loops.Out) -> None:
    """The tokens after the move are those expected, the prefix in its position, the others in any order."""
    after = merge(view.tokens, move, pack=False)
    there = after.size[image] > 0
    ours = list(zip(after.x[image][there], after.size[image][there].tolist(), strict=True))
    assert len(ours) == len(expected)
    left = list(range(view.prefix, len(ours)))
    for i, (vector, size) in enumerate(expected):
        positions = [i] if i < view.prefix else left
        nearest = min(positions, key=lambda j: float((ours[j][0] - vector).abs().max()))
        torch.testing.assert_close(ours[nearest][0], vector, atol=2e-5, rtol=2e-5)
        assert ours[nearest][1] == pytest.approx(size, abs=1e-4)
        if i >= view.prefix:
            left.remove(nearest)


def tokens_of(view: View, image: int) -> tuple[Tensor, Tensor]:
    count = int(view.tokens.num_tokens[image])
    if view.tokens.packed:
        start = view.tokens.starts[image]
        return view.tokens.x[0, start : start + count], view.tokens.size[image, :count]
    return view.tokens.x[image], view.tokens.size[image]


def part(view: View, values: Tensor, image: int) -> Tensor:
    """Keys or values of one image, [H,N,d]."""
    if not view.tokens.packed:
        return values[image]
    start = view.tokens.starts[image]
    return values[0, :, start : start + int(view.tokens.num_tokens[image])]


Check = Callable[[Any, View, int], loops.Out]


def _evit(m: tm.EViT, view: View, i: int) -> loops.Out:
    return loops.evit(*tokens_of(view, i), row_of(view, i, m.prop_attn), view.prefix, m.keep, m.fuse)


def _bat(m: tm.BAT, view: View, i: int) -> loops.Out:
    row = row_of(view, i, m.prop_attn)
    return loops.bat(*tokens_of(view, i), row, view.prefix, m.keep, m.clusters, m.neighbours)


def _ppt(m: tm.PPT, view: View, i: int) -> loops.Out:
    assert view.v is not None
    row = row_of(view, i, m.prop_attn)
    return loops.ppt(*tokens_of(view, i), row, view.k[i], view.v[i], view.prefix, m.r, m.threshold)


def _ats(m: tm.ATS, view: View, i: int) -> loops.Out:
    assert view.v is not None
    x, size = tokens_of(view, i)
    samples = m.samples or view.tokens.original
    return loops.ats(x, size, row_of(view, i, False)[:, : len(x)], part(view, view.v, i), view.prefix, samples)


# Which layers do what, written out for the two depths: a model of 4 blocks and DeiT's 12.
TOFU_DROPS = {4: (1, 2, 3), 12: (1, 2, 3, 4, 5, 6, 7)}
PITOME_LATE = {4: (3, 4), 12: (7, 8, 9, 10, 11, 12)}
PITOME_MARGINS = {4: (0.75, 0.5625, 0.375, 0.1875), 12: [0.75 - 0.0625 * i for i in range(12)]}
ZERO_TPRUNE_VOTES = {4: (30, 30, 30, 1), 12: (30,) * 3 + (5,) * 6 + (1,) * 3}
ZERO_TPRUNE_SIMPLIFIED = {4: (30, 30, 5, 1), 12: (30,) * 4 + (5,) * 4 + (1,) * 4}
ZERO_TPRUNE_LAYERS = {4: {1, 2, 3, 4}, 12: {1, 3, 6, 9, 11}}


def _tofu(m: tm.ToFu, view: View, i: int) -> loops.Out:
    drops = view.layer in TOFU_DROPS[view.depth]
    return loops.tofu(*tokens_of(view, i), view.k[i], view.prefix, m.r_of(view.layer), drops)


def _diffrate(m: tm.DiffRate, view: View, i: int) -> loops.Out:
    row, at = row_of(view, i, m.prop_attn), view.layer - 1
    return loops.diffrate(*tokens_of(view, i), row, view.prefix, m.prune[at], m.merge[at])


def _pitome(m: tm.PiToMe, view: View, i: int) -> loops.Out:
    margin, late = PITOME_MARGINS[view.depth][view.layer - 1], view.layer in PITOME_LATE[view.depth]
    return loops.pitome(*tokens_of(view, i), view.k[i], view.prefix, m.keep, margin, late)


def _zero_tprune(m: tm.ZeroTPrune, view: View, i: int) -> loops.Out:
    assert view.map is not None
    published = m.variant == "published"
    votes = (ZERO_TPRUNE_VOTES if published else ZERO_TPRUNE_SIMPLIFIED)[view.depth][view.layer - 1]
    variance = (m.variance[0], m.variance[1])
    x, size = tokens_of(view, i)
    return loops.zero_tprune(x, size, view.k[i], view.map[i], view.prefix, m.keep, m.similar, votes, variance, published)


# On a small random model of four blocks, and on DeiT-Tiny.
PUBLISHED: dict[str, tuple[Check, tm.Method, tm.Method]] = {
    "evit": (_evit, tm.EViT(0.6), tm.EViT(0.7)),
    "evit-drop": (_evit, tm.EViT(0.6, fuse=False), tm.EViT(0.5, fuse=False)),
    "bat": (_bat, tm.BAT(0.6), tm.BAT(0.7)),
    "bat-clusters": (_bat, tm.BAT(0.5, clusters=0.4, neighbours=2), tm.BAT(0.5, clusters=0.3, neighbours=9)),
    "ppt-merge": (_ppt, tm.PPT(6, threshold=1.0), tm.PPT(50, threshold=1.0)),
    "ppt-prune": (_ppt, tm.PPT(6, threshold=0.0), tm.PPT(50, threshold=0.0)),
    "ppt": (_ppt, tm.PPT(6, threshold=2e-4), tm.PPT(50)),
    "ats": (_ats, tm.ATS(), tm.ATS()),
    "ats-few": (_ats, tm.ATS(12, layers=[1, 3]), tm.ATS(60)),
    "tofu": (_tofu, tm.ToFu(4), tm.ToFu(13)),
    "diffrate": (
        _diffrate,
        tm.DiffRate([26, 22, 17, 12], [24, 19, 14, 9]),
        tm.DiffRate(
            [197, 196, 190, 168, 150, 139, 129, 117, 99, 78, 58, 3], [197, 194, 176, 156, 141, 133, 121, 107, 88, 64, 56, 3]
        ),
    ),
    "pitome": (_pitome, tm.PiToMe(0.8), tm.PiToMe(0.925)),
    "zero-tprune": (_zero_tprune, tm.ZeroTPrune(0.7), tm.ZeroTPrune(0.8)),
    "zero-tprune-simplified": (
        _zero_tprune,
        tm.ZeroTPrune(0.7, variant="simplified"),
        tm.ZeroTPrune(0.8, variant="simplified"),
    ),
    "zero-tprune-unlike": (_zero_tprune, tm.ZeroTPrune(0.7, similar=0.0), tm.ZeroTPrune(0.8, similar=1.0)),
}


@pytest.mark.parametrize("model_name", ["cls", "distilled"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_random_activations(monkeypatch: pytest.MonkeyPatch, name: str, model_name: str) -> None:
    check, method, _ = PUBLISHED[name]
    for view, move in watch(monkeypatch, build(model_name), method, batch(model_name)):
        if move is not None:
            for image in range(3):
                same_tokens(view, move, image, check(method, view, image))


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_activations(monkeypatch: pytest.MonkeyPatch, name: str, deit_tiny: nn.Module, photos: Tensor) -> None:
    check, _, method = PUBLISHED[name]
    acts = [pair for pair in watch(monkeypatch, deit_tiny, method, photos[:2]) if pair[1] is not None]
    for view, move in (acts[0], acts[-1]):
        assert move is not None
        for image in range(2):
            same_tokens(view, move, image, check(method, view, image))


def test_mctf_on_random_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    _check_mctf(watch(monkeypatch, build("cls"), tm.MCTF(7), batch("cls", 2)), 7)


def test_mctf_on_real_activations(monkeypatch: pytest.MonkeyPatch, deit_tiny: nn.Module, photos: Tensor) -> None:
    _check_mctf(watch(monkeypatch, deit_tiny, tm.MCTF(16), photos[:1]), 16)


def _check_mctf(seen: Seen, r: int) -> None:
    """Groups, weighed means, and the map of attention that merges with them."""
    for view, move in [pair for pair in seen if pair[1] is not None][:2]:
        assert view.map is not None
        assert move is not None
        after, folded = merge(view.tokens, move), merge_map(view.map, view.tokens, move)
        b, n = view.tokens.size.shape
        m = n - r
        for image in range(b):
            x, size = tokens_of(view, image)
            groups, each = loops.mctf_groups(x, size, view.map[image], view.prefix, r, (1.0, 20.0, 40.0))
            position = (move.rows(b * n).reshape(b, n)[image] - image * m).tolist()
            ours = [[i for i in range(n) if position[i] == slot] for slot in range(m)]
            assert sorted(map(sorted, groups)) == sorted(ours)
            tokens, expected = loops.mctf_attention(x, view.map[image], ours, each)
            torch.testing.assert_close(after.x[image], torch.stack(tokens), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(folded[image], expected, atol=1e-6, rtol=1e-4)


def test_mctf_block_is_attention_over_merged_tokens() -> None:
    """The whole block: merged map times values of the merged tokens, projection, residual, MLP."""
    model, x = build("cls"), batch("cls", 2)
    with torch.inference_mode():
        tm.apply(model, tm.MCTF(7, layers=[1], last_layer="full"))
        seen: list[Tensor] = []
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out))
        model(x)
        handle.remove()
        tm.remove(model)
        block = model.blocks[0]
        tokens = model.pos_embed + torch.cat((model.cls_token.expand(2, -1, -1), model.patch_embed(x)), 1)
        b, n, c = tokens.shape
        heads = block.attn.num_heads
        q, k, _ = block.attn.qkv(block.norm1(tokens)).reshape(b, n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3) / math.sqrt(c // heads)).softmax(-1)
        for image in range(b):
            groups, each = loops.mctf_groups(tokens[image], torch.ones(n), weights[image], 1, 7, (1.0, 20.0, 40.0))
            merged, folded = loops.mctf_attention(tokens[image], weights[image], groups, each)
            y = torch.stack(merged)
            v = block.attn.qkv(block.norm1(y)).reshape(len(y), 3, heads, c // heads)[:, 2].transpose(0, 1)
            y = y + block.attn.proj((folded @ v).transpose(0, 1).reshape(len(y), c))
            y = y + block.mlp(block.norm2(y))
            ours = seen[0][image]
            for vector in y:
                assert float((ours - vector).abs().amax(1).min()) < 1e-4


def test_ats_equals_attention_of_all_tokens_with_the_unhit_left_out() -> None:
    """Queries of tokens that are dropped are never computed; the others must not notice."""
    model, x = build("cls"), batch("cls", 3)
    with torch.inference_mode():
        whole = model.blocks[0](model.norm_pre(model._pos_embed(model.patch_embed(x))))
        seen: list[Tensor] = []
        tm.apply(model, tm.ATS(layers=[1], last_layer="full"))
        with tm.trace(model) as t:
            handle = model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out))
            model(x)
        handle.remove()
    owner, lengths = t.owner_after(1), t.tokens[0].tolist()
    assert len(set(lengths)) > 1, "the images should differ"
    start = 0
    for image, length in enumerate(lengths):
        stayed = (owner[image] >= 0).nonzero()[:, 0]
        torch.testing.assert_close(seen[0][0, start : start + length], whole[image, stayed], atol=1e-5, rtol=1e-5)
        start += length


@pytest.mark.parametrize("model_name", ["cls", "registers", "registers-alone", "no-class-avg"])
@pytest.mark.parametrize("method", [tm.ATS(layers=[1]), tm.EViT(0.5, layers=[1]), tm.DiffRate([20] * 4, [18] * 4)], ids=repr)
def test_the_attention_of_the_cls_token(monkeypatch: pytest.MonkeyPatch, model_name: str, method: tm.Method) -> None:
    """From the block's own weights; in a model without a CLS token, even if it has registers, the mean over all tokens."""
    model, x = build(model_name), batch(model_name)
    view, _ = watch(monkeypatch, model, method, x)[0]
    with torch.inference_mode():
        row = view.cls_attention()
        block = tm.remove(model).blocks[0]
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
        b, n, c = tokens.shape
        heads = block.attn.num_heads
        q, k, _ = block.attn.qkv(block.norm1(tokens)).reshape(b, n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3) / math.sqrt(c // heads)).softmax(-1)
        expected = weights[:, :, 0] if model_name in ("cls", "registers") else weights.mean(2)
    torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("depth", [4, 12])
def test_layers_at_which_rivals_act(depth: int) -> None:
    every = range(1, depth + 1)
    layers = {
        tm.ZeroTPrune(0.5): ("map", ZERO_TPRUNE_LAYERS[depth]),
        tm.MCTF(2): ("values", set(every) - {1}),
        tm.ATS(): ("queries", set(range(depth // 4 + 1, depth + 1))),
    }
    for method, (stage, expected) in layers.items():
        assert {i for i in every if method.rule(i, depth) is not None} == expected
        assert {method.stage(i, depth) for i in expected} == {stage}
    assert quarters(depth) == ((2, 3, 4) if depth == 4 else (4, 7, 10))


def test_at_most_half_of_the_patches_merge_in_a_layer() -> None:
    """ToMe's own limit, r ≤ (tokens − prefix) // 2, on a model with CLS and distillation tokens and 25 patches."""
    expected = []
    patches = 25
    for _ in range(4):
        patches -= patches // 2
        expected.append(2 + patches)
    assert expected == [15, 9, 6, 4]
    for method in (tm.ToMe(40), tm.TopR(40), tm.ATM(counts=[40] * 4), tm.ToFu(40), tm.RandomMerge(40)):
        model = tm.apply(build("distilled"), replace(method, last_layer="full"))
        with torch.inference_mode(), tm.trace(model) as t:
            model(batch("distilled"))
        assert [int(layer[0]) for layer in t.tokens] == expected, method


def test_ppt_leaves_pruned_tokens_in_the_order_of_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the authors' code does: a later layer that merges splits them by rank."""
    seen = 0
    for view, move in watch(monkeypatch, build("cls"), tm.PPT(6, threshold=0.0), batch("cls")):
        if move is None:
            continue
        score = view.significance()
        b, n = view.tokens.size.shape
        kept = move.kept.reshape(b, -1)[:, 1:] - n * torch.arange(b).unsqueeze(1) - 1
        assert torch.equal(kept, score.argsort(dim=1, descending=True, stable=True)[:, : kept.shape[1]])
        seen += 1
    assert seen == 2  # layers 2 and 3 of 4; the last keeps the CLS token only


def test_bat_costs_what_the_log_of_its_authors_says() -> None:
    """DeiT-S, keep 0.7: 3.0048 GMACs by torchprofile, which counts two MACs per element of a LayerNorm."""
    model = tm.apply(timm.create_model("deit_small_patch16_224").eval(), tm.BAT(0.7, last_layer="full"))
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(torch.zeros(1, 3, 224, 224))
    assert [int(layer[0]) - 1 for layer in t.tokens] == [196] * 3 + [138] * 3 + [97] * 3 + [68] * 3
    macs, with_norms = t.cost("macs").gmacs, t.cost("paper").gmacs
    assert macs + 2 * (with_norms - macs) == pytest.approx(3.0048, abs=0.0005)
