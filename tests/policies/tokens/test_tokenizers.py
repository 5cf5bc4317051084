"""Both tokenisers: what they promise of errors, tokens, garbage and bytes."""

import numpy as np
import pytest

from policies.tokens.config import FastConfig, ResidualVQConfig
from policies.tokens.fast import FastTokenizer
from policies.tokens.read_tokenizer import read_tokenizer
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import report
from wire.errors import ConfigError, InvalidDataError

H, DA = 20, 3


def smooth(count, seed=0):
    """Reaches between random places of unlike dimensions, a little noise; float32[count, H, DA]."""
    rng = np.random.default_rng(seed)
    begin, end = rng.uniform(-1, 1, (2, count, 1, DA))
    u = np.clip((np.linspace(0, 1, H) - rng.uniform(0, 0.4, (count, 1))) / 0.6, 0, 1)[..., None]
    path = begin + (end - begin) * u**3 * (10 - 15 * u + 6 * u**2) + rng.normal(0, 0.002, (count, H, DA))
    return (path * [1, 10, 0.1] + [0, 5, 1]).astype(np.float32)


@pytest.fixture(scope="module")
def fast():
    return FastTokenizer.fit(smooth(600), FastConfig(vocabulary=512, error_goal=0.01))


@pytest.fixture(scope="module")
def residual():
    return ResidualVQ.fit(smooth(1000), ResidualVQConfig(tokens=24, codes=64, group=3, error_goal=0.01))


