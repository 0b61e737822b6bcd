"""Checks that LLaMA-shaped checkpoints come in and go out unchanged."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from models import llama_oracle
from safetensors.numpy import load_file, save_file

import lowcomm_jax as lc
from lowcomm_jax.models import TransformerConfig, build
from lowcomm_jax.models.weights import config_from_llama, config_to_llama, load_llama, save_llama

DESCRIBED = {
    "model_type": "llama",
    "vocab_size": 29,
    "num_hidden_layers": 3,
    "hidden_size": 18,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 31,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-3,
}
SMALL = {
    "vocab_size": 31,
    "layers": 2,
    "width": 12,
    "heads": 3,
    "kv_heads": 1,
    "head_dim": 6,
    "mlp_width": 20,
}


def checkpoint(path, dtype=np.float32, **changes):
    """Writes a checkpoint of random weights; returns its tensors and its configuration."""
    described = {**DESCRIBED, **changes}
    rng = np.random.default_rng(0)
    heads, kv_heads, head_dim = 24, 8, described["head_dim"]
    assert heads == described["num_attention_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(29, 18)),
        "model.norm.weight": 1 + 0.3 * rng.normal(size=18),
    }
    if not described["tie_word_embeddings"]:
        tensors["lm_head.weight"] = rng.normal(size=(29, 18))
    shapes = {
        "self_attn.q_proj": (heads, 18),
        "self_attn.k_proj": (kv_heads, 18),
        "self_attn.v_proj": (kv_heads, 18),
        "self_attn.o_proj": (18, heads),
        "mlp.gate_proj": (31, 18),
        "mlp.up_proj": (31, 18),
        "mlp.down_proj": (18, 31),
        "input_layernorm": (18,),
        "post_attention_layernorm": (18,),
    }
    for layer in range(3):
        for name, shape in shapes.items():
            values = rng.normal(size=shape) * 0.4 + (1.0 if len(shape) == 1 else 0.0)
            tensors[f"model.layers.{layer}.{name}.weight"] = values
    tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(described))
    return tensors, described


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_an_imported_checkpoint_against_numpy(tmp_path, tied, loop):
    tensors, described = checkpoint(tmp_path, tie_word_embeddings=tied)
    model, params = load_llama(tmp_path, layer_loop=loop)
    tokens = np.array([3, 28, 0, 7, 7, 11, 19])
    got = jax.jit(model.logits)(params, jnp.asarray(tokens[None], jnp.int32))[0]
    expected = llama_oracle.logits(tokens, tensors, described)
    assert np.abs(expected).max() > 3
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
@pytest.mark.parametrize("tied", [True, False])
def test_export_gives_back_the_same_tensors(tmp_path, tied, loop):
    tensors, described = checkpoint(tmp_path, tie_word_embeddings=tied)
    model, params = load_llama(tmp_path, layer_loop=loop)
    save_llama(tmp_path / "again", model, params)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: written[key] for key in described} == described


def test_bfloat16_and_several_files(tmp_path):
    tensors, _ = checkpoint(tmp_path, dtype=ml_dtypes.bfloat16)
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    for part, chosen in enumerate((names[:9], names[9:])):
        file = tmp_path / f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in chosen}, file)
    model, params = load_llama(tmp_path, layer_loop="unrolled")
    assert params["head"]["kernel"].dtype == np.float32
    np.testing.assert_array_equal(
        params["head"]["kernel"], tensors["lm_head.weight"].astype(np.float32).T
    )
    save_llama(tmp_path / "low", model, params, dtype="bfloat16")
    low = load_file(tmp_path / "low" / "model.safetensors")
    assert low["lm_head.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(low["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_leaves_come_back_bit_for_bit(tmp_path, loop, dtype):
    """Both dtypes hold every bit of a bfloat16 leaf; the folder says which one it has."""
    wide = build(TransformerConfig(**SMALL, layer_loop=loop))
    params = narrowed(jax.jit(wide.init)(jax.random.key(1)))
    save_llama(tmp_path, wide, params, dtype)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    stored = load_file(tmp_path / "model.safetensors")
    assert {str(x.dtype) for x in stored.values()} == {dtype}
    model, loaded = load_llama(tmp_path, layer_loop=loop)
    assert model == wide and {str(x.dtype) for x in jax.tree.leaves(loaded)} == {"float32"}
    assert_same_bits(narrowed(loaded), params)
    save_llama(tmp_path / "again", wide, loaded, dtype)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {k: x.tobytes() for k, x in again.items()} == {k: x.tobytes() for k, x in stored.items()}


def test_what_an_engine_trained_in_narrow_leaves_is_exported(tmp_path):
    """In bfloat16 it is what each region holds after `finish`; in float32 the anchor itself."""
    model = build(TransformerConfig(**SMALL, layer_loop="scan"))
    params = narrowed(jax.jit(model.init)(jax.random.key(1)))
    engine = lc.Engine(squares, optax.sgd(0.3), lc.methods.diloco(period=2), regions=2)
    with jax.numpy_dtype_promotion("standard"):
        state, _ = engine.run(engine.init(params), [np.ones((2, 4), np.float32)] * 3)
        state = engine.finish(state)
    trained = lc.global_params(state)
    save_llama(tmp_path / "low", model, trained, "bfloat16")
    save_llama(tmp_path / "high", model, trained)
    low, high = (load_llama(tmp_path / n, layer_loop="scan")[1] for n in ("low", "high"))
    assert_same_bits(high, trained)
    for region in range(2):
        held = jax.tree.map(lambda x, r=region: x[r], lc.region_params(state))
        assert_same_bits(narrowed(low), held)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(high)))


def squares(params, batch, rng):
    wide = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]
    return batch.mean() * sum((x * x).sum() for x in wide)


def narrowed(params):
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16), params)


def assert_same_bits(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_every_name_that_does_not_fit_is_listed(tmp_path):
    tensors, _ = checkpoint(tmp_path)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        del tensors[name]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((31, 18), np.float32)
    tensors["lm_head.weight"] = np.zeros((30, 18), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)  # allowed
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_llama(tmp_path)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 5
    for word in ("layers.1.mlp.up", "model.norm", "q_proj.bias", "layers.3", "lm_head"):
        assert sum(word in line for line in lines) == 1


def test_tied_checkpoint_may_repeat_the_table_but_not_contradict_it(tmp_path):
    tensors, _ = checkpoint(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    load_llama(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.weight"):
        load_llama(tmp_path)


def test_what_llama_has_and_this_model_lacks_is_listed():
    described = {**DESCRIBED, "hidden_act": "gelu", "attention_bias": True}
    described["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0}
    del described["hidden_size"]
    with pytest.raises(ValueError) as error:
        config_from_llama(described)
    for word in ("hidden_act", "attention_bias", "rope_scaling", "hidden_size: missing"):
        assert word in str(error.value)


def test_what_this_model_has_and_llama_lacks_is_listed(tmp_path):
    config = config_from_llama(DESCRIBED, qk_norm=True, mlp="gelu")
    model = build(config)
    with pytest.raises(ValueError) as error:
        save_llama(tmp_path, model, {}, dtype="float16")
    for word in ("qk_norm", "mlp", "float16"):
        assert word in str(error.value)
    checkpoint(tmp_path)
    with pytest.raises(ValueError, match="qk_norm=True: a LLaMA checkpoint has no QK-norm"):
        load_llama(tmp_path, qk_norm=True)


def test_config_defaults_and_both_places_of_rope_theta():
    short = {k: DESCRIBED[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    short["num_attention_heads"] = 3
    config = config_from_llama(short)
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (3, 6, 10_000.0)
    newer = {**short, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}}
    assert config_from_llama(newer).rope_theta == 70.0
    assert config_from_llama(config_to_llama(config)) == config


def test_a_folder_without_weights_is_refused(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_llama(tmp_path)
