"""How a user's parameter pytree maps to named leaves, and which of them are trained.

`make_layout` describes a pytree once; `Layout` turns trees into named leaves and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.params.fragments import path_name

PyTree = Any
Role = Literal["train", "frozen", "local", "average"]
Roles = PyTree | Callable[[str, Any], Role] | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static description of the user's tree: its structure, leaf names and leaf roles.

    Roles: `train` leaves are optimised and exchanged; `frozen` ones are neither, and one copy
    serves all regions; `local` and `average` leaves are non-trainable state that a step may
    replace (batch statistics, counters): kept per region, or averaged when fragment 0 is sent.
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


def default_role(name: str, leaf: Any) -> Role:
    """Float leaves are trained, all others (counters, tables) are frozen."""
    del name
    return "train" if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else "frozen"


def make_layout(params: PyTree, roles: Roles = None) -> Layout:
    """Describe `params`.

    Args:
      params: any pytree of arrays (Flax NNX state, Linen, Equinox with arrays only, dicts, ...).
      roles: None (`default_role`), a function of (name, leaf), or a pytree of roles with the
        structure of `params` (a LoRA mask, for example).

    Raises:
      ValueError: listing every leaf of an unknown role, trained leaves that are not floats, and a
        tree without a trained leaf.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(path_name(path) for path, _ in with_path)
    as_tree = roles is not None and jax.tree.structure(roles) == treedef
    if roles is None or (callable(roles) and not as_tree):
        role_of = default_role if roles is None else roles
        chosen = tuple(role_of(name, leaf) for name, (_, leaf) in zip(names, with_path))
    else:
        chosen = tuple(treedef.flatten_up_to(roles))
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [f"{name!r}: two leaves have this path; rename one" for name in twice]
    for name, role, (_, leaf) in zip(names, chosen, with_path):
        if role not in ("train", "frozen", "local", "average"):
            problems.append(f"{name!r}: role {role!r}; use train, frozen, local or average")
        elif role in ("train", "average") and default_role(name, leaf) != "train":
            dtype = jnp.result_type(leaf)
            problems.append(f"{name!r}: dtype {dtype} cannot have role {role}; use frozen or local")
    if "train" not in chosen:
        problems.append("no leaf is trained: give at least one leaf the role 'train'")
    if problems:
        raise ValueError("parameters cannot be trained as given:\n- " + "\n- ".join(problems))
    shapes = tuple(jnp.shape(leaf) for _, leaf in with_path)
    dtypes = tuple(jnp.result_type(leaf) for _, leaf in with_path)
    return Layout(treedef, names, chosen, shapes, dtypes)
