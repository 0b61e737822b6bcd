"""One codec at several levels: what a checkpoint says of it, and what a plain codec refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.checkpoint.load import describe_method


def test_checkpoints_describe_every_level():
    method = lc.methods.dilocox(8, rank=8, adaptive=True)
    assert isinstance(method.codec, compression.CodecLevels)
    described = describe_method(method)["codec"]
    assert described["type"] == "CodecLevels"
    assert list(described) == ["type", *(f.name for f in dataclasses.fields(method.codec))]
    assert {one["type"] for one in (described["codec"], *described["others"])} == {"ErrorFeedback"}


def test_a_plain_codec_has_level_0_alone():
    codec = compression.make("int4")
    assert codec.at(0) is codec
    with pytest.raises(ValueError, match="int4 has one level: level 1"):
        codec.at(1)


def test_levels_whose_states_differ_in_shape_are_refused():
    like = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}

    def levels(**settings):
        wide, narrow = (compression.make("low_rank", rank=rank, **settings) for rank in (4, 2))
        return compression.CodecLevels(wide, (narrow,))

    levels(basis=4).init(like)
    with pytest.raises(ValueError, match="the states of low_rank2 differ from that of low_rank4"):
        levels().init(like)
