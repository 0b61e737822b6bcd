"""Which documents validate, and which region (and trainer) every other document belongs to."""

import numpy as np

from lowcomm_jax.data.mixing import salt, salted

_DRAWS = 100


def validation_mask(key_D: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Choose the validation documents; bool [D].

    A document is chosen when the seeded hash of its text falls below `fraction`. The choice does
    not depend on other documents, and equal texts are on the same side. Where none (or all) would
    be chosen, the document with the smallest hash validates (the largest trains).
    """
    hash_D = salted(key_D, "split", seed)
    chosen_D = hash_D < np.uint64(int(fraction * (1 << 64)))
    if not chosen_D.any():
        chosen_D = hash_D == hash_D.min()
    if chosen_D.all():
        chosen_D = hash_D != hash_D.max()
    return chosen_D


def shuffled(documents_N: np.ndarray, key_D: np.ndarray, *seeds: object) -> np.ndarray:
    """Return the document numbers in the order of their seeded hashes (ties as they stand)."""
    return documents_N[np.argsort(salted(key_D[documents_N], *seeds), kind="stable")]


def cut(length_N: np.ndarray, share_P: np.ndarray) -> np.ndarray:
    """Cut a row of documents into P runs whose token counts follow `share_P`; int32 [N].

    A document belongs to the part in which its middle token falls. Shares sum to one.
    """
    middle_N = (np.cumsum(length_N) - length_N / 2) / length_N.sum()
    bound_P = np.cumsum(share_P)[:-1]
    return np.searchsorted(bound_P, middle_N, side="right").astype(np.int32)


def cut_evenly(length_N: np.ndarray, parts: int) -> np.ndarray:
    """Cut a row of N >= parts documents into runs of about equal tokens, none empty; int32 [N]."""
    part_N = cut(length_N, np.full(parts, 1 / parts))
    first_P = np.searchsorted(part_N, np.arange(parts))
    # Move a boundary only where a part would be empty: part p starts after p documents at least
    # and leaves one for every part behind it; then strictly increasing starts.
    for p in range(1, parts):
        first_P[p] = max(first_P[p], first_P[p - 1] + 1)
    first_P = np.minimum(first_P, len(length_N) - parts + np.arange(parts))
    return (np.searchsorted(first_P, np.arange(len(length_N)), side="right") - 1).astype(np.int32)


def shard(
    kind: str,
    documents_N: np.ndarray,
    key_D: np.ndarray,
    topic_D: np.ndarray,
    length_D: np.ndarray,
    regions: int,
    alpha: float,
    seed: int,
) -> tuple[list[np.ndarray], list[str]]:
    """Assign every document to exactly one region, in a seeded order for each region.

    - `iid`: slices of the shuffled row with equal token counts.
    - `topic`: the topic with the most tokens goes to the region with the fewest, and so on; the
      numbers of the regions are drawn from the seed.
    - `dirichlet`: for every topic, the regions' shares of its tokens are drawn from
      Dirichlet(alpha, ..., alpha), and drawn again where a region stays empty. Source: Hsu et al.,
      arXiv 1909.06335; per topic as in Yurochkin et al., arXiv 1905.12022.

    Returns:
        (document numbers of each region, violations); with violations the list is empty.
    """
    row_N = shuffled(documents_N, key_D, "shard", seed)
    found = _violations(kind, topic_D[row_N], regions)
    if found:
        return [], found
    if kind == "iid":
        region_N = cut_evenly(length_D[row_N], regions)
    elif kind == "topic":
        region_N = _by_topic(topic_D[row_N], length_D[row_N], regions, seed)
    else:
        region_N = _dirichlet(topic_D[row_N], length_D[row_N], regions, alpha, seed)
    shards = [row_N[region_N == region] for region in range(regions)]
    if all(len(part) for part in shards):
        return shards, []
    return [], [
        f"alpha={alpha} left a region without documents in each of {_DRAWS} draws; "
        "raise alpha or lower regions"
    ]


def _violations(kind: str, topic_N: np.ndarray, regions: int) -> list[str]:
    found = []
    if len(topic_N) < regions:
        found.append(
            f"regions={regions} but there are only {len(topic_N)} training documents; lower "
            "regions or give a larger corpus"
        )
    topics = len(np.unique(topic_N))
    if kind == "topic" and topics < regions:
        found.append(
            f"regions={regions} but the training documents have only {topics} topics; lower "
            "regions or use sharding='dirichlet' or 'iid'"
        )
    return found


def _by_topic(topic_N: np.ndarray, length_N: np.ndarray, regions: int, seed: int) -> np.ndarray:
    size_K = np.bincount(topic_N, weights=length_N)
    load_R = np.zeros(regions)
    region_K = np.zeros(len(size_K), np.int32)
    for topic in np.argsort(-size_K, kind="stable"):
        region_K[topic] = np.argmin(load_R)
        load_R[region_K[topic]] += size_K[topic]
    label_R = np.argsort(salted(np.arange(regions, dtype=np.uint64), "label", seed))
    return label_R[region_K][topic_N]


def _dirichlet(
    topic_N: np.ndarray, length_N: np.ndarray, regions: int, alpha: float, seed: int
) -> np.ndarray:
    region_N = np.zeros(len(topic_N), np.int32)
    for draw in range(_DRAWS):
        rng = np.random.Generator(np.random.PCG64(salt("dirichlet", seed, draw)))
        for topic in np.unique(topic_N):
            mine_N = topic_N == topic
            region_N[mine_N] = cut(length_N[mine_N], rng.dirichlet(np.full(regions, alpha)))
        if len(np.unique(region_N)) == regions:
            break
    return region_N
