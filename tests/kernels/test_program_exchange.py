"""The zeros that programs need for their exchange: each launch gets its own zeros."""

import pytest
import torch

from logitless.kernels import program_exchange as exchange


class OnAGPU(torch.Tensor):
    """A tensor in the memory of a CPU that looks like a tensor on a GPU."""

    is_cuda = True


class Driver:
    """Triton's driver, with a given stream as the current stream."""

    def __init__(self, stream: int):
        self.active, self.get_current_stream = self, lambda index: stream


@pytest.fixture
def like(monkeypatch, device):
    """A tensor on the default stream, before any fill."""
    monkeypatch.setattr(exchange, "_pieces", {})
    monkeypatch.setattr(exchange, "driver", Driver(0))
    return torch.zeros(3, device=device).as_subclass(OnAGPU)


def test_no_launch_gets_the_integers_of_another_launch(like):
    """More calls than one fill serves, with two sizes. Each call overwrites its integers."""
    sizes = [exchange.piece_of(count) for count in (3, 5000)]
    assert sizes == [64, 8192]
    kept = []
    for call in range(5 * exchange.MOST_PIECES):
        piece = exchange.zeros(sizes[call % 2], like)
        assert piece.shape == (sizes[call % 2],)
        assert piece.dtype == torch.int64
        assert piece.device == like.device
        assert piece.data_ptr() % 16 == 0
        assert not piece.any()
        piece.fill_(call + 1)
        kept.append(piece)
    for call, piece in enumerate(kept):
        assert (piece == call + 1).all()


def test_one_fill_serves_many_calls(like):
    size = exchange.piece_of(1000)
    pieces = [exchange.zeros(size, like) for _ in range(exchange.MOST_PIECES)]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    another = exchange.zeros(size, like)
    assert another.untyped_storage().data_ptr() != pieces[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("count", [1, 1000, exchange.LARGEST_PIECE])
def test_a_fill_is_small(count, like):
    size = exchange.piece_of(count)
    fill = exchange.zeros(size, like).untyped_storage().nbytes() // 8
    assert fill % size == 0
    assert fill <= exchange.FILL
    assert fill <= size * exchange.MOST_PIECES


def test_many_integers_are_not_kept(like):
    size = exchange.piece_of(exchange.LARGEST_PIECE + 1)
    assert size == exchange.LARGEST_PIECE + 1
    assert exchange.zeros(size, like).untyped_storage().nbytes() == 8 * size
    assert not exchange._pieces


def test_other_streams_get_new_zeros(like, monkeypatch):
    exchange.zeros(64, like)
    monkeypatch.setattr(exchange, "driver", Driver(7))
    left = len(exchange._pieces[like.device, 64])
    assert exchange.zeros(64, like).untyped_storage().nbytes() == 8 * 64
    assert len(exchange._pieces[like.device, 64]) == left


def is_piece(zeros):
    return zeros.untyped_storage().nbytes() > zeros.nbytes


def test_the_default_stream_of_a_gpu(device):
    """A CPU has no streams. A CUDA graph and its replays must not share integers with a launch."""
    like = torch.zeros(3, device=device)
    if device == "cpu":
        assert not is_piece(exchange.zeros(64, like))
        return
    assert is_piece(exchange.zeros(64, like))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not is_piece(exchange.zeros(64, like))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        zeros = exchange.zeros(64, like)
        before = zeros.sum()
        zeros.fill_(7)
    assert not is_piece(zeros)
    for _ in range(2):
        graph.replay()
        assert before.item() == 0
