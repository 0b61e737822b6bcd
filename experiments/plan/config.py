"""Check a plan's config and give a `PlanRequest`; all problems are reported at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.cli import OWN, Field, named_function
from experiments.plan.model import PlanModel, read_model
from experiments.train import parts
from lowcomm_jax.methods import Method
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.parse import parse
from lowcomm_jax.planner.dry_run import Scenario
from lowcomm_jax.planner.expected_loss import TOKENS_PER_PARAM
from lowcomm_jax.planner.methods import FACTORIES, PlanMethod, plan_method
from lowcomm_jax.planner.plan import Workload, mesh_violations, network_violations
from lowcomm_jax.refused import above_zero, collect, is_unknown, not_negative, refuse, whole
from lowcomm_jax.settings import settings_of

NEEDED = ("model", "network", "methods", "tokens_per_step")
_OF_WORK = {name: setting.about for name, setting in settings_of(Workload).items()}
_ROWS = {
    "name": ("plan", "title of the answer"),
    "notes": ("", "a line that is printed under the title"),
    "model": (
        object,
        "A name of lowcomm_jax.models.PRESETS, or {preset: name} and fields that differ, or all "
        "fields of a TransformerConfig; or module:factory of your own, or {name: module:factory} "
        "and its settings.",
    ),
    "network": (
        object,
        'A preset (configs/network.py lists them), "aws:Oregon,Tokyo,London", a .yaml file, or the '
        "mapping itself.",
    ),
    "compute_s": (
        0.0,
        "Seconds of the median region's inner step (the network says how much slower one region is "
        "than another); 0 = from devices, FLOP/s and MFU.",
    ),
    "devices_per_region": (int, "devices that compute in a region"),
    "flops_per_device": (float, "FLOP/s of a device at its peak"),
    "mfu": (float, "share of a device's peak that training reaches, in (0, 1]"),
    "tokens": (0.0, f"{_OF_WORK['tokens']}; 0 = {TOKENS_PER_PARAM:g} per parameter"),
    "tokens_per_step": (float, _OF_WORK["tokens_per_step"]),
    "seq_len": (2048, "tokens of a sequence"),
    "device_gb": (
        float,
        "Memory of a device in GB (10^9 bytes). Methods whose estimate is above it are not on the "
        "frontier; what fits only the compiler knows (plan --target). None = unknown.",
    ),
    "price_per_gpu_hour": (float, "price of a device and hour, in any currency; None = unknown"),
    "price_per_gb": (float, "price of a GB that leaves a region; None = unknown"),
    "mesh": ({}, _OF_WORK["mesh"]),
    "microbatch_tokens": (0, _OF_WORK["microbatch_tokens"]),
    "remat": (True, _OF_WORK["remat"]),
    "methods": (
        object,
        'Rows by name: preset, a method of lowcomm_jax.methods (or "allreduce"), as published, '
        "or module:function of your own, and keywords of its factory that differ. overlap = "
        '"auto" takes as many steps as hide a fragment\'s transfer, and margin more. A method '
        "that can never catch up with the link is refused unless it has stalls = True.",
    ),
    "loss_bound": (
        0.03,
        "Largest published loss penalty (nats beside H = 30) that the search for the best H, K, "
        "tau and codec may use.",
    ),
    "scenario": ({}, _OF_WORK["scenario"]),
}
FIELDS = {name: Field(*row) for name, row in _ROWS.items()}
DEFAULTS = {
    name: None if isinstance(field.default, type) else field.default
    for name, field in FIELDS.items()
    if name not in NEEDED
}
SPEED = ("devices_per_region", "flops_per_device", "mfu")
_NUMBERS = {
    **dict.fromkeys(("tokens", "compute_s", "loss_bound"), not_negative),
    **dict.fromkeys(("price_per_gpu_hour", "price_per_gb"), not_negative),
    **dict.fromkeys(("tokens_per_step", "device_gb", "flops_per_device"), above_zero),
    **dict.fromkeys(("seq_len", "devices_per_region"), whole),
    "mfu": functools.partial(above_zero, most=1.0),
    "microbatch_tokens": functools.partial(whole, least=0),
}
"""Field -> what lists a number's problems."""
MANY_LAYERS = 10**6  # where the model is wrong, so that methods give no problems of its making


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A plan's config, checked.

    Attributes:
      fields: plain values, defaults filled in.
      work, methods: what the planner takes.
      model: where the shapes come from.
    """

    fields: Mapping[str, Any]
    work: Workload
    methods: tuple[PlanMethod, ...]
    model: PlanModel


def descriptions(config: Mapping[str, Any] | ConfigDict) -> dict[str, str]:
    """Dotted name -> description of a plan's fields, keywords of methods among them."""
    from experiments.config import plain  # with Flax: slow to import
    from experiments.train.fields import method_descriptions

    found = {name: field.about for name, field in FIELDS.items()}
    found |= {f"scenario.{k}": setting.about for k, setting in settings_of(Scenario).items()}
    rows = plain(config)["methods"]
    for name, row in rows.items() if isinstance(rows, Mapping) else ():
        method = {**row, "name": row.get("preset")} if isinstance(row, Mapping) else {}
        found |= {f"methods.{name}.{k}": text for k, text in method_descriptions(method).items()}
    return found


