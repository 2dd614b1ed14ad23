"""Random draws as a pure function of (key, index of the element). They are not cryptographic."""

import math
from typing import Final

import torch
from torch import Tensor

_MASK64: Final = 2**64 - 1
_ROW: Final = 4096  # elements of a row in `bits`
_MANTISSA: Final = {torch.float16: 11, torch.bfloat16: 8}  # dtype -> bits of its mantissa


def key_seed(*parts: int) -> int:
    """Fold the lowest 64 bits of integers into a 64-bit seed, by splitmix64's finaliser; their order matters."""
    seed = len(parts)
    for part in parts:
        seed = (seed ^ (part & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & _MASK64
        seed ^= seed >> 31
    return seed


def _signed(value: int) -> int:
    """Return the lowest 32 bits, as the value of an int32."""
    return (value + 2**31 & 0xFFFFFFFF) - 2**31


_FIRST: Final = _signed(0x9E3779B1)
_SECOND: Final = 0x7FEB352D
_THIRD: Final = _signed(0x846CA68B)


# Three rounds of xor-shift and multiply on 32-bit integers, after the finalisers of MurmurHash3 and of Wellons'
# *hash-prospector*. The key determines the first counter and the first multiplier. 32-bit multiplication is vectorised
# on every CPU, so a mask costs less than torch's own. All draws are bitwise equal on every device, except normals,
# which are rounded.
def bits(key: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` uniform int32, a function of (key, index)."""
    x: Tensor
    start = _signed(key)
    # Multipliers must be odd, so the key changes all bits of this one but the lowest.
    keyed = _signed(_SECOND ^ key >> 31 & 0xFFFFFFFE)
    if count <= _ROW:
        x = torch.arange(count, dtype=torch.int32, device=device).mul_(_FIRST).add_(start)
    else:
        # `arange` is several times slower than an addition of rows and columns.
        rows = torch.arange((count + _ROW - 1) // _ROW, dtype=torch.int32, device=device)
        rows = rows.mul_(_signed(_FIRST * _ROW)).add_(start).unsqueeze(1)
        columns = torch.arange(_ROW, dtype=torch.int32, device=device).mul_(_FIRST)
        x = torch.add(rows, columns).flatten()[:count]
    # The shift is arithmetic, so x and ~x collide, and the function is no bijection. It collides as often as by chance.
    x.bitwise_xor_(x >> 16).mul_(keyed)
    x.bitwise_xor_(x >> 15).mul_(_THIRD)
    x.bitwise_xor_(x >> 16).mul_(_FIRST)
    return x


def long_bits(key: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` uniform int64."""
    high, low = bits(key, 2 * count, device).to(torch.int64).view(2, count).unbind()
    return high.bitwise_left_shift_(32).bitwise_or_(low.bitwise_and_(0xFFFFFFFF))


def uniform(key: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw `count` uniform floats in [0, 1), in float32 or float64, with as many random bits as `dtype` holds."""
    if dtype == torch.float64:
        return (long_bits(key, count, device) >> 11).to(torch.float64).mul_(2.0**-53).add_(0.5)
    num_bits = _MANTISSA.get(dtype, 24)
    # The integers are signed, so scale them to [-1/2, 1/2), and add 1/2. All of these steps are exact.
    return (bits(key, count, device) >> (32 - num_bits)).to(torch.float32).mul_(2.0**-num_bits).add_(0.5)


def normal(key: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw `count` standard normals, in float32 or float64, by Box and Muller's method."""
    # Draws are equal on every device up to the rounding of its logarithm and cosine.
    half = (count + 1) // 2
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    radius, angle = uniform(key, 2 * half, wide, device).view(2, half)
    # The logarithm of 1 - u is finite, because 1 - u is in (0, 1].
    radius = radius.neg().log1p_().mul_(-2).sqrt_()
    angle = angle.mul(2 * math.pi)
    return torch.cat((angle.cos().mul_(radius), angle.sin_().mul_(radius)))[:count]


def random_mask(key: int, like: Tensor, probability: float, out: Tensor | None = None) -> Tensor:
    """Draw a mask of the shape of `like`, each element of which is true with this probability."""
    if not 0.0 <= probability <= 1.0:
        raise RuntimeError(f"a probability must be in 0..1, got p={probability}")
    if out is None:
        out = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    if probability in (0.0, 1.0):
        return out.fill_(probability)
    threshold = min(round(probability * 2**32), 2**32 - 1) - 2**31
    return torch.lt(bits(key, like.numel(), like.device).view(like.shape), threshold, out=out)
