"""One forward pass: attention, the method's decision, merge, MLP. The state lives in the call, never on the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..backbones.base import Backbone, Call, Unsupported
from ..backbones.helpers import check_hooks
from ..core import fused
from ..core.attention import BlockAttention, attend, group_mean, merge_map
from ..core.matching import InputView, Ledger, PairRule, View
from ..core.state import Update, update
from ..core.tokens import Decision, Tokens, as_lists, assign_kept, merge
from ..methods.base import InputRule, LastLayer, Method, Rule, Stage
from ..methods.learning import MODULES
from .records import COUNTER, LESSON, OBSERVERS, CallRecord, LateProjection, Lesson, TokenCounter

NO_X = torch.empty(0)

# What the original tokens get back where a model returns the whole sequence: the vector of their group, or their own vector
# at the merge plus what the group has changed since.
Restore = Literal["group", "residual"]

# Which tokens a model returns where it returns the sequence: all original ones, or those that are left.
Output = Literal["full", "reduced"]


def method_modules(model: nn.Module) -> nn.ModuleDict | None:
    """The modules of the method that is applied to a model, if it has any."""
    return model._modules.get(MODULES)  # type: ignore[return-value]


@dataclass(frozen=True)
class Plan:
    """What `apply` stores on the model: everything that does not change from call to call."""

    method: Method
    backbone: Backbone
    depth: int
    prefix: int
    has_cls: bool
    rules: tuple[Rule | None, ...] = field(repr=False)  # per layer; None: the layer never merges
    stages: tuple[Stage, ...] = field(repr=False)
    input_rules: tuple[InputRule | None, ...] = field(repr=False)
    restore: Restore | None = (
        None  # what the original tokens get where the whole sequence is returned; None: see `_residual`
    )
    output: Output = "full"
    matmul: bool = False  # in graphs, merge by a matrix product instead of a scatter

    @classmethod
    def of(
        cls, model: nn.Module, method: Method, backbone: Backbone, restore: Restore | None = None, output: Output = "full"
    ) -> Plan:
        depth = len(backbone.blocks(model))
        layers = range(1, depth + 1)
        return cls(
            method,
            backbone,
            depth,
            backbone.prefix(model),
            backbone.has_cls_token(model),
            tuple(method.rule(layer, depth) for layer in layers),
            tuple(method.stage(layer, depth) for layer in layers),
            tuple(method.input_rule(layer, depth) for layer in layers),
            restore,
            output,
        )

    @cached_property
    def pair_rules(self) -> bool:
        """Whether any layer has a rule that the fused kernels may know."""
        return any(isinstance(rule, PairRule) for rule in self.rules)

    def last_layer(self, model: nn.Module) -> LastLayer:
        """Looked up at every call: a head may be replaced after `apply`."""
        prefix_only = self.backbone.head_reads_prefix_only(model)
        asked = self.method.last_layer
        if asked in ("prefix", "query") and not prefix_only:
            raise Unsupported(
                f"last_layer={asked!r} needs a head that reads only prefix tokens; the head of this "
                f"{type(model).__name__} reads patches too. Leave last_layer out, or use 'full'"
            )
        return asked or ("query" if prefix_only else "full")

    def _check_padding(self, valid: Tensor) -> Tensor | None:
        """The mask of a padded batch; None where nothing is padded."""
        if torch.compiler.is_compiling():
            raise ValueError("padded inputs do not compile or export; give images of equal size, without a mask")
        lengths = set(valid.sum(1).tolist())
        if len(lengths) > 1 and not self.takes_unequal_images:
            raise ValueError(
                f"{type(self.method).__name__} keeps equal numbers of tokens, and the images of this batch have "
                f"{min(lengths)} to {max(lengths)}. ATM, ToMe, TopR and methods that decide per image take such batches; "
                "others take images of equal size, or one at a time"
            )
        return None if lengths <= {valid.shape[1]} else valid

    @cached_property
    def takes_unequal_images(self) -> bool:
        known = all(rule is None or isinstance(rule, PairRule) for rule in self.rules) and not any(self.input_rules)
        return known or self.method.batch_invariant

    def _residual(self, model: nn.Module, entry: str) -> bool:
        """Whether the original tokens get their own vectors back. By default, where a model returns the sequence: a
        classifier that pools it reads the merged tokens, as published."""
        if self.restore is None:
            return entry != "forward" or not self.backbone.has_classifier(model)
        return self.restore == "residual"

    def open(
        self,
        model: nn.Module,
        x: Tensor,
        *,
        entry: str = "forward",
        restore_each: bool = False,
        grid: bool = False,
        valid: Tensor | None = None,
        **options: Any,
    ) -> Run:
        """Start the state of a call on images x. `entry` is the method of the model that was called. If it is not
        `forward`, or if every block returns the whole sequence, more than the head may read the output, so the last layer
        is computed in full. `grid`: the model arranges its patches in their grid. `options`: keywords of the call that
        change what is computed around the blocks. `valid` [B,N0] bool: where images are padded to the longest, which tokens
        are not padding."""
        if grid and self.output == "reduced":
            raise ValueError(
                f"this call of {type(model).__name__} arranges patches in their grid, and with output='reduced' there is "
                "none; apply with output='full'"
            )
        blocks = self.backbone.blocks(model)
        for layer, block in enumerate(blocks, 1):
            check_hooks(self.backbone, block, layer)
        plan = self
        if len(blocks) != self.depth:  # blocks were removed or added after `apply`
            if len(blocks) > self.depth:
                self.method.check_depth(len(blocks))
            plan = replace(Plan.of(model, self.method, self.backbone, self.restore, self.output), matmul=self.matmul)
        compiling = torch.compiler.is_compiling()
        run = Run(
            plan,
            self.last_layer(model) if entry == "forward" and not restore_each else "full",
            restore_each,
            pack=not (model.training or compiling),
            fuse=not (model.training or compiling) and plan.pair_rules and fused.available(x.device.type),
            checkpoint=self.backbone.checkpoints_blocks(model),
        )
        if valid is not None:
            run.valid = self._check_padding(valid.bool())
        run.reduced = self.output == "reduced"
        run.residual = run.last_layer == "full" and self._residual(model, entry)
        run.training = model.training
        run.modules = method_modules(model)
        if not compiling and (lesson := LESSON.get()) is not None and lesson.model is model:
            run.lesson = lesson
            if self.method.needs_tokens:
                run.last_layer = "full"
        if not compiling and (counter := COUNTER.get()) is not None and counter.model is model:
            run.counter = counter
        observers = () if compiling else tuple(o for o in OBSERVERS.get() if o.model is model)
        if observers:
            detail = any(observer.detail for observer in observers)
            run.record = CallRecord(
                self.backbone,
                self.prefix,
                tuple(x.shape[1:]),
                entry,
                run.last_layer,
                detail,
                tuple(options.items()),
                x[:4].detach().clone() if detail else None,
            )
            for observer in observers:
                observer.calls.append(run.record)
        return run


def _standard_attention(backbone: Backbone, block: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """The first half of a block while nothing has merged and nothing merges. (A function of its own, so that its tensors are
    freed before the MLP.)"""
    q, k, v = backbone.project(block, x)
    bias = None if bias is None else bias.to(q.dtype)
    return backbone.add_attention(block, x, attend(q, k, v, bias, backbone.attention_config(block)))


class Run(Call):
    """The state of one call, keyed by layer: a block that is recomputed reads what it read before, and decides the same."""

    def __init__(
        self, plan: Plan, last_layer: LastLayer, restore_each: bool, pack: bool, fuse: bool, checkpoint: bool
    ) -> None:
        self.plan = plan
        self.last_layer = last_layer
        self.restore_each = restore_each  # every block returns the full sequence, for intermediate features
        self.pack = pack  # pack images of different lengths; else pad them
        self.fuse = fuse  # merge by the fused kernels where they apply
        self.checkpoint = checkpoint
        self.entering: dict[int, Tokens | None] = {1: None}  # state that enters a layer, without x; None: not built yet
        self.decisions: dict[str, Decision | Update | None] = {}
        self.record: CallRecord | None = None  # where a trace observes
        # Kept during the call, as the caller of an nn.Sequential keeps its input. If it is freed after the first block, the
        # buffers of the CPU allocator rotate in another way, and a batch of 8 takes 4 % longer (benchmarks/overhead.py).
        self.first_x: Tensor | None = None
        self.training = False
        self.residual = False  # original tokens get their own vectors back
        self.reduced = False  # no token is restored
        self.valid: Tensor | None = None  # [B,N0] bool: tokens that are not padding
        self.modules: nn.ModuleDict | None = None  # of the method
        self.lesson: Lesson | None = None  # where a training step observes
        self.counter: TokenCounter | None = None  # where the tokens that enter the last layer are counted

    @property
    def depth(self) -> int:
        return self.plan.depth

    def step(
        self,
        block: nn.Module,
        layer: int,
        x: Tensor,
        rope: Any = None,
        plain: Callable[[Tensor], Tensor] | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Run one block on x; this is what a patched block's forward calls."""
        if layer == 1:
            self.first_x = x
        if self.checkpoint and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._step, block, layer, x, rope, plain, position_bias, use_reentrant=False)
            return result
        return self._step(block, layer, x, rope, plain, position_bias)

    def _step(
        self,
        block: nn.Module,
        layer: int,
        x: Tensor,
        rope: Any,
        plain: Callable[[Tensor], Tensor] | None,
        position_bias: Tensor | None,
    ) -> Tensor:
        plan = self.plan
        backbone = plan.backbone
        if layer not in self.entering:
            raise RuntimeError(f"block {layer} was called before block {layer - 1}; a merged model runs its blocks in order")
        entering = self.entering[layer]
        last = layer == plan.depth
        prefix_only = last and self.last_layer != "full"
        merged = self.valid is not None if entering is None else entering.merged
        if last and self.counter is not None:
            counts = torch.full((len(x),), x.shape[1]) if entering is None else entering.num_tokens
            self.counter.calls.append(counts)
        quiet = plan.rules[layer - 1] is None and plan.input_rules[layer - 1] is None and self.record is None
        if quiet and not merged and not prefix_only and rope is None and not (last and self.lesson is not None):
            self.entering[layer + 1] = entering
            if plain is not None:
                return plain(x)
            return backbone.add_mlp(block, _standard_attention(backbone, block, x, position_bias))
        tokens = self._start(x) if entering is None else self._enter(entering, x)
        after = self._attend_and_merge(block, layer, tokens, rope, position_bias, prefix_only)
        self.entering[layer + 1] = after._replace(x=NO_X)
        out = backbone.add_mlp(block, after.x)
        if after.merged and not prefix_only and (last or self.restore_each):
            out = after.unpack(out) if self.reduced else after.restore(out, plan.prefix)
        if last:
            out = plan.method.finish(out, after)
            if self.lesson is not None:
                self.lesson.tokens = out
        return out

    def _start(self, x: Tensor) -> Tokens:
        """The tokens of the model, without padding."""
        tokens = Tokens.start(x)
        padding = None if self.valid is None else assign_kept(tokens, self.valid)
        return tokens if padding is None else merge(tokens, padding, pack=self.pack)

    def add_between(self, layer: int, x: Tensor, values: Tensor) -> Tensor:
        tokens = self.entering[layer + 1]
        values = values.to(x)
        if tokens is None or not tokens.merged or (self.restore_each and not self.reduced):
            return x + values
        (b, m), owner, parked = tokens.size.shape, tokens.owner, tokens.parked
        count = m if parked is None else m + parked.x.shape[1]  # parked tokens follow the others
        mean = group_mean(values.unsqueeze(1).expand(b, -1, -1, -1), owner, count)[:, 0]
        if parked is not None:
            self.entering[layer + 1] = tokens._replace(parked=parked._replace(x=parked.x + mean[:, m:]))
        return x + tokens.pack(mean[:, :m])

    def _enter(self, tokens: Tokens, x: Tensor) -> Tokens:
        """The state of the layer, with x as the model hands it on."""
        if self.restore_each and tokens.merged:
            if not self.reduced:
                index = tokens.representative().unsqueeze(-1).expand(-1, -1, x.shape[-1])
                x = x.gather(1, index)
                if tokens.offset is not None:
                    x = x - tokens.offset.gather(1, index)
            x = tokens.pack(x)
        return tokens._replace(x=x)

    def _attend_and_merge(
        self, block: nn.Module, layer: int, tokens: Tokens, rope: Any, position_bias: Tensor | None, prefix_only: bool
    ) -> Tokens:
        """The first half of a block and the merge. (A function of its own for the same reason.)"""
        plan = self.plan
        backbone = plan.backbone
        entering, ledger = tokens, None if self.record is None else Ledger(backbone.cost(block).macs_q)
        if (input_rule := plan.input_rules[layer - 1]) is not None:
            view = InputView(layer, plan.depth, plan.prefix, tokens, ledger=ledger, **self._training)
            tokens, _ = self._decide(view, input_rule, "input")
        attention = BlockAttention(
            tokens,
            backbone.attention_config(block),
            plan.prefix,
            plan.has_cls,
            plan.method.prop_attn,
            rope,
            None if rope is None else partial(backbone.apply_rope, block),
            position_bias,
        )
        if prefix_only:
            return self._prefix_only(block, layer, attention, entering, ledger)
        stage = plan.stages[layer - 1] if plan.rules[layer - 1] is not None else "tokens"
        if stage in ("map", "values") and tokens.ragged:
            raise ValueError(
                f"{type(plan.method).__name__}: the stage {stage!r} needs images of equal length; once they keep "
                "different numbers of tokens, decide at 'tokens' or 'queries'"
            )
        if stage == "queries":
            after, late = self._merge_queries(block, layer, attention, ledger), "q"
        elif stage == "values":
            after, late = self._merge_values(block, layer, attention, ledger), "v"
        else:
            after, late = self._merge_tokens(block, layer, attention, stage == "map", ledger), None
        if self.record is not None and ledger is not None:
            self.record.add(layer, entering, after, ledger, late, attending=tokens)  # type: ignore[arg-type]
        return after

    @property
    def _training(self) -> dict[str, Any]:
        """What a view shows of training."""
        notes = None if self.lesson is None else self.lesson.notes
        return {"modules": self.modules, "training": self.training, "notes": notes}

    def _merge_tokens(
        self, block: nn.Module, layer: int, attention: BlockAttention, with_map: bool, ledger: Ledger | None
    ) -> Tokens:
        """Standard attention; its output is merged."""
        plan = self.plan
        before = attention.tokens
        q, k, v = plan.backbone.project(block, before.x)
        if with_map:
            weights = attention.map(q, k)
            out = attention.apply_map(weights, v)
        else:
            weights = None
            out = attention(q, k, v)
        tokens = before._replace(x=plan.backbone.add_attention(block, before.x, out))
        if (rule := plan.rules[layer - 1]) is not None:
            view = View(layer, plan.depth, plan.prefix, tokens, k, attention, q, v, weights, ledger=ledger, **self._training)
            tokens, _ = self._decide(view, rule)
        return tokens

    def _merge_queries(self, block: nn.Module, layer: int, attention: BlockAttention, ledger: Ledger | None) -> Tokens:
        """Merge the input of attention: only the remaining tokens have a query, keys and values are those of all."""
        plan = self.plan
        before = attention.tokens
        k, v = plan.backbone.project(block, before.x, "kv")

        def project_q(x: Tensor) -> Tensor:
            return plan.backbone.project(block, x, "q")[0]

        view = View(
            layer, plan.depth, plan.prefix, before, k, attention, v=v, project_q=project_q, ledger=ledger, **self._training
        )
        tokens, _ = self._decide(view, plan.rules[layer - 1])
        out = attention(project_q(tokens.x), k, v, tokens)
        return tokens._replace(x=plan.backbone.add_attention(block, tokens.x, out))

    def _merge_values(self, block: nn.Module, layer: int, attention: BlockAttention, ledger: Ledger | None) -> Tokens:
        """Merge after QKᵀ: the attention map merges with the tokens, values are those of the remaining tokens."""
        plan = self.plan
        before = attention.tokens
        q, k = plan.backbone.project(block, before.x, "qk")
        weights = attention.map(q, k)
        view = View(layer, plan.depth, plan.prefix, before, k, attention, q=q, map=weights, ledger=ledger, **self._training)
        tokens, decision = self._decide(view, plan.rules[layer - 1])
        if decision is not None:
            weights = merge_map(weights, before, as_lists(decision))
        (v,) = plan.backbone.project(block, tokens.x, "v")
        return tokens._replace(x=plan.backbone.add_attention(block, tokens.x, attention.apply_map(weights, v)))

    def _prefix_only(
        self, block: nn.Module, layer: int, attention: BlockAttention, entering: Tokens, ledger: Ledger | None
    ) -> Tokens:
        """The last layer, when the head reads nothing but the prefix: no merge, and the patches are left behind."""
        backbone = self.plan.backbone
        tokens = attention.tokens
        if self.last_layer == "query":
            x = attention.prefix_tokens(tokens.x)
            (q,) = backbone.project(block, x, "q")
            k, v = backbone.project(block, tokens.x, "kv")
            x = backbone.add_attention(block, x, attention(q, k, v))
        else:
            q, k, v = backbone.project(block, tokens.x)
            x = attention.prefix_tokens(backbone.add_attention(block, tokens.x, attention(q, k, v)))
        if self.record is not None and ledger is not None:
            late: LateProjection = "q" if self.last_layer == "query" else None
            self.record.add(layer, entering, tokens, ledger, late, kept=self.plan.prefix, attending=tokens)
        return tokens._replace(x=x)

    def _decide(self, view: Any, rule: Any, stage: str = "") -> tuple[Tokens, Decision | None]:
        """Ask the method, once per layer, and merge. (Views and rules come in pairs: of a block or of its input.)"""
        plan = self.plan
        began = 0.0 if self.record is None else time.perf_counter()
        decision: Decision | Update | None
        if self.fuse and isinstance(rule, PairRule) and fused.applies(rule, view):
            tokens, decision = fused.select_and_merge(rule, view)
        else:
            decision = self._ask(view, rule, f"{stage}{view.layer}")
            tokens = view.tokens
            if isinstance(decision, Update):
                tokens, decision = update(tokens, decision, self.pack), decision.move
            elif decision is not None:
                tokens = merge(tokens, decision, pack=self.pack, matmul=plan.matmul)
        if self.residual and (decision is not None or tokens.mask is not view.tokens.mask):
            tokens = tokens.with_offset(view.tokens)
        if self.record is not None:
            self.record.seconds += time.perf_counter() - began
        return tokens, decision

    def _ask(self, view: Any, rule: Any, key: str) -> Decision | Update | None:
        """A block that gradient checkpointing runs again decides as before. Where gradients pass through the decision, the
        decision runs again, too, with the same random numbers."""
        if not view.tokens.size.shape[0]:  # an empty batch has nothing to decide
            return None
        if self.plan.method.learns and torch.is_grad_enabled():
            decision: Decision | Update | None = rule(view)
            return decision
        if key not in self.decisions:
            with torch.no_grad():
                self.decisions[key] = rule(view)
        return self.decisions[key]
