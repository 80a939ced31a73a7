"""What losses and backends share."""

import torch


def test_what_is_made_once_is_no_inference_tensor(device):
    """Autograd could not save it: a first call in inference mode would spoil all later ones."""
    from logitless.contract import made_once

    zero = made_once(lambda device: torch.zeros((), device=device))
    with torch.inference_mode():
        first = zero[torch.device(device)]
    assert not first.is_inference()
    assert zero[torch.device(device)] is first
