"""What every method on every model must keep."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tokenmerge as tm
from tests.contract.table import (
    BATCH_INVARIANT_PAIRS,
    CONFIGS,
    MODELS,
    PAIRS,
    REFUSED_PAIRS,
    batch,
    build,
    output,
    refusal,
)
from tests.tiny_models import DEPTH
from tokenmerge.engine.patch import backbone_of

every_model = pytest.mark.parametrize("name", MODELS)
TIMM = [name for name in MODELS if MODELS[name].library == "timm"]
VARIED = [name for name in MODELS if MODELS[name].varied]
every_pair = pytest.mark.parametrize(("name", "method"), PAIRS)
# What hardly depends on the method: all methods on a few models, a few on all.
SOME = [pair for pair in PAIRS if pair[0] in VARIED or pair[1] in ("atm-each", "tome", "ats")]
some_pairs = pytest.mark.parametrize(("name", "method"), SOME)


def blocks_of(model: nn.Module) -> Sequence[Any]:
    return backbone_of(model).blocks(model)


def set_checkpointing(model: Any, enable: bool) -> None:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(enable)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable() if enable else model.gradient_checkpointing_disable()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@every_model
def test_baseline_parity(name: str) -> None:
    """NoMerge with the full last layer is the model itself; with the CLS-only last layer, it differs by rounding only."""
    model, x = build(name), batch(name)
    with torch.inference_mode():
        expected = output(model(x))
        tm.apply(model, tm.NoMerge(last_layer="full"))
        torch.testing.assert_close(output(model(x)), expected, atol=1e-6, rtol=1e-5)
        features = tm.remove(model).forward_features(x) if name in TIMM else None
        for last_layer in ("prefix", "query"):
            if MODELS[name].prefix_head:
                tm.apply(model, tm.NoMerge(last_layer=last_layer))  # type: ignore[arg-type]
                torch.testing.assert_close(output(model(x)), expected, atol=1e-5, rtol=1e-5)
                if features is not None:
                    torch.testing.assert_close(model.forward_features(x), features, atol=1e-5, rtol=1e-5)
            else:
                with pytest.raises(tm.Unsupported, match="reads patches"):
                    tm.apply(model, tm.NoMerge(last_layer=last_layer))  # type: ignore[arg-type]


@every_pair
def test_merging_keeps_prefix_sizes_and_shapes(name: str, method: str) -> None:
    model, x = build(name), batch(name)
    prefix = MODELS[name].prefix
    keys = list(model.state_dict())
    with torch.inference_mode():
        expected = output(model(x))
        tm.apply(model, CONFIGS[method])
        with tm.trace(model) as t:
            out = output(model(x))
    assert out.shape == expected.shape
    assert out.isfinite().all()
    assert [key for key in model.state_dict() if not key.startswith("tokenmerge_modules.")] == keys
    assert len(t.tokens) == DEPTH
    n = t.owner.shape[1]
    assert t.owner[:, :prefix].tolist() == [list(range(prefix))] * 3
    for layer in range(1, DEPTH + 1):
        owner, sizes = t.owner_after(layer), t.sizes(layer)
        dropped = (owner < 0).sum(1).tolist()
        assert CONFIGS[method].drops_tokens or not any(dropped)
        for image, size in enumerate(sizes):
            held = torch.bincount(owner[image][owner[image] >= 0], minlength=len(size))
            assert (held > 0).all(), "every token stands for some original"
            assert (size[:prefix] == 1).all()
            if CONFIGS[method].soft_sizes:
                assert float(size.sum()) <= n - dropped[image] + 1e-3
            else:
                assert size.tolist() == held.tolist()
                assert int(size.sum()) == n - dropped[image]
    fewer = int(t.tokens_in[-1].sum()) < 3 * n  # tokens that enter the last layer
    assert fewer == (method != "none")
    if not (CONFIGS[method].drops_tokens or CONFIGS[method].parks):  # what is gone has joined others
        left = [layer.sum() for layer in (*t.tokens_in[1:], t.tokens[-1])]
        steps = [int(a.sum() - b) for a, b in zip(t.tokens_in, left, strict=True)]
        if MODELS[name].prefix_head:
            steps[-1] = 0
        assert [int(m.sum()) for m in t.merged] == steps
    if MODELS[name].prefix_head:
        assert t.tokens[-1].tolist() == [prefix] * 3
    if method == "none":
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "method"), REFUSED_PAIRS)
def test_refused_with_a_reason(name: str, method: str) -> None:
    model = build(name)
    modules = len(list(model.modules()))
    with pytest.raises(ValueError, match=f"{type(CONFIGS[method]).__name__}.*{refusal(name, method)}"):
        tm.apply(model, CONFIGS[method])
    assert len(list(model.modules())) == modules
    assert type(model) is type(build(name))


@pytest.mark.parametrize(
    ("name", "method", "entry"),
    [
        (name, method, entry)
        for name, method in PAIRS
        for entry in ("forward", "forward_features", "forward_intermediates")
        if entry == "forward" or name in {*VARIED} & {*TIMM}
    ],
)
def test_counted_macs_agree_with_torch(name: str, method: str, entry: str) -> None:
    model, x = build(name).requires_grad_(False), batch(name, 1)
    tm.apply(model, CONFIGS[method])
    call = getattr(model, entry)
    # The fused kernel of the CPU has no formula in torch's counter: take the one that is made of matrix products.
    with (
        torch.no_grad(),
        tm.trace(model, detail=False) as t,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        call(x, indices=[1], stop_early=True) if entry == "forward_intermediates" else call(x)
    tm.remove(model)  # a trace can be asked afterwards
    assert t.cost("macs").gmacs == pytest.approx(counter.get_total_flops() / 2e9, rel=0.005)
    assert t.cost("paper").gmacs > t.cost("macs").gmacs


@pytest.mark.parametrize(("name", "method"), BATCH_INVARIANT_PAIRS)
def test_per_image_configs_are_batch_invariant(name: str, method: str) -> None:
    model, x = tm.apply(build(name), CONFIGS[method]), batch(name, 5)
    with torch.inference_mode():
        with tm.trace(model) as t:
            together = output(model(x))
        alone = torch.cat([output(model(x[i : i + 1])) for i in range(5)])
        order = torch.tensor([3, 0, 4, 2, 1])
        shuffled = output(model(x[order]))
    assert len({tuple(int(layer[i]) for layer in t.tokens) for i in range(5)}) > 1, "the images should differ"
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shuffled, together[order], atol=1e-5, rtol=1e-5)


@some_pairs
def test_one_image_and_none(name: str, method: str) -> None:
    """A batch of one is the first image of a larger batch, where images do not depend on each other; an empty one is
    empty."""
    model, x = build(name), batch(name, 3)
    with torch.inference_mode():
        expected = output(model(x[:1]))
        merged = tm.apply(model, CONFIGS[method])
        out = output(merged(x[:1]))
        assert out.shape == expected.shape
        if CONFIGS[method].batch_invariant or method in ("none", "tome", "evit", "tofu", "pitome"):
            torch.testing.assert_close(out, output(merged(x))[:1], atol=1e-5, rtol=1e-5)
        if MODELS[name].empty_batch:
            assert output(merged(x[:0])).shape == (0, *expected.shape[1:])


@every_model
def test_remove_restores_exactly(name: str) -> None:
    model, x = build(name), batch(name)
    before, dicts, types = state(model), [set(m.__dict__) for m in model.modules()], [type(m) for m in model.modules()]
    with torch.inference_mode():
        expected = output(model(x))
        for method in (tm.ToMe(3), tm.ATM(thresholds=[0.5] * DEPTH), tm.ToMe(3)):
            assert tm.apply(model, method) is model
        once = output(model(x))
        tm.apply(model, tm.ToMe(3))
        assert torch.equal(output(model(x)), once)
        assert tm.remove(model) is model
        assert torch.equal(output(model(x)), expected)
    assert [type(m) for m in model.modules()] == types
    assert [set(m.__dict__) for m in model.modules()] == dicts
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert tm.remove(model) is model


@some_pairs
def test_deepcopy_and_pickle(name: str, method: str) -> None:
    model, x = tm.apply(build(name), CONFIGS[method]), batch(name)
    copies = [copy.deepcopy(model)]
    if MODELS[name].pickles:
        copies.append(pickle.loads(pickle.dumps(model)))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies.append(torch.load(buffer, weights_only=False))
    with torch.inference_mode():
        expected = output(model(x))
        tm.remove(model)  # must not undo the copies
        for other in copies:
            # Weights at other addresses round otherwise.
            torch.testing.assert_close(output(other(x)), expected, atol=1e-6, rtol=0)
    assert type(tm.remove(copies[0])) is type(model)


@some_pairs
def test_gradient_and_checkpointing(name: str, method: str) -> None:
    """Merging stays active in training; recomputed blocks give the same gradient, bit for bit."""
    model, x = tm.apply(build(name), CONFIGS[method]).train(), batch(name)
    grads, times = [], []
    passes = [0]
    norms = [module for module in blocks_of(model)[0].modules() if isinstance(module, nn.LayerNorm)]
    norms[-1].register_forward_pre_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    for enable in (False, True):
        set_checkpointing(model, enable)
        model.zero_grad()
        torch.manual_seed(0)  # some methods draw in training
        passes[0] = 0
        with tm.trace(model, detail=False) as t:
            out = output(model(x)).square().sum()
            tokens = [layer.tolist() for layer in t.tokens]
            out.backward()
        times.append(passes[0])
        assert [layer.tolist() for layer in t.tokens] == tokens
        grads.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})
    if MODELS[name].checkpointing:
        assert times == [1, 2], "checkpointing recomputes each block once"
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][k], grads[1][k]) for k in grads[0])
    assert all(g.isfinite().all() for g in grads[0].values())
    assert sum(g.abs().sum() for g in grads[0].values()) > 0


@pytest.mark.parametrize(("name", "method"), [p for p in PAIRS if p[1] in ("atm-each", "tome", "none") or p[0] in VARIED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(name: str, method: str, dtype: torch.dtype) -> None:
    model, x = tm.apply(build(name), CONFIGS[method]), batch(name)
    with torch.inference_mode():
        exact = output(model(x))
        with torch.autocast("cpu", dtype):
            results = [output(model(x))]
        if MODELS[name].half_precision:
            results.append(output(model.to(dtype)(x.to(dtype))))
            assert results[-1].dtype == dtype
        else:
            with pytest.raises(RuntimeError, match="expected scalar type Float"):
                tm.remove(model).to(dtype)(x.to(dtype))
    for result in results:
        assert result.isfinite().all()
        assert result.shape == exact.shape
        if method == "none":  # no decision that rounding could flip
            similarity = torch.cosine_similarity(result.float().flatten(1), exact.flatten(1))
            assert similarity.min() > 0.99


@every_model
def test_hooks_on_blocks_see_tensors(name: str) -> None:
    model, x = tm.apply(build(name), tm.ToMe(4)), batch(name)
    seen: list[tuple[int, int]] = []

    def length(found: Any) -> int:
        while not isinstance(found, Tensor):  # in a tuple, in a list, or with the state of the call
            found = found[0]
        return found.shape[0 if MODELS[name].tokens_first else 1]

    for block in blocks_of(model):
        block.register_forward_hook(lambda module, args, out: seen.append((length(args), length(out))))
    with torch.inference_mode():
        model(x)
    n = seen[0][0]
    steps = [(n, n - 4), (n - 4, n - 8), (n - 8, n - 12), (n - 12, n)]  # the last one restores
    if MODELS[name].prefix_head:
        steps[-1] = (n - 12, MODELS[name].prefix)
    if MODELS[name].whole_blocks:
        steps = [(n, n)] * 4
    assert seen == steps


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if pair[0] in TIMM])
def test_forward_features_and_intermediates_are_whole(name: str, method: str) -> None:
    model, x = build(name), batch(name)
    with torch.inference_mode():
        features = model.forward_features(x)
        final, middle = model.forward_intermediates(x)
        tm.apply(model, CONFIGS[method])
        assert model.forward_features(x).shape == features.shape
        merged_final, merged_middle = model.forward_intermediates(x)
        assert merged_final.shape == final.shape
        assert [m.shape for m in merged_middle] == [m.shape for m in middle]
        torch.testing.assert_close(merged_final, model.forward_features(x), atol=1e-5, rtol=1e-5)
        if method == "none":
            torch.testing.assert_close(merged_middle, middle, atol=1e-5, rtol=1e-5)
        early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
        assert [m.shape for m in early] == [m.shape for m in middle[:2]]


@pytest.mark.parametrize("method", ["atm-each", "atm-mean", "tome", "ats", "mctf", "ppt"])
def test_threads_share_one_model(method: str) -> None:
    """8 threads × 20 calls, each thread its own images and its own trace: nothing leaks."""
    model = tm.apply(build("cls"), CONFIGS[method])
    inputs = [batch("cls", 1 + i % 3, seed=i) for i in range(8)]
    with torch.inference_mode():
        expected = [output(model(x)) for x in inputs]

    def work(i: int) -> int:
        wrong = 0
        with torch.inference_mode(), tm.trace(model, detail=False) as t:
            for _ in range(20):
                wrong += not torch.equal(output(model(inputs[i])), expected[i])
        return wrong + (len(t.tokens[0]) != 20 * len(inputs[i]))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0
