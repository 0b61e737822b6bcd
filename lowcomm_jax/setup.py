"""`Setup`: the settings of an engine in one record.

`Engine` takes its fields as keywords, a config section fills them, and the table of refusals
(`refusals`) reads them. A setting is one field: name, type, the values that it takes, what it is,
default. What follows from the fields is a property.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from lowcomm_jax import methods
from lowcomm_jax.compat import is_gpu
from lowcomm_jax.mesh.regions import Regions, Replicas, default_mesh
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import Network, parse
from lowcomm_jax.params.layout import Roles
from lowcomm_jax.params.sharding import SpecFn
from lowcomm_jax.refused import Refused, is_number, is_whole
from lowcomm_jax.settings import FROM_1, PREFIXES, SWITCH, InConfig, Takes

P = ParamSpec("P")
T = TypeVar("T")


def _optimizer(value: Any) -> str:
    if hasattr(value, "gradient_transformation"):  # optax.MultiSteps
        return f"give optax.{type(value).__name__}(...).gradient_transformation()"
    return "give an Optax optimizer, as optax.adamw(1e-3)"


def _factory(value: Any) -> str:
    name = value if isinstance(value, str) else getattr(value, "__name__", "")
    near = difflib.get_close_matches(name, methods.NAMES, n=1) or ["diloco"]
    return f"no Method; call its factory, as lc.methods.{near[0]}(...)"


LOSS = Takes(callable, "give a function (params, batch, rng) -> loss")
OPTIMIZER = Takes(lambda x: isinstance(x, optax.GradientTransformation), _optimizer)
METHOD = Takes(lambda x: isinstance(x, Method), _factory)
MESH = Takes(
    lambda x: x is None or isinstance(x, Mesh),
    "no Mesh; give one of lc.make_mesh(region=2), or leave it out",
)


def _up_to(most: int) -> Takes:
    """Whole numbers from 1 to `most`: what is allocated by more would take all memory."""
    return Takes(
        lambda x: FROM_1.fits(x) and x <= most,
        lambda x: f"use at most {most:,}" if FROM_1.fits(x) else FROM_1.fix_of(x),
    )


REGIONS = _up_to(100_000)
BLOCK = _up_to(1 << 16)  # more steps at once would gain nothing
FROM_1_OR_NONE = Takes(lambda x: x is None or FROM_1.fits(x), FROM_1.fix)
WHOLE = Takes(is_whole, "give a whole number")
SWITCH_OR_NONE = Takes(lambda x: x is None or isinstance(x, bool), "use True, False or None")
FUNCTION_OR_NONE = Takes(lambda x: x is None or callable(x), "give a function, or None")


def _is_roles(value: Any) -> bool:
    if value is None or callable(value):
        return True
    try:
        return all(isinstance(role, str) for role in jax.tree.leaves(value))
    except (TypeError, ValueError):  # keys that cannot be sorted, which `make_layout` names
        return True


ROLES = Takes(
    _is_roles,
    "give a function of (name, leaf), or a tree of train, frozen, local and average with the "
    "structure of the parameters",
)
ABOVE_1 = Takes(
    lambda x: x is None or (is_number(x) and x > 1), "must exceed 1; or None for no bound"
)
POSITIVE = Takes(
    lambda x: x is None or (is_number(x) and x > 0), "must be positive; or None for no clipping"
)


@typing.runtime_checkable
class BetweenJobs(Protocol):
    """What an engine must know of an exchange between jobs, whether it is open or only described.

    Attributes:
      lingers: whether others can get the payloads of a job only while it runs.
      region: number of the region that this job is.
      count: regions of the run.
      heal: what happens where anchors differ.
    """

    @property
    def lingers(self) -> bool: ...
    @property
    def region(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def heal(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class DescribedExchange:
    """An exchange between jobs that is not open (`BetweenJobs`).

    An engine of it makes states, and takes those of checkpoints; it cannot train.
    """

    lingers: bool
    region: int
    count: int
    heal: str


EXCHANGE = Takes(
    lambda x: x == "mesh" if isinstance(x, str) else isinstance(x, BetweenJobs),
    "use 'mesh' or exchange.store(...)",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """The settings of an engine.

    Attributes:
      adaptive: whether an `AdaptiveEngine` takes them (`adloco.setup`).
    """

    adaptive: ClassVar[bool] = False

    loss_fn: Annotated[
        Callable,
        LOSS,
        "`loss_fn(params, batch, rng)` -> scalar, or (scalar, aux dict of scalars). `params` is "
        "the user's tree of one region, batch leaves are `[per-region batch, ...]`. An aux entry "
        "`tokens` counts tokens; `updates` (leaf name -> new value) replaces leaves of role "
        "`local` or `average`.",
    ]
    inner: Annotated[
        optax.GradientTransformation,
        OPTIMIZER,
        "inner Optax optimizer; its state stays in the region and is kept across rounds. It is the "
        "same in all regions at the start, with any random keys in it. Periods count steps, not "
        "moves: with `optax.MultiSteps` a period is a multiple of its k (else a warning says so), "
        "or `accumulate` takes its place.",
    ]
    method: Annotated[Method, METHOD, "one of `lowcomm_jax.methods`."]
    regions: Annotated[int, REGIONS, "number of regions R."]
    _: dataclasses.KW_ONLY
    mesh: Annotated[
        Mesh | None,
        MESH,
        "mesh with axes region, stage, fsdp, tensor; default: `mesh.default_mesh`.",
    ] = None
    exchange: Annotated[
        Literal["mesh"] | BetweenJobs,
        EXCHANGE,
        "how payloads travel: `mesh` (collectives inside one program), or a result of "
        "`exchange.store`. This job is then one region of several: its mesh lies inside that "
        "region, and states, batches and metrics have that one row.",
    ] = "mesh"
    network: Annotated[
        Any,
        "a `network.Network`, preset name or spec. The engine then books the run on a virtual "
        "clock, `engine.clock`; what the clock says changes no step. Before the first step a "
        "schedule may read the network's timing once (`Schedule.settle`): CoCoDC its slots, "
        "DiLoCoX and Decoupled DiLoCo how long a payload travels.",
    ] = None
    replicas: Annotated[
        Replicas,
        InConfig("place"),
        "how a mesh slot runs the replicas it holds (`mesh.Regions`).",
    ] = "map"
    seed: Annotated[
        int, WHOLE, "seeds a step's `rng`, a pure function of (seed, region, step)."
    ] = 0
    roles: Annotated[Roles, ROLES, "which leaves are trained (`params.make_layout`)."] = None
    weights: Annotated[
        Literal["equal", "tokens"] | Sequence[float] | np.ndarray,
        "`equal`, `tokens` (tokens consumed since the fragment's last send) or R numbers.",
    ] = "equal"
    specs: Annotated[
        SpecFn | None,
        FUNCTION_OR_NONE,
        "`(leaf name, shape) -> PartitionSpec` over the axes inside a region; default: FSDP on the "
        "longest axis that divides, or, with a codec, on the rows if they hold whole blocks.",
    ] = None
    stacked: Annotated[
        Sequence[str], PREFIXES, "path prefixes of leaves with a leading layer axis."
    ] = ()
    accumulate: Annotated[
        int, InConfig("place"), FROM_1, "microbatches a step's batch is cut into."
    ] = 1
    skip_nonfinite: Annotated[
        bool,
        SWITCH,
        "leave a region as it was when its gradient is not finite (counted in the metric "
        "`skipped`). Else one bad batch makes its parameters and moments NaN for good.",
    ] = True
    outlier_factor: Annotated[
        float | None,
        InConfig("learnt", section="guards"),
        ABOVE_1,
        "leave out a region whose pseudo-gradient norm exceeds this multiple of the median over "
        "regions; None = off. With two regions the median is their mean, so that a factor of 2 or "
        "more never applies.",
    ] = None
    max_update_norm: Annotated[
        float | None,
        InConfig("learnt", section="guards"),
        POSITIVE,
        "clip the outer update to this global norm per fragment; None = off.",
    ] = None
    hops: Annotated[
        Callable | None,
        FUNCTION_OR_NONE,
        "where `loss_fn` itself moves values between regions (random routing): region 0's batch "
        "and keys -> the transfers of each call, `Pipeline.hops`; they are booked at every step.",
    ] = None
    block: Annotated[
        int,
        InConfig("place"),
        BLOCK,
        "most steps that `run` stages on the device at once; where batches are cut "
        "(`microbatch=`), most microbatches.",
    ] = 16
    offload: Annotated[
        bool,
        InConfig("place"),
        SWITCH,
        "keep anchor, outer state, residuals and snapshots in pinned host memory.",
    ] = False
    codec_error: Annotated[
        bool,
        InConfig("beside"),
        SWITCH,
        "let sends measure how far decoded payloads are from what they stand for, and how many "
        "entries they carry (metrics `codec_error`, `sent_share`); it takes another decoding, and "
        "its memory.",
    ] = False
    concurrent_exchange: Annotated[
        bool | None,
        InConfig("place"),
        SWITCH_OR_NONE,
        "exchange payloads in flight beside inner steps, in one program "
        "(`sync.concurrent_exchange`); None = where the mesh has GPUs or TPUs, and the method a "
        "delay. It serves `run`; with `step`, or where batches are cut, landings exchange.",
    ] = None
    batches: Annotated[
        Literal["whole", "own"],
        "what each process of a program of several processes is given of a batch: the `whole` "
        "batch, or its `own` part (see `own_batch`).",
    ] = "whole"

    def __post_init__(self) -> None:
        """NumPy's whole numbers and switches become Python's, and one text is one prefix."""
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.integer | np.bool_):
                object.__setattr__(self, field.name, value.item())
        if isinstance(self.stacked, str):
            object.__setattr__(self, "stacked", (self.stacked,))

    @property
    def separate(self) -> bool:
        """Whether this job is one region of several."""
        return not isinstance(self.exchange, str)

    @property
    def here(self) -> tuple[int, ...]:
        """Numbers of the regions in this job."""
        if isinstance(self.exchange, str):
            return tuple(range(self.regions))
        return (self.exchange.region,)

    @functools.cached_property
    def placed(self) -> Regions:
        """The regions of this job on its mesh."""
        return Regions(len(self.here), self.mesh or default_mesh(len(self.here)), self.replicas)

    @property
    def everyone(self) -> Regions:
        """All regions of the run on this mesh, as far as refusals read it."""
        return dataclasses.replace(self.placed, count=self.regions)

    @functools.cached_property
    def links(self) -> Network | None:
        """The network between the regions; None where none is given.

        Raises:
          Refused: `network` describes none.
        """
        return None if self.network is None else parse(self.network)

    @property
    def concurrent(self) -> bool:
        """Whether payloads are exchanged beside inner steps: as asked, else where it pays."""
        if self.concurrent_exchange is not None:
            return self.concurrent_exchange
        device = self.placed.mesh.devices.flat[0]
        fast = is_gpu(device) or device.platform == "tpu"
        return fast and self.why_not_concurrent is None

    @property
    def why_not_concurrent(self) -> str | None:
        """Why payloads cannot be exchanged beside inner steps, as far as these settings decide."""
        if self.separate:
            return "regions that are jobs of their own exchange beside inner steps anyway"
        method, schedule = self.method, self.method.schedule
        if method.channels:
            return f"{method.name} exchanges inside the program of the inner steps"
        if method.topology is not None:
            return f"{method.name} picks one of several permutes when it lands"
        no_delay = not schedule.land_after_send and not np.any(np.asarray(schedule.delay))
        if method.signal == "gradient" or (no_delay and not schedule.needs_network):
            return f"{method.name} has no delay, so that no inner step is beside its exchange"
        if self.placed.slots == 1:
            return "all regions are in one slot of the mesh, and nothing moves"
        return None

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """What steps: `inner`, with gradient exchange behind the method's outer rule."""
        inner = self.inner
        if self.method.signal == "gradient" and self.method.outer is not None:
            inner = optax.chain(self.method.outer, inner)
        return optax.with_extra_args_support(inner)


