"""What timm's VisionTransformer asks of an embedding that makes one token of 16 × 16 pixels."""

from __future__ import annotations

from torch import nn

PATCH = 16


class Embedding(nn.Module):
    """Images [B,3,H,W] → tokens [B,N,C], row by row."""

    def __init__(self, img_size: int | tuple[int, int]) -> None:
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        if any(side % PATCH for side in self.img_size):
            raise ValueError(f"{type(self).__name__} needs sides that are multiples of {PATCH}, not {self.img_size}")
        self.patch_size = (PATCH, PATCH)
        self.grid_size = self.dynamic_feat_size(self.img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self) -> int:
        return PATCH

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        return img_size[0] // PATCH, img_size[1] // PATCH
