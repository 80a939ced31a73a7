"""GRPO without a framework: a fused model samples answers, and learns from their rewards.

    python examples/grpo.py

The script needs the package transformers, but neither a network nor a GPU. The model is small and
random. Every letter is a token, and the task is to repeat a letter. Each step samples several
answers to each prompt. The sampling runs under no_grad, where small logits of a fused head are
plain. The advantage of an answer is its reward relative to the rewards of the other answers to the
same prompt. After the sampling, each step updates the weights twice. `row_loss` computes the policy
loss of an update, including the entropy, without materialising the logits.
"""

import argparse
import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import logitless as ll

PROMPTS, ANSWERS, LENGTH = 16, 16, 6  # prompts per step, answers per prompt, tokens per answer
UPDATES, CLIP, ENTROPY = 2, 0.2, 0.003


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the letters, and the colon that ends a prompt."""
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
    """The fraction of the answer's tokens that equal the prompt's letter."""
    return answer.count(prompt[0]) / LENGTH


def policy_loss(stats: ll.RowStats, old: Tensor, advantage: Tensor) -> Tensor:
    """GRPO's clipped loss per token, with a small entropy bonus."""
    ratio = (stats.logprob - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratio * advantage, clipped * advantage) - ENTROPY * stats.entropy


def answer_logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits (B, LENGTH, V) that predict the tokens of the answers."""
    return model(input_ids=ids).logits[:, -LENGTH - 1 : -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = letters()
    model = ll.fuse(small_model(tokenizer).to(device))  # the only line that logitless needs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(string.ascii_lowercase), (PROMPTS,)).tolist()
        prompts = [f"{string.ascii_lowercase[i]}:" for i in chosen for _ in range(ANSWERS)]
        prompt_ids = tokenizer(prompts, return_tensors="pt").input_ids.to(device)
        ids = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            do_sample=True,
            max_new_tokens=LENGTH,
        )
        tokens = ids[:, -LENGTH:]
        answers = ["".join(tokenizer.convert_ids_to_tokens(row)) for row in tokens.tolist()]
        rewards = torch.tensor(list(map(reward, prompts, answers)), device=device)
        groups = rewards.view(PROMPTS, ANSWERS)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1).expand(tokens.shape)
        with torch.no_grad(), ll.lazy_logits():  # lazy logits are not materialised
            old = ll.token_logprobs(answer_logits(model, ids), tokens)
        for _ in range(UPDATES):
            loss = ll.row_loss(
                policy_loss, answer_logits(model, ids), tokens, rows=(old, advantage), entropy=True
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % max(args.steps // 6, 1) == 0 or step == 1:
            example = f"{prompts[0]}{answers[0]}"
            print(f"step {step:4}  reward {rewards.mean():.3f}  example {example}", flush=True)


if __name__ == "__main__":
    main()
