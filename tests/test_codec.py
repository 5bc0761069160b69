"""What every codec promises: nothing lost, nothing hidden, and the bytes it says."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.codec import (
    BF16,
    FP16,
    Codec,
    ErrorFeedback,
    Int8,
    OneBit,
    Packed,
    Plain,
    TopK,
    parse,
)
from offbeat.errors import ConfigError, RunError

CODECS = [Plain(), BF16(), FP16(), Int8(), TopK(0.25), TopK(1.0), OneBit()]
LOSSY = [codec for codec in CODECS if codec.lossy]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)
every_lossy = pytest.mark.parametrize("codec", LOSSY, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def same_bits(left: Packed, right: Packed) -> bool:
    return left.tensors.keys() == right.tensors.keys() and all(
        torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors
    )


# Sizes from far below fp16's smallest value to far above its largest.
numbers = st.one_of(
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.floats(-1e-6, 1e-6, allow_subnormal=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 65504.0, 65536.0]),
)


@st.composite
def gradient_rows(draw: st.DrawFn) -> Tensor:
    width = draw(st.integers(0, 19))
    row = st.lists(numbers, min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=1, max_size=6))
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), width)


class TestNothingIsLost:
    @every_codec
    @given(gradients=gradient_rows(), seed=st.integers(0, 1000))
    def test_sent_plus_residual_is_all_gradients(
        self, codec: Codec, gradients: Tensor, seed: int
    ) -> None:
        feedback, generator = ErrorFeedback(codec), seeded(seed)
        sent = torch.zeros(gradients.shape[1], dtype=torch.float64)
        for gradient in gradients:
            sent += codec.decode(feedback.pack("w", gradient, generator))
        owed = feedback.residual.get("w", torch.zeros_like(sent))
        # Rounding is relative to the largest value that passed through, not to the sum.
        size = float(gradients.abs().sum()) + 1e-300
        assert ((sent + owed - gradients.sum(0)).abs() <= 1e-12 * size).all()

    @every_codec
    @every_dtype
    def test_narrow_tensors_keep_a_residual_that_is_wide_enough(
        self, codec: Codec, dtype: torch.dtype
    ) -> None:
        feedback, generator = ErrorFeedback(codec), seeded()
        sent = given_in_all = torch.zeros(3, 11, dtype=torch.float64)
        for step in range(30):
            gradient = noise(3, 11, dtype=dtype, seed=step)
            packed = feedback.pack("w", gradient, generator)
            sent = sent + codec.decode(packed).double()
            given_in_all = given_in_all + gradient.double()
        owed = feedback.residual.get("w", torch.zeros(1)).double()
        assert (sent + owed - given_in_all).abs().max() < 1e-4

    @every_lossy
    def test_a_steady_gradient_arrives_on_average(self, codec: Codec) -> None:
        gradient, feedback, generator = noise(64), ErrorFeedback(codec), seeded()
        sent = sum(codec.decode(feedback.pack("w", gradient, generator)) for _ in range(1000))
        assert torch.allclose(sent / 1000, gradient, atol=0.06)

    def test_names_do_not_share_a_residual(self) -> None:
        feedback = ErrorFeedback(TopK(0.5))
        feedback.pack("a", torch.tensor([1.0, 2.0]))
        feedback.pack("b", torch.tensor([30.0, 40.0]))
        assert feedback.residual["a"].tolist() == [1.0, 0.0]
        assert feedback.residual["b"].tolist() == [30.0, 0.0]
        assert TopK(0.5).decode(feedback.pack("a", torch.tensor([2.0, 1.0]))).tolist() == [3.0, 0.0]


class TestEveryCodec:
    @every_codec
    @every_dtype
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (17,), (2, 3, 4)], ids=str)
    def test_shape_dtype_and_bytes(
        self, codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        tensor = noise(*shape, dtype=dtype)
        packed = codec.encode(tensor, seeded())
        decoded = codec.decode(packed)
        assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
        assert packed.nbytes == codec.nbytes(shape, dtype)
        assert ErrorFeedback(codec).pack("w", tensor, seeded()).nbytes == packed.nbytes

    @every_codec
    def test_zero_stays_zero(self, codec: Codec) -> None:
        assert torch.equal(codec.decode(codec.encode(torch.zeros(9))), torch.zeros(9))

    @every_codec
    def test_views_and_gradients_are_packed_by_value(self, codec: Codec) -> None:
        matrix = noise(6, 4)
        turned = matrix.t().requires_grad_()
        decoded = codec.decode(codec.encode(turned, seeded(1)))
        straight = codec.decode(codec.encode(turned.detach().contiguous(), seeded(1)))
        assert torch.equal(decoded, straight)
        assert not decoded.requires_grad

    @every_codec
    def test_the_input_is_never_written(self, codec: Codec) -> None:
        tensor = noise(20)
        feedback = ErrorFeedback(codec)
        for _ in range(3):
            feedback.pack("w", tensor, seeded())
        assert torch.equal(tensor, noise(20))

    @every_codec
    @every_dtype
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_stays_visible(
        self, codec: Codec, dtype: torch.dtype, bad: float
    ) -> None:
        tensor = noise(40, dtype=dtype)
        tensor[23] = bad
        assert not codec.decode(codec.encode(tensor, seeded())).isfinite().all()

    @every_codec
    @every_dtype
    @pytest.mark.parametrize("share", [1.0, 0.999])
    def test_finite_values_stay_finite(
        self, codec: Codec, dtype: torch.dtype, share: float
    ) -> None:
        tensor = torch.tensor([share, -share, 0.0, share / 3]).to(dtype) * torch.finfo(dtype).max
        decoded = codec.decode(codec.encode(tensor, seeded()))
        assert decoded.isfinite().all()
        assert decoded[0] > 0 >= decoded[1]

    @every_codec
    @every_dtype
    def test_travels_as_json_and_plain_tensors(self, codec: Codec, dtype: torch.dtype) -> None:
        packed = codec.encode(noise(3, 5, dtype=dtype), seeded())
        tensors = {name: part.clone().reshape(-1) for name, part in packed.tensors.items()}
        arrived = Packed.from_header(json.loads(json.dumps(packed.header())), tensors)
        assert arrived.codec == codec
        assert torch.equal(arrived.codec.decode(arrived), codec.decode(packed))

    @every_codec
    def test_one_seed_gives_one_result(self, codec: Codec) -> None:
        tensor = noise(100)
        first = codec.encode(tensor, seeded(5))
        torch.rand(3)  # the global generator must not matter
        assert same_bits(first, codec.encode(tensor, seeded(5)))

    @every_codec
    def test_other_tensors_are_refused_with_a_remedy(self, codec: Codec) -> None:
        with pytest.raises(ConfigError, match="convert to one of float16"):
            codec.encode(torch.arange(3))
        with pytest.raises(ConfigError, match="to_dense"):
            codec.encode(torch.eye(2).to_sparse())


class TestPlain:
    def test_is_free(self) -> None:
        tensor, feedback = noise(4, 4).t(), ErrorFeedback(Plain())
        packed = feedback.pack("w", tensor)
        assert Plain().decode(packed).data_ptr() == tensor.data_ptr()
        assert packed.tensors["values"].data_ptr() == tensor.data_ptr()
        assert feedback.residual == {}


class TestNarrow:
    def test_rounds_as_torch_does(self) -> None:
        tensor = noise(100)
        assert torch.equal(BF16().decode(BF16().encode(tensor)), tensor.bfloat16().float())
        assert torch.equal(FP16().decode(FP16().encode(tensor)), tensor.half().float())

    def test_fp16_clamps_and_sends_the_rest_later(self) -> None:
        feedback = ErrorFeedback(FP16())
        first = FP16().decode(feedback.pack("w", torch.tensor([100_000.0, -1e5, 2.0])))
        assert first.tolist() == [65504.0, -65504.0, 2.0]
        assert feedback.residual["w"].tolist() == [34496.0, -34496.0, 0.0]
        assert FP16().decode(feedback.pack("w", torch.zeros(3))).tolist() == [34496, -34496, 0]

    def test_values_too_small_for_fp16_add_up(self) -> None:
        feedback, tiny = ErrorFeedback(FP16()), torch.tensor([2.0**-27])
        sent = [FP16().decode(feedback.pack("w", tiny)).item() for _ in range(8)]
        assert sent[0] == 0.0
        assert sum(sent) + feedback.residual["w"].item() == 8 * 2.0**-27
        assert sum(sent) > 0


class TestInt8:
    @every_dtype
    def test_is_unbiased(self, dtype: torch.dtype) -> None:
        tensor = torch.tensor([1.0, -1.0, 0.3, -0.3, 0.001, 1 / 127, 0.0]).to(dtype)
        generator, rounds = seeded(), 4000
        # Wide on the way back, so that what is measured is the rounding of the codec alone.
        mean = torch.zeros(len(tensor), dtype=torch.float64)
        for _ in range(rounds):
            parts = Int8().encode(tensor, generator).tensors
            mean += parts["values"].double() * parts["scale"].double() / rounds
        # Five standard errors of a value that falls between two steps of 1/127.
        assert (mean - tensor.double()).abs().max() < 5 * 0.5 / 127 / math.sqrt(rounds)

    def test_stays_within_one_step(self) -> None:
        tensor = noise(1000)
        step = tensor.abs().max() / 127
        decoded = Int8().decode(Int8().encode(tensor, seeded()))
        assert ((decoded - tensor).abs() <= step * 1.0001).all()
        assert (decoded != tensor).any()

    def test_whole_steps_are_exact(self) -> None:
        tensor = torch.arange(-127.0, 128.0)
        for seed in range(20):
            assert torch.equal(Int8().decode(Int8().encode(tensor, seeded(seed))), tensor)

    def test_another_seed_rounds_otherwise(self) -> None:
        tensor = noise(100)
        assert not same_bits(Int8().encode(tensor, seeded(1)), Int8().encode(tensor, seeded(2)))

    @pytest.mark.parametrize("peak", [1e-300, 1e-45, 1e-40, 3e38, 1e300])
    def test_any_peak_has_a_finite_scale(self, peak: float) -> None:
        feedback = ErrorFeedback(Int8())
        tensor = torch.tensor([peak, 0.0, -peak], dtype=torch.float64)
        sent = Int8().decode(feedback.pack("w", tensor, seeded()))
        assert torch.allclose(sent + feedback.residual["w"], tensor, rtol=1e-12, atol=0)

    def test_scale_covers_the_peak(self) -> None:
        # Were the scale rounded down, the largest value would be clamped, always the same way.
        for seed in range(200):
            tensor = noise(1, seed=seed)
            scale = Int8().encode(tensor, seeded()).tensors["scale"].double()
            assert scale.item() * 127 >= abs(tensor.item())
            assert scale.item() * 127 <= abs(tensor.item()) * (1 + 1e-6)


class TestTopK:
    @pytest.mark.parametrize(
        ("ratio", "count", "kept"),
        [(0.01, 100, 1), (0.01, 101, 2), (0.07, 100, 7), (1e-6, 5, 1), (1.0, 5, 5), (0.5, 0, 0)],
    )
    def test_keeps_the_ceiling(self, ratio: float, count: int, kept: int) -> None:
        packed = TopK(ratio).encode(noise(count))
        assert packed.tensors["indices"].numel() == packed.tensors["values"].numel() == kept

    @given(
        values=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
        ratio=st.floats(0.01, 1.0),
    )
    def test_largest_first_and_among_equals_the_lowest_index(
        self, values: list[int], ratio: float
    ) -> None:
        codec = TopK(ratio)
        packed = codec.encode(torch.tensor(values, dtype=torch.float32))
        order = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
        chosen = sorted(order[: codec.kept(len(values))])
        assert packed.tensors["indices"].tolist() == chosen
        assert packed.tensors["values"].tolist() == [values[index] for index in chosen]

    def test_ties_in_a_large_tensor(self) -> None:
        packed = TopK(0.01).encode(torch.ones(100_000))
        assert torch.equal(packed.tensors["indices"], torch.arange(1000, dtype=torch.int32))

    @pytest.mark.parametrize("ratio", [0, -0.1, 1.5, math.nan, "many", None])
    def test_bad_ratio(self, ratio: float) -> None:
        with pytest.raises(ConfigError, match=r"above 0 and at most 1.*topk:0\.01"):
            TopK(ratio)

    def test_index_outside_the_tensor(self) -> None:
        good = TopK(0.5).encode(noise(4))
        for index in (-1, 4):
            indices = torch.tensor([0, index], dtype=torch.int32)
            damaged = Packed(
                good.codec, good.shape, good.dtype, {**good.tensors, "indices": indices}
            )
            with pytest.raises(RunError, match="outside"):
                TopK(0.5).decode(damaged)


class TestOneBit:
    def test_two_means(self) -> None:
        packed = OneBit().encode(torch.tensor([-1.0, 4.0, -3.0, 0.0, -0.0, 8.0]))
        assert packed.tensors["bits"].tolist() == [0b101]
        assert OneBit().decode(packed).tolist() == [-2.0, 3.0, -2.0, 3.0, 3.0, 3.0]

    def test_every_bit_comes_back(self) -> None:
        sign = torch.where(noise(1003) < 0, -1.0, 1.0)
        assert torch.equal(OneBit().decode(OneBit().encode(sign)), sign)

    def test_one_sign_only(self) -> None:
        assert OneBit().decode(OneBit().encode(torch.tensor([-1.0, -3.0]))).tolist() == [-2, -2]


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        (Plain(), 4000),
        (BF16(), 2000),
        (FP16(), 2000),
        (Int8(), 1004),
        (TopK(0.01), 10 * (4 + 4)),
        (OneBit(), 125 + 8),
    ],
    ids=str,
)
def test_bytes_of_a_thousand_floats(codec: Codec, nbytes: int) -> None:
    assert codec.encode(noise(1000), seeded()).nbytes == nbytes
    assert codec.nbytes((10, 100), torch.float32) == nbytes


def test_topk_values_travel_in_their_own_dtype() -> None:
    assert TopK(0.01).encode(noise(1000, dtype=torch.bfloat16)).nbytes == 10 * (4 + 2)
    assert OneBit().encode(noise(1001)).nbytes == 126 + 8


class TestText:
    @pytest.mark.parametrize(
        ("text", "codec"),
        [
            ("plain", Plain()),
            ("bf16", BF16()),
            ("fp16", FP16()),
            ("int8", Int8()),
            ("topk:0.01", TopK(0.01)),
            ("1bit", OneBit()),
        ],
    )
    def test_names(self, text: str, codec: Codec) -> None:
        assert str(codec) == text
        assert parse(text) == codec
        assert {codec: 1}[parse(text)] == 1

    def test_spellings_of_topk(self) -> None:
        assert parse("topk") == parse("topk:ratio=0.01") == parse(" topk:1e-2 ") == TopK(0.01)
        assert str(TopK(1)) == "topk:1.0"

    @given(st.floats(0, 1, exclude_min=True))
    def test_any_ratio_survives(self, ratio: float) -> None:
        assert parse(str(TopK(ratio))) == TopK(ratio)

    def test_different_codecs_differ(self) -> None:
        assert len({*CODECS, TopK(0.5)}) == len(CODECS) + 1
        assert BF16() != FP16()

    def test_unknown_names_list_what_exists(self) -> None:
        with pytest.raises(ConfigError, match="plain, bf16, fp16, int8, topk, 1bit"):
            parse("zip")

    @pytest.mark.parametrize(
        "text", ["", "int8:3", "topk:2", "topk:0", "topk:x", "topk:k=1", "topk:nan"]
    )
    def test_mistakes(self, text: str) -> None:
        with pytest.raises(ConfigError):
            parse(text)


class TestDamage:
    def test_the_wrong_codec(self) -> None:
        with pytest.raises(ConfigError, match=r"packed\.codec\.decode"):
            BF16().decode(FP16().encode(noise(3)))

    @every_codec
    def test_parts_that_do_not_fit_the_header(self, codec: Codec) -> None:
        packed = codec.encode(noise(16), seeded())
        with pytest.raises(RunError, match="damaged"):
            codec.decode(Packed(codec, (400,), packed.dtype, packed.tensors))
        with pytest.raises(RunError, match="damaged"):
            codec.decode(Packed(codec, packed.shape, packed.dtype, {}))

    @pytest.mark.parametrize(
        "change",
        [
            {"codec": 3},
            {"dtype": "int64"},
            {"dtype": None},
            {"shape": [-1]},
            {"shape": [1.5]},
            {"shape": None},
        ],
        ids=str,
    )
    def test_headers(self, change: dict[str, object]) -> None:
        packed = Plain().encode(noise(3))
        with pytest.raises(RunError, match="damaged header"):
            Packed.from_header({**packed.header(), **change}, packed.tensors)


class TestErrorFeedbackState:
    @every_lossy
    def test_resumed_is_uninterrupted(self, codec: Codec) -> None:
        through, generator = ErrorFeedback(codec), seeded()
        for step in range(4):
            through.pack("w", noise(30, seed=step), generator)
        state, random = through.state_dict(), generator.get_state()
        kept = {name: tensor.clone() for name, tensor in state.items()}
        expected = [through.pack("w", noise(30, seed=step), generator) for step in (4, 5)]
        # The state taken earlier did not move with the run.
        assert torch.equal(state["w"], kept["w"])
        resumed, generator = ErrorFeedback(codec), seeded(9)
        resumed.load_state_dict(state)
        generator.set_state(random)
        actual = [resumed.pack("w", noise(30, seed=step), generator) for step in (4, 5)]
        assert all(same_bits(*pair) for pair in zip(expected, actual, strict=True))

    def test_loading_copies(self) -> None:
        state, feedback = {"w": torch.ones(2)}, ErrorFeedback(OneBit())
        feedback.load_state_dict(state)
        state["w"].zero_()
        assert feedback.residual["w"].tolist() == [1.0, 1.0]

    def test_reset(self) -> None:
        feedback = ErrorFeedback(TopK(0.5))
        feedback.pack("w", torch.tensor([1.0, 2.0]))
        feedback.reset()
        assert feedback.state_dict() == {}

    @every_lossy
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_one_bad_gradient_does_not_spoil_the_next(self, codec: Codec, bad: float) -> None:
        feedback = ErrorFeedback(codec)
        feedback.pack("w", noise(8), seeded())
        before = feedback.residual["w"].clone()
        spoilt = feedback.pack("w", torch.full((8,), bad), seeded())
        assert not codec.decode(spoilt).isfinite().all()
        assert torch.equal(feedback.residual["w"], before)
        assert codec.decode(feedback.pack("w", noise(8), seeded())).isfinite().all()

    def test_a_name_keeps_its_shape(self) -> None:
        feedback = ErrorFeedback(Int8())
        feedback.pack("w", noise(3), seeded())
        with pytest.raises(ConfigError, match=r"w has shape \(4,\).*reset"):
            feedback.pack("w", noise(4), seeded())

    def test_plain_refuses_a_debt(self) -> None:
        feedback = ErrorFeedback(Plain())
        feedback.load_state_dict({})
        with pytest.raises(ConfigError, match="owed for w"):
            feedback.load_state_dict({"w": torch.ones(2)})
