"""GRPO by hand: a fused model samples answers, is rewarded, and learns by a loss of its own.

    python examples/grpo.py

Needs transformers, and neither a network nor a GPU: the model is small and random, its tokenizer a
letter a token, and the task is to repeat a letter. Each step samples several answers to each
prompt, under no_grad, where a fused head gives plain logits. An answer's advantage is its reward
compared with that of the others to the same prompt. Two updates then go through the policy loss,
which `row_loss` computes without ever making the logits, entropy and all.
"""

import argparse
import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import logitless as ll

PROMPTS, ANSWERS, LENGTH = 16, 16, 6  # a step, a prompt, tokens an answer
UPDATES, CLIP, ENTROPY = 2, 0.2, 0.003


def letters() -> PreTrainedTokenizerFast:
    """Every letter is a token, and so is the colon that ends a prompt."""
    vocabulary = {token: i for i, token in enumerate(("<pad>", ":", *string.ascii_lowercase))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def small_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, bos_token_id=None, eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def reward(prompt: str, answer: str) -> float:
    """The share of the answer that repeats the prompt's letter."""
    return answer.count(prompt[0]) / LENGTH


def policy_loss(stats: ll.RowStats, old: Tensor, advantage: Tensor) -> Tensor:
    """GRPO's clipped ratio of the answer's tokens, and a little entropy."""
    ratio = (stats.logprob - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratio * advantage, clipped * advantage) - ENTROPY * stats.entropy


def answers_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits of the answers' tokens, (B, LENGTH, V): each is predicted by the one before."""
    return model(input_ids=ids).logits[:, -LENGTH - 1 : -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = letters()
    model = ll.fuse(small_model(tokenizer).to(device))  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(string.ascii_lowercase), (PROMPTS,)).tolist()
        prompts = [f"{string.ascii_lowercase[i]}:" for i in chosen for _ in range(ANSWERS)]
        asked = tokenizer(prompts, return_tensors="pt").input_ids.to(device)
        ids = model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=True, max_new_tokens=LENGTH
        )
        tokens = ids[:, -LENGTH:]
        answers = ["".join(tokenizer.convert_ids_to_tokens(row)) for row in tokens.tolist()]
        rewards = torch.tensor(list(map(reward, prompts, answers)), device=device)
        groups = rewards.view(PROMPTS, ANSWERS)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1).expand(tokens.shape)
        with torch.no_grad(), ll.lazy_logits():  # nor are these logits made
            old = ll.token_logprobs(answers_of(model, ids), tokens)
        for _ in range(UPDATES):
            loss = ll.row_loss(
                policy_loss, answers_of(model, ids), tokens, rows=(old, advantage), entropy=True
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % max(args.steps // 6, 1) == 0 or step == 1:
            shown = f"{prompts[0]}{answers[0]}"
            print(f"step {step:4}  reward {rewards.mean():.3f}  such as {shown}", flush=True)


if __name__ == "__main__":
    main()
