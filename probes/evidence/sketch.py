"""Seeded linear projections of gradients, small enough to store for every row.

A count sketch (Charikar, Chen, Farach-Colton 2002): every coordinate gets a random sign and a random one of S
buckets, and a sketch is the sums of the buckets. <sketch a, sketch b> has the expectation <a, b> and, for
vectors spread over many coordinates, a standard error of sqrt(|a|^2 |b|^2 + <a, b>^2) / sqrt(S). The buckets
of S neighbouring coordinates are a random rotation of 0 ... S-1, so that a sketch takes a gather and a sum,
which accelerators repeat bit by bit, and no scatter.

Signs and rotations are hashes of the seed, the parameter's name and the coordinate: the same on any device
and for any number of rows, with nothing to store.

Legend: N gradients, P numbers of a parameter, S buckets, F stretches of S coordinates.
"""

from __future__ import annotations

import hashlib

import torch

BITS = 32
"""Signs taken from one hash."""

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sketch(gradients_NP: torch.Tensor, name: str, *, dim: int, seed: int) -> torch.Tensor:
    """Returns the sketches of gradients of one parameter, `[N, S]`; those of several parameters add up.

    Args:
        gradients_NP: Gradients, flat.
        name: Name of the parameter.
        dim: S.
        seed: Seed of the projection.
    """
    num, size = gradients_NP.shape
    stretches = -(-size // dim)
    signed = torch.zeros(num, stretches * dim, dtype=gradients_NP.dtype, device=gradients_NP.device)
    signs = _signs(_key(name, "sign", seed), size, gradients_NP.device).to(gradients_NP.dtype)
    torch.mul(gradients_NP, signs, out=signed[:, :size])
    shifts_F = (_hashes(_key(name, "bucket", seed), stretches, signed.device) >> 1).remainder(dim)
    bucket_S = torch.arange(dim, device=signed.device)
    # Coordinate i of a stretch goes to bucket (i + shift) mod S: bucket s takes coordinate (s - shift) mod S.
    source_FS = (bucket_S - shifts_F[:, None]).remainder(dim) + dim * torch.arange(
        stretches, device=signed.device
    ).unsqueeze(1)
    return signed.index_select(1, source_FS.flatten()).view(num, stretches, dim).sum(1)


def _signs(key: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns `size` numbers -1 or 1, int8."""
    words = _hashes(key, -(-size // BITS), device)
    bits = (words[:, None] >> torch.arange(BITS, device=device)) & 1
    return (1 - 2 * bits.flatten()[:size]).to(torch.int8)


def _hashes(key: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns the numbers of the generator splitmix64 (Steele, Lea, Flood 2014) from a key on, int64."""
    state = torch.arange(1, size + 1, device=device) * _signed(_GOLDEN) + _signed(key)
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    return state ^ _shifted(state, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns a shift to the right that fills with zeros; torch's fills with the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _key(name: str, purpose: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{purpose}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _signed(number: int) -> int:
    """Returns the signed 64-bit integer of the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number
