"""The profile `fast`: every form of the C library computes what integer_product.py says, row by row."""

import hashlib
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.build import compile_to
from kernels.cpu.library import load, open_library
from kernels.cpu.operations import CpuOperations
from kernels.cpu.packing import GROUP_ROWS, pack
from kernels.integer_product import HIGHEST, integer_product, multiply_add, quantise_rows
from kernels.operations import NUMERICS, Weight, WeightFormat, select_operations
from kernels.torch_operations import TorchOperations, dequantize
from kernels.whole_numbers import E2M1, FORMATS, whole_numbers

FORMS = {
    "native": None,
    "sixteen lanes without instructions for it": ("-DLANES=16", "-mno-avx512f"),
    "AVX-VNNI": ("-mno-avx512f",),
    "AVX2": ("-mno-avx512f", "-mno-avxvnni"),
}
QUANTISED: tuple[WeightFormat, ...] = ("q4_1", "q8_0", *FORMATS)
HEADERS = {"q4_1": 4, "q8_0": 2}
COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 512]


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS.keys())
def operations(
    request: pytest.FixtureRequest, cpu_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> CpuOperations:
    if request.param is None:
        return CpuOperations(2, "fast", library=open_library(cpu_library))
    path = tmp_path_factory.mktemp("form") / "form.so"
    compile_to(path, *request.param)
    return CpuOperations(2, "fast", library=open_library(path))


def random_weight(form: WeightFormat, rows: int, columns: int, seed: int = 0) -> Weight:
    """Any quants; scales and minima of either sign, or powers of two, below 0.1."""
    generator = torch.Generator().manual_seed(seed)
    size = {"q4_1": 20, "q8_0": 34, "mxfp4": 17, "mxfp8": 33}[form]
    data = torch.randint(0, 256, (rows, columns // 32, size), generator=generator, dtype=torch.uint8)
    if form in FORMATS:
        data[..., 0] = data[..., 0] % 9 + 115
    for header in {"q4_1": (1, 3), "q8_0": (1,)}.get(form, ()):
        data[..., header] = (data[..., header] & 0x83) | 0x2C
    return Weight(data.flatten(1), rows, columns, form)


def rows_of(count: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize(("rows", "columns"), [(193, 576), (16, 32), (7, 1536), (40, 96)])
def test_agrees_with_the_reference(
    operations: CpuOperations, form: WeightFormat, rows: int, columns: int
) -> None:
    weight, x = random_weight(form, rows, columns), 3 * rows_of(9, columns)
    found = operations.linear(x, (operations.prepare(weight),))[0]
    assert torch.equal(found, integer_product(x, weight))


@pytest.mark.parametrize("form", QUANTISED)
def test_a_row_does_not_know_its_neighbours(operations: CpuOperations, form: WeightFormat) -> None:
    weights = [operations.prepare(random_weight(form, rows, 576, seed=rows)) for rows in (193, 16, 7)]
    x = rows_of(max(COUNTS), 576)
    one = CpuOperations(1, "fast", library=operations._library)
    alone = torch.cat([torch.cat(one.linear(row[None], weights), 1) for row in x])
    for count in COUNTS:
        assert torch.equal(torch.cat(operations.linear(x[:count], weights), 1), alone[:count]), count
        assert torch.equal(torch.cat(operations.linear(x[-count:], weights), 1), alone[-count:]), count


@settings(max_examples=60, deadline=None)
@given(size=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 40)), seed=st.integers(0, 99))
@pytest.mark.parametrize("form", QUANTISED)
def test_any_size(cpu_library: Path, form: WeightFormat, size: tuple[int, int, int], seed: int) -> None:
    count, blocks, rows = size
    ops = CpuOperations(1, "fast", library=load())
    weight, x = random_weight(form, rows, 32 * blocks, seed), rows_of(count, 32 * blocks, seed)
    found = ops.linear(x, (ops.prepare(weight),))[0]
    assert torch.equal(found, integer_product(x, weight))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("quant", [0x00, 0x7F, 0x80, 0x81, 0xFF])
def test_the_largest_sums_do_not_overflow(operations: CpuOperations, quant: int, sign: int) -> None:
    for form in QUANTISED:
        weight = random_weight(form, 17, 64)
        weight.data.view(17, 2, -1)[..., HEADERS.get(form, 1) :] = quant
        x = sign * torch.ones(5, 64)
        found = operations.linear(x, (operations.prepare(weight),))[0]
        torch.testing.assert_close(found, x @ dequantize(weight).T, rtol=1e-5, atol=1e-4)


def test_what_is_not_a_number_stays_in_its_row(operations: CpuOperations) -> None:
    for form in QUANTISED:
        weight, x = operations.prepare(random_weight(form, 20, 96)), rows_of(6, 96)
        clean = operations.linear(x, (weight,))[0]
        x[1, 40], x[2, 70], x[3], x[4] = torch.nan, torch.inf, 0.0, 1e-33
        found = operations.linear(x, (weight,))[0]
        assert bool(found[1].isnan().all())
        assert not bool(found[2].isfinite().any())
        assert float(found[3:5].abs().max()) == 0.0
        assert torch.equal(found[[0, 5]], clean[[0, 5]])


def test_every_form_gives_the_same_bits(operations: CpuOperations, cpu_library: Path) -> None:
    native = CpuOperations(1, "fast", library=open_library(cpu_library))
    for form in QUANTISED:
        weight, x = native.prepare(random_weight(form, 50, 576)), rows_of(5, 576)
        assert torch.equal(operations.linear(x, (weight,))[0], native.linear(x, (weight,))[0])


def test_these_bits_have_a_version(cpu_library: Path) -> None:
    """Another digest is another arithmetic: raise NUMERICS["fast"], then note its digest here."""
    digests = {2: "a7e1df0f17167b92", 3: "a7e1df0f17167b92"}
    scattered = (torch.arange(50 * 576) * 7919 % 10_007).view(50, 576)
    x, in_8_bits = (scattered[:5] - 5003) / 1024, ((scattered - 5003) / 4096).to(torch.float8_e4m3fn).float()
    weights = [w for m in (in_8_bits, E2M1[scattered % 16].float()) if (w := whole_numbers(m)) is not None]
    for form, size, headers in (("q4_1", 20, (1, 3)), ("q8_0", 34, (1,))):
        data = (torch.arange(50 * 18 * size) * 7919 % 251).to(torch.uint8).view(50, 18, size)
        for header in headers:
            data[..., header] = (data[..., header] & 0x83) | 0x2C
        weights.append(Weight(data.flatten(1), 50, 576, form))
    operations = CpuOperations(1, "fast", library=open_library(cpu_library))
    products = operations.linear(x, [operations.prepare(weight) for weight in weights])
    found = hashlib.sha256(b"".join(product.numpy().tobytes() for product in products)).hexdigest()[:16]
    assert digests[NUMERICS["fast"]] == found


def test_quantising_rounds_to_the_nearest_of_65535_values() -> None:
    x = rows_of(40, 576)
    q_JMB, scale_JM1 = quantise_rows(x)
    assert float(q_JMB.abs().amax(-1).min()) == float(q_JMB.abs().max()) == HIGHEST
    assert torch.equal(q_JMB, q_JMB.round())
    error = (q_JMB * scale_JM1).transpose(0, 1).flatten(1) - x
    assert bool((error.abs().view(40, -1, 32) <= 0.505 * scale_JM1.transpose(0, 1)).all())


@pytest.mark.parametrize("form", QUANTISED)
def test_rounding_costs_half_a_step_of_65534_at_most(operations: CpuOperations, form: WeightFormat) -> None:
    """Outliers in other blocks cost a row nothing."""
    weight, x = random_weight(form, 193, 576), rows_of(9, 576)
    x[:, ::37] *= 1000
    found = operations.linear(x, (operations.prepare(weight),))[0].double()
    w_NK = dequantize(weight).double()
    step_MK = (x.view(9, -1, 32).abs().amax(-1, keepdim=True) / HIGHEST).expand(9, -1, 32).flatten(1)
    bound = 0.5 * step_MK.double() @ w_NK.abs().T
    sums = x.double().abs() @ w_NK.abs().T * 2e-6  # what float32 costs by itself
    assert bool(((found - x.double() @ w_NK.T).abs() <= bound + sums).all())


@pytest.mark.parametrize("form", QUANTISED)
def test_packing_moves_bytes_and_adds_none(form: WeightFormat) -> None:
    weight = random_weight(form, 64, 96)
    packed = pack(weight)
    assert packed.packed
    assert packed.data.shape == (2, GROUP_ROWS * weight.data.shape[1])
    assert torch.equal(packed.data.flatten().sort().values, weight.data.flatten().sort().values)


def test_float32_weights_stay_as_they_are(cpu_library: Path) -> None:
    weight, x = Weight(rows_of(40, 64), 40, 64, "f32"), rows_of(3, 64)
    fast, exact = (CpuOperations(1, profile, library=load()) for profile in ("fast", "exact"))
    mixed = [fast.prepare(weight), fast.prepare(random_weight("q4_1", 8, 64)), fast.prepare(weight)]
    first, _, last = fast.linear(x, mixed)
    assert torch.equal(first, exact.linear(x, (weight,))[0])
    assert torch.equal(first, last)


@pytest.mark.parametrize("kind", ["c", "torch"])
def test_a_profile_is_chosen_by_name(cpu_library: Path, kind: str) -> None:
    assert select_operations(1, kind).profile == "exact"  # pyright: ignore[reportArgumentType]
    assert select_operations(1, kind, "fast").profile == "fast"  # pyright: ignore[reportArgumentType]


def test_the_fallback_multiplies_in_integers_too() -> None:
    weight, x = random_weight("q8_0", 20, 96), rows_of(4, 96)
    assert torch.equal(TorchOperations("fast").linear(x, (weight,))[0], integer_product(x, weight))


def test_a_sum_and_a_product_are_rounded_once() -> None:
    """Where most of a product cancels, and where a sum lies half-way between two values of float32."""
    generator = torch.Generator().manual_seed(4)
    a, b, e = torch.randn(3, 4000, generator=generator)
    c = torch.cat((-a * b * (1 + 1e-6 * e), a * b * (1e7 * e).exp2().clamp(1e-9, 1e9)))
    a, b = a.repeat(2), b.repeat(2)
    a[:3], b[:3], c[:3] = 1 + 2**-23, 1 + 2**-23, torch.tensor([2.0**25, 2.0**24 + 2, 3.0])
    a[3:6], b[3:6], c[3:6] = 2.0**-70, torch.tensor([2.0**-70, -(2.0**-79), 3e-20]), 2.0**-149
    for found, *terms in zip(multiply_add(a, b, c).tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
        x, y, z = map(Fraction, terms)
        near = torch.tensor(float(x * y + z))
        ends = (torch.nextafter(near, torch.tensor(end)).item() for end in (-torch.inf, torch.inf))
        distances = {value: abs(Fraction(value) - (x * y + z)) for value in (near.item(), *ends)}
        assert distances[found] == min(distances.values()), terms


def test_a_sum_that_a_double_takes_for_half_way_is_rounded_to_its_own_side() -> None:
    a, b = torch.full((2,), 1 + 2.0**-20), torch.full((2,), 2.0**-24 * (1 - 2.0**-20))
    c = torch.tensor([1 + 2.0**-23, -1 - 2.0**-23])
    assert float(a[0].double() * b[0] + c[0]) == 1 + 2.0**-23 + 2.0**-24
    assert torch.equal(multiply_add(a, b * c.sign(), c), c)
