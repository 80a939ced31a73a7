"""The faults that real clients and newcomers met, one function per number, for replay.py."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll

V, N, D = 1024, 64, 32
ROOT = Path(ll.__file__).parents[1]
IDS = torch.randint(6, V, (2, 9), generator=torch.Generator().manual_seed(0))
LORA = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def llama(tied: bool = False) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": V,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def small(width: int = V) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, D), nn.Linear(D, width))


def fused(**how) -> nn.Module:
    return ll.fuse(small(), head="1", **how)


def step() -> tuple[nn.Module, Tensor]:
    """A fused model with gradients, and the logits that gave them."""
    model = fused()
    z = model(IDS)
    F.cross_entropy(z.view(-1, V), IDS.view(-1)).backward()
    return model, z


def told(call) -> list[str]:
    """The warnings of ours in a call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if "fuse" in str(w.message) or "head" in str(w.message)]


def products(call) -> int:
    """The number of GEMMs over all logits (N, V) in a call, forward and backward."""
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    sizes = [sorted({n for shape in e.input_shapes for n in shape}) for e in profile.events()
             if e.name in ("aten::mm", "aten::addmm")]  # fmt: skip
    return sum({N, D, V} <= set(size) for size in sizes)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def clients_w1(_):
    from accelerate import cpu_offload

    want = logits(llama())
    model = ll.fuse(llama())
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: 3 * inner(x)
    apart = float((model(input_ids=IDS).logits.detach() + 0 - 3 * want).abs().max())
    assert apart < 1e-4, f"a forward of others is lost: {apart:.1f} apart"
    model = cpu_offload(ll.fuse(llama()), execution_device=torch.device("cpu"))
    apart = float((logits(model) - want).abs().max())
    assert apart < 1e-4, f"offloaded: {apart:.1f} apart"


def clients_w2(_):
    model, z = step()
    want = small()(IDS)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-1.0)
    try:
        same = torch.allclose(z.detach().view(-1, V), want.view(-1, V))
    except RuntimeError:
        return
    assert same, "logits of the new weights"


def clients_c1(_):
    from peft import LoraConfig, get_peft_model

    def second(model):
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**LORA, modules_to_save=["lm_head"]))
        model.add_adapter("b", LoraConfig(**LORA))
        model.set_adapter("b")
        return model

    assert torch.equal(logits(second(ll.fuse(llama()))), logits(second(llama())))
    second(ll.fuse(llama()))(input_ids=IDS, labels=IDS).loss.backward()


def clients_c2(_):
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        return get_peft_model(model, LoraConfig(**LORA, trainable_token_indices=[5, 6]))

    for model in (adapted(ll.fuse(llama(True))), ll.fuse(adapted(llama(True)))):
        model.generate(input_ids=IDS, max_new_tokens=2)
        model(input_ids=IDS, labels=IDS).loss.backward()


def clients_c3(_):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(TypeError):
        ll.fuse(model)


def clients_c4(_):
    from accelerate import dispatch_model

    places = {"model": "cpu", "lm_head": "cpu"}
    model = ll.fuse(dispatch_model(llama(), places, force_hooks=True))
    assert torch.equal(logits(model), logits(llama()))


def clients_c5(_):
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, how = fused(), {"device_id": torch.device("cpu"), "use_orig_params": True}
    model[1] = FullyShardedDataParallel(model[1], **how)
    model = FullyShardedDataParallel(model, **how)
    F.cross_entropy(model(IDS).view(-1, V), IDS.view(-1)).backward()
    dist.destroy_process_group()


def clients_c6(_):
    model, z = step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="before the step"):
        z.argmax(-1)


def clients_c7(_):
    z, plain = fused()(IDS), small()(IDS)
    found = []
    for t in (z, plain):
        (g,) = torch.autograd.grad(F.cross_entropy(t.view(-1, V), IDS.view(-1)), t)
        found.append(float(g.norm()))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def clients_c8(_):
    model = fused()
    model[1].register_forward_hook(lambda module, args, out: out.mul_(2))
    with pytest.raises(RuntimeError, match="Write to a copy instead"):
        model(IDS)


class Sink(torch.autograd.Function):
    """Keeps a branch that no loss uses, as DDP does."""

    @staticmethod
    def forward(ctx, *xs):
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx, *gs):
        return gs


def head_step(branch) -> None:
    head = ll.nn.FusedHead(D, V, workspace=8 * V * 4)
    z = head(torch.randn(N, D, requires_grad=True))
    loss, _ = Sink.apply(F.cross_entropy(z, torch.arange(N)), branch(z))
    loss.backward()


def clients_m1(_):
    made = products(lambda: head_step(lambda z: z / 2))
    assert not made, f"{made} products over all logits"


