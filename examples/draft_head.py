"""Trains a draft head with a reduced vocabulary for speculative sampling.

    python examples/draft_head.py

The script needs neither a network nor a GPU. A target model is trained on the source code of
Python's standard library, as in `make demo`, and is then frozen. The draft head predicts three
tokens ahead, one after the other, as EAGLE does. In the first step, the draft head reads the
target's hidden state at one position and the embedding of the next token. From both, the draft head
computes a hidden state for the next position. In the next step, the draft head reads its own hidden
state instead of the target's hidden state. The draft head predicts only the 512 most frequent of
the 4,096 tokens. So its logits are the product of its hidden state and 512 rows of the target's
head.

The loss of each step is the total variation distance (TVD) from the target plus a cross-entropy.
The target's distribution is restricted to the 512 tokens and renormalised, because the target's
logits in the loss are the product of its hidden state and the same 512 rows. The loss does not
materialise logits. Before and after the training of the draft head, the script prints the
acceptance rate of each step in two ways. The first rate is computed as 1 - TVD over all 4,096
tokens. The second rate is counted in rounds of speculative sampling.
"""

import argparse
import itertools
import time

import torch
from torch import Tensor, nn

import logitless as ll
from demo import Batch, Scale, Transformer, draw_batches, encode, read_sources, vocabulary

VOCAB, DRAFTED, AHEAD = 4096, 512, 3
TARGET = Scale(batch=16, context=32, width=64, layers=2, lr=5e-3)


