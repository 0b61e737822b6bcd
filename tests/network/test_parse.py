"""Networks: parsing, presets, and what bad descriptions are told."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.network import as_config, get_config
from lowcomm_jax.network import Jitter, Network, names, parse, uniform
from lowcomm_jax.network.links import components
from lowcomm_jax.network.parse import aws_pairs
from lowcomm_jax.network.randomness import generator, step_factors


def test_mapping_with_overrides_reads_up_and_down():
    network = parse(
        {
            "regions": ["a", "b", "c"],
            "bandwidth_gbps": 2.0,
            "delay_ms": 30,
            "loss": 0.1,
            "egress_gbps": [4.0, None, 1.5],
            "compute_s": [0.2, 0.3, 0.5],
            "links": [
                {"pair": ["a", "c"], "bandwidth_gbps": {"up": 0.3, "down": 0.7}, "delay_ms": 80}
            ],
            "transfer_jitter": {"kind": "lognormal", "scale": 0.4},
            "first_use_s": 0.5,
        }
    )
    np.testing.assert_allclose(network.bandwidth_RxR[0], [2.0, 2.0, 0.3])
    assert network.bandwidth_RxR[2, 0] == 0.7
    assert network.delay_RxR[0, 2] == network.delay_RxR[2, 0] == 0.08
    np.testing.assert_allclose(network.rate_RxR[0, 2], 0.3 * 0.9 * 1e9 / 8)
    assert network.egress_R.tolist() == [4.0, np.inf, 1.5]
    assert network.transfer_jitter == Jitter("lognormal", 0.4)
    assert network.slowest_gbps == pytest.approx(0.27)


def test_asymmetric_matrix_needs_consent():
    matrix = [[0, 1, 3], [2, 0, 3], [3, 3, 0]]
    with pytest.raises(ValueError, match=r"r0 -> r1 is 1 but r1 -> r0 is 2.*symmetric: false"):
        parse({"regions": 3, "bandwidth_gbps": matrix})
    network = parse({"regions": 3, "bandwidth_gbps": matrix, "symmetric": False})
    assert network.bandwidth_RxR[0, 1] == 1 and network.bandwidth_RxR[1, 0] == 2


def test_all_violations_come_at_once_with_fixes():
    spec = {
        "regions": ["a", "b", "c"],
        "bandwidth_gbps": [[0, 1, 0], [1, 0, 0], [0, 0, 0]],
        "delay_ms": [[0, 1], [1, 0]],
        "compute_s": [0.1, -2, 0.1],
        "loss": 1.0,
        "speed": 3,
        "links": [{"pair": ["a", "z"]}],
        "transfer_jitter": {"kind": "cauchy", "scale": 0.1},
    }
    with pytest.raises(ValueError) as caught:
        parse(spec)
    text = str(caught.value)
    for part in (
        "key 'speed' is unknown",
        "2 parts {a, b} | {c}",
        "bandwidth_gbps a -> c is 0: use a finite number above 0",
        "delay_ms has 2 rows",
        "compute_s of region 'b' is -2",
        "loss a -> b is 1",
        "links[0].pair is ['a', 'z']",
        "kind 'cauchy' is unknown: use one of none, lognormal, uniform",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"bandwidth_gbps": 1.0}, "'regions' is missing"),
        ({"regions": [], "bandwidth_gbps": 1.0}, "regions is empty"),
        ({"regions": ["a", "a"], "bandwidth_gbps": 1.0}, "'a' is used twice"),
        ({"regions": 2, "bandwidth_gbps": "fast"}, "bandwidth_gbps is 'fast': use a number"),
        ({"regions": 2, "bandwidth_gbps": 1.0, "egress_gbps": 0}, "egress_gbps of region 'r0'"),
        ({"regions": 2, "bandwidth_gbps": 1.0, "compute_s": [1, 1, 1]}, "compute_s has 3 entries"),
        ({"regions": -1, "bandwidth_gbps": 1.0}, "regions is -1: use a number of at least 1"),
        ({"regions": [False, "se"], "bandwidth_gbps": 1}, r"regions\[0\] is False.*quote"),
        ({"regions": [["a"], "b"], "bandwidth_gbps": 1}, r"regions\[0\] is \['a'\]"),
        ({"regions": 2, "bandwidth_gbps": 1.0, "links": 7}, "links is 7: use a list"),
        ({"regions": 2, "bandwidth_gbps": 1.0, "links": [3]}, r"links\[0\] is 3: use {pair"),
        (
            {"regions": 2, "bandwidth_gbps": 1, "links": [{"pair": [["r0"], "r1"]}]},
            r"\[0\].pair is",
        ),
        ({"regions": 2, "bandwidth_gbps": 1.0, "symmetric": "no"}, "symmetric is 'no'"),
        (
            {"regions": 2, "bandwidth_gbps": [[0, None], [1, 0]]},
            r"gbps\[0\]\[1\] is None: use a number",
        ),
        (
            {"regions": 2, "bandwidth_gbps": 1, "compute_s": [1, None]},
            r"compute_s\[1\] is None: use a number",
        ),
        (
            {
                "regions": 2,
                "bandwidth_gbps": 1,
                "links": [{"pair": ["r0", "r1"], "delay_ms": {"up": 3}}],
            },
            r"links\[0\].delay_ms.down is None: use a number",
        ),
        ({"regions": 2, "bandwidth_gbps": 1.0, 3: 4, "x": 5}, "key 3 is unknown"),
        (
            {"regions": 2, "bandwidth_gbps": 1.0, "compute_jitter": {"scale": float("nan")}},
            "compute_jitter.scale is nan",
        ),
        ("mars", "'mars' is unknown: use"),
        ("nowhere.yaml", "does not exist"),
        ("aws:", "no region is named"),
        ("aws: ,", "no region is named"),
        (5, "5 is no network: use a preset's name"),
        (None, "None is no network"),
        ([1], r"\[1\] is no network"),
    ],
)
def test_bad_input_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_yaml_file_round_trip(tmp_path):
    path = tmp_path / "two_sites.yaml"
    path.write_text(
        "regions: [west, east]\nbandwidth_gbps: 0.5\ndelay_ms: 30\n"
        "links:\n  - {pair: [west, east], bandwidth_gbps: {up: 0.2, down: 0.4}}\n"
    )
    network = parse(path)
    assert network.name == "two_sites" and network.bandwidth_RxR[0, 1] == 0.2
    for broken in (b"regions: [a, b\nx: {", b"\xff\xfe\x00", b"regions: *nobody"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="is no YAML"):
            parse(path)
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        parse(str(path))


def test_numbers_name_regions_and_null_means_absent(tmp_path):
    path = tmp_path / "numbered.yaml"
    path.write_text(
        "regions: [1, 2, 7]\nbandwidth_gbps: 0.5\ndelay_ms: null\nlinks:\n"
        "  - {pair: [7, 1], bandwidth_gbps: 0.2, delay_ms: null}\n"
    )
    network = parse(path)
    assert network.regions == ("1", "2", "7")
    assert network.bandwidth_RxR[0, 2] == network.bandwidth_RxR[2, 0] == 0.2
    assert network.subset(["7", "1"]).slowest_gbps == pytest.approx(0.2)
    assert parse({"regions": 2, "bandwidth_gbps": 1.0, "links": None}).size == 2


def test_a_config_is_a_network():
    config = ConfigDict({"regions": ["a", "b"], "bandwidth_gbps": 1.0, "loss": 0.5})
    config.transfer_jitter = ConfigDict({"kind": "uniform", "scale": 0.1})
    network = parse(config)
    assert network.slowest_gbps == 0.5 and network.transfer_jitter == Jitter("uniform", 0.1)


def test_presets_build_and_survive_the_config_round_trip():
    for name in names():
        network = parse(name)
        assert isinstance(network, Network) and network.source
        again = parse(as_config(network))
        off = ~np.eye(network.size, dtype=bool)
        np.testing.assert_array_equal(again.bandwidth_RxR[off], network.bandwidth_RxR[off])
        np.testing.assert_allclose(again.delay_RxR[off], network.delay_RxR[off], rtol=1e-12)
        np.testing.assert_array_equal(again.egress_R, network.egress_R)
        assert again.transfer_jitter == network.transfer_jitter
    assert get_config("lan").bandwidth_gbps[0][1] == 10.0


@pytest.mark.parametrize("regions", [8, 16])
def test_the_networks_of_the_study_of_gossip(regions):
    network = parse(f"configs/compare/lognormal_{regions}.yaml")
    assert network.size == regions
    assert network.transfer_jitter.kind == "lognormal"


def test_aws_table_has_45_pairs_of_ten_regions():
    pairs = aws_pairs()
    assert len(pairs) == 45 and len({frozenset(p[:2]) for p in pairs}) == 45
    network = parse("aws")
    assert network.size == 10 and network.confidence == "measured"
    i, j = network.regions.index("Sydney"), network.regions.index("London")
    assert network.bandwidth_RxR[i, j] == 0.326 and network.delay_RxR[j, i] == 0.262
    half = parse("aws:Tokyo,Seoul").scaled(bandwidth=0.5, delay=0.5)
    assert half.bandwidth_RxR[0, 1] == 0.55 and half.delay_RxR[0, 1] == 0.017
    with pytest.raises(ValueError, match="'Mars' is unknown"):
        parse("aws:Tokyo,Mars")


def test_scaled_subset_and_compute():
    network = uniform(["a", "b", "c"], 2.0, delay_s=0.1, compute_s=0.5, shared=True)
    faster = network.scaled(bandwidth=3.0, delay=0.5)
    assert faster.bandwidth_RxR[0, 1] == 6.0 and faster.egress_R[0] == 6.0
    assert faster.delay_RxR[0, 1] == 0.05
    assert network.subset(["c", "a"]).regions == ("c", "a")
    assert network.with_compute([0.1, 0.2, 0.3]).compute_R.tolist() == [0.1, 0.2, 0.3]
    with pytest.raises(ValueError, match="above 0"):
        network.with_compute(0.0)
    with pytest.raises(ValueError, match="bandwidth_gbps r0 -> r1"):
        uniform(2, 0.0)


def test_components_of_a_graph():
    linked = np.zeros((5, 5), bool)
    linked[0, 3] = linked[3, 0] = linked[1, 4] = linked[4, 1] = True
    assert components(linked) == [[0, 3], [1, 4], [2]]


def test_jitter_has_median_one_and_is_a_pure_function_of_its_key():
    jitter = Jitter("lognormal", 0.7)
    draws = jitter.draw(generator(3, "x"), (40001,))
    assert np.median(draws) == pytest.approx(1.0, abs=0.02)
    assert draws.mean() == pytest.approx(jitter.mean, rel=0.03)
    box = Jitter("uniform", 0.3).draw(generator(3, "y"), (1000,))
    assert 0.7 <= box.min() < 0.72 and 1.28 < box.max() <= 1.3
    np.testing.assert_array_equal(
        generator(3, ("k", 1), 7).random(4), generator(3, ("k", 1), 7).random(4)
    )
    streams = ("a", "b", 0, ("k", 1), "delta")
    firsts = {generator(3, stream, step).random() for stream in streams for step in range(200)}
    assert len(firsts) == 200 * len(streams)  # no two (stream, step) share their draws
    assert generator(3, ("k", 1), 7).random() != generator(4, ("k", 1), 7).random()
    block = step_factors(3, "compute", 2, 5, jitter)
    assert block.shape == (256, 5) and not block.flags.writeable


def test_a_mapping_in_the_text_of_a_flag():
    text = "{regions: [a, b, c], bandwidth_gbps: 2, delay_ms: 40}"
    given = {"regions": ["a", "b", "c"], "bandwidth_gbps": 2, "delay_ms": 40}
    np.testing.assert_array_equal(parse(text).delay_RxR, parse(given).delay_RxR)
    assert parse(text).regions == ("a", "b", "c")
    with pytest.raises(ValueError, match="text is no YAML"):
        parse("{regions: 3, bandwidth_gbps: [}")
    with pytest.raises(ValueError, match="'bandwidth_gbps' is missing"):
        parse("{regions: 3, delay_ms: 1}")
