"""The processes of a job as threads of one, which talk over pipes."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

from lowcomm_jax.mesh.leader import Leader, LeaderChannel


def leaders(count):
    """A job of so many processes; `together` runs something in all of them."""
    ends = {process: Pipe() for process in range(1, count)}

    def connect(process):
        peers = {p: end for p, (end, _) in ends.items()} if process == 0 else {0: ends[process][1]}
        return lambda hear: LeaderChannel(peers, hear)

    return [Leader(count, process, connect(process)) for process in range(count)]


def together(act, members):
    """`act(member)` in all at once; results, or errors, in their order."""

    def one(member):
        try:
            return act(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))
