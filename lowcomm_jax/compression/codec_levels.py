"""One codec at several sizes (levels), all with the same state.

The schedule of an adaptive method (`Schedule.level`) names the level that a payload is encoded at.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from lowcomm_jax.compression.base import Codec, PyTree, Wrapper


@dataclasses.dataclass(frozen=True)
class CodecLevels(Wrapper):
    """Codecs that share a state; `codec`, level 0, is the one used unless a level is asked for.

    Attributes:
      others: the codecs of levels 1, 2, ...
    """

    in_slices: ClassVar[bool | None] = False  # a level is named for every payload

    others: tuple[Codec, ...] = ()

    @property
    def name(self) -> str:
        return self.codec.name

    def at(self, level: int) -> Codec:
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

    def encode(self, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.codec.encode(tree, state)
