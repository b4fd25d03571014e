"""State that trained methods add to a call: values per token, soft masks, tokens set aside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tokens import Assignment, KeyMask, Origin, Parked, Tokens, assign, flat_positions, merge, padded_rows


@dataclass(frozen=True)
class Update:
    """A decision that changes the state of a call. Applied in this order: (1) recall parked tokens, appended at the end; (2)
    replace the given fields; (3) move tokens."""

    move: Assignment | None = None
    recall: bool = False
    x: Tensor | None = None  # the fields of Tokens
    extra: Tensor | None = None
    memory: Tensor | None = None
    mask: KeyMask | None = None


def update(tokens: Tokens, change: Update, pack: bool = True) -> Tokens:
    """The state after a decision."""
    if change.recall:
        tokens = recall(tokens)
    names = ("x", "extra", "memory", "mask")
    given = {name: getattr(change, name) for name in names if getattr(change, name) is not None}
    tokens = tokens._replace(merged=True, **given)
    if change.move is None:
        return tokens
    if tokens.mask is not None:
        raise ValueError("masked tokens stay where they are: a method masks tokens in training, or removes them")
    moved = merge(tokens, change.move, pack=pack)._replace(memory=tokens.memory)
    if tokens.extra is not None:
        moved = moved._replace(extra=_take_extra(tokens, change.move, tokens.extra))
    return moved if change.move.parked is None else _park(tokens, moved, change.move.parked)


def recall(tokens: Tokens) -> Tokens:
    """The tokens with those that were set aside behind them."""
    parked = tokens.parked
    if parked is None:
        return tokens
    extra = None if tokens.extra is None or parked.extra is None else torch.cat((tokens.extra, parked.extra), 1)
    x, size = torch.cat((tokens.x, parked.x), 1), torch.cat((tokens.size, parked.size), 1)
    return tokens._replace(x=x, size=size, extra=extra, parked=None)


def park(tokens: Tokens, keep: Tensor, aside: Tensor) -> Assignment:
    """Positions `keep` [B,M] stay, in this order; the others, `aside` [B,P], are set aside."""
    return Assignment(
        assign(tokens, keep).order,
        keep.new_zeros(0),
        keep.shape[1],
        parked=flat_positions(aside, tokens.size.shape[1], tokens.positions),
    )


def _take_extra(tokens: Tokens, move: Assignment, extra: Tensor) -> Tensor:
    """The values [B,N,E] of the tokens that keep a position, padded like the sizes."""
    b, _, e = extra.shape
    values = extra.flatten(0, 1).index_select(0, move.kept)
    if move.lengths is not None:
        at = padded_rows(move.lengths, move.length, values.device)
        values = values.new_zeros(b * move.length, e).index_copy(0, at, values)
    return values.reshape(b, move.length, e)


def _park(before: Tokens, after: Tokens, parked: Tensor) -> Tokens:
    b = before.size.shape[0]
    p = parked.shape[0] // b

    def take(values: Tensor) -> Tensor:
        return values.flatten(0, 1).index_select(0, parked).reshape(b, p, *values.shape[2:])

    origin = after.origin
    whole = torch.Size((b, after.size.shape[1] + p))
    origin = Origin(whole, origin.positions, origin.before, origin.mapping, before.origin.drops)
    extra = None if before.extra is None else take(before.extra)
    return after._replace(origin=origin, parked=Parked(take(before.x), take(before.size), extra))
