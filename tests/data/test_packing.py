"""Sequences against an oracle in plain Python: no token lost, none twice, mask exact."""

import numpy as np
import pytest

from lowcomm_jax.data.packing import Tokens, pack

EOS, PAD = 90, 91


def stored(lengths):
    """Tokens of documents whose values tell document and place: 1000 d + k, then the end."""
    rows = [[1000 * d + k for k in range(1, n)] + [EOS] for d, n in enumerate(lengths)]
    flat = np.array([t for row in rows for t in row], np.uint16)
    return rows, Tokens(flat, np.concatenate([[0], np.cumsum(lengths)]))


def oracle(rows, groups, seq_len, packing):
    """Return per group the list of (tokens, mask, documents)."""
    out = []
    for group in groups:
        pieces = [[d] for d in group] if packing == "document" else [list(group)]
        sequences = []
        for piece in pieces:
            line = [EOS] + [t for d in piece for t in rows[d]]
            owner = [-1] + [d for d in piece for _ in rows[d]]
            for at in range(0, len(line) - 1, seq_len):
                tokens, owners = line[at : at + seq_len + 1], owner[at + 1 : at + seq_len + 1]
                lack = seq_len + 1 - len(tokens)
                mask = [1.0] * len(owners) + [0.0] * lack
                sequences.append((tokens + [PAD] * lack, mask, owners + [-1] * lack))
        out.append(sequences)
    return out


@pytest.mark.parametrize("packing", ["stream", "document"])
@pytest.mark.parametrize("seq_len", [1, 3, 7, 50])
@pytest.mark.parametrize("seed", range(6))
def test_sequences_match_the_oracle(packing, seq_len, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 23, 12)
    rows, tokens = stored(lengths)
    order = rng.permutation(12)
    groups = [order[:5], order[5:6], order[6:]]
    packed = pack(tokens, groups, seq_len, packing, EOS, PAD)
    expected = oracle(rows, groups, seq_len, packing)
    assert np.diff(packed.first_F).tolist() == [len(part) for part in expected]
    flat = [sequence for part in expected for sequence in part]
    assert len(packed) == len(flat)
    wanted = rng.permutation(len(flat))
    got = packed.gather(wanted)
    owners = packed.documents(wanted)
    assert got["tokens"].dtype == np.int32 and got["mask"].dtype == np.float32
    assert owners.dtype == np.int32
    for row, number in enumerate(wanted):
        tokens_T, mask_T, owner_T = flat[number]
        assert got["tokens"][row].tolist() == tokens_T
        assert got["mask"][row].tolist() == mask_T
        assert owners[row].tolist() == owner_T


@pytest.mark.parametrize("packing", ["stream", "document"])
def test_every_token_is_a_target_once(packing):
    lengths = [5, 17, 2, 31, 9]
    rows, tokens = stored(lengths)
    packed = pack(tokens, [np.array([3, 0]), np.array([4, 1, 2])], 6, packing, EOS, PAD)
    got = packed.gather(np.arange(len(packed)))
    targets = got["tokens"][:, 1:][got["mask"] == 1]
    assert sorted(targets.tolist()) == sorted(t for row in rows for t in row)
    assert (got["tokens"][:, 1:][got["mask"] == 0] == PAD).all()


def test_no_document_sequence_holds_two_documents():
    _, tokens = stored([5, 17, 2, 31, 9])
    packed = pack(tokens, [np.arange(5)], 6, "document", EOS, PAD)
    for owners in packed.documents(np.arange(len(packed))):
        assert len(set(owners.tolist()) - {-1}) == 1


def test_no_sequences_give_empty_arrays():
    _, tokens = stored([5, 17])
    got = pack(tokens, [np.arange(2)], 6, "stream", EOS, PAD).gather(np.arange(0))
    assert got["tokens"].shape == (0, 7) and got["mask"].shape == (0, 6)
