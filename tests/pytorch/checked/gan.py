"""A GAN in a loop of its own. With `own` each rank trains its critic by its own gradient."""

import sys

import torch

import elastic_agent.torch as elastic

torch.manual_seed(1)
generator = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
critic = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
likeness = torch.nn.functional.binary_cross_entropy_with_logits

state = elastic.State(generator=generator, critic=critic, optimizers=[of_generator, of_critic])
with elastic.Loop(state) as loop:
    while loop.step_number < 1000:
        with loop.step():
            torch.manual_seed(loop.step_number * 1000 + loop.rank)
            real, fake = torch.randn(8, 2) + 3, generator(torch.randn(8, 4))
            of_critic.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))
            likeness(scores, torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])).backward()
            if "own" not in sys.argv:
                loop.mean_gradients(critic)
            of_critic.step()
            of_generator.zero_grad()
            likeness(critic(fake), torch.ones(8, 1)).backward()
            loop.mean_gradients(generator)
            of_generator.step()
