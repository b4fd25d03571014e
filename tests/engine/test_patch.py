"""What is refused, and that refusing leaves nothing half done."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import nn

import tokenmerge as tm
from tests import tiny_models as tiny
from tests.contract.table import batch, build
from tests.tiny_models import DEPTH
from tokenmerge.core.tokens import Decision
from tokenmerge.methods import View


def small(**options: object) -> VisionTransformer:
    return tiny.vit(**(dict(img_size=16, embed_dim=16, depth=2, num_classes=3) | options)).eval()


@dataclass(frozen=True, repr=False)
class EveryOtherLayer(tm.ToMe):
    """A method derived from another, with a decision of its own."""

    def __call__(self, view: View) -> Decision | None:
        return super().__call__(view) if view.layer % 2 else None


def test_a_derived_method_decides_by_itself() -> None:
    """`apply` asks methods for their rule in each layer; a rule of the base class must not replace a derived `__call__`."""
    model = tm.apply(build("cls"), EveryOtherLayer(3))
    with torch.inference_mode(), tm.trace(model) as t:
        model(batch("cls"))
    assert [int(n[0]) for n in t.tokens_in] == [26, 23, 23, 20]


class OddBlock(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OldForward(VisionTransformer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.forward_head(self.forward_features(x))


class OwnLoop(VisionTransformer):
    def forward_features(self, x: torch.Tensor, attn_mask: object = None, is_causal: bool = False) -> torch.Tensor:
        x = self._pos_embed(self.patch_embed(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            lambda: small(block_fn=ParallelScalingBlock),
            "block 0 is a ParallelScalingBlock; supported is Block or ResPostBlock, because merging happens between its "
            "attention and its MLP",
        ),
        (lambda: small(block_fn=ParallelThingsBlock), "block 0 is a ParallelThingsBlock"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), "SwinTransformer is not supported; supported families"),
        (lambda: timm.create_model("hiera_tiny_224"), "Hiera is not supported; supported families"),
        (
            lambda: timm.create_model("test_convnext"),
            "ConvNeXt is not supported; supported families: .*timm VisionTransformer, timm Eva",
        ),
        (lambda: nn.Sequential(nn.Identity(), small()), r"contains one at \.1: apply there"),
        (lambda: nn.DataParallel(small()), r"wrapped in DataParallel; apply to the bare model first, then wrap"),
        (lambda: torch.compile(small()), "apply to the bare model first"),
        (lambda: OldForward(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2), "takes no attn_mask"),
        (lambda: small(attn_layer="diff"), "the attention of block 0 is a DiffAttention"),
    ],
    ids=[
        "parallel",
        "parallel-things",
        "swin",
        "hiera",
        "convnet",
        "inside",
        "data-parallel",
        "compiled",
        "old-forward",
        "diff-attention",
    ],
)
def test_refusals_name_what_was_found(model, says: str) -> None:
    """And what is supported, and what to do."""
    network = model()
    types = [type(m) for m in network.modules()]
    with pytest.raises(tm.Unsupported, match=says) as refused:
        tm.apply(network, tm.ToMe(1))
    text = str(refused.value)
    inside = getattr(network, "_orig_mod", network)
    assert any(type(found).__name__ in text for found in (network, inside))
    assert "supported" in text or "apply to the bare model first" in text
    assert re.search(r"apply (there|to the bare)|Use a model that|use a model that|add the argument", text), text
    assert [type(m) for m in network.modules()] == types


def test_a_strange_block_is_named() -> None:
    model = small()
    model.blocks[1] = OddBlock()
    with pytest.raises(tm.Unsupported, match="block 1 is a OddBlock"):
        tm.apply(model, tm.ToMe(1))


def test_hooks_on_attention_are_refused() -> None:
    model = small()
    handle = model.blocks[0].attn.register_full_backward_hook(lambda *args: None)
    with pytest.raises(tm.Unsupported, match="hooks, which would not fire"):
        tm.apply(model, tm.ToMe(1))
    handle.remove()
    tm.apply(model, tm.ToMe(1))
    model.blocks[1].attn.register_forward_hook(lambda *args: None)
    with pytest.raises(tm.Unsupported, match="the attention of block 1 has hooks"):
        model(torch.randn(1, 3, 16, 16))


def test_a_failed_apply_keeps_the_method_before() -> None:
    model = tm.apply(small(), tm.ToMe(1))
    with pytest.raises(ValueError, match="thresholds has 3 entries, but the model has 2 blocks"):
        tm.apply(model, tm.ATM(thresholds=[0.5] * 3))
    with tm.trace(model) as t:
        model(torch.randn(1, 3, 16, 16))
    assert t.tokens[0].tolist() == [4]
    with pytest.raises(ValueError, match=r"split_layer must be in \[0, 2\]"):
        tm.apply(model, tm.ATM(0.9, 0.1, 0.5, split_layer=3))


def test_a_loop_of_its_own_is_not_run_unmerged_in_silence() -> None:
    model = tm.apply(OwnLoop(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2), tm.ToMe(1))
    with pytest.raises(RuntimeError, match="block 1 of a merged model was called on its own"):
        model(torch.randn(1, 3, 16, 16))


class DenseHead(VisionTransformer):
    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return x


class DenseForward(VisionTransformer):
    def forward(self, x: torch.Tensor, attn_mask: object = None, is_causal: bool = False) -> torch.Tensor:
        return self.forward_features(x, attn_mask=attn_mask)


class Reader(VisionTransformer):
    def forward_features(self, x: torch.Tensor, attn_mask: object = None, is_causal: bool = False) -> torch.Tensor:
        x = super().forward_features(x, attn_mask=attn_mask)
        return torch.cat((x[:, :1] + x[:, 1:].mean(1, keepdim=True), x[:, 1:]), 1)


@pytest.mark.parametrize("kind", [DenseHead, DenseForward, Reader, "instance"])
def test_who_overrides_the_way_to_the_head_is_not_trusted_to_read_the_class_token_only(kind: object) -> None:
    cls = VisionTransformer if kind == "instance" else kind
    model = cls(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2).eval()  # type: ignore[operator]
    if kind == "instance":
        model.forward_head = lambda x: x
    x = torch.randn(1, 3, 16, 16)
    with torch.inference_mode():
        expected = model(x)
        torch.testing.assert_close(tm.apply(model, tm.NoMerge())(x), expected)


def test_remove_after_another_tool_changed_the_class() -> None:
    model = tm.apply(small(), tm.ToMe(1))
    nn.utils.parametrize.register_parametrization(model, "pos_embed", nn.Identity())
    with pytest.raises(tm.Unsupported, match="changed again after"):
        tm.remove(model)
    nn.utils.parametrize.remove_parametrizations(model, "pos_embed")


def test_one_block_twice_is_refused_whole() -> None:
    model = small()
    model.blocks[1] = model.blocks[0]
    with pytest.raises(tm.Unsupported, match="more than once"):
        tm.apply(model, tm.ToMe(1))
    assert type(model.blocks[0]).__mro__[0] is timm.models.vision_transformer.Block


def test_masks_are_refused() -> None:
    model, x = tm.apply(small(), tm.ToMe(1)), torch.randn(1, 3, 16, 16)
    with pytest.raises(ValueError, match="takes no attn_mask"):
        model(x, attn_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match="takes no is_causal"):
        model.forward_features(x, is_causal=True)


def test_apply_then_wrap(tmp_path: Path) -> None:
    """DataParallel copies modules by their class and their __dict__; DistributedDataParallel calls the model itself."""
    model, x = tm.apply(small(), tm.ToMe(1)), torch.randn(2, 3, 16, 16)
    replica = model._replicate_for_data_parallel()
    assert isinstance(replica, type(model))
    assert replica._tokenmerge == model._tokenmerge
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        torch.testing.assert_close(wrapped(x), model(x))
        wrapped(x).sum().backward()
        with pytest.raises(tm.Unsupported, match="wrapped in DistributedDataParallel"):
            tm.apply(wrapped, tm.ToMe(2))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("bad", [None, "ATM", tm.ToMe])
def test_apply_wants_a_method(bad: object) -> None:
    with pytest.raises(TypeError, match="apply takes a method"):
        tm.apply(small(), bad)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        tm.apply(torch.zeros(1), tm.ToMe(1))  # type: ignore[type-var]


def test_pickle_in_a_new_process(tmp_path: Path) -> None:
    model, x = tm.apply(build("cls"), tm.ATM(thresholds=[0.5] * DEPTH, batch="each")), batch("cls")
    with torch.inference_mode():
        expected = model(x)
    torch.save({"model": model, "x": x, "expected": expected}, tmp_path / "m.pt")
    code = (
        f"import torch; d = torch.load({str(tmp_path / 'm.pt')!r}, weights_only=False); torch.set_num_threads(1)\n"
        "with torch.inference_mode(): torch.testing.assert_close(d['model'](d['x']), d['expected'], atol=1e-6, rtol=0)\n"
        "import tokenmerge; print(type(tokenmerge.remove(d['model'])).__mro__[0].__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "timm.models.vision_transformer"


def test_trace_needs_apply_and_a_call() -> None:
    model = small()
    with pytest.raises(ValueError, match="no method is applied"), tm.trace(model):
        pass
    tm.apply(model, tm.ToMe(1))
    with tm.trace(model) as t:
        pass
    with pytest.raises(ValueError, match="the trace is empty"):
        _ = t.tokens
    with tm.trace(model, detail=False) as t:
        model(torch.randn(1, 3, 16, 16))
    with pytest.raises(ValueError, match="detail=True"):
        _ = t.owner
    with pytest.raises(ValueError, match="unknown convention"):
        t.cost("flops")  # type: ignore[arg-type]


def test_several_calls_make_one_long_batch_and_traces_nest() -> None:
    model = tm.apply(small(), tm.ToMe(1))
    with torch.inference_mode(), tm.trace(model) as outer:
        model(torch.randn(2, 3, 16, 16))
        with tm.trace(model, detail=False) as inner:
            model(torch.randn(3, 3, 16, 16))
    assert [len(layer) for layer in outer.tokens] == [5, 5]
    assert [len(layer) for layer in inner.tokens] == [3, 3]
    assert outer.owner.shape == (5, 5)
    assert [m.tolist() for m in outer.merged] == [[1] * 5, [0] * 5]
    assert [len(s) for s in outer.similarities(1)] == [2] * 5
    assert [p.shape for p in outer.pairs(1)] == [(1, 2)] * 5
    assert [len(s) for s in outer.similarities(2)] == [0] * 5  # the last layer keeps the class token, and compares nothing
    with pytest.raises(ValueError, match="no layer 3"):
        outer.sizes(3)


def test_similarities_are_kept_where_nothing_merged_and_costs_after_a_change() -> None:
    model = tm.apply(small(), tm.ATM(thresholds=[0.999999] * 2))
    with torch.inference_mode(), tm.trace(model) as t:
        model(torch.randn(2, 3, 16, 16))
    assert [m.tolist() for m in t.merged] == [[0, 0], [0, 0]]
    assert all(len(s) == 2 and (s.abs() <= 1).all() for s in t.similarities(1))
    before = t.cost().gmacs
    tm.apply(model, tm.ToMe(1))
    assert t.cost().gmacs == before
    model.forward_intermediates(torch.randn(1, 3, 16, 16), indices=[0], stop_early=True)


def test_a_trace_of_whole_and_early_calls_adds_up() -> None:
    model, x = tm.apply(small(), tm.ToMe(1)), torch.randn(1, 3, 16, 16)
    costs = []
    with torch.inference_mode(), tm.trace(model) as both:
        for call in (lambda: model(x), lambda: model.forward_intermediates(x, indices=[0], stop_early=True)):
            with tm.trace(model) as t:
                call()
            costs.append(t.cost().gmacs)
    assert both.cost().gmacs == pytest.approx(sum(costs) / 2)
    assert costs[1] < costs[0]


def test_counting_fires_no_hook_of_the_user() -> None:
    model = tm.apply(small(), tm.ToMe(1))
    seen = []
    model.norm.register_forward_hook(lambda module, args, out: seen.append(float(out.detach().max())))
    with tm.trace(model) as t:
        model(torch.randn(1, 3, 16, 16))
    t.cost()
    assert len(seen) == 1


def test_training_with_dropout_and_drop_path() -> None:
    model = small(drop_path_rate=0.5, proj_drop_rate=0.2, attn_drop_rate=0.2, pos_drop_rate=0.1, patch_drop_rate=0.5).train()
    tm.apply(model, tm.ATM(thresholds=[0.0, 0.0], batch="each"))
    for grad_checkpointing in (False, True):
        model.set_grad_checkpointing(grad_checkpointing)
        model(torch.randn(4, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_prune_intermediate_layers_still_works() -> None:
    model = tm.apply(small(depth=3), tm.ToMe(1))
    model.prune_intermediate_layers([0, 1])
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 5, 16)
