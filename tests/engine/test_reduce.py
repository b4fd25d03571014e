"""Models that return the tokens that are left."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

import tokenmerge as tm
from tests.backbones.test_towers import IDS, clip, llava
from tests.contract.table import CONFIGS, batch, build

NAMES = ["unpooled", "hf-vit-model", "hf-clip", "hf-siglip", "hf-dinov3", "hf-mae", "hf-beit-shared"]


@pytest.mark.parametrize("method", ["tome", "atm-each", "ats", "evit"])
@pytest.mark.parametrize("name", NAMES)
def test_restored_they_are_the_whole_output(name: str, method: str) -> None:
    """Giving every original token the vector of its group is what the model does without `output="reduced"`."""
    model, x = build(name), batch(name)
    with torch.inference_mode():
        tm.apply(model, CONFIGS[method], restore="group")
        whole = model.forward_features(x) if name == "unpooled" else model(x).last_hidden_state
        tm.apply(model, CONFIGS[method], output="reduced")
        found = tm.reduce(model, x)
    assert found.x.shape[:2] == found.mask.shape == found.size.shape
    assert found.x.shape[1] < whole.shape[1]
    for image, (tokens, owner) in enumerate(zip(found.as_list(), found.owner, strict=True)):
        held = owner >= 0
        torch.testing.assert_close(tokens[owner[held]], whole[image][held], atol=1e-5, rtol=1e-5)
        members = found.members(image)
        assert [len(group) for group in members] == found.size[image][found.mask[image]].tolist()
        assert sorted(chain.from_iterable(members)) == held.nonzero()[:, 0].tolist()
        patches = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0))
        for token, group in enumerate(members):
            if token < found.prefix:
                assert found.position[image, token].isnan().all()
            else:
                mean = patches[[member - found.prefix for member in group]].mean(0)
                torch.testing.assert_close(found.position[image, token], mean)


@pytest.mark.parametrize("layer", [1, 3])
def test_hidden_layers(layer: int) -> None:
    """As language models take them: tokens after a layer before the last one."""
    model, x = build("hf-clip"), batch("hf-clip")
    with torch.inference_mode():
        tm.apply(model, tm.ToMe(4), restore="group")
        whole = model(x, output_hidden_states=True).hidden_states[layer]
        found = tm.reduce(tm.apply(model, tm.ToMe(4), output="reduced"), x, layer=layer)
    assert found.x.shape[1] == 26 - 4 * layer
    torch.testing.assert_close(found.x.gather(1, found.owner.unsqueeze(-1).expand_as(whole)), whole, atol=1e-5, rtol=1e-5)


def test_a_language_model_reads_fewer_tokens() -> None:
    """From images to text logits; the number of image tokens in the prompt is that of the tokens that are left."""
    model = llava()
    x = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))

    def logits(count: int) -> torch.Tensor:
        prompt = torch.cat((IDS[:, :1], torch.full((2, count), 31), IDS[:, 1:]), 1)
        out: torch.Tensor = model(input_ids=prompt, pixel_values=x).logits
        return out

    with torch.inference_mode():
        full = logits(25)
        tm.apply(model, tm.NoMerge(), output="reduced")
        torch.testing.assert_close(logits(25), full, atol=1e-5, rtol=1e-5)
        tm.apply(model, tm.ToMe(4), output="reduced")
        left = tm.reduce(model, x, layer=3)
        assert left.mask.all()
        patches = left.x.shape[1] - left.prefix
        assert patches == 25 - 3 * 4
        assert logits(patches).shape == (2, patches + 3, 32)
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            logits(25)
        assert torch.equal(tm.remove(model) and logits(25), full)


def test_what_reduced_outputs_refuse() -> None:
    with pytest.raises(tm.Unsupported, match="would pool the tokens that are left as if each stood for one patch"):
        tm.apply(build("mae-avg"), tm.ToMe(4), output="reduced")
    with pytest.raises(ValueError, match="arranges patches in their grid"):
        tm.apply(build("hf-dinov2-backbone"), tm.ToMe(4), output="reduced")(batch("hf-dinov2-backbone"))
    with pytest.raises(ValueError, match="arranges patches in their grid"):
        tm.apply(build("unpooled"), tm.ToMe(4), output="reduced").forward_intermediates(batch("unpooled"))
    with pytest.raises(ValueError, match="output is one of 'full', 'reduced', not 'short'"):
        tm.apply(clip(), tm.ToMe(4), output="short")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"apply\(…, output='reduced'\)"):
        tm.reduce(tm.apply(clip(), tm.ToMe(4)), batch("hf-clip"))
    with pytest.raises(ValueError, match="layer is from 1 to 4, not 5"):
        tm.reduce(tm.apply(clip(), tm.ToMe(4), output="reduced"), batch("hf-clip"), layer=5)
