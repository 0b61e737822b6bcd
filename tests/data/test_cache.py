"""Cache folders appear whole or not at all."""

import logging

import pytest

from lowcomm_jax.data.cache import open_or_build


def build(folder):
    (folder / "x.bin").write_bytes(b"12345")


def refuse(folder):
    raise AssertionError("built again")


def test_built_once(tmp_path):
    path = open_or_build(tmp_path / "deep/a", build)
    assert (path / "x.bin").read_bytes() == b"12345"
    assert open_or_build(path, refuse) == path


def test_a_failed_build_leaves_nothing(tmp_path):
    def half(folder):
        build(folder)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        open_or_build(tmp_path / "a", half)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_absent_until_it_is_whole(tmp_path):
    seen = []

    def look(folder):
        build(folder)
        seen.append((tmp_path / "a").exists())

    open_or_build(tmp_path / "a", look)
    assert seen == [False]


def test_the_first_of_two_builders_wins(tmp_path):
    def slow(folder):
        (folder / "x.bin").write_bytes(b"slow")
        open_or_build(tmp_path / "a", build)

    assert (open_or_build(tmp_path / "a", slow) / "x.bin").read_bytes() == b"12345"
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("harm", ["shorten", "remove", "unseal"])
def test_damage_is_reported_and_repaired(tmp_path, harm, caplog):
    path = open_or_build(tmp_path / "a", build)
    if harm == "shorten":
        (path / "x.bin").write_bytes(b"123")
    else:
        (path / ("x.bin" if harm == "remove" else "sizes.json")).unlink()
    with caplog.at_level(logging.WARNING):
        open_or_build(path, build)
    assert "damaged" in caplog.text
    assert (path / "x.bin").read_bytes() == b"12345"
    open_or_build(path, refuse)
