"""Learns by playing, in a loop of its own. With `own` a rank ends when its own games go well."""

import sys

import torch

import elastic_agent.torch as elastic

torch.manual_seed(1)
policy = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
state = elastic.State(policy=policy, optimizer=optimizer, baseline=0.0)


def play(seed):
    """The reward is how often the action is the side on which most of what is seen lies."""
    games = torch.Generator().manual_seed(seed)
    seen = torch.randn(32, 4, generator=games)
    chances = torch.distributions.Categorical(logits=policy(seen))
    actions = torch.multinomial(chances.probs.detach(), 1, generator=games).squeeze(1)
    return chances.log_prob(actions), (actions == (seen.sum(1) > 0)).float()


with elastic.Loop(state) as loop:
    while loop.step_number < 1000:
        with loop.step():
            chances, rewards = play(loop.step_number * 1000 + loop.rank)
            optimizer.zero_grad()
            (-chances * (rewards - state.baseline)).mean().backward()
            loop.mean_gradients(policy)
            optimizer.step()
            reward = float(rewards.mean()) if "own" in sys.argv else loop.mean(rewards.mean())
            state.baseline = 0.9 * state.baseline + 0.1 * loop.mean(reward)
        if reward > (0.6 if "own" in sys.argv else 0.95):
            break
