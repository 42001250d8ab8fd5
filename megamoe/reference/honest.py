"""Honest kernels: a recipe's roundings with the sums and exponentials that real hardware has.

`Emulated` is a perfect kernel. A real one adds in tensor-core steps whose accumulator truncates, in
several parts of K, and takes exp2 and reciprocals from approximate instructions. None of that is a
fault, so how many bits it costs is measured here, from models of the hardware, and is what a kernel
is allowed; what some kernel gave when it was first run never is.

Sources: Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021):
exact products, aligned to the greatest and added with truncation; DeepSeek-V3's report, section
3.5: the FP8 accumulator of Hopper keeps 14 bits; PTX ISA: ex2.approx within 2 units in the last
place, rcp.approx within 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.formats import (
    BF16,
    F64,
    Format,
    decode,
    exponent_of,
    power_of_two,
    quantise,
    rn32,
    rnbf16,
    row_scale,
)
from megamoe.problem import BF16_COMBINE, Recipe
from megamoe.reference.case import Inputs, output
from megamoe.reference.dot import Product
from megamoe.reference.elementwise import canonical_nan
from megamoe.reference.hashing import hashed
from megamoe.reference.moe import Emulated, term

STEP = 16  # terms that a 16-bit tensor-core instruction adds at once
STEP_FP8 = 32
FP8_BITS = 14  # the significand that Hopper's FP8 accumulator keeps
# ex2 (2 units in the last place), rcp (1), and half a unit of each of two products, as a fraction.
APPROXIMATION = 4 * 2.0**-23
CPU_SCRATCH = 1 << 20  # elements of partial sums held at once
CUDA_SCRATCH = 1 << 27


@dataclass(frozen=True, slots=True)
class Honest(Emulated):
    """Rounds where the recipe says, and adds as a kernel may.

    split_k: the sum falls into this many runs, added in float32 at the end. approximate_exp: what
    is computed in float32 between FC1 and FC2 is off by up to ``APPROXIMATION``. fp8_promote: None
    sums in truncated float32; a number emulates 14-bit FP8 accumulators that are added to a float32
    sum every so many terms, 0 never.
    """

    split_k: int = 1
    approximate_exp: bool = True
    fp8_promote: int | None = None

    def dots(self, products: Iterable[Product]) -> None:
        for product in products:
            pairs = zip(product.a, product.b, strict=True)
            product.put(torch.stack([self.dot(a, b) for a, b in pairs]))

    def enter(self, values: Tensor, fmt: Format) -> Tensor:
        """For FP8 accumulators the codes themselves, [n, K], with their scales behind them."""
        if self.fp8_promote is None or fmt.scale is None:
            return Emulated.enter(self, values, fmt)
        coded = quantise(values, fmt)
        return torch.cat([decode(coded.data, fmt.element), row_scale(coded)], dim=1)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        scratch = CPU_SCRATCH if a.device.type == "cpu" else CUDA_SCRATCH
        if self.fp8_promote is None:
            a, b = _padded(a, STEP * self.split_k), _padded(b, STEP * self.split_k)
            rows = max(1, scratch * STEP // max(1, b.numel()))
            parts = [_tensor_core(part, b, self.split_k) for part in a.split(rows)]
        else:
            rows = max(1, scratch // max(1, len(b)))
            parts = [self._fp8(part, b) for part in a.split(rows)]
        return torch.cat(parts) + 0.0

    def _fp8(self, a: Tensor, b: Tensor) -> Tensor:
        """Between promotions, and under one scale of ``a``, sums stay in the FP8 accumulator."""
        columns = b.shape[1]
        codes, scale = a[:, :columns], a[:, columns:]
        widths = (fmt.block[1] or columns for fmt in (self.recipe.act, self.recipe.mid))
        width = next((w for w in widths if -(-columns // w) == scale.shape[1]), columns)
        run = min(width, self.fp8_promote or columns)
        out = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
        for start in range(0, columns, run):
            k = slice(start, start + run)
            total = _fp8_tensor_core(codes[:, k], b[:, k])
            if scale.shape[1]:
                total = total * scale[:, start // width, None]
            out = out + rn32(total)
        return out

    def narrow(self, values: Tensor) -> Tensor:
        if self.approximate_exp:
            values = values + values * (_uniform(values) * APPROXIMATION)
        return rn32(values)

    def __str__(self) -> str:
        if self.fp8_promote is None:
            sums = "truncated float32 sums"
        else:
            sums = f"{FP8_BITS}-bit FP8 sums"
            sums += (
                f" promoted every {self.fp8_promote}" if self.fp8_promote else ", never promoted"
            )
        return f"{sums}, K in {self.split_k}" + (", approximate exp" * self.approximate_exp)


def _padded(a: Tensor, multiple: int) -> Tensor:
    """Zero columns up to a multiple: they add nothing."""
    return torch.nn.functional.pad(a, (0, -a.shape[1] % multiple))


def _tensor_core(a: Tensor, b: Tensor, runs: int) -> Tensor:
    """Each step's exact sum is added to its run's float32 accumulator, which truncates."""
    steps = torch.bmm(
        a.unflatten(1, (-1, STEP)).transpose(0, 1), b.unflatten(1, (-1, STEP)).permute(1, 2, 0)
    ).unflatten(0, (runs, -1))
    total = torch.zeros_like(steps[:, 0])
    for step in steps.unbind(1):
        total = ((total + step).view(torch.int64) & ~0x1FFFFFFF).view(F64)
    out = rn32(total[0])
    for run in total[1:]:
        out = out + rn32(run)
    return out


def _fp8_tensor_core(a: Tensor, b: Tensor) -> Tensor:
    """Products and accumulator are cut to 14 bits below the greatest of them, then added: float64.

    A cut product loses half a unit of the cut on average, and that times 1 / sqrt(12) about it: the
    losses of a step are added as their mean and a hashed noise, because products one by one would
    cost thirty times as much. Where all products are multiples of the unit nothing is lost.
    """
    a, b = _padded(a, STEP_FP8), _padded(b, STEP_FP8)
    total = torch.zeros(len(a), len(b), dtype=F64, device=a.device)
    noise = math.sqrt(STEP_FP8 / 4)  # a uniform spread with the deviation of that many losses
    for start in range(0, a.shape[1], STEP_FP8):
        x, y = a[:, start : start + STEP_FP8], b[:, start : start + STEP_FP8].T
        sums, sizes, signs = x @ y, x.abs() @ y.abs(), x.sign() @ y.sign()
        greatest = torch.maximum((x.square() @ y.square()).sqrt(), total.abs())
        exponent = (FP8_BITS - 1 - exponent_of(greatest)).clamp(-1000, 1000)
        to_integer, back = power_of_two(exponent), power_of_two(-exponent)
        sums, sizes = sums * to_integer, sizes * to_integer
        lost = signs * 0.5 + _uniform(sums) * (sums.sign() * noise)  # odd, as truncation is
        exact = (sums == sums.trunc()) & (sizes == sizes.trunc())
        cut = torch.where(exact, sums, (sums - lost).round())
        total = (cut + (total * to_integer).trunc()) * back
    return total


def _uniform(values: Tensor) -> Tensor:
    """Numbers in [-1, 1) that depend on the significands of float64 ``values`` alone."""
    return hashed((values.view(torch.int64) >> 20) & 0xFFFFFFFF).to(F64) * 2.0**-31 - 1.0


def honest_kernels(recipe: Recipe) -> tuple[Honest, ...]:
    """The kernels whose bits a verdict grants: sums in 1, 4 and 16 runs, or FP8 accumulators.

    A kernel whose scales change along K must promote at each; one whose scales do not (a whole row
    or tensor) may leave the entire sum to the tensor core.
    """
    if max(recipe.act.element.bits, recipe.mid.element.bits) > 8:
        return tuple(Honest(recipe, split_k=runs) for runs in (1, 4, 16))
    blocks = (recipe.act.block[1], recipe.mid.block[1])
    promote = 0 if 0 in blocks else max(blocks)
    return (Honest(recipe), Honest(recipe, fp8_promote=promote))


def honest_output(inputs: Inputs, kernel: Honest) -> Tensor:
    """The layer as that kernel gives it, BF16 [T, H]; the shared expert under the same sums."""
    layer = inputs.layer
    if layer.shared is None:
        return output(inputs, kernel)
    ranks = tuple(replace(rank, shared=None) for rank in inputs.ranks)
    routed = output(replace(inputs, weights=ranks), kernel).to(torch.float32)
    plain = replace(kernel, recipe=BF16_COMBINE, fp8_promote=None)
    shared = term(inputs.x, None, layer.shared.weights, layer.shared.activation, plain)
    return canonical_nan(rnbf16(routed + kernel.round(shared, BF16)))
