"""Capture at real sizes: a device encodes what the CPU encodes, and nobody waits for it."""

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.store import Header, Store, Writer, capture
from logitless.store import codes as _codes
from tests.support.sizes import DEVICE

pytestmark = pytest.mark.gpu("a device beside the CPU")
V, D, K, ROWS = 151_936, 1024, 64, 256


def test_captured_on_the_device(tmp_path):
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V, bias=False)).to(DEVICE).bfloat16()
    documents = torch.randint(0, V, (4, 512))
    with Writer(tmp_path, vocab_size=V, k=K) as writer:
        assert capture(model, documents.split(1), writer, head="1") == len(documents)
    store = Store(tmp_path)
    for tokens in documents:
        with torch.no_grad():
            want = ll.capture_topk(model(tokens[None].to(DEVICE)), K)[0].to("cpu")
        _, got = store[store.find(tokens)]
        assert torch.equal(got.ids.long(), want.ids.long())
        assert (got.logprobs - want.logprobs).abs().mean() < 0.02
        assert (got.tail - want.tail).abs().max() < 1e-3
    batch = documents[:2].to(DEVICE)
    assert store.targets_for(batch).device.type == torch.device(DEVICE).type


@pytest.mark.parametrize("values", ["u8", "f16"])
def test_encoded_as_on_a_cpu(values):
    header = Header(V, K, values)
    targets = ll.capture_topk(3 * torch.randn(ROWS, V, device=DEVICE), K)
    found = _codes.encoded(targets, header, sorted_=True)
    want = _codes.encoded(targets.to("cpu"), header)
    got, plain = (_codes.decoded(c.cpu(), header) for c in (found, want))
    assert torch.equal(got.ids, plain.ids)
    assert (got.logprobs - plain.logprobs).abs().max() < 0.1  # another step may be as good
    assert (got.logprobs - plain.logprobs).abs().mean() < 0.01


def test_encoding_waits_for_nobody():
    targets = ll.capture_topk(torch.randn(ROWS, V, device=DEVICE), K)
    header = Header(V, K)
    _codes.encoded(targets, header, sorted_=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _codes.encoded(targets, header, sorted_=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
