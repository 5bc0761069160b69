"""Characters: windows that line up, a model that cannot see ahead, and errors with a remedy."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.recipes import chars
from offbeat.recipes.chars import encode, windows

TEXT = "".join(chr(97 + i * i % 23) for i in range(200))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "text.txt"
    target.write_text(TEXT, encoding="utf-8")
    return target


@settings(deadline=None, max_examples=25)
@given(length=st.integers(9, 60), context=st.integers(1, 8), stride=st.integers(1, 10))
def test_y_is_x_moved_on_by_one(length: int, context: int, stride: int) -> None:
    pairs = windows(torch.arange(length), context, stride)
    for number, (x, y) in enumerate(pairs):
        assert x.tolist() == list(range(number * stride, number * stride + context))
        assert torch.equal(y, x + 1)
    # One more window would run past the end.
    assert len(pairs) * stride + context + 1 > length


def test_nine_tenths_train_and_the_last_tenth_tests(path: Path) -> None:
    task = chars(path, context=4, width=8, heads=2)
    codes = encode(TEXT, task.model.alphabet)
    assert task.data[0][0].tolist() == codes[:4].tolist()
    assert task.data[-1][1].tolist() == codes[173:177].tolist()
    assert task.test[0][0].tolist() == codes[180:184].tolist()


def test_windows_do_not_overlap_unless_asked(path: Path) -> None:
    apart = chars(path, context=4, width=8, heads=2).data
    dense = chars(path, context=4, width=8, heads=2, stride=1).data
    assert (len(apart), len(dense)) == (44, 176)


def test_the_alphabet_decodes(path: Path) -> None:
    task = chars(path, context=5, width=8, heads=2)
    assert "".join(task.model.alphabet[code] for code in task.data[1][0]) == TEXT[5:10]


def test_no_position_sees_ahead(path: Path) -> None:
    task = chars(path, context=8, width=16, heads=4, layers=2)
    x = task.data[0][0].unsqueeze(0).clone()
    before = task.model(x)
    x[0, 5] = (x[0, 5] + 1) % len(task.model.alphabet)
    after = task.model(x)
    assert before.shape == (1, 8, len(task.model.alphabet))
    torch.testing.assert_close(after[0, :5], before[0, :5])
    assert not torch.allclose(after[0, 5:], before[0, 5:])


def test_the_loss_is_the_mean_over_positions(path: Path) -> None:
    loss = chars(path, context=4, width=8, heads=2).loss
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(loss(logits, targets), by_hand)


def test_a_text_too_short_for_the_context(path: Path) -> None:
    assert len(chars(path, context=19, width=8, heads=2).test) == 1
    with pytest.raises(ConfigError, match=r"200 characters.*below 20 .*at least 210 characters"):
        chars(path, context=20)


@pytest.mark.parametrize("option", ["context", "stride", "width", "layers", "heads"])
def test_sizes_start_at_one(path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be a whole number of at least 1"):
        chars(path, **{option: 0})


def test_heads_must_divide_the_width(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"width=10 .* heads=4; write for example width=12"):
        chars(path, context=4, width=10, heads=4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*write path="):
        chars(tmp_path / "none.txt")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff\xfe")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 2\)"):
        chars(tmp_path / "bytes")
