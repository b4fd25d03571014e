"""Methods as values: checks, repr, JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import tokenmerge as tm
from tokenmerge.methods import METHODS, from_dict

EXAMPLES = [
    tm.ATM(0.98, 0.035, 0.84),
    tm.ATM(alpha=1, beta=0.0, theta_min=0.5, split_layer=0, batch="each", metric="tokens", prop_attn=False),
    tm.ATM(thresholds=[0.9, 0.8, 1.0], last_layer="full"),
    tm.ATM(counts=[3, 0, 1]),
    tm.ToMe(r=8),
    tm.ToMe(0, last_layer="prefix"),
    tm.TopR(4, "decreasing"),
    tm.TopR(ramp=[1, 2, 3]),
    tm.ConstantThreshold(0.9, batch="each"),
    tm.NoMerge(),
    tm.ToMe([3, 0, 1]),
    tm.EViT(0.7),
    tm.EViT(0.5, fuse=False, layers=[1, 2], prop_attn=True),
    tm.MCTF(16),
    tm.MCTF(0.35, layers=[4, 7, 10]),
    tm.MCTF([0, 3, 5], tau_info=0),
    tm.ZeroTPrune(0.8),
    tm.ZeroTPrune(0.8, similar=0.25, layers=[1, 5], iterations=[3, 2, 1], variance=[0, 9]),
    tm.ATS(),
    tm.ATS(50, layers=[3], batch="mean"),
    tm.ToFu(8, switch=3),
    tm.PPT(50),
    tm.PPT(20, threshold=0.0, layers=[2]),
    tm.DiffRate([26, 20], [22, 18]),
    tm.PiToMe(0.9, margin=0.5),
    tm.BAT(0.7, clusters=0.2, neighbours=3, layers=[4, 7]),
    tm.RandomMerge(5, seed=1),
    tm.DynamicViT(0.7),
    tm.DynamicViT(0.5, layers=[2]),
    tm.IARED2(threshold=0.4, penalty=5, groups=2, sample=True),
    tm.EvoViT(0.4, stage_length=1),
    tm.AViT(gamma=5, beta=30),
]


def test_every_method_has_an_example() -> None:
    assert {type(m).__name__ for m in EXAMPLES} == set(METHODS)


@pytest.mark.parametrize("method", EXAMPLES, ids=repr)
def test_repr_json_and_command_line_round_trip(method: tm.Method, tmp_path: Path) -> None:
    assert eval(repr(method), {name: getattr(tm, name) for name in METHODS}) == method
    assert tm.parse(repr(method)) == method
    tm.save(method, tmp_path / "m.json")
    assert tm.load(tmp_path / "m.json") == method
    assert json.loads((tmp_path / "m.json").read_text())["type"] == type(method).__name__
    assert hash(tm.load(tmp_path / "m.json")) == hash(method)
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize("method", EXAMPLES, ids=repr)
def test_methods_are_frozen(method: tm.Method) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.prop_attn = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: tm.ATM(1.2, 0.03, 0.8), r"alpha must be a number in \[0.0, 1.0\], not 1.2"),
        (lambda: tm.ATM(0.9, -0.1, 0.8), r"beta must be a number in \[0.0, 1.0\]"),
        (lambda: tm.ATM(0.9, 0.1, float("nan")), "theta_min"),
        (lambda: tm.ATM("0.9", 0.1, 0.8), "alpha must be a number"),
        (lambda: tm.ATM(0.9, 0.1), "together"),
        (tm.ATM, "together"),
        (lambda: tm.ATM(0.9, 0.1, 0.8, thresholds=[0.5]), "together"),
        (lambda: tm.ATM(thresholds=[]), "one per layer"),
        (lambda: tm.ATM(thresholds=[0.5, 1.5]), r"\[-1.0, 1.0\]"),
        (lambda: tm.ATM(counts=[1.5]), "integers"),
        (lambda: tm.ATM(counts=[1], batch="each"), "same for every image"),
        (lambda: tm.ATM(0.9, 0.1, 0.8, batch="all"), r"one of \['mean', 'each'\], not 'all'"),
        (lambda: tm.ATM(0.9, 0.1, 0.8, metric="queries"), "metric"),
        (lambda: tm.ATM(0.9, 0.1, 0.8, split_layer=-1), "split_layer must be an integer"),
        (lambda: tm.ATM(0.9, 0.1, 0.8, last_layer=True), "last_layer"),
        (lambda: tm.ATM(0.9, 0.1, 0.8, prop_attn="yes"), "prop_attn"),
        (lambda: tm.ToMe(-1), "r must be an integer, 0 or more, not -1"),
        (lambda: tm.ToMe(2.5), "integer"),
        (lambda: tm.ToMe(True), "integer"),
        (lambda: tm.TopR(3, "up"), "ramp"),
        (lambda: tm.TopR(3, [1, 2]), "leave out r"),
        (tm.TopR, "r must be"),
        (lambda: tm.ConstantThreshold(2), r"theta must be a number in \[-1.0, 1.0\]"),
    ],
)
def test_bad_values_say_the_range(build, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "not a saved method"),
        ({"type": "ATM"}, "not a saved method"),
        ({"type": "os.system", "version": 1, "config": {}}, "unknown method"),
        ({"type": "ToMe", "version": 99, "config": {"r": 1}}, "version 99"),
        ({"type": "ToMe", "version": 1, "config": {"r": 1, "extra": 2}}, "its fields are"),
        ({"type": "ToMe", "version": 1, "config": {}}, "its fields are"),
    ],
)
def test_bad_files_are_refused(data: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        from_dict(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"bad\.json"):
        tm.load(tmp_path / "bad.json")


def test_not_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="not JSON"):
        tm.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "ToMe(r=open('x'))",
        "1",
        "ToMe(r=",
        "tm.ToMe(1)",
        "ToMe(**{})(1)",
        "NoMerge(**{'last_layer': 'full'})",
        "ToMe(r={[]: 1})",
    ],
)
def test_parse_evaluates_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read|unknown method"):
        tm.parse(text)


def test_parse_accepts_a_bare_name() -> None:
    assert tm.parse("NoMerge") == tm.NoMerge()
