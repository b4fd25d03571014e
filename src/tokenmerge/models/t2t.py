"""T2T-ViT_t (Tokens-to-Token ViT, ICCV 2021), written from its published facts: timm's VisionTransformer behind two small
transformers that fold 3,136 tokens into 784 and 196. Keys are those of the official checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import Mlp
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from .embedding import Embedding
from .registry import build, config

WIDTH = 64  # of the tokens before the last folding


class FoldingAttention(nn.Module):
    """One head; the scale is that of the input's width, and values skip the attention."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.scale = dim**-0.5
        self.qkv = nn.Linear(dim, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # By a fused kernel: 3,136 tokens would need a map of 39 MB an image.
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return (self.proj(out) + v).squeeze(1)


class FoldingTransformer(nn.Module):
    """Attention that changes the width, so that there is no residual around it; then an MLP."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = FoldingAttention(dim, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokensToToken(Embedding):
    """Overlapping patches three times: 7 × 7 pixels every 4, then 3 × 3 tokens every 2, twice."""

    def __init__(self, img_size: int | tuple[int, int], in_chans: int, embed_dim: int, **options: Any) -> None:
        super().__init__(img_size)
        self.attention1 = FoldingTransformer(in_chans * 49, WIDTH)
        self.attention2 = FoldingTransformer(WIDTH * 9, WIDTH)
        self.project = nn.Linear(WIDTH * 9, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2] // 4, x.shape[3] // 4
        x = self.attention1(F.unfold(x, 7, stride=4, padding=2).transpose(1, 2))
        x = F.unfold(x.transpose(1, 2).unflatten(2, (height, width)), 3, stride=2, padding=1)  # type: ignore[no-untyped-call]
        x = self.attention2(x.transpose(1, 2))
        x = F.unfold(x.transpose(1, 2).unflatten(2, (height // 2, width // 2)), 3, stride=2, padding=1)  # type: ignore[no-untyped-call]
        return self.project(x.transpose(1, 2))


def sinusoid(positions: int, width: int) -> Tensor:
    """sin and cos of p / 10000^(2⌊j/2⌋/C) in turn, [1,positions,width]."""
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) / 10000 ** (
        2 * torch.div(torch.arange(width), 2, rounding_mode="floor").double() / width
    )
    return torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos()).float().unsqueeze(0)


class T2TViT(VisionTransformer):
    """The head reads the CLS token."""

    def __init__(self, **options: Any) -> None:
        options = {"patch_size": 16, "mlp_ratio": 3.0, "qkv_bias": False, "embed_layer": TokensToToken} | options
        super().__init__(norm_layer=partial(nn.LayerNorm, eps=1e-5), **options)
        self._modules["tokens_to_token"] = self._modules.pop("patch_embed")
        table = sinusoid(self.patch_embed.num_patches + 1, self.embed_dim)
        self.pos_embed = nn.Parameter(table, requires_grad=False)

    @property
    def patch_embed(self) -> Any:
        """timm's name for what the checkpoints call tokens_to_token."""
        return self._modules.get("tokens_to_token", self._modules.get("patch_embed"))


_CONFIG = config(0.9, None, "bsd-3-clause-clear", "https://github.com/yitu-opensource/T2T-ViT")


@register_model
def t2t_vit_t_14(pretrained: bool = False, **options: Any) -> T2TViT:
    """21.5 M parameters."""
    return build(T2TViT, "t2t_vit_t_14", pretrained, _CONFIG, **({"embed_dim": 384, "depth": 14, "num_heads": 6} | options))


@register_model
def t2t_vit_t_19(pretrained: bool = False, **options: Any) -> T2TViT:
    """39.2 M parameters."""
    return build(T2TViT, "t2t_vit_t_19", pretrained, _CONFIG, **({"embed_dim": 448, "depth": 19, "num_heads": 7} | options))


@register_model
def t2t_vit_t_24(pretrained: bool = False, **options: Any) -> T2TViT:
    """64.1 M parameters."""
    return build(T2TViT, "t2t_vit_t_24", pretrained, _CONFIG, **({"embed_dim": 512, "depth": 24, "num_heads": 8} | options))
