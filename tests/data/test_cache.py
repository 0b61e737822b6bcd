"""Cache folders appear whole or not at all."""

import logging
import pwd
import tempfile

import pytest

from lowcomm_jax.data import cache as caches
from lowcomm_jax.data.cache import cache_folder, open_or_build


def build(folder):
    (folder / "x.bin").write_bytes(b"12345")


def refuse(folder):
    raise AssertionError("built again")


def test_built_once(tmp_path):
    path = open_or_build(tmp_path, "deep/a", build)
    assert (path / "x.bin").read_bytes() == b"12345"
    assert open_or_build(tmp_path, "deep/a", refuse) == path


def test_a_failed_build_leaves_nothing(tmp_path):
    def half(folder):
        build(folder)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        open_or_build(tmp_path, "a", half)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_absent_until_it_is_whole(tmp_path):
    seen = []

    def look(folder):
        build(folder)
        seen.append((tmp_path / "a").exists())

    open_or_build(tmp_path, "a", look)
    assert seen == [False]


def test_the_first_of_two_builders_wins(tmp_path):
    def slow(folder):
        (folder / "x.bin").write_bytes(b"slow")
        open_or_build(tmp_path, "a", build)

    assert (open_or_build(tmp_path, "a", slow) / "x.bin").read_bytes() == b"12345"
    assert [item.name for item in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("harm", ["shorten", "remove", "unseal"])
def test_damage_is_reported_and_repaired(tmp_path, harm, caplog):
    path = open_or_build(tmp_path, "a", build)
    if harm == "shorten":
        (path / "x.bin").write_bytes(b"123")
    else:
        (path / ("x.bin" if harm == "remove" else "sizes.json")).unlink()
    with caplog.at_level(logging.WARNING):
        open_or_build(tmp_path, path.name, build)
    assert "damaged" in caplog.text
    assert (path / "x.bin").read_bytes() == b"12345"
    open_or_build(tmp_path, path.name, refuse)


# -- a cache that cannot be written ---------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder of a machine whose user has no folder of caches."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    caches._instead.cache_clear()
    return folder


def nobody(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null", None])
def test_without_a_home_a_temporary_folder_takes_its_place(home, temporary, monkeypatch, caplog):
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
    else:
        monkeypatch.setenv("HOME", home)
    for name in ("documents/a", "tokens/a"):
        path = open_or_build(cache_folder(None), name, build)
        assert path.is_relative_to(temporary) and (path / "x.bin").read_bytes() == b"12345"
        assert open_or_build(cache_folder(None), name, refuse) == path
    (line,) = caplog.messages
    assert "/.cache/lowcomm_jax cannot be written (" in line
    assert str(path.parent.parent) in line and "data.cache_dir" in line


def test_what_a_cache_that_cannot_be_written_holds_is_read(tmp_path, temporary):
    held = open_or_build(tmp_path, "documents/a", build)
    (tmp_path / "tokens").write_text("no folder")
    assert open_or_build(tmp_path, "documents/a", refuse) == held
    assert open_or_build(tmp_path, "tokens/a", build).is_relative_to(temporary)


def test_without_a_temporary_folder_either_the_error_says_what_to_give(tmp_path, temporary):
    temporary.rmdir()
    temporary.write_text("no folder")
    with pytest.raises(ValueError, match=r"no home.*nor is there a temporary.*give data.cache_dir"):
        caches._instead(tmp_path, "no home")


def test_a_temporary_folder_of_another_user_is_not_used(tmp_path, temporary, monkeypatch):
    first = caches._instead(tmp_path, "read-only")
    monkeypatch.setattr(caches.os, "getuid", lambda: first.stat().st_uid + 1)
    (temporary / f"lowcomm_jax-{caches.os.getuid()}").mkdir()  # ours, so not that user's
    caches._instead.cache_clear()
    second = caches._instead(tmp_path, "read-only")
    assert second.parent == temporary and second != first and list(second.iterdir()) == []
