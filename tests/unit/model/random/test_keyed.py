import math
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.random import KeyedRandom, checkpoint_contexts, key_seed, operators
from lightning_swarm.model.random.keyed_stream import bits
from lightning_swarm.model.random.operators import PlainAttention

CPU = torch.device("cpu")
X = torch.linspace(-2, 2, 96).view(2, 3, 4, 4)
P = torch.linspace(0.1, 0.9, 16)


def drawn(function: Callable[[], Any], seed: int = 1) -> Any:
    with KeyedRandom(seed):
        return function()


def attention(x: Tensor, dropout_p: float = 0.3, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x + 1, x * 2, dropout_p=dropout_p, **options)


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "dropout2d": lambda: F.dropout2d(X.repeat(8, 8, 1, 1), 0.5),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(X.repeat(8, 8, 1, 1), 0.5, training=True),
    "attention": lambda: attention(X),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "rrelu": lambda: F.rrelu(X, training=True),
    "rrelu_": lambda: F.rrelu_(X.clone(), training=True),
    "rand": lambda: torch.rand(3, 4),
    "rand double": lambda: torch.rand(3, 4, dtype=torch.float64),
    "rand complex": lambda: torch.rand(3, 4, dtype=torch.complex64),
    "rand out": lambda: torch.rand(3, 4, out=torch.empty(0)),
    "rand_like": lambda: torch.rand_like(X),
    "uniform_": lambda: torch.empty(9).uniform_(-3, 5),
    "randn": lambda: torch.randn(7),
    "randn bfloat16": lambda: torch.randn(7, dtype=torch.bfloat16),
    "randn complex": lambda: torch.randn(7, dtype=torch.complex128),
    "randn_like": lambda: torch.randn_like(X),
    "normal_": lambda: torch.empty(9).normal_(3, 2),
    "normal tensors": lambda: torch.normal(torch.zeros(2, 1), torch.ones(3)),
    "normal numbers": lambda: torch.normal(1.0, 2.0, (5,)),
    "exponential_": lambda: torch.empty(9).exponential_(2.0),
    "bernoulli": lambda: torch.bernoulli(P),
    "bernoulli p": lambda: torch.bernoulli(P, 0.5),
    "bernoulli_ tensor": lambda: torch.empty(16).bernoulli_(P),
    "randint": lambda: torch.randint(1000, (5,)),
    "randint low": lambda: torch.randint(-1000, 1000, (5,)),
    "randint_like": lambda: torch.randint_like(P, -100, 100),
    "random_": lambda: torch.empty(5, dtype=torch.int64).random_(),
    "random_ all": lambda: torch.empty(5, dtype=torch.int64).random_(-(2**63), None),
    "random_ float": lambda: torch.empty(5).random_(),
    "randperm": lambda: torch.randperm(20),
    "randperm out": lambda: torch.randperm(20, out=torch.empty(0, dtype=torch.int64)),
    # These operations have no rule of their own, and get a generator.
    "multinomial": lambda: torch.multinomial(torch.ones(50), 5),
    "poisson": lambda: torch.poisson(torch.full((9,), 9.0)),
    "geometric_": lambda: torch.empty(9).geometric_(0.1),
    "cauchy_": lambda: torch.empty(9).cauchy_(),
    "log_normal_": lambda: torch.empty(9).log_normal_(),
    "binomial": lambda: torch.binomial(torch.full((9,), 50.0), torch.full((9,), 0.5)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(9)).sample(),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(9)),
    "linear": lambda: nn.Linear(4, 4).weight.detach(),
    "lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5)(X[0])[0].detach(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_seed_decides_and_no_generator_moves(name: str) -> None:
    operation = OPERATIONS[name]
    state = torch.get_rng_state()

    first, again, other = drawn(operation), drawn(operation), drawn(operation, seed=2)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_and_dtypes_are_torchs_own(name: str) -> None:
    ours, theirs = drawn(OPERATIONS[name]), OPERATIONS[name]()

    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "lstm"])  # its fast kernel leaves dropout out