def clients_m2(_):
    z = fused()(IDS)
    assert told(lambda: z.detach().data_ptr()), "no warning"


def clients_m3(_):
    z = fused()(IDS)
    with torch.no_grad():
        assert told(lambda: z.sin()), "no warning"


def clients_m4(_):
    class ByWeight(nn.Sequential):
        def forward(self, ids):
            return self[0](ids) @ self[1].weight.t()

    assert told(lambda: ll.fuse(ByWeight(*small()), head="1")(IDS)), "no warning"


def clients_m5(_):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**LORA | {"target_modules": ["lm_head"]})
    model = get_peft_model(ll.fuse(llama()), config)
    assert told(lambda: model(input_ids=IDS, labels=IDS).loss.backward()), "no warning"


def clients_x1(_):
    def entropy_bonus():
        head = ll.nn.FusedHead(D, V, workspace=8 * V * 4)
        log_p = head(torch.randn(N, D, requires_grad=True)).log_softmax(-1)
        (log_p.exp() * log_p).sum().backward()

    made = products(entropy_bonus)
    assert made <= 3, f"{made} products over all logits"  # one in forward, two gradients


def clients_x2(_):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(ll.fuse(llama()), LoraConfig(**LORA))
    ll.unfuse(model)
    assert type(model(input_ids=IDS).logits) is Tensor, "still lazy"


def clients_x3(_):
    other = torch.ones(2, 9, V)
    for name, call in (
        ("Tensor.sub", lambda z: z - other),
        ("F.mse_loss", lambda z: F.mse_loss(z, other)),
    ):
        said = " ".join(told(lambda call=call: call(fused()(IDS))))
        assert f"by {name}." in said, said


def clients_x4(_):
    said = " ".join(told(lambda: torch.export.export(fused(), (IDS,), strict=False)))
    assert "torch.compile" not in said, said


def clients_table(_):
    """The table of operations that materialised."""
    other, ids = torch.randn(2, 9, V).softmax(-1), IDS[..., None]
    calls = {
        "+ bias": lambda z: F.cross_entropy((z + torch.ones(V)).view(-1, V), IDS.view(-1)),
        "mean()": lambda z: z.mean(),
        "mean(-1)": lambda z: z.mean(-1),
        "sum()": lambda z: z.sum(),
        "F.kl_div": lambda z: F.kl_div(z.log_softmax(-1), other, reduction="batchmean"),
        "soft labels": lambda z: F.cross_entropy(z.view(-1, V), other.view(-1, V)),
        "take_along_dim": lambda z: torch.take_along_dim(z.log_softmax(-1), ids, -1),
        "topk": lambda z: z.topk(3, -1),
        "max": lambda z: z.max(-1),
        "softmax": lambda z: z.softmax(-1).gather(-1, ids),
        "isfinite": lambda z: z.isfinite().all(),
        "masked_fill": lambda z: z.masked_fill(torch.arange(V) > 9, -1.0).logsumexp(-1),
        "cat": lambda z: torch.cat([z, z]).logsumexp(-1),
    }
    wide = ll.fuse(nn.Sequential(nn.Embedding(V, 2), nn.Linear(2, V)), head="1")
    made = [name for name, call in calls.items() if told(lambda call=call: call(wide(IDS)))]
    assert not made, f"materialised by {', '.join(made)}"


def newcomer_b1(_):
    assert "[project.urls]" in read("pyproject.toml"), "no addresses in pyproject.toml"
    assert "authors" in read("pyproject.toml"), "no authors in pyproject.toml"
    assert re.search(r"^## Install", read("README.md"), re.M), "README does not say how to install"


def newcomer_b2(_):
    for page in ("docs/fuse.md", "docs/migrating.md"):
        assert re.search(r"TRL[^|]*\b(head|trainers)\b", read(page)), f"{page} is silent"
    clients_m4(_)


def newcomer_b3(_):
    assert "max_logprobs" in read("docs/store.md"), "docs/store.md is silent"


def newcomer_b4(_):
    row = torch.randn(50).log_softmax(-1)
    entry = {i: SimpleNamespace(logprob=float(row[i])) for i in (*row.topk(4).indices.tolist(), 3)}
    done = SimpleNamespace(token_ids=(3,), logprobs=[entry])
    output = SimpleNamespace(prompt_token_ids=[7, 1], prompt_logprobs=None, outputs=[done])
    tokens, _ = ll.store.from_vllm(output, k=4)
    assert tokens.tolist() == [7, 1, 3]


def newcomer_b5(_):
    clients_c2(_)


def newcomer_b6(_):
    text = read("README.md")
    silent = [name for name in ("A100", "MI300", "macOS", "Windows") if name not in text]
    assert not silent, f"README is silent on {', '.join(silent)}"
