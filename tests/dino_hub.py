"""Stand-ins for the classes of facebookresearch/dinov2 and dinov3, which no package registry has in their present form: the
same names, arguments and layout, so that the same backbone is used, written for these tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGLUFFN(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * value)


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, dim: int, flatten: bool) -> None:
        super().__init__()
        self.img_size, self.patch_size, self.in_chans, self.flatten = (img_size, img_size), patch_size, 3, flatten
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = 0.0, nn.Dropout(0.0)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, c = x.shape
        return self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.heads(x))
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class MemEffAttention(Attention):
    def forward(self, x: Tensor, attn_bias: Any = None) -> Tensor:
        if attn_bias is not None:
            raise AssertionError("xFormers is required for using nested tensors")
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, ffn: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim, eps=1e-6), MemEffAttention(dim, num_heads), LayerScale(dim)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(dim, eps=1e-6), ffn(dim), LayerScale(dim)
        self.sample_drop_ratio = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class NestedTensorBlock(Block):
    def forward(self, x: Any) -> Any:
        return [super(NestedTensorBlock, self).forward(part) for part in x] if isinstance(x, list) else super().forward(x)


class BlockChunk(nn.ModuleList):
    def forward(self, x: Any) -> Any:
        for block in self:
            x = block(x)
        return x


class SelfAttention(Attention):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.attn_drop: Any = nn.Dropout(0.0)

    def forward(self, x: Tensor, rope: Any = None) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x)
        out = F.scaled_dot_product_attention(self.apply_rope(q, rope), self.apply_rope(k, rope), v)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    @staticmethod
    def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        sin, cos = rope
        first, patches = x.split((x.shape[2] - len(sin), len(sin)), 2)
        a, b = patches.to(sin.dtype).chunk(2, -1)
        patches = torch.cat((a, b), -1) * cos + torch.cat((-b, a), -1) * sin
        return torch.cat((first, patches.to(x.dtype)), 2)


class SelfAttentionBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim, eps=1e-6), SelfAttention(dim, num_heads), LayerScale(dim)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(dim, eps=1e-6), Mlp(dim), LayerScale(dim)
        self.sample_drop_ratio = 0.0

    def forward(self, x: Any, rope: Any = None) -> Any:
        if not isinstance(x, list):
            return self.forward([x], [rope])[0]
        out = []
        for part, angles in zip(x, rope, strict=True):
            after = part + self.ls1(self.attn(self.norm1(part), rope=angles))
            out.append(after + self.ls2(self.mlp(self.norm2(after))))
        return out


class RopePositionEmbedding(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("periods", 100.0 ** (torch.arange(head_dim // 4) * 4 / head_dim))

    def forward(self, *, H: int, W: int) -> tuple[Tensor, Tensor]:  # noqa: N803
        y, x = torch.meshgrid(torch.linspace(-1, 1, H), torch.linspace(-1, 1, W), indexing="ij")
        coordinates = torch.stack((y, x), -1).reshape(-1, 2, 1).to(self.periods)
        angles = (torch.pi * coordinates / self.periods).flatten(1).tile(2)
        return angles.sin(), angles.cos()


class _Features(nn.Module):
    """What both versions do after the blocks."""

    norm: nn.Module
    blocks: nn.ModuleList

    def outputs(self, x: Tensor, prefix: int, masks: Any) -> dict[str, Any]:
        normed = self.norm(x)
        return {
            "x_norm_clstoken": normed[:, 0],
            "x_norm_patchtokens": normed[:, prefix:],
            "x_prenorm": x,
            "masks": masks,
        }

    def get_intermediate_layers(self, x: Tensor, n: int = 1, norm: bool = True) -> tuple[Tensor, ...]:
        chunked: Any = getattr(self, "_get_intermediate_layers_chunked", None)
        take: Any = chunked if self.chunked_blocks else self._get_intermediate_layers_not_chunked
        return tuple((self.norm(out) if norm else out)[:, 1:] for out in take(x, n))

    def forward(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        found = self.forward_features(*args, **kwargs)
        return found if is_training else self.head(found["x_norm_clstoken"])


def dinov2(chunks: int = 0, registers: int = 0, ffn: type[nn.Module] = Mlp, **options: Any) -> nn.Module:
    return DinoVisionTransformer(chunks=chunks, registers=registers, ffn=ffn, **options)


def dinov3(**options: Any) -> nn.Module:
    return DinoV3.DinoVisionTransformer(**options)


class DinoVisionTransformer(_Features):
    """Version 2."""

    def __init__(
        self,
        img_size: int = 40,
        patch_size: int = 8,
        embed_dim: int = 32,
        depth: int = 4,
        num_heads: int = 2,
        chunks: int = 0,
        registers: int = 0,
        ffn: type[nn.Module] = Mlp,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim, flatten=True)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (img_size // patch_size) ** 2, embed_dim))
        self.num_register_tokens = registers
        self.register_tokens = nn.Parameter(torch.randn(1, registers, embed_dim)) if registers else None
        blocks = [NestedTensorBlock(embed_dim, num_heads, ffn) for _ in range(depth)]
        self.chunked_blocks = chunks > 0
        if chunks:
            size = depth // chunks
            parts = [[nn.Identity()] * i + blocks[i : i + size] for i in range(0, depth, size)]
            self.blocks = nn.ModuleList([BlockChunk(part) for part in parts])
        else:
            self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(embed_dim, eps=1e-6), nn.Identity()

    def prepare_tokens_with_masks(self, x: Tensor, masks: Any = None) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1) + self.pos_embed
        if self.register_tokens is not None:
            x = torch.cat((x[:, :1], self.register_tokens.expand(x.shape[0], -1, -1), x[:, 1:]), 1)
        return x

    def forward_features_list(self, xs: list[Tensor], masks: list[Any]) -> list[dict[str, Any]]:
        x: Any = [self.prepare_tokens_with_masks(part, mask) for part, mask in zip(xs, masks, strict=True)]
        for block in self.blocks:
            x = block(x)
        return [self.outputs(part, 1 + self.num_register_tokens, mask) for part, mask in zip(x, masks, strict=True)]

    def forward_features(self, x: Any, masks: Any = None) -> Any:
        if isinstance(x, list):
            return self.forward_features_list(x, masks)
        x = self.prepare_tokens_with_masks(x, masks)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x, 1 + self.num_register_tokens, masks)

    def _get_intermediate_layers_not_chunked(self, x: Tensor, n: int = 1) -> list[Tensor]:
        x = self.prepare_tokens_with_masks(x)
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return found[-n:]

    def _get_intermediate_layers_chunked(self, x: Tensor, n: int = 1) -> list[Tensor]:
        x = self.prepare_tokens_with_masks(x)
        found: list[Tensor] = []
        for chunk in self.blocks:
            for block in chunk[len(found) :]:
                x = block(x)
                found.append(x)
        return found[-n:]


class DinoV3:
    class DinoVisionTransformer(_Features):
        """Version 3."""

        def __init__(
            self,
            img_size: int = 40,
            patch_size: int = 8,
            embed_dim: int = 32,
            depth: int = 4,
            num_heads: int = 2,
            n_storage_tokens: int = 4,
        ) -> None:
            super().__init__()
            self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim, flatten=False)
            self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
            self.n_storage_tokens = n_storage_tokens
            self.storage_tokens = nn.Parameter(torch.randn(1, n_storage_tokens, embed_dim))
            self.rope_embed = RopePositionEmbedding(embed_dim // num_heads)
            self.blocks = nn.ModuleList([SelfAttentionBlock(embed_dim, num_heads) for _ in range(depth)])
            self.chunked_blocks = False
            self.norm, self.head = nn.LayerNorm(embed_dim, eps=1e-6), nn.Identity()

        def prepare_tokens_with_masks(self, x: Tensor, masks: Any = None) -> tuple[Tensor, tuple[int, int]]:
            x = self.patch_embed(x)
            b, h, w, _ = x.shape
            prefix = torch.cat((self.cls_token, self.storage_tokens), 1).expand(b, -1, -1)
            return torch.cat((prefix, x.flatten(1, 2)), 1), (h, w)

        def forward_features_list(self, xs: list[Tensor], masks: list[Any]) -> list[dict[str, Any]]:
            made = [self.prepare_tokens_with_masks(part, mask) for part, mask in zip(xs, masks, strict=True)]
            x: Any = [part for part, _ in made]
            for block in self.blocks:
                x = block(x, [self.rope_embed(H=h, W=w) for _, (h, w) in made])
            return [self.outputs(part, 1 + self.n_storage_tokens, mask) for part, mask in zip(x, masks, strict=True)]

        def forward_features(self, x: Any, masks: Any = None) -> Any:
            if isinstance(x, Tensor):
                return self.forward_features_list([x], [masks])[0]
            return self.forward_features_list(x, masks)

        def _get_intermediate_layers_not_chunked(self, x: Tensor, n: int = 1) -> list[Tensor]:
            x, (h, w) = self.prepare_tokens_with_masks(x)
            found = []
            for block in self.blocks:
                x = block(x, self.rope_embed(H=h, W=w))
                found.append(x)
            return found[-n:]