@pytest.fixture(params=["fast", "residual"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def test_chunks_never_seen_meet_the_goal_in_few_tokens(tokenizer):
    found = report(tokenizer, smooth(200, seed=1))
    assert found.chunks == 200
    assert found.mean_abs < 0.0115
    assert found.mean_abs < found.rms < found.p99 < found.largest
    assert found.mean_abs <= found.worst_dimension < 0.02
    # 60 numbers each; an error of 1 % of the range needs at least 5 bits of each at the two ends
    assert 3 < found.tokens_mean <= found.tokens_p99 <= found.tokens_max <= 24


def test_a_report_counts_what_encoding_and_decoding_give(fast):
    chunks = smooth(30, seed=2)
    found = report(fast, chunks)
    tokens = [fast.encode(chunk) for chunk in chunks]
    errors = np.stack([np.abs(fast.decode(t) - c) for t, c in zip(tokens, chunks, strict=True)]) / fast.scaling.span
    assert found.mean_abs == pytest.approx(errors.mean(), rel=1e-4)
    assert found.tokens_max == max(map(len, tokens))
    assert tokens == fast.encode_batch(chunks)


def test_the_same_chunks_fit_the_same_tokeniser(tokenizer):
    kind, config = (
        (FastTokenizer, FastConfig(vocabulary=512, error_goal=0.01))
        if tokenizer.length is None
        else (ResidualVQ, ResidualVQConfig(tokens=24, codes=64, group=3, error_goal=0.01))
    )
    again = kind.fit(smooth(600 if tokenizer.length is None else 1000), config)
    assert again.to_bytes() == tokenizer.to_bytes()


def test_bytes_come_back_as_the_same_tokeniser(tokenizer):
    data = tokenizer.to_bytes()
    other = read_tokenizer(data)
    assert type(other) is type(tokenizer)
    assert (other.vocabulary, other.length, other.horizon) == (tokenizer.vocabulary, tokenizer.length, H)
    assert other.to_bytes() == data
    for chunk in smooth(20, seed=3):
        tokens = tokenizer.encode(chunk)
        assert other.encode(chunk) == tokens
        assert np.array_equal(other.decode(tokens), tokenizer.decode(tokens))


def test_any_tokens_give_a_finite_chunk(tokenizer):
    rng = np.random.default_rng(0)
    low, high = tokenizer.scaling.low, tokenizer.scaling.high
    for length in (0, 1, 5, 60, 500):
        tokens = rng.integers(-3, tokenizer.vocabulary + 3, length).tolist()
        chunk = tokenizer.decode(tokens)
        assert chunk.shape == (H, DA)
        assert chunk.dtype == np.float32
        assert np.isfinite(chunk).all()
        # clipped to one range beyond either end
        assert (chunk >= low - 1.01 * (high - low)).all()
        assert (chunk <= high + 1.01 * (high - low)).all()


def test_more_tokens_come_closer(tokenizer):
    chunks = smooth(40, seed=4)
    shares = (0.0, 0.4, 0.7, 1.0)
    errors = []
    for share in shares:
        each = [
            np.abs(tokenizer.decode(tokens[: round(share * len(tokens))]) - chunk) / tokenizer.scaling.span
            for tokens, chunk in zip(tokenizer.encode_batch(chunks), chunks, strict=True)
        ]
        errors.append(float(np.mean(each)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 10


def test_values_far_outside_the_fitted_range_still_come_back(fast):
    chunk = smooth(1, seed=5)[0]
    far = (chunk + np.array([1.5, -9, 0.1])).astype(np.float32)
    inside = np.abs(fast.scaling.normalize(far)) < 2.9
    error = np.abs(fast.decode(fast.encode(far)) - far) / fast.scaling.span
    assert error[inside.all(1)].mean() < 0.015
    # and what is beyond one more range is clipped, not refused
    assert np.isfinite(fast.decode(fast.encode(1e6 * chunk))).all()


def test_integers_beyond_the_alphabet_are_carried():
    made = FastTokenizer.unfitted(np.array([-1.0]), np.array([1.0]), 4, FastConfig(scale=10.0, vocabulary=13))
    assert made.vocabulary == 13  # carries, and the integers from -5 to 5
    chunk = np.float32([[1.0], [1.0], [1.0], [1.0]])
    tokens = made.encode(chunk)
    assert tokens == [1, 1, 1, 2 + 5 + 2]  # 20 = 6 + 6 + 6 + 2
    assert np.allclose(made.decode(tokens), chunk, atol=1e-6)
    assert np.allclose(made.decode(made.encode(-chunk)), -chunk, atol=1e-6)
    assert made.encode(0 * chunk) == []


def test_byte_pairs_shorten_and_change_nothing_else(fast):
    bare = FastTokenizer(fast.scaling, H, fast.scale, fast.dead_zone, fast.least, fast.most)
    chunks = smooth(50, seed=6)
    short, long = fast.encode_batch(chunks), bare.encode_batch(chunks)
    assert sum(map(len, short)) < 0.7 * sum(map(len, long))
    for one, other in zip(short, long, strict=True):
        assert np.array_equal(fast.decode(one), bare.decode(other))


def test_a_larger_error_costs_fewer_tokens():
    chunks, held = smooth(600), smooth(100, seed=7)
    found = [report(FastTokenizer.fit(chunks, FastConfig(error_goal=goal)), held) for goal in (0.003, 0.01, 0.03)]
    assert [one.tokens_mean for one in found] == sorted((one.tokens_mean for one in found), reverse=True)
    assert found[0].tokens_mean > 1.3 * found[2].tokens_mean
    assert [one.mean_abs for one in found] == pytest.approx([0.003, 0.01, 0.03], rel=0.15)
    # the scale of the paper, as it is
    assert FastTokenizer.fit(chunks).scale == 10.0


def test_a_dimension_at_rest_costs_no_tokens_for_its_jitter():
    chunks = smooth(300)
    chunks[..., 2] = 1 + np.random.default_rng(0).normal(0, 1e-5, chunks.shape[:2])
    still = FastTokenizer.fit(chunks, FastConfig(), least_span=np.array([0.02, 0.2, 0.02]))
    loud = FastTokenizer.fit(chunks, FastConfig())
    assert still.scaling.span[2] == pytest.approx(0.02, rel=1e-3)
    assert report(still, chunks).tokens_mean < 0.75 * report(loud, chunks).tokens_mean


def test_each_stage_has_its_own_codes(residual):
    tokens = residual.encode(smooth(1, seed=8)[0])
    assert len(tokens) == residual.length
    for position, token in enumerate(tokens):
        first, last = residual.allowed(position)
        assert first <= token < last
        assert last - first == 64
    assert residual.allowed(residual.length - 1)[1] == residual.vocabulary


def test_chunks_that_do_not_fit_are_refused(tokenizer):
    with pytest.raises(InvalidDataError, match="expected numbers"):
        tokenizer.encode_batch(np.zeros((H, DA)))
    with pytest.raises(InvalidDataError, match="chunks of 7 actions"):
        tokenizer.encode(np.zeros((7, DA)))
    with pytest.raises(InvalidDataError, match="chunks of 4 dimensions"):
        tokenizer.encode(np.zeros((H, 4)))
    bad = smooth(2)
    bad[1, 3, 0] = np.nan
    with pytest.raises(InvalidDataError, match="1 of 2 chunks are not finite"):
        tokenizer.encode_batch(bad)
    with pytest.raises(InvalidDataError, match="m > 0"):
        type(tokenizer).fit(np.zeros((0, H, DA)))


def test_bytes_that_are_no_tokeniser_are_refused(tokenizer):
    data = tokenizer.to_bytes()
    for bad in (b"", b"{}", b"\x80\x04N.", bytes(range(256)) * 8, data[: len(data) // 2], b"{" + data):
        with pytest.raises(InvalidDataError):
            read_tokenizer(bad)


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(60), b"\x80\x04N." + bytes(9)])
def test_a_pickle_is_not_opened(data):
    with pytest.raises(InvalidDataError, match=r"a pickle or torch archive.*not opened.*JSON or safetensors"):
        read_tokenizer(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"least":', b'"least":1'),  # -> a positive end, or far too long an alphabet
        (b'"kind":"fast"', b'"kind":"slow"'),
        (b'"horizon":20', b'"horizon":0'),
        (b'"merges":[[', b'"merges":[[900000,1],['),
        (b'"dead_zone":0.', b'"dead_zone":7.'),
    ],
)
def test_a_changed_fast_tokeniser_is_refused(fast, old, new):
    data = fast.to_bytes()
    assert old in data
    with pytest.raises(InvalidDataError, match="FAST tokeniser"):
        read_tokenizer(data.replace(old, new))


def test_byte_pairs_that_grow_without_end_are_refused(fast):
    last = fast.vocabulary - 1
    doubling = [[last + i, last + i] for i in range(50_000)]
    text = fast.to_bytes().decode()
    grown = text[: text.rindex("]")] + "," + str(doubling)[1:] + "}"
    with pytest.raises(InvalidDataError, match="changed"):
        read_tokenizer(grown.encode())


def test_a_changed_residual_tokeniser_is_refused(residual):
    import safetensors.numpy

    tensors = safetensors.numpy.load(residual.to_bytes())
    metadata = {"vla_fleet_tokenizer": f"residual_vq {H}"}
    for name, change in (
        ("picked", lambda t: t + 1000),
        ("basis", lambda t: t[:, :-1].copy()),
        ("codebooks", lambda t: np.full_like(t, np.inf)),
        ("low", lambda t: t + 1e6),
    ):
        bad = safetensors.numpy.save(tensors | {name: change(tensors[name])}, metadata)
        with pytest.raises(InvalidDataError, match="residual VQ"):
            read_tokenizer(bad)
    with pytest.raises(InvalidDataError, match="no action tokeniser"):
        read_tokenizer(safetensors.numpy.save(tensors))
    # chunks of so many actions would be allocated
    with pytest.raises(InvalidDataError, match="never gives"):
        read_tokenizer(safetensors.numpy.save(tensors, {"vla_fleet_tokenizer": f"residual_vq {2**40}"}))


def test_configurations_that_cannot_work_are_refused():
    for config in (
        FastConfig(scale=0.0),
        FastConfig(dead_zone=0.2),
        FastConfig(vocabulary=3),
        FastConfig(error_goal=2),
    ):
        with pytest.raises(ConfigError, match="tokeniser"):
            FastTokenizer.fit(smooth(10), config)
    for other in (ResidualVQConfig(tokens=0), ResidualVQConfig(codes=1), ResidualVQConfig(error_goal=0.0)):
        with pytest.raises(ConfigError):
            ResidualVQ.fit(smooth(10), other)
    with pytest.raises(ConfigError, match="2 tokens leave an error of"):
        ResidualVQ.fit(smooth(400), ResidualVQConfig(tokens=2, codes=16, error_goal=0.001))


def test_no_tokeniser_is_larger_than_its_configuration_says(fast, residual):
    assert len(fast.to_bytes()) <= FastConfig(vocabulary=512).max_bytes(DA)
    assert len(residual.to_bytes()) <= ResidualVQConfig(tokens=24, codes=64, group=3).max_bytes(H, DA)