def takes_settings(
    make: Callable[P, Any],
) -> Callable[[Callable[[T, Any], None]], Callable[Concatenate[T, P], None]]:
    """Let a constructor that is given a `Setup` be called with the settings themselves.

    Args:
      make: `Setup`, or one with more settings; a checker of types reads the parameters from it. A
        setting that is missing is None there, which the table refuses with its fix.
    """
    kinds = typing.get_type_hints(make)
    parameters = inspect.signature(make).parameters
    needed = [name for name, x in parameters.items() if x.default is inspect.Parameter.empty]

    def decorate(init: Callable[[T, Any], None]) -> Callable[Concatenate[T, P], None]:
        @functools.wraps(init)
        def called(self: T, *given: P.args, **named: P.kwargs) -> None:
            refuse_unknown(named, parameters)
            signature.bind_partial(self, *given, **named)  # raises a TypeError of this name's own
            missing = dict.fromkeys(needed[len(given) :])
            init(self, make(*given, **(missing | named)))

        own = inspect.signature(init).parameters["self"]
        named = [x.replace(annotation=kinds[name]) for name, x in parameters.items()]
        signature = inspect.Signature([own, *named])
        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate


def refuse_unknown(named: Collection[str], settings: Collection[str]) -> None:
    """Refuse keywords that are no settings, with the nearest ones.

    Raises:
      Refused: there are some.
    """
    lines = []
    for name in set(named).difference(settings):
        near = difflib.get_close_matches(name, settings, n=1)
        lines.append(f"{name}: no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    if lines:
        raise Refused("these settings cannot work", sorted(lines))
