"""A script of two sessions: the second has the model of the first as its teacher. It ends with the epoch that the test
names."""

import os
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent
import elastic_agent.torch as elastic

torch.set_num_threads(1)
elastic_agent.ready()

import harness  # noqa: E402

harness.report_start()

SAMPLES = 240
torch.manual_seed(int(os.environ["GROUP_RANK"]))
pixels, labels = harness.digits(SAMPLES)
dataset = TensorDataset(pixels.double(), labels, torch.arange(SAMPLES))


def built():
    model = torch.nn.Linear(64, 10).double()
    sampler = elastic.ElasticBatchSampler(dataset, 30, seed=7)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), sampler, DataLoader(dataset, batch_sampler=sampler)


def tell(event, model, **facts):
    # The environment may have the next round's already, while this rank does the rest of a step that is lost.
    harness.ROUND = session._members.place["round"]
    total = sum(float(one.detach().abs().sum()) for one in model.parameters())
    harness.trace(event, pid=os.getpid(), sum=total, **facts)


teacher, optimizer, sampler, loader = built()
with elastic.Session(teacher, optimizer, sampler, name="teacher") as session:
    for images, numbers, _ in session.steps(loader, epochs=2):
        session.backward(torch.nn.functional.cross_entropy(teacher(images), numbers))
        session.step()
    tell("taught", teacher, step=session.step_number)
teacher.requires_grad_(False)
model, optimizer, sampler, loader = built()
with elastic.Session(model, optimizer, sampler, name="pupil") as session:
    while session.epoch < harness.wanted("epochs"):
        for images, _, places in session.steps(loader, epochs=session.epoch + 1):
            tell("uses", model, step=session.step_number, epoch=session.epoch, used=places.tolist())
            session.backward(torch.nn.functional.mse_loss(model(images), teacher(images)))
            if session.step():
                tell("applied", model, step=session.step_number)
            if not harness.is_set("epochs"):
                time.sleep(0.05)
    tell("end", model, step=session.step_number)
harness.exit_now()
