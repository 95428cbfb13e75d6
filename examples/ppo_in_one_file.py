"""PPO with a reward model and a critic in one file, on torch and transformers alone: to be copied, read and changed.

    python ppo_in_one_file.py          a minute on a CPU

A small language model learns sentences of a toy world; a reward model learns from pairs of answers which one people
prefer, the right and polite one; PPO makes the policy give answers that it scores high. Policy, reference, reward model
and critic are LoRA adapters on one frozen base: four models in the memory of one. A test holds one step here equal to a
step of `rlhf run ppo`. Left out: SFT, checkpoints, evaluation, several cards, 4-bit weights, a cache, micro-batches.

Shapes: B rows, T tokens of prompt and response, right-padded; R response slots; slot t holds the t-th generated token.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Settings:
    """Hyperparameters of PPO. Lengths are in tokens, KL in nats."""

    steps: int = 20
    batch_size: int = 64  # responses of a step
    epochs: int = 2  # passes over them
    minibatches: int = 2  # of each pass
    response_length: int = 10
    learning_rate: float = 3e-3
    kl_coef: float = 0.05
    lam: float = 0.95
    cliprange: float = 0.2
    vf_coef: float = 0.5
    max_grad_norm: float = 1.0


FACTS = {"grass": "green", "snow": "white", "coal": "black", "sky": "blue", "blood": "red", "lemon": "yellow"}
WORDS = f"<pad> <eos> colour of ? it is . enjoy your day go away {' '.join(FACTS)} {' '.join(FACTS.values())}".split()
PAD, EOS = 0, 1


def encode(text: str) -> list[int]:
    """Return the numbers of a text's words."""
    return [WORDS.index(word) for word in text.split()]


def questions(count: int) -> tuple[list[str], list[list[int]]]:
    """Draw things, and return them with the prompts that ask for their colour."""
    things = random.choices([*FACTS], k=count)
    return things, [encode(f"colour of {thing} ?") for thing in things]


def some_answer(thing: str) -> list[int]:
    """Return a response that may be wrong or rude, as those in the data."""
    fact = FACTS[thing] if random.random() < 0.6 else random.choice([*FACTS.values()])
    return [*encode(f"it is {fact} . " + ("enjoy your day ." if random.random() < 0.4 else "go away .")), EOS]


