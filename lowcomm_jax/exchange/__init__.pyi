# For type checkers, which cannot follow the names that `__init__.py` resolves when they are used.

from lowcomm_jax.exchange.mesh import InSlices as InSlices
from lowcomm_jax.exchange.mesh import MeshExchange as MeshExchange
from lowcomm_jax.exchange.mesh import Traffic as Traffic
from lowcomm_jax.exchange.mesh import all_gather as all_gather
from lowcomm_jax.exchange.mesh import in_halves as in_halves
from lowcomm_jax.exchange.mesh import pair as pair
from lowcomm_jax.exchange.mesh import two_shot as two_shot
from lowcomm_jax.exchange.pairs import GroupExchange as GroupExchange
from lowcomm_jax.rounds.connect import peers as peers
from lowcomm_jax.rounds.connect import store as store
from lowcomm_jax.rounds.remote import RemoteExchange as RemoteExchange
from lowcomm_jax.rounds.request import Arrived as Arrived
from lowcomm_jax.store.context import ExchangeContext as ExchangeContext
from lowcomm_jax.store.errors import Lost as Lost
from lowcomm_jax.store.errors import Missing as Missing
from lowcomm_jax.store.errors import Parted as Parted
from lowcomm_jax.store.errors import Rejected as Rejected
from lowcomm_jax.store.errors import StoreUnavailable as StoreUnavailable
from lowcomm_jax.store.errors import Superseded as Superseded
from lowcomm_jax.store.errors import Unreadable as Unreadable
from lowcomm_jax.store.timing import Timing as Timing
from lowcomm_jax.store.transport import Transport as Transport
