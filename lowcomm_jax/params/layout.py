"""How a user's parameter pytree maps to named leaves, and which of them are trained.

`make_layout` describes a pytree once; `Layout` turns trees into named leaves and back.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.refused import refuse

PyTree = Any
UNFIT = "parameters cannot be trained as given"
Role = Literal["train", "frozen", "local", "average"]
Roles = PyTree | Callable[[str, Any], Role] | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static description of the user's tree: its structure, leaf names and leaf roles.

    Roles:

    - `train`: optimised and exchanged.
    - `frozen`: neither; one copy serves all regions.
    - `local`, `average`: non-trainable state that a step may replace (batch statistics, counters).
      `local` leaves stay in their region; `average` ones are averaged when fragment 0 is sent.
    """

    treedef: Any
    names: tuple[str, ...]
    roles: tuple[Role, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    def named(self, tree: PyTree) -> dict[str, Any]:
        """Name -> leaf, in tree order."""
        return dict(zip(self.names, self.treedef.flatten_up_to(tree)))

    def train_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape and dtype of the trained leaves of one region."""
        described = zip(self.names, self.roles, self.shapes, self.dtypes)
        return {n: jax.ShapeDtypeStruct(s, d) for n, role, s, d in described if role == "train"}

    def select(self, tree: PyTree, *roles: Role) -> dict[str, Any]:
        """The named leaves that have one of `roles`."""
        chosen = dict(zip(self.names, self.roles))
        return {k: v for k, v in self.named(tree).items() if chosen[k] in roles}

    def tree(self, named: dict[str, Any]) -> PyTree:
        """Rebuild the user's tree; leaves that are not in `named` become None."""
        return self.treedef.unflatten([named.get(name) for name in self.names])


def _mixed_keys(tree: PyTree) -> list[str]:
    """Problems of dicts whose keys JAX cannot sort."""
    problems = []

    def look(x: Any) -> bool:
        if type(x) in (dict, collections.defaultdict):  # an OrderedDict is not sorted
            try:
                sorted(x)
            except TypeError:
                problems.append(f"a dict has the keys {[*x]}, which cannot be sorted: use str only")
                return True
        return False

    jax.tree.structure(tree, is_leaf=look)
    return list(dict.fromkeys(problems))


def _no_arrays(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    problems = []
    for name, value in zip(names, values):
        try:
            jnp.result_type(value)
        except TypeError:
            problems.append(
                f"{name!r}: a {type(value).__name__} is no array: keep it out of the parameters "
                "(Equinox: `params, static = eqx.partition(model, eqx.is_array)`; NNX: nnx.split)"
            )
            continue
        if not hasattr(value, "shape"):
            kind = type(value).__name__
            problems.append(f"{name!r}: a {kind} is no array: make it one, as jnp.asarray(value)")
    return problems


def default_role(name: str, leaf: Any) -> Role:
    """Float leaves are trained, all others (counters, tables) are frozen."""
    del name
    return "train" if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else "frozen"


def inferred_roles(params: PyTree) -> tuple[dict[str, Role], list[str]]:
    """Roles of leaves that Flax keeps apart from its trained parameters: (by name, problems).

    Running statistics (Linen's collection `batch_stats`, NNX's `BatchStat`) are averaged, caches
    stay local. Any other collection or variable type with float leaves is a problem: the user must
    give its role. So is the state of NNX's random streams: frozen, it would give every step the
    same numbers.
    """
    kinds, found, problems = _flax_kinds(params), {}, []
    streams = [name for name, kind in kinds.items() if kind == _RANDOM]
    if streams:
        problems.append(
            f"{', '.join(map(repr, streams))}: frozen NNX random streams would give the same "
            "numbers at every step: keep them out, `graph, params, rest = nnx.split(model, "
            "nnx.Param, ...)`, and use the step's rng in the loss_fn, `model = nnx.merge(graph, "
            "params, rest)` and `model(x, rngs=nnx.Rngs(dropout=rng))`; or give roles="
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        kind = kinds.get(name)
        if kind in _FLAX_ROLES:
            found[name] = _FLAX_ROLES[kind]
        elif kind not in (None, _RANDOM) and default_role(name, leaf) == "train":
            problems.append(
                f"{name!r}: the role of {kind} is not known; give roles= (train, frozen, local or "
                "average), a function of a leaf's name or a tree"
            )
    return found, problems


def adapter_problems(params: PyTree) -> list[str]:
    """Whether NNX's `LoRAParam` stands beside other parameters, all of which would be trained.

    An adapter is there to be trained alone; whoever trains all says so by roles.
    """
    lora, others = [], []
    for name, kinds in _nnx_variables(params):
        if "Param" in kinds:
            (lora if "LoRAParam" in kinds else others).append(name)
    if not lora or not others:
        return []
    ends = tuple(sorted({"/".join(name.split("/")[-2:]) for name in lora}))
    chosen = f"name.endswith({ends!r})"
    if any(name.endswith(ends) for name in others):
        chosen = f"name in {tuple(lora)!r}"
    return [
        f"{len(lora)} leaves are nnx.LoRAParam, and {len(others)} others nnx.Param, as "
        f"{others[0]!r}: without roles all would be trained and sent; to train the adapter give "
        f'roles=lambda name, leaf: "train" if {chosen} else "frozen"; to train all, '
        'roles=lambda name, leaf: "train"'
    ]


_RANDOM = "RngState"  # base of NNX's RngCount and RngKey
_FLAX_ROLES: dict[str, Role] = {
    "batch_stats": "average",
    "BatchStat": "average",
    "cache": "local",
    "Cache": "local",
}


def _nnx_variables(params: PyTree) -> Iterator[tuple[str, list[str]]]:
    """Names of leaves in variables of NNX, with the names of the variable's type and its bases."""
    nnx = sys.modules.get("flax.nnx")  # whoever has variables of NNX has imported it
    if nnx is None:
        return
    variables, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, variable in variables:
        if isinstance(variable, nnx.Variable):
            for inside, _ in jax.tree_util.tree_flatten_with_path(variable)[0]:
                kinds = [t.__name__ for t in type(variable).__mro__]
                yield path_name((*path, *inside)), kinds


def _flax_kinds(params: PyTree) -> dict[str, str]:
    """Name -> Linen collection or NNX variable type, of leaves that are no parameters of Flax."""
    kinds = {}
    nnx = sys.modules.get("flax.nnx")
    if isinstance(params, Mapping) and not (nnx and isinstance(params, nnx.State)):
        collections = params.keys() - {"params"} if "params" in params else ()
        for collection in collections:
            inside, _ = jax.tree_util.tree_flatten_with_path({collection: params[collection]})
            kinds |= {path_name(path): collection for path, _ in inside}
    for name, types in _nnx_variables(params):
        if "Param" not in types:
            known = [kind for kind in types if kind in _FLAX_ROLES or kind == _RANDOM]
            kinds[name] = (known or types)[0]
    return kinds


def _roles_of_tree(treedef: Any, roles: PyTree) -> tuple[Role, ...]:
    try:
        return tuple(treedef.flatten_up_to(roles))
    except (ValueError, TypeError) as error:
        raise ValueError(
            "roles: give a function of (name, leaf), or a tree of train, frozen, local and average "
            f"with the structure of the parameters: {error}"
        ) from error


def make_layout(params: PyTree, roles: Roles = None) -> Layout:
    """Describe `params`.

    Args:
      params: any pytree of arrays (Flax NNX state, Linen, Equinox with arrays only, dicts, ...).
      roles: None (`default_role`, `inferred_roles`), a function of (name, leaf), or a pytree of
        roles with the structure of `params` (a LoRA mask, for example).

    Raises:
      ValueError: listing every leaf of an unknown role (of Flax's own kinds, too), and trained
        leaves that are not floats. Without roles also complex leaves, and NNX's adapters
        (`LoRAParam`) beside other parameters. Also float64 that is trained,
        dicts whose keys cannot be sorted, and a tree without a trained leaf.
    """
    refuse(UNFIT, _mixed_keys((params, roles)))
    with_path, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(path_name(path) for path, _ in with_path)
    as_tree = roles is not None and jax.tree.structure(roles) == treedef
    refuse(UNFIT, _no_arrays(names, [leaf for _, leaf in with_path]))
    problems: list[str] = []
    if roles is None:
        inferred, problems = inferred_roles(params)
        problems += adapter_problems(params)
        problems += [
            f"{name!r}: the role of dtype {jnp.result_type(leaf)} is not known; train its real and "
            "imaginary parts as two leaves, or give roles= (frozen or local)"
            for name, (_, leaf) in zip(names, with_path)
            if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
        ]
        defaults = (default_role(name, leaf) for name, (_, leaf) in zip(names, with_path))
        chosen = tuple(inferred.get(name, role) for name, role in zip(names, defaults))
    elif callable(roles) and not as_tree:
        chosen = tuple(roles(name, leaf) for name, (_, leaf) in zip(names, with_path))
    else:
        chosen = _roles_of_tree(treedef, roles)
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"{name!r}: two leaves have this path; rename one" for name in twice]
    for name, role, (_, leaf) in zip(names, chosen, with_path):
        if role not in ("train", "frozen", "local", "average"):
            problems.append(f"{name!r}: role {role!r}; use train, frozen, local or average")
        elif role in ("train", "average") and default_role(name, leaf) != "train":
            dtype = jnp.result_type(leaf)
            problems.append(f"{name!r}: dtype {dtype} cannot have role {role}; use frozen or local")
        elif role == "train" and jnp.result_type(leaf) == jnp.float64:
            problems.append(
                f"{name!r}: dtype float64 would be rounded to that of the anchor, float32: give it "
                "as float32, x.astype(jnp.float32)"
            )
    if "train" not in chosen:
        problems.append("no leaf is trained: give at least one leaf the role 'train'")
    refuse(UNFIT, problems)
    shapes = tuple(jnp.shape(leaf) for _, leaf in with_path)
    dtypes = tuple(jnp.result_type(leaf) for _, leaf in with_path)
    return Layout(treedef, names, chosen, shapes, dtypes)
