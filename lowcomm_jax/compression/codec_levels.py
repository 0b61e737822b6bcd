"""One codec at several sizes (levels), all with the same state.

The schedule of an adaptive method (`Schedule.level`) names the level that a payload is encoded at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.base import Codec, PyTree, Wrapper


@dataclasses.dataclass(frozen=True)
class CodecLevels(Wrapper):
    """Codecs that share a state; `codec`, level 0, is the one used unless a level is asked for.

    Attributes:
      others: the codecs of levels 1, 2, ...
    """

    others: tuple[Codec, ...] = ()
    elementwise = True

    @property
    def name(self) -> str:
        return self.codec.name

    def at(self, level: int) -> Codec:
        if not 0 <= level <= len(self.others):
            raise ValueError(f"{self.name} has levels 0 to {len(self.others)}, not {level}")
        return (self.codec, *self.others)[level]

    def init(self, like: PyTree) -> PyTree:
        """The common state.

        Raises:
          ValueError: the codecs' states differ in shape.
        """
        shapes = [jax.eval_shape(lambda c=c: c.init(like)) for c in (self.codec, *self.others)]
        differ = [c.name for c, s in zip(self.others, shapes[1:]) if s != shapes[0]]
        if differ:
            raise ValueError(
                f"the states of {', '.join(differ)} differ from that of {self.codec.name}: the "
                "codecs of several levels may differ only in what they send"
            )
        return self.codec.init(like)

    def placed(
        self, like: PyTree, specs: Mapping[str, P], sizes: Mapping[str, int], staged: bool
    ) -> Codec:
        own, *others = (
            codec.placed(like, specs, sizes, staged) for codec in (self.codec, *self.others)
        )
        return dataclasses.replace(self, codec=own, others=tuple(others))

    def encode(self, tree: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return self.codec.encode(tree, state, params)