def true_reward(thing: str, response: list[int]) -> float:
    """Return what people think of a response: a point for the fact, half a point for being polite."""
    return float(WORDS.index(FACTS[thing]) in response) + 0.5 * float(WORDS.index("enjoy") in response)


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank adapter for each role: W x + (alpha / r) B A x."""

    active: str | None = None  # the role that computes, of all layers; None: the base alone

    def __init__(self, base: nn.Linear, roles: tuple[str, ...], r: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.a = nn.ParameterDict({role: torch.randn(r, base.in_features) / base.in_features**0.5 for role in roles})
        self.b = nn.ParameterDict({role: torch.zeros(base.out_features, r) for role in roles})

    def forward(self, x: Tensor) -> Tensor:
        role, y = LoraLinear.active, self.base(x)
        return y if role is None else y + self.scale * (x @ self.a[role].T @ self.b[role].T)


class Roles(nn.Module):
    """A causal language model whose linear layers, but the last one, have adapters; and heads of reward and value."""

    def __init__(self, lm: LlamaForCausalLM, r: int = 8, alpha: float = 16.0):
        super().__init__()
        self.lm = lm.requires_grad_(False).eval()
        linears = [(m, n, x) for m in lm.model.modules() for n, x in m.named_children() if isinstance(x, nn.Linear)]
        for module, name, linear in linears:
            setattr(module, name, LoraLinear(linear, ("policy", "reference", "reward", "value"), r, alpha))
        self.heads = nn.ModuleDict({role: nn.Linear(lm.config.hidden_size, 1) for role in ("reward", "value")})

    def adapter(self, role: str) -> list[nn.Parameter]:
        """Return the trained weights of a role."""
        return [each[role] for m in self.modules() if isinstance(m, LoraLinear) for each in (m.a, m.b)]

    def hidden(self, role: str | None, ids: Tensor) -> Tensor:
        """Return the last hidden states (B, T, H). Padding is on the right, where no real token sees it."""
        LoraLinear.active = role
        states: Tensor = self.lm.model(input_ids=ids, use_cache=False).last_hidden_state
        return states


@dataclass
class Rollout:
    """Prompts and their responses."""

    ids: Tensor  # (B, T)
    prompt: Tensor  # (B,) tokens of each prompt
    mask: Tensor  # (B, R) bool: the slots of real response tokens, EOS included

    @property
    def tokens_at(self) -> Tensor:
        """Return the positions (B, R) of the response tokens; those of unused slots are in bounds."""
        return (self.prompt[:, None] + torch.arange(self.mask.shape[1])).clamp(max=self.ids.shape[1] - 1)

    @property
    def last(self) -> Tensor:
        """Return the position (B, 1) of the last token."""
        return (self.prompt + self.mask.sum(1) - 1)[:, None]


def padded(prompts: list[list[int]], responses: list[list[int]]) -> Rollout:
    """Return given prompts and responses as a rollout."""
    rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    sizes = torch.tensor([[len(r)] for r in responses])
    return Rollout(ids, torch.tensor([len(p) for p in prompts]), torch.arange(int(sizes.max())) < sizes)


@torch.no_grad()
def sample(model: Roles, prompts: list[list[int]], settings: Settings) -> Rollout:
    """1. Draw a response to each prompt from the policy."""
    given, slots = padded(prompts, [[]] * len(prompts)), torch.arange(settings.response_length)
    ids, lengths = F.pad(given.ids, (0, settings.response_length)), given.prompt.clone()
    rows, done = torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.bool)
    for _ in slots:
        logits = model.lm.lm_head(model.hidden("policy", ids)[rows, lengths - 1])
        drawn = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        ids[rows[~done], lengths[~done]] = drawn[~done]
        lengths[~done] += 1
        done |= drawn == EOS
    return Rollout(ids, given.prompt, slots < (lengths - given.prompt)[:, None])


def response_states(model: Roles, role: str, rollout: Rollout) -> Tensor:
    """Return the states (B, R, H) from which each response token is predicted: one position before it."""
    hidden = model.hidden(role, rollout.ids)
    return hidden.gather(1, (rollout.tokens_at - 1)[..., None].expand(-1, -1, hidden.shape[-1]))


def logprobs(model: Roles, role: str, rollout: Rollout) -> Tensor:
    """Return log-probabilities (B, R) of the response tokens, in nats."""
    logp = model.lm.lm_head(response_states(model, role, rollout)).log_softmax(-1)
    return logp.gather(-1, rollout.ids.gather(1, rollout.tokens_at)[..., None]).squeeze(-1)


def values(model: Roles, rollout: Rollout) -> Tensor:
    """Return the critic's values (B, R), before each response token."""
    v: Tensor = model.heads["value"](response_states(model, "value", rollout))
    return v.squeeze(-1)


def scores(model: Roles, rollout: Rollout) -> Tensor:
    """Return the reward model's scores (B,), read at the last token."""
    hidden = model.hidden("reward", rollout.ids)
    score: Tensor = model.heads["reward"](hidden.gather(1, rollout.last[..., None].expand(-1, -1, hidden.shape[-1])))
    return score.flatten()


@dataclass
class Batch(Rollout):
    """A rollout and what an update needs of it: (B, R) unless noted, 0 behind the end of a response."""

    scores: Tensor  # (B,) raw
    old_logp: Tensor
    ref_logp: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over real tokens."""
    return torch.where(mask, x, 0.0).sum() / mask.sum()


def gae(rewards: Tensor, values: Tensor, settings: Settings) -> Tensor:
    """Return generalised advantage estimates (B, R): arXiv 1506.02438, eq. 16, gamma = 1."""
    advantages, advantage, next_value = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + next_value - values[:, t]
        advantage = delta + settings.lam * advantage
        next_value, advantages[:, t] = values[:, t], advantage
    return advantages


@torch.no_grad()
def make_batch(model: Roles, rollout: Rollout, settings: Settings, norm: tuple[float, float]) -> Batch:
    """2. Score responses, 3. make rewards of scores and KL, 4. estimate advantages. `norm`: mean and sd of scores."""
    mask, raw = rollout.mask, scores(model, rollout)
    old, ref = (logprobs(model, role, rollout) * mask for role in ("policy", "reference"))
    v = values(model, rollout) * mask
    shaped = (raw - norm[0]) / norm[1]
    last = rollout.tokens_at == rollout.last
    rewards = -settings.kl_coef * (old - ref) + shaped[:, None] * (last & mask)
    advantages = gae(rewards, v, settings)
    returns = advantages + v
    real = advantages[mask]
    white = (advantages - real.mean()) / (real.var() + 1e-8).sqrt() * mask
    return Batch(rollout.ids, rollout.prompt, mask, raw, old, ref, v, white, returns)


def losses(model: Roles, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the clipped losses of policy and critic (arXiv 1707.06347, eq. 7), means over the response tokens."""
    ratio = (logprobs(model, "policy", batch) - batch.old_logp).exp()
    clipped = ratio.clamp(1 - settings.cliprange, 1 + settings.cliprange)
    policy = -mean(torch.minimum(ratio * batch.advantages, clipped * batch.advantages), batch.mask)
    v = values(model, batch)
    near = v.clamp(batch.values - settings.cliprange, batch.values + settings.cliprange)
    critic = mean(torch.maximum((v - batch.returns) ** 2, (near - batch.returns) ** 2), batch.mask) / 2
    return policy, critic


