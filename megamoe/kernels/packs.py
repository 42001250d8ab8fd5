"""Packs of experts as trees of tensors: walked, written over, and made a layer's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megamoe.problem import ExpertWeights


def tensors_of(pack: Any) -> Iterator[Tensor]:
    """Every tensor of a pack, in the order of its fields."""
    if isinstance(pack, Tensor):
        yield pack
    elif dataclasses.is_dataclass(pack):
        for field in dataclasses.fields(pack):
            yield from tensors_of(getattr(pack, field.name))
    elif isinstance(pack, (tuple, list)):
        for item in pack:
            yield from tensors_of(item)


def write_over(held: Any, fresh: Any) -> Callable[[], None]:
    """What writes every tensor of one pack over those of another of the same shapes."""
    pairs = list(zip(tensors_of(held), tensors_of(fresh), strict=True))
    for old, new in pairs:
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    return lambda: _write(pairs)


def _write(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        bits = torch.uint8 if old.dtype.itemsize == 1 else old.dtype
        old.view(bits).copy_(new.view(bits))


def owned(pack: Any, experts: ExpertWeights) -> Any:
    """The pack without a byte of the caller's: what it only viewed is copied, strides kept."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in experts.tensors}

    def own(tensor: Tensor) -> Tensor:
        shared = tensor.untyped_storage().data_ptr() in theirs
        return tensor.clone(memory_format=torch.preserve_format) if shared else tensor

    return _mapped(pack, own)


def _mapped(pack: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(pack, Tensor):
        return change(pack)
    if next(tensors_of(pack), None) is None:
        return pack  # a format, say, which is known by its identity
    if dataclasses.is_dataclass(pack) and not isinstance(pack, type):
        names = [field.name for field in dataclasses.fields(pack) if field.init]
        return dataclasses.replace(pack, **{n: _mapped(getattr(pack, n), change) for n in names})
    if isinstance(pack, (tuple, list)):
        return type(pack)(_mapped(item, change) for item in pack)
    return pack
