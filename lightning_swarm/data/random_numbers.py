"""The random numbers that samplers draw from, as plain buffers that travel."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_swarm.errors import ProtocolError
from lightning_swarm.types.data import RandomNumbers


def own_generators(loader: Any) -> list[torch.Generator]:
    """Of a DataLoader, or what takes its place, and its samplers: each once."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(one, "generator", None) for one in (loader, *samplers)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def take(own: Sequence[torch.Generator]) -> RandomNumbers:
    """Where all generators are."""
    _, python, python_gauss = random.getstate()
    numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - what users draw from
    _, keys, place, has_gauss, gauss = numpy
    return RandomNumbers(
        torch=torch.get_rng_state().numpy().tobytes(),
        python=np.array(python, dtype="<u4").tobytes(),
        python_gauss=python_gauss,
        numpy=np.asarray(keys, dtype="<u4").tobytes(),
        numpy_place=int(place),
        numpy_gauss=float(gauss) if has_gauss else None,
        own=[one.get_state().numpy().tobytes() for one in own],
    )


def restore(numbers: RandomNumbers, own: Sequence[torch.Generator]) -> None:
    """Have them go on from there.

    Raises:
        ProtocolError: It is not where generators of this machine can be.
    """
    try:
        torch.set_rng_state(_as_tensor(numbers.torch))
        python = np.frombuffer(numbers.python, dtype="<u4").tolist()
        random.setstate((3, tuple(python), numbers.python_gauss))
        keys = np.frombuffer(numbers.numpy, dtype="<u4").astype(np.uint32)
        gauss = numbers.numpy_gauss
        state = ("MT19937", keys, numbers.numpy_place, int(gauss is not None), gauss or 0.0)
        np.random.set_state(state)  # noqa: NPY002 - what users draw from
        for one, buffer in zip(own, numbers.own, strict=True):
            one.set_state(_as_tensor(buffer))
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ProtocolError(f"the lead's random numbers cannot be gone on with here: {error}") from error


@contextmanager
def drawing_from(numbers: RandomNumbers, own: Sequence[torch.Generator]) -> Iterator[None]:
    """Have generators go on from there; those of the process are afterwards where they were before."""
    before = take(())
    try:
        restore(numbers, own)
        yield
    finally:
        restore(before, ())


def _as_tensor(buffer: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