def test_the_same_is_drawn_without_gradients(name: str) -> None:
    expected = drawn(OPERATIONS[name])
    state = torch.get_rng_state()

    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.allclose(drawn(OPERATIONS[name]), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_are_counted_on_through_operations_that_are_made_of_others() -> None:
    def twice() -> tuple[Tensor, Tensor]:
        return F.dropout(X, 0.5), F.dropout(X, 0.5)

    with torch.inference_mode():  # decomposed operations arrive whole in this mode
        first, second = drawn(twice)

    assert not torch.equal(first, second)
    assert torch.allclose(second, drawn(twice)[1])


def test_the_stream_never_changes() -> None:
    # Peers of different versions must agree, because these values are part of the protocol.
    assert key_seed() == 0
    assert key_seed(0) == 0x910A2DEC89025CC1  # splitmix64's first number for seed 1
    assert key_seed(1, 2, 3) == 74078413316773926
    assert drawn(lambda: torch.randint(100, (8,))).tolist() == [56, 22, 41, 80, 44, 37, 78, 33]
    assert drawn(lambda: torch.rand(3)).tolist() == pytest.approx(
        [0.05019247531890869, 0.6679692268371582, 0.9732365608215332], abs=1e-7
    )
    assert drawn(lambda: torch.bernoulli(torch.zeros(12), 0.5)).tolist() == [1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1]
    assert drawn(lambda: torch.randperm(8)).tolist() == [0, 7, 6, 5, 1, 3, 4, 2]


def test_key_seed_mixes_all_its_parts() -> None:
    keys = [key_seed(i, j) for i in range(60) for j in range(60)]
    keys += [key_seed(i) for i in range(60)] + [key_seed(0, 0, i) for i in range(60)]

    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    ones = [sum(key >> bit & 1 for key in keys) / len(keys) for bit in range(64)]
    assert all(abs(share - 0.5) < 0.04 for share in ones)
    flips = [(key_seed(7, 1 << bit) ^ key_seed(7, 0)).bit_count() for bit in range(64)]
    assert all(16 <= count <= 48 for count in flips)
    assert key_seed(-1) == key_seed(2**64 - 1)


def test_draws_do_not_depend_on_strides_or_on_how_many_follow() -> None:
    assert torch.equal(bits(5, 10_000, CPU)[:4096], bits(5, 4096, CPU))
    assert torch.equal(bits(5, 4097, CPU)[:9], bits(5, 9, CPU))
    expected = drawn(lambda: torch.empty(6, 5).uniform_())
    assert torch.equal(drawn(lambda: torch.empty(5, 6).t().uniform_()), expected)
    assert torch.equal(drawn(lambda: torch.empty(6, 10)[:, ::2].uniform_()), expected)
    masked = drawn(lambda: F.dropout(torch.ones(6, 5), 0.5))
    assert torch.equal(drawn(lambda: F.dropout(torch.ones(5, 6).t(), 0.5)), masked)


# --- statistics: all is deterministic, so no bound can fail by chance ---

MANY = 1 << 17


def chi_square(counts: Tensor) -> float:
    """Return the deviation of chi-square from that of equally likely cells, in standard deviations."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def correlation(left: Tensor, right: Tensor) -> float:
    """Return the correlation in standard deviations of that of independent samples."""
    stacked = torch.stack((left.flatten(), right.flatten())).double()
    return float(torch.corrcoef(stacked)[0, 1] * math.sqrt(left.numel()))


@pytest.mark.parametrize("seed", range(5))
def test_bits_are_uniform_and_neighbours_independent(seed: int) -> None:
    words = bits(key_seed(3, seed), MANY, CPU).long() & 0xFFFFFFFF

    for shift in (0, 8, 16, 24):
        assert abs(chi_square(torch.bincount(words >> shift & 255, minlength=256).double())) < 4
    for lag in (1, 2, 3, 64, 256, 4095, 4096):
        for shift in (0, 28):
            pairs = (words[:-lag] >> shift & 15) * 16 + (words[lag:] >> shift & 15)
            assert abs(chi_square(torch.bincount(pairs, minlength=256).double())) < 4.5
    assert words.unique().numel() > MANY - 20


def test_one_changed_bit_of_the_index_changes_half_of_the_bits() -> None:
    words = torch.stack([bits(key_seed(4, key), 1 << 12, CPU) for key in range(64)]).long() & 0xFFFFFFFF
    index = torch.arange(1 << 12)

    for bit in range(12):
        changed = words ^ words[:, index ^ (1 << bit)]
        shares = torch.stack([(changed >> place & 1).double().mean() for place in range(32)])
        assert float((shares - 0.5).abs().max()) < 0.01


def test_draws_and_seeds_are_independent_of_each_other() -> None:
    def draws(seed: int) -> list[Tensor]:
        with KeyedRandom(seed):
            return [torch.rand(MANY) for _ in range(4)]

    samples = [sample for seed in (0, 1, 2, 2**63) for sample in draws(seed)]

    for i, left in enumerate(samples):
        for right in samples[:i]:
            assert abs(correlation(left, right)) < 4.5
            assert abs(correlation(left[1:], right[:-1])) < 4.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniforms_fill_their_interval_but_not_its_end(dtype: torch.dtype) -> None:
    values = drawn(lambda: torch.rand(MANY, dtype=dtype)).double()

    assert 0 <= float(values.min()) < 0.01
    assert 0.99 < float(values.max()) < 1
    tolerance = 0.003 if dtype != torch.bfloat16 else 0.005  # the mean of 1/256ths is half a step low
    assert abs(float(values.mean()) - 0.5) < tolerance
    assert abs(float(values.var()) - 1 / 12) < 0.002
    wide = drawn(lambda: torch.empty(MANY, dtype=dtype).uniform_(-2, 6)).double()
    assert abs(float(wide.mean()) - 2) < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_normals_have_the_moments_of_normals(dtype: torch.dtype) -> None:
    values = drawn(lambda: torch.randn(MANY + 1, dtype=dtype)).double()

    assert torch.isfinite(values).all()
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.var()) - 1) < 0.02
    assert abs(float((values**3).mean())) < 0.05
    assert abs(float((values**4).mean()) - 3) < 0.1
    assert 3.9 < float(values.abs().max()) < 6
    half = MANY // 2
    assert abs(correlation(values[:half], values[half : 2 * half])) < 4
    shifted = drawn(lambda: torch.empty(MANY, dtype=dtype).normal_(5, 0.5)).double()
    assert abs(float(shifted.mean()) - 5) < 0.01
    assert abs(float(shifted.std()) - 0.5) < 0.01


@pytest.mark.parametrize(
    ("low", "high"),
    [(-(7 << 60), 1 << 62), (-(2**63), 2**63 - 1), (-(2**63), 1), (-5, 2**63 - 1), (-(2**62) - 7, 2**62 + 9)],
)
def test_integers_of_most_of_int64_are_in_their_range(low: int, high: int) -> None:
    integers = drawn(lambda: torch.randint(low, high, (MANY,)))
    assert low <= int(integers.min())
    assert int(integers.max()) < high
    # The remainder of a random number of 64 bits, as torch's own kernels take it, is not equally likely everywhere.
    assert int(torch.histc(integers.double(), 10, low, high).min()) > MANY // 20


def test_other_distributions_are_what_they_are_called() -> None:
    exponential = drawn(lambda: torch.empty(MANY).exponential_(2.0))
    assert float(exponential.min()) > 0
    assert abs(float(exponential.mean()) - 0.5) < 0.01
    integers = drawn(lambda: torch.randint(-3, 7, (MANY,)))
    assert abs(chi_square(torch.bincount(integers + 3, minlength=10).double())) < 4
    places = torch.stack(drawn(lambda: [torch.randperm(6) for _ in range(3000)]))
    assert torch.equal(places.sort(1).values, torch.arange(6).expand(3000, 6))
    for place in range(6):
        assert abs(chi_square(torch.bincount(places[:, place], minlength=6).double())) < 4
    shares = drawn(lambda: torch.bernoulli(P.repeat(MANY // 16, 1))).mean(0)
    assert float((shares - P).abs().max()) < 0.02
    widest = drawn(lambda: torch.empty(MANY, dtype=torch.int64).random_(-(2**63), None))
    assert abs(float((widest < 0).double().mean()) - 0.5) < 0.01
    assert int(drawn(lambda: torch.empty(MANY).random_()).max()) <= 2**24
    assert set(drawn(lambda: torch.empty(99, dtype=torch.bool).random_()).tolist()) == {True, False}
    assert int(drawn(lambda: torch.empty(MANY, dtype=torch.int8).random_()).min()) >= 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_its_share_and_scales_the_rest(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(300, 300, dtype=dtype, requires_grad=True)

    y = drawn(lambda: nn.Dropout(p)(x))
    y.sum().backward()

    kept = y != 0
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.005
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    if p < 1:
        assert torch.allclose(y[kept].double(), torch.tensor(1 / (1 - p)).double(), rtol=1e-2)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_gpus_dropout_meets_the_mask_of_the_cpus(p: float) -> None:
    # On GPUs `dropout` is one fused operation, on the CPU it is composed.
    x = X.clone().requires_grad_()
    fused = drawn(lambda: torch.native_dropout(x, p, True)[0])
    composed = drawn(lambda: F.dropout(x, p))

    assert torch.allclose(fused, composed)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (fused, composed)]
    assert torch.allclose(*gradients)


def test_fused_dropout_that_drops_nothing_copies() -> None:
    for arguments in ((0.0, True), (0.5, False)):
        y, mask = drawn(lambda arguments=arguments: torch.native_dropout(X, *arguments))  # type: ignore[misc]
        assert torch.equal(y, X)
        assert y is not X
        assert mask.all()
    assert not drawn(lambda: torch.native_dropout(X, 1.0, True)[0]).any()


def test_probabilities_are_checked() -> None:
    for p in (-0.1, 1.1):
        with pytest.raises(RuntimeError, match=r"must be in 0\.\.1"):
            drawn(lambda p=p: torch.empty(3).bernoulli_(p))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="low < high, got 5 and 5"):
        drawn(lambda: torch.randint(5, 5, (3,)))
    with pytest.raises(RuntimeError, match="std >= 0"):
        drawn(lambda: torch.empty(3).normal_(0, -1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: F.alpha_dropout(x, 0.3, training=True),
        lambda x: F.gumbel_softmax(x, tau=0.7),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.rrelu(x, training=False),
        lambda x: attention(x),
        lambda x: attention(x, is_causal=True),
    ],
)
def test_gradients_are_those_of_the_drawn_function(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(2, 3, 4).add(0.01).requires_grad_()

    assert torch.autograd.gradcheck(lambda value: drawn(lambda: function(value)), x)


def test_gumbel_softmax_gives_one_hot_samples_with_a_gradient() -> None:
    x = X.clone().requires_grad_()
    y = drawn(lambda: F.gumbel_softmax(x, hard=True))

    assert torch.equal(y.sum(-1), torch.ones_like(y[..., 0]))
    (gradient,) = torch.autograd.grad((y * X).sum(), x)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.eye(4).bool()},
        {"attn_mask": X[0, 0]},
    ],
)
def test_plain_attention_is_the_cpus(options: dict[str, Any]) -> None:
    x = X.clone().requires_grad_()
    expected = drawn(lambda: attention(x, **options))

    with PlainAttention():
        found = drawn(lambda: attention(x, **options))
        without = attention(x, dropout_p=0.0, **options)

    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    assert torch.equal(without, attention(x, dropout_p=0.0, **options))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_inside_of_torchs_own_functions_is_plain(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True, dtype=torch.float64)
    x = torch.linspace(-1.0, 1.0, 2 * 3 * 8, dtype=torch.float64).view(2, 3, 8)
    expected = drawn(lambda: layer(x))
    calls: list[float] = []

    def plain(*args: Any) -> Any:
        calls.append(args[4])
        return math_attention(*args)

    math_attention = operators._plain
    monkeypatch.setattr(operators, "_plain", plain)
    with PlainAttention():
        found = drawn(lambda: layer(x))
    assert torch.equal(found, expected)
    assert calls == [dropout] * bool(dropout)


def test_where_there_are_gpus_attention_with_dropout_is_made_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drawn(lambda: attention(X))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    with KeyedRandom(1):
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
        assert torch.equal(attention(X), expected)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_users_generator_is_honoured() -> None:
    def draw() -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        return [
            torch.rand(3, generator=generator),
            torch.empty(3).normal_(generator=generator),
            torch.randperm(5, generator=generator),
            torch.multinomial(torch.ones(9), 2, generator=generator),
            torch.poisson(torch.ones(3), generator=generator),
        ]

    assert all(map(torch.equal, drawn(draw), draw()))


def test_attention_of_gpus_passes_without_dropout_and_is_refused_with_it() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    seen = []

    def run(dropout_p: float) -> None:
        # The CPU has no such kernel, so this error shows that the mode let the call pass.
        try:
            drawn(lambda: flash(X, X, X, dropout_p))
        except NotImplementedError:
            seen.append(dropout_p)

    run(0.0)
    assert seen == [0.0]
    with pytest.raises(ConfigError, match=r"draw from the swarm's keyed stream, got aten\._scaled") as error:
        run(0.1)
    assert "set its dropout to 0" in str(error.value)
    assert "sdpa_kernel(SDPBackend.MATH)" in str(error.value)


def test_what_is_not_random_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)

    def run() -> list[Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])]

    assert all(map(torch.equal, drawn(run), run()))


def test_a_recomputation_is_bitwise_the_same() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)

    def run() -> list[Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])]

    mode = KeyedRandom(11)
    with mode:
        first = run()
    torch.rand(3)
    with mode:  # entering begins the stream again
        again = run()
    with torch.no_grad():
        blind = drawn(lambda: model(x), seed=11)

    assert all(map(torch.equal, first, again))
    assert torch.equal(blind, first[0])


def test_it_composes_with_autocast() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.randn(4, 8)

    with torch.autocast("cpu", torch.bfloat16):
        inside = drawn(lambda: layer(x))
    with KeyedRandom(1), torch.autocast("cpu", torch.bfloat16):
        outside = layer(x)

    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, outside)
    assert torch.equal(inside == 0, drawn(lambda: layer(x)) == 0)


def test_modes_nest_and_the_inner_one_draws() -> None:
    inner = drawn(lambda: torch.rand(3), seed=2)
    with KeyedRandom(1):
        whole = torch.rand(3), torch.rand(3)
    with KeyedRandom(1):
        first = torch.rand(3)
        between = drawn(lambda: torch.rand(3), seed=2)
        second = torch.rand(3)

    assert torch.equal(between, inner)
    assert torch.equal(first, whole[0])
    assert torch.equal(second, whole[1])


def test_other_threads_draw_from_their_own_sources() -> None:
    found: list[Tensor] = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    with KeyedRandom(1):
        thread = threading.Thread(target=lambda: found.append(torch.rand(3)))
        thread.start()
        thread.join()

    assert torch.equal(found[0], expected)


def checkpointed(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    y: Tensor = F.dropout(x * weight, 0.5)
    y = checkpoint(lambda value: F.dropout(value * weight, 0.5).sin() * weight, y, **options)
    return F.dropout(y, 0.5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_that_recomputes_itself_is_found_out(use_reentrant: bool) -> None:
    x, weight = X.clone().requires_grad_(), torch.full((4,), 1.5, requires_grad=True)

    with KeyedRandom(3):
        y = checkpointed(x, weight, use_reentrant=use_reentrant)
        with pytest.raises(ConfigError, match=r"draw their random numbers in forward.*in backward") as error:
            y.sum().backward()
    assert "context_fn=lightning_swarm.randomness.checkpoint_contexts" in str(error.value)
    assert "the swarm recomputes" in str(error.value)


def test_a_block_that_recomputes_itself_may_be_given_its_draws() -> None:
    x, weight = X.clone().requires_grad_(), torch.full((4,), 1.5, requires_grad=True)

    def run(**options: Any) -> list[Tensor]:
        with KeyedRandom(3):
            y = checkpointed(x, weight, use_reentrant=False, **options)
        with KeyedRandom(0):  # like a stage's backward
            return [y, *torch.autograd.grad(y.sum(), [x, weight])]

    def plain() -> list[Tensor]:
        with KeyedRandom(3):
            y = F.dropout(x * weight, 0.5)
            y = F.dropout(F.dropout(y * weight, 0.5).sin() * weight, 0.5)
            return [y, *torch.autograd.grad(y.sum(), [x, weight])]

    assert all(map(torch.allclose, run(context_fn=checkpoint_contexts), plain()))
    # Without the swarm it has no effect, and torch restores its own generators as always.
    torch.manual_seed(1)
    y = checkpointed(x, weight, use_reentrant=False, context_fn=checkpoint_contexts)
    y.sum().backward()


def test_a_stream_may_begin_in_the_middle() -> None:
    with KeyedRandom(1):
        torch.rand(3)
        second = torch.rand(3)

    with KeyedRandom(1, first_draw=1):
        assert torch.equal(torch.rand(3), second)


def test_compiled_blocks_draw_the_same() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    ran = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(graph)
            return graph(*args)

        return run

    compiled = torch.compile(block, backend=backend)
    x = torch.randn(3, 4)

    for _ in range(2):
        assert torch.equal(drawn(lambda: compiled(x)), drawn(lambda: block(x)))
    assert len(ran) == 2, "it ran as it was"


@pytest.mark.thorough
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_inductor_draws_its_seeds_from_the_stream() -> None:
    """Its kernels generate random numbers themselves, from seeds that they are passed."""
    block = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    compiled = torch.compile(block, backend="inductor")
    x = torch.randn(3, 4)
    before = torch.get_rng_state()

    first, again = (drawn(lambda: compiled(x)) for _ in range(2))
    with KeyedRandom(99):
        other = compiled(x)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
