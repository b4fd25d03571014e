"""A language model that reads fewer image tokens: from images to text logits.

    python examples/llava.py        # a small LLaVA with random weights, seconds on two cores

LLaVA's projector takes every token of the image tower on its own, so the tower may return the tokens that are left. A fixed
number of merges per layer gives every image the same number of tokens, and the prompt has one place for each. Random
weights show what is saved, not what is lost: for that, compare answers of a trained model. Towers whose projector joins
neighbouring patches (2 × 2, pixel shuffle) need the grid: leave `output` out, so that the tower restores it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import tokenmerge as tm

IMAGE = 31  # the token in the prompt that stands for one image token


def small_llava() -> Any:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        image_size=336, patch_size=14, hidden_size=256, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=4
    )
    text = LlamaConfig(vocab_size=32, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)).eval()


def logits_and_gmacs(model: Any, images: Tensor, image_tokens: int) -> tuple[Tensor, float]:
    prompt = torch.tensor([1, *[IMAGE] * image_tokens, 5, 9, 7]).expand(len(images), -1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(input_ids=prompt, pixel_values=images).logits
    return logits, counter.get_total_flops() / 2e9 / len(images)


@torch.inference_mode()
def main() -> None:
    model = small_llava()
    images = torch.randn(2, 3, 336, 336)
    layer = model.config.vision_config.num_hidden_layers + 1 + model.config.vision_feature_layer  # hidden_states[-2]
    baseline = None
    for name, method in {"baseline": tm.NoMerge(), "ToMe(r=24)": tm.ToMe(24), "ToMe(r=40)": tm.ToMe(40)}.items():
        tm.apply(model, method, output="reduced")
        tokens = tm.reduce(model, images, layer=layer)
        count = tokens.x.shape[1] - tokens.prefix  # LLaVA leaves the CLS token out
        with tm.trace(model, detail=False) as t:
            logits, total = logits_and_gmacs(model, images, count)
        tower = t.cost().gmacs
        baseline = baseline or (tower, total - tower)
        print(
            f"{name:<11} {count:>4} image tokens   tower {tower:6.2f} GMACs ({tower / baseline[0]:.0%})   "
            f"projector and language model {total - tower:6.2f} ({(total - tower) / baseline[1]:.0%})   "
            f"logits {list(logits.shape)}"
        )
    tm.remove(model)


if __name__ == "__main__":
    main()
