"""Patches between bf16 weights: lossless, verified, and refused where they do not fit."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lowcomm_jax.models.weight_patch import apply_patch, digest, read_about, write_patch

SHAPES = {"a": (37, 53), "scalar": (), "row": (70_000,), "none": (0, 4), "same": (5, 3)}
BF16 = ml_dtypes.bfloat16


def bits(x):
    return np.ascontiguousarray(np.asarray(x, BF16)).reshape(-1).view(np.uint16)


def sets(share=0.3, seed=0):
    """Two sets of fp32 tensors, of which about this share differs in bf16."""
    rng = np.random.default_rng(seed)
    old = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    new = {}
    for name, x in old.items():
        moves = rng.random(x.shape) < (0 if name == "same" else share)
        new[name] = np.where(moves, x * np.float32(1.1), x * np.float32(1 + 1e-7))
    return old, new


def same(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == BF16 and got[name].shape == x.shape, name
        np.testing.assert_array_equal(bits(got[name]), bits(x), err_msg=name)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_the_newer_weights_come_back_bit_by_bit(share, tmp_path):
    old, new = sets(share)
    changed = write_patch(tmp_path / "p", old, new, {"step": "7"})
    assert changed == sum((bits(old[k]) != bits(new[k])).sum() for k in old)
    same(apply_patch(tmp_path / "p", old), new)
    # Of an export in bf16 the same; what the older set lost by rounding plays no part.
    same(apply_patch(tmp_path / "p", {k: x.astype(BF16) for k, x in old.items()}), new)
    about = read_about(tmp_path / "p")
    assert about["step"] == "7" and about["result"] == digest(new) != digest({})
    assert (tmp_path / "p").stat().st_size < 2000 + 3.2 * changed


def test_bits_that_no_arithmetic_keeps(tmp_path):
    """Zeros of both signs and NaNs of any payload."""
    old = {"x": np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16).view(BF16)}
    new = {"x": np.array([0x8000, 0x0000, 0x7FC1, 0xFFC5, 0x3F80], np.uint16).view(BF16)}
    assert write_patch(tmp_path / "p", old, new) == 4
    same(apply_patch(tmp_path / "p", old), new)


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        ([0, 1, 2, 199_999], "uint16"),
        ([254, 255, 510, 766], "uint8"),
        ([65_534, 131_069, 131_070], "uint16"),
        ([65_535, 131_071, 199_999], "uint16"),
        ([199_999], "uint16"),
        (range(0, 200_000, 255), "uint8"),
        (range(0, 200_000, 300), "uint8"),
    ],
)
def test_gaps_that_do_not_fit_are_spelt_out(places, kind, tmp_path):
    old = {"x": np.zeros(200_000, np.float32)}
    new = {"x": old["x"].copy()}
    new["x"][list(places)] = 1.0
    assert write_patch(tmp_path / "p", old, new) == len(places)
    same(apply_patch(tmp_path / "p", old), new)
    with safe_open(tmp_path / "p", "np") as opened:
        assert set(opened.keys()) == {"x:values", f"x:{kind}"}


def test_patches_in_a_row(tmp_path):
    old, new = sets()
    newest = {k: x * np.float32(1.01) for k, x in new.items()}
    write_patch(tmp_path / "1", old, new)
    write_patch(tmp_path / "2", new, newest)
    same(apply_patch(tmp_path / "2", apply_patch(tmp_path / "1", old)), newest)
    with pytest.raises(ValueError, match=r"made for weights \w{12}, and these are \w{12}: apply"):
        apply_patch(tmp_path / "2", old)
    with pytest.raises(ValueError, match="made for weights"):
        apply_patch(tmp_path / "1", {"b": old["a"]})


def test_another_model(tmp_path):
    old, new = sets()
    new["a"], new["b"] = new["a"].T, new.pop("row")
    with pytest.raises(ValueError, match=r"(?s)b: in one set.*row: in.*a: \[37, 53\] became"):
        write_patch(tmp_path / "p", old, new)
    assert not (tmp_path / "p").exists()


def test_a_damaged_patch(tmp_path):
    """Whatever byte is another, the result is the one written, or there is none."""
    old, new = ({k: x[k] for k in ("a", "same")} for x in sets(0.02))
    write_patch(tmp_path / "p", old, new, {"step": "7"})
    whole = (tmp_path / "p").read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :]):
            (tmp_path / "d").write_bytes(damaged)
            try:
                same(apply_patch(tmp_path / "d", old), new)
            except ValueError as error:
                refused += 1
                assert "damaged" in str(error) or "made for" in str(error)
    assert refused > 0.6 * len(whole) / 3


@pytest.mark.parametrize("what", ["values", "uint8"])
def test_a_part_that_is_missing_or_of_another_patch(what, tmp_path):
    old, new = sets()
    write_patch(tmp_path / "p", old, new)
    write_patch(tmp_path / "q", old, sets(seed=1)[1])
    about, arrays = read_about(tmp_path / "p"), load_file(tmp_path / "p")
    other = load_file(tmp_path / "q")
    for content in (None, other[f"row:{what}"]):
        changed = {k: x for k, x in arrays.items() if k != f"row:{what}"}
        changed |= {} if content is None else {f"row:{what}": content}
        save_file(changed, tmp_path / "r", metadata=about)
        with pytest.raises(ValueError, match="a damaged one"):
            apply_patch(tmp_path / "r", old)


def test_no_patch_at_all(tmp_path):
    old, _ = sets()
    save_file({"x": np.zeros(3)}, tmp_path / "weights")
    for content in (b"", b"text" * 9, (tmp_path / "weights").read_bytes()):
        (tmp_path / "p").write_bytes(content)
        with pytest.raises(ValueError, match="no patch, or a damaged one"):
            apply_patch(tmp_path / "p", old)
    with pytest.raises(FileNotFoundError):
        apply_patch(tmp_path / "nowhere", old)