def read(config: Mapping[str, Any]) -> PlanRequest:
    """Turn config fields (`FIELDS`) into what the planner takes.

    Args:
      config: plain mapping; a field that is None takes its default.

    Raises:
      Refused: everything that is wrong.
    """
    fields = {**DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
    known = sorted(FIELDS)
    unknown = sorted(set(config) - set(known), key=str)
    found = [f"field {name!r} {is_unknown(name, known)}" for name in unknown]
    found += [f"field {name!r} is missing: give it" for name in NEEDED if name not in fields]
    found += _number_violations(fields)
    model = network = None
    if "model" in fields:
        given = fields["model"], fields["seq_len"]
        model = collect(found, "model: ", lambda: read_model(*given))
        found += [] if model is None else _unknown_of_own(fields, model)
    if "network" in fields:
        network = collect(found, "network: ", lambda: parse(fields["network"]))
    if network is not None:
        found += network_violations(network)
    layers = MANY_LAYERS if model is None else model.shapes.layers
    wrong_mesh = mesh_violations(fields["mesh"], layers)
    regions = 2 if network is None else max(2, network.size)
    methods: tuple[PlanMethod, ...] = ()
    scenario = _scenario(fields["scenario"], found)
    if "methods" in fields:
        stacked = () if model is None else model.shapes.stacked
        methods = _methods(fields["methods"], layers, regions, stacked, found)
    fragments = {row.fragments for row in methods}
    if scenario.rates is not None and not found and len(scenario.rates) not in fragments:
        found.append(
            f"scenario.rates has {len(scenario.rates)} entries: give one for each fragment of a "
            f"method here ({', '.join(map(str, sorted(fragments)))})"
        )
    refuse("plan config", found + wrong_mesh)
    work = dataclasses.replace(_workload(fields, model, network), scenario=scenario)
    return PlanRequest(fields, work, methods, model)


def _scenario(spec: Any, found: list[str]) -> Scenario:
    """Read what a run would measure; problems go to `found`."""
    known = tuple(field.name for field in dataclasses.fields(Scenario))
    if not isinstance(spec, Mapping):
        found.append(f"scenario is {spec!r}: use {{field: value}} with fields {', '.join(known)}")
        return Scenario()
    given = {name: value for name, value in spec.items() if value is not None}
    problems = [f"scenario.{k} {is_unknown(k, known)}" for k in given if k not in known]
    if "rank" in given:
        problems += above_zero("scenario.rank", given["rank"])
    rates = given.get("rates", ())
    if not isinstance(rates, list | tuple):
        problems.append(f"scenario.rates is {rates!r}: give a number for each fragment")
    else:
        problems += [line for rate in rates for line in not_negative("scenario.rates", rate)]
    found += problems
    if problems:
        return Scenario()
    return Scenario(given.get("rank"), tuple(rates) or None)


def _unknown_of_own(fields: Mapping[str, Any], model: PlanModel) -> list[str]:
    """What a plan needs to know and a model of one's own does not say."""
    if model.decoder is not None:
        return []
    found = []
    if model.flops is None and not fields["compute_s"]:
        found.append(
            f"model {model.section['name']} has no flops_per_token: give it one, or give "
            "compute_s, the seconds of an inner step"
        )
    if fields["device_gb"] is not None:
        found.append(
            "device_gb: a plan knows no activations of a model of your own: leave it out, and ask "
            "the compiler: plan --target with the training config"
        )
    stages = fields["mesh"].get("stage", 1) if isinstance(fields["mesh"], Mapping) else 1
    if stages != 1:
        found.append(
            f"mesh.stage is {stages!r}: stages are cut of the built-in decoder alone: with model "
            f"{model.section['name']} leave it out"
        )
    return found


def _number_violations(fields: Mapping[str, Any]) -> list[str]:
    given = {name: fields[name] for name in _NUMBERS if fields.get(name) is not None}
    found = [line for name, value in given.items() for line in _NUMBERS[name](name, value)]
    if not fields["compute_s"]:
        found += [
            f"field {name!r} is missing: give it, or give compute_s"
            for name in SPEED
            if name not in given
        ]
    if not isinstance(fields["remat"], bool):
        found.append(f"remat is {fields['remat']!r}: use True or False")
    return found


def _methods(
    spec: Any, layers: int, regions: int, stacked: tuple[str, ...], found: list[str]
) -> tuple[PlanMethod, ...]:
    """Read the rows, names -> fields."""
    if not isinstance(spec, Mapping):
        found.append(f"methods is {spec!r}: use {{name: {{preset: name, field: value}}}}")
        return ()
    if not spec:
        found.append("methods is empty: name at least one")
    methods = []
    for name, row in spec.items():
        if not isinstance(row, Mapping):
            found.append(f"methods.{name} is {row!r}: use {{preset: name, field: value}}")
            continue
        make = functools.partial(plan_method, name, row, regions, _factory, stacked)
        method = collect(found, f"methods.{name}: ", make)
        if method is not None:
            methods.append(method)
            found += method.violations(layers, regions)
    return tuple(methods)


def _factory(preset: str) -> Callable[..., Method] | None:
    """Of a preset, which also takes the names of a method's rules, as a training config does."""
    factory = named_function(preset, "preset") if OWN in preset else FACTORIES.get(preset)
    if factory is None:
        return None
    signature = inspect.signature(factory)
    rules = [key for key in parts.PARTS if parts.is_rule(key, signature.parameters)]
    more = [key for key in rules if key not in signature.parameters]

    @functools.wraps(factory)
    def with_rules(**given: Any) -> Method:
        problems = []
        for key in rules:
            if given.get(key) is not None:
                given[key], found = parts.build(key, given[key])
                problems += found
        refuse(preset, problems)
        replaced = {key: given.pop(key) for key in more if key in given}
        method = factory(**given)
        for key, rule in replaced.items():
            if rule is not None:
                method, problems = parts.put(method, key, rule)
                refuse(preset, problems)
        return method

    keywords = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None) for key in more
    ]
    in_order = sorted([*signature.parameters.values(), *keywords], key=lambda one: one.kind)
    with_rules.__signature__ = signature.replace(parameters=in_order)
    return with_rules


def _workload(fields: Mapping[str, Any], model: PlanModel, network: Network) -> Workload:
    step_s = fields["compute_s"] or _step_seconds(fields, model.flops, network.size)
    return Workload(
        model=model.shapes,
        tokens=float(fields["tokens"] or TOKENS_PER_PARAM * model.shapes.size),
        tokens_per_step=float(fields["tokens_per_step"]),
        # The network's own seconds only say how much slower one region is than another.
        network=network.with_median_step(step_s),
        **{name: fields[name] for name in ("mesh", "microbatch_tokens", "remat")},
    )


def _step_seconds(fields: Mapping[str, Any], each: float, regions: int) -> float:
    """Give `each` FLOP of a token x tokens / (devices x FLOP/s x MFU) of one region."""
    devices, flops, mfu = (fields[name] for name in SPEED)
    return each * fields["tokens_per_step"] / regions / (devices * flops * mfu)