class Draft(nn.Module):
    """Maps a hidden state and the embedding of the next token to the next hidden state."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(2 * width)
        self.mix = nn.Sequential(
            nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        return hidden + self.mix(self.norm(torch.cat((hidden, embedding), -1)))


def train_target(target: Transformer, batches, steps: int) -> None:
    optimizer = torch.optim.AdamW(target.parameters(), TARGET.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TARGET.lr, total_steps=steps + 1)
    for tokens, labels in itertools.islice(batches, steps):
        loss = ll.cross_entropy(ll.LinearLogits(target.hidden(tokens), target.head.weight), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def embedded(target: Transformer, tokens: Tensor) -> Tensor:
    return target.gain * target.token(tokens)


def chain(draft: Draft, target: Transformer, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
    """Returns the draft's hidden states of all steps, along the tokens of the text.

    Step k starts at each position t, reads the tokens t + 1 to t + k, and predicts token t + k + 1.
    The result of step k has shape (B, T - k, width).
    """
    states, state = [], hidden
    for k in range(1, AHEAD + 1):
        state = draft(state[:, : tokens.shape[1] - k], embedded(target, tokens[:, k:]))
        states.append(state)
    return states


def train_draft(draft: Draft, target: Transformer, kept: Tensor, batches, steps: int) -> None:
    """Trains the draft on the target's distribution over the kept tokens, and on the text."""
    head = target.head.weight.index_select(0, kept)  # (DRAFTED, width)
    place = torch.full((VOCAB,), -100, device=kept.device)  # each token's column in the draft
    place[kept] = torch.arange(len(kept), device=kept.device)
    optimizer = torch.optim.AdamW(draft.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    for tokens, labels in itertools.islice(batches, steps):
        with torch.no_grad():
            hidden = target.hidden(tokens)
        losses = []
        for k, state in enumerate(chain(draft, target, hidden, tokens), start=1):
            logits = ll.LinearLogits(state, head)
            wanted = ll.LinearLogits(hidden[:, k:], head)  # restricted and renormalised
            # Labels outside the draft's vocabulary are -100, so they are ignored.
            ce = ll.cross_entropy(logits, place[labels[:, k:]])
            losses.append(ll.tvd(logits, wanted) + 0.2 * ce)
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def spread(q: Tensor, kept: Tensor) -> Tensor:
    """Returns the draft's probabilities over the whole vocabulary, with 0 for tokens not kept."""
    return torch.zeros(*q.shape[:-1], VOCAB, device=q.device).index_copy(-1, kept, q)


@torch.no_grad()
def computed_rates(draft: Draft, target: Transformer, kept: Tensor, held_out: list[Batch]):
    """Returns the acceptance rate of each step on held-out text: the mean of 1 - TVD = Σ min(p, q).

    p is the target's distribution, and q is the draft's distribution.
    """
    rates = []
    for tokens, _ in held_out:
        hidden = target.hidden(tokens)
        p = target.head(hidden).softmax(-1)
        states = chain(draft, target, hidden, tokens)
        q = [spread((s @ target.head.weight[kept].T).softmax(-1), kept) for s in states]
        rates.append(
            [torch.min(p[:, k:], q_k).sum(-1).mean().item() for k, q_k in enumerate(q, start=1)]
        )
    return torch.tensor(rates).mean(0).tolist()


@torch.no_grad()
def counted_rates(draft: Draft, target: Transformer, kept: Tensor, held_out: list[Batch]):
    """Counts the acceptance rate of each step in rounds of speculative sampling.

    Returns the rates and the number of tokens per round. Each round continues a held-out prefix.
    The target samples the next token. Then the draft samples three more tokens, and the target
    accepts each token with the probability min(1, p / q). The first rejected token ends the round.
    The rate of step k counts only rounds in which all earlier tokens were accepted. The tokens of a
    round are all accepted tokens and one token of the target.
    """
    reached, accepted = torch.zeros(AHEAD), torch.zeros(AHEAD)
    head = target.head.weight
    for tokens, _ in held_out:
        prefix = tokens[:, : -AHEAD - 1]
        state = target.hidden(prefix)[:, -1]
        texts = [prefix, (state @ head.T).softmax(-1).multinomial(1)]
        qs = []
        for _ in range(AHEAD):
            state = draft(state, embedded(target, texts[-1][:, 0]))
            qs.append(spread((state @ head[kept].T).softmax(-1), kept))
            texts.append(qs[-1].multinomial(1))
        p = target.head(target.hidden(torch.cat(texts, 1))).softmax(-1)[:, -AHEAD - 1 : -1]
        q, drawn = torch.stack(qs, 1), torch.cat(texts[2:], 1)[..., None]  # (B, AHEAD, V or 1)
        ratio = (p.gather(-1, drawn) / q.gather(-1, drawn))[..., 0]
        alive = (torch.rand_like(ratio) < ratio).float().cumprod(1)  # (B, AHEAD)
        accepted += alive.sum(0).cpu()
        reached += torch.cat((torch.ones_like(alive[:, :1]), alive[:, :-1]), 1).sum(0).cpu()
    return (accepted / reached.clamp_min(1)).tolist(), 1 + float(accepted.sum() / reached[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="draft training steps; default: 300")
    parser.add_argument("--held-out", type=int, default=40, help="held-out batches; default: 40")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    for name, value in (("steps", args.steps), ("held-out", args.held_out)):
        if value < 1:
            raise SystemExit(f"--{name} must be at least 1, got {value}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    text = read_sources(limit=2_000_000)
    ids = encode(text, vocabulary(text, VOCAB))
    ids, unseen = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    kept = ids.bincount(minlength=VOCAB).topk(DRAFTED).indices.sort().values.to(device)

    torch.manual_seed(args.seed)
    target, draft = Transformer(TARGET, VOCAB).to(device), Draft(TARGET.width).to(device)
    train_target(target, draw_batches(ids, TARGET, device, args.seed), 2 * args.steps)
    target.requires_grad_(False)
    unseen_batches = draw_batches(unseen, TARGET, device, args.seed + 1)
    held_out = list(itertools.islice(unseen_batches, args.held_out))

    results = {}
    for name in ("before", "after"):
        if name == "after":
            batches = draw_batches(ids, TARGET, device, args.seed + 2)
            train_draft(draft, target, kept, batches, args.steps)
        computed = computed_rates(draft, target, kept, held_out)
        counted, per_round = counted_rates(draft, target, kept, held_out)
        results[name] = computed, counted, per_round

    print(f"{time.perf_counter() - start:.0f} s\n")
    print(f"acceptance rates of steps 1 to {AHEAD}, and tokens per call of the target")
    for name, (computed, counted, per_round) in results.items():
        print(f"{name:>7}  1 - TVD  {'  '.join(f'{r:.3f}' for r in computed)}")
        print(f"{name:>7}  counted  {'  '.join(f'{r:.3f}' for r in counted)}  {per_round:.2f}")


if __name__ == "__main__":
    main()