def new_optimizer(model: Roles, settings: Settings) -> torch.optim.AdamW:
    """Return the optimizer of policy and critic, whose gradients are clipped apart."""
    critic = [*model.adapter("value"), *model.heads["value"].parameters()]
    groups = [{"params": parameters} for parameters in (model.adapter("policy"), critic)]
    return torch.optim.AdamW(groups, settings.learning_rate, eps=1e-5, weight_decay=0.0)


def update(model: Roles, batch: Batch, optimizer: torch.optim.Optimizer, settings: Settings) -> list[float]:
    """5. Pass over the batch in minibatches. Return the means of the two losses."""
    taken = []
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(batch.scores)).chunk(settings.minibatches):
            part = Batch(*(getattr(batch, field.name)[rows] for field in fields(batch)))
            policy, critic = losses(model, part, settings)
            (policy + settings.vf_coef * critic).backward()
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(torch.stack([policy.detach(), critic.detach()]))
    return torch.stack(taken).mean(0).tolist()


def fit(parameters: list[nn.Parameter], loss: Callable[[], Tensor], steps: int, lr: float) -> float:
    """Take steps of AdamW on new batches. Return the last loss."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        last = loss()
        last.backward()
        optimizer.step()
    return last.item()


def main(settings: Settings) -> None:
    """Train the base, the reward model and PPO, and print what people think of the answers."""
    random.seed(0)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), bos_token_id=None, eos_token_id=EOS, **shape))

    def pretraining() -> Tensor:
        things, prompts = questions(64)
        ids = padded(prompts, [some_answer(thing) for thing in things]).ids
        return F.cross_entropy(lm(input_ids=ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=PAD)

    def preference() -> Tensor:  # Bradley-Terry
        things, prompts = questions(64)
        pairs = [
            sorted((some_answer(x), some_answer(x)), key=lambda answer, x=x: true_reward(x, answer)) for x in things
        ]
        worse, better = (scores(model, padded(prompts, [*side])) for side in zip(*pairs, strict=True))
        return -F.logsigmoid(better - worse).mean()

    print(f"pretrain: loss {fit([*lm.parameters()], pretraining, 150, 3e-3):.3f}")
    model = Roles(lm)
    reward_model = [*model.adapter("reward"), *model.heads["reward"].parameters()]
    print(f"reward model: loss {fit(reward_model, preference, 100, 3e-3):.3f}")
    before = scores(model, sample(model, questions(256)[1], settings)).detach()
    norm = before.mean().item(), before.std().item()
    for start, critic in zip(model.adapter("reward"), model.adapter("value"), strict=True):
        critic.data.copy_(start)  # the critic starts as the normalised score
    model.heads["value"].weight.data = model.heads["reward"].weight.data / norm[1]
    model.heads["value"].bias.data = (model.heads["reward"].bias.data - norm[0]) / norm[1]
    optimizer = new_optimizer(model, settings)
    for step in range(settings.steps):
        things, prompts = questions(settings.batch_size)
        batch = make_batch(model, sample(model, prompts, settings), settings, norm)
        policy_loss, value_loss = update(model, batch, optimizer, settings)
        truth = sum(map(true_reward, things, batch.ids.tolist())) / len(things)
        print(f"ppo {step + 1}: true reward {truth:.2f} of 1.5, losses {policy_loss:.3f} {value_loss:.3f}")


if __name__ == "__main__":
    main(Settings())
