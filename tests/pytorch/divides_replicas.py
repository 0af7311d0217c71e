"""Two replicas of a small model are trained in a Session, whose ranks divide it along several dimensions: `tensor` has
two parts of each layer, `both` two shards of these, `copies` two copies of two shards, and `pipeline` two stages, which
are divided in two shards or two parts of each layer in `staged-shards` and `staged-parts`. A sum is broken on one rank
alone. In the end parameters and checkpoint are those of a training on one rank, without a mesh."""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent import worker
from elastic_agent.torch import boxes, checkpoints, refusals
from elastic_agent.torch import replica as replicas
from elastic_agent.torch.replica import Replica, shape_of

WAYS = {
    "tensor": (2, {"tensor": 2}),
    "both": (4, {"tensor": 2}),
    "copies": (4, {"replicate": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "staged-shards": (4, {"pipeline": 2}),
    "staged-parts": (4, {"pipeline": 2, "tensor": 2}),
}
SEQUENCE = 4
# The samples of a step and of an epoch. The batches of a pipeline have one size, on all ranks of a stage.
BATCH, SAMPLES = {"pipeline": (10, 42), "staged-parts": (10, 42), "staged-shards": (12, 52)}.get(sys.argv[2], (10, 43))
# Along the sequence the ranks of "tensor" share the normalization: each has a part of its gradient.
PLAN = {
    "0": ColwiseParallel(output_layouts=Shard(1)),
    "1": SequenceParallel(),
    "3": RowwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def built(seed):
    torch.manual_seed(seed)
    parts = torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
    return torch.nn.Sequential(*parts).double()


def loss_of(found, labels, reduction="sum"):
    return torch.nn.functional.cross_entropy(found.mean(1), labels, reduction=reduction)


def train(model, broken=lambda session: False, counted=True, schedule=None, **settings):
    """Two epochs, whose last step has fewer samples than ranks that read. Returns the samples that this rank has used,
    by steps, the norms of gradients, and the sum of losses in the end."""
    pixels = torch.linspace(-1, 1, SAMPLES * SEQUENCE * 5, dtype=torch.float64).reshape(SAMPLES, SEQUENCE, 5).sin()
    dataset = TensorDataset(pixels, torch.arange(SAMPLES) % 3, torch.arange(SAMPLES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = elastic.ElasticBatchSampler(dataset, global_batch=BATCH, micro_batch=2, seed=3)
    used, norms = {}, []

    def passes(run, inputs, **target):
        return run(*[inputs] * schedule._stage.is_first, **target)

    def measure(batch):
        found = passes(schedule.eval, batch[0], target=batch[1]) if schedule else model(batch[0])
        return 0.0 if found is None else loss_of(found, batch[1])

    session = elastic.Session(model, optimizer, sampler, **settings)
    if schedule:
        session.warm_up(lambda: passes(schedule.step, dataset[:2][0], target=dataset[:2][1]))
    with session:
        for inputs, labels, places in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=2):
            if session._step.done == 0:
                used[session.step_number] = []
            if session._step.batches != [0]:
                used[session.step_number] += places.tolist()
            if broken(session):
                session._members.group.cut()
            if schedule:
                assert len(labels) == 2, labels
                with session.backward_pass(count=len(labels)):
                    passes(schedule.step, inputs, target=labels)
                ranks.refused("session.backward_pass is for a batch", session.backward_pass().__enter__, RuntimeError)
            else:
                loss = loss_of(model(inputs), labels, reduction="sum" if counted else "mean")
                session.backward(loss, count=len(labels) if counted else None)
            norm = session.clip(0.2)
            if session.step():
                norms.append(float(norm))
        measured = session.evaluate(DataLoader(dataset, batch_size=2), measure)
    assert len(norms) == 10, norms
    return used, norms, float(measured)


def divided(way, seed):
    size, dimensions = WAYS[way]
    mesh = elastic.replica_mesh(1, **dimensions)
    model = built(seed)
    first, plan = "4", PLAN
    if "pipeline" in dimensions:
        # Both stages have the same names for some of their parameters.
        cut, later = 4 if "tensor" in dimensions else 3, mesh.get_local_rank("pipeline") > 0
        first, model = "0", torch.nn.Sequential(*(model[cut:] if later else model[:cut]))
        plan = {"0": ColwiseParallel(output_layouts=Replicate())} if later else PLAN
    if "tensor" in dimensions:
        parallelize_module(model, mesh["tensor"], plan)
    if "shard" in mesh.mesh_dim_names and mesh["shard"].size() > 1:
        shards = mesh["replicate", "shard"] if "replicate" in dimensions else mesh["shard"]
        if first == "4":
            for part in (*model[:2], model[3]):
                fully_shard(part, mesh=shards)
        ranks.refused(f"'{first}.weight' is not sharded over", lambda: elastic.Session(model, None, None))
        fully_shard(model, mesh=shards)
    return model


def schedule_of(model):
    mesh = elastic.replica_mesh(1)
    at, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    stage = PipelineStage(model, at, 2, torch.device("cpu"), group=group)
    return Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=False)


def of_all_stages(about, parameters, state, layout):
    """The parameters of both stages, whose states of an optimizer have the same names. And what pipelines refuse."""
    assert len(state) == len(parameters) and state[0]["step"] == 10, state
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, parameters)
    four = dataclasses.replace(layout, mesh=(4, *layout.mesh[1:]))
    ranks.refused("a pipeline of 2 stages, and this job's model has 4", lambda: checkpoints.read(about, four))
    if len(layout.mesh) == 1:
        refuses_pipelines()
    if "shard" in layout.names:
        sampler = elastic.ElasticBatchSampler(52, global_batch=10, micro_batch=2)
        ranks.refused("micro_batch, now 2 times the 2 shards", lambda: refusals._fit_pipeline(sampler, 2))
    return [*found[0], *found[-1]]


def refuses_pipelines():
    for length, micro in ((43, 2), (42, 3), (42, 4)):
        sampler = elastic.ElasticBatchSampler(length, global_batch=BATCH, micro_batch=micro)
        made = functools.partial(elastic.Session, torch.nn.Linear(2, 2), [], sampler)
        ranks.refused("all batches of a pipeline have one size", made)
    synced = torch.nn.Sequential(torch.nn.SyncBatchNorm(2))
    ranks.refused("is a SyncBatchNorm", lambda: elastic.Session(synced, [], None))


def as_on_one_rank(parameters, norms, measured, kept):
    """After this there is no mesh."""
    ranks.alone()
    torch.distributed.destroy_process_group()
    replicas._mesh = None
    whole = built(seed=0)
    _, of_whole, of_samples = train(whole, counted=False)
    assert abs(measured - of_samples) < 1e-8 * of_samples, (measured, of_samples)
    assert torch.allclose(torch.tensor(norms), torch.tensor(of_whole), rtol=1e-8), (norms, of_whole)
    assert len(parameters) == len(list(whole.parameters()))
    for one, (name, other) in zip(parameters, whole.named_parameters()):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), (name, one, other)
        assert kept is None or torch.equal(kept[name], one), name


def rank(port, way, folder, number):
    size, dimensions = WAYS[way]
    os.environ.update(LOCAL_RANK=str(number % size), LOCAL_WORLD_SIZE=str(size), RANK=str(number))
    os.environ["WORLD_SIZE"] = str(2 * size)
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, 2, size)
    committed = folder / "committed"
    worker.commit_checkpoint = lambda step, path, digest, timeout: committed.write_text(
        json.dumps({"step": step, "path": str(path), "digest": digest})
    )
    worker.training_is_over = lambda *_: None
    model, staged = divided(way, seed=number // size), dimensions.get("pipeline", 1) > 1
    schedule = schedule_of(model) if staged else None
    broken = []

    def breaks(session):
        if number == 1 and session.step_number == 4 and not broken:
            broken.append(True)
            return True
        return False

    used, norms, measured = train(model, breaks, schedule=schedule, checkpoint_dir=folder)
    assert agent.place["round"] == 2, agent.place
    parameters = [one.detach().full_tensor() if boxes.is_sharded(one) else one.detach() for one in model.parameters()]

    # Ranks that hold parts of one layer have used the same samples, and all others have used each once
    replica, told = Replica(model), [None] * size
    torch.distributed.all_gather_object(told, (used, measured))
    # Of a pipeline the last stage has it
    measured, told = told[-1][1], [one for one, _ in told]
    parts, in_a_row = dimensions.get("tensor", 1), size // dimensions.get("pipeline", 1)
    assert all(told[at] == told[at % in_a_row // parts * parts] for at in range(size)), told
    assert replica.readers == in_a_row // parts
    assert len({json.dumps(used) for used in told}) == replica.readers, told

    # Each rank finds its part in the checkpoint, and the state of the optimizer with it
    torch.distributed.barrier()
    about = json.loads(committed.read_text())
    assert about["step"] == 10, about
    mine = checkpoints.read(about, replica.layout, replica.mesh_of)
    for name, one in model.named_parameters():
        found = mine["model"][name]
        assert torch.equal(boxes.part_of(found), boxes.part_of(one)), name
        assert boxes.is_sharded(one) is boxes.is_sharded(found), name
        assert not boxes.is_sharded(one) or found.placements == one.placements, (found.placements, one.placements)
    model.load_state_dict(mine["model"])
    other = boxes.Layout((size,), (0,), (0,), ("shard",))
    ranks.refused("the dimensions", lambda: checkpoints.read(about, other, replica.mesh_of))
    if staged:
        parameters = of_all_stages(about, parameters, mine["optimizer"]["state"], replica.layout)
    if way == "both":
        # A mesh of another size reads it too
        of_four = init_device_mesh("cpu", (1, 4), mesh_dim_names=("shard", "tensor"))
        layout = boxes.Layout((1, 4), (0, number % 4), (0, 1), ("shard", "tensor"))
        state = checkpoints.read(about, layout, lambda sharded: of_four[tuple(sharded["names"])])["model"]
        for (name, _), one in zip(model.named_parameters(), parameters):
            assert torch.equal(state[name].full_tensor(), one), name
    torch.distributed.barrier()

    # A layer that only one of them has
    model = torch.nn.Linear(5, 2 + number % size)
    if way != "pipeline":
        ranks.refused("pipeline", lambda: elastic.Session(model, None, None))

    if number == 0:
        as_on_one_rank(parameters, norms, measured, None if staged else checkpoints.read(about)["model"])
    os._exit(0)


def decisions():
    assert shape_of(8) == {"shard": 8}
    assert list(shape_of(16, 2, 4).items()) == [("replicate", 2), ("shard", 2), ("tensor", 4)]
    ranks.refused("replicate=1 copies of the model times tensor=4", lambda: shape_of(6, tensor=4))
    assert shape_of(4, pipeline=4) == {"pipeline": 4}
    assert list(shape_of(16, tensor=2, pipeline=4).items()) == [("pipeline", 4), ("shard", 2), ("tensor", 2)]
    ranks.refused("divided into pipeline=4 stages times", lambda: shape_of(6, pipeline=4))
    # What fully_shard cuts into three lies in the pieces of two parts of a layer, with the remainder in the first ones.
    cut = {"shape": [11, 2], "placements": ["_S(0, 2)", "S(0)"], "mesh": [3, 2], "names": ["shard", "tensor"]}
    layouts = [boxes.Layout((3, 2), (one, other), (0, 1), ("shard", "tensor")) for one in range(3) for other in range(2)]
    found = [boxes.box_for({"sharded": cut}, layout) for layout in layouts]
    assert [one.offset[0] for one in found] == [0, 6, 2, 8, 4, 10] and [one.shape[0] for one in found] == [2, 2, 2, 2, 2, 1]
    # In a mesh of another size they are cut as that one is.
    layout = boxes.Layout((1, 4), (0, 3), (0, 1), ("shard", "tensor"))
    placements, mesh, place = layout.place(cut)
    assert (placements, mesh, place) == (["_S(0, 4)", "S(0)"], (1, 4), (0, 3))
    assert boxes.box_for({"sharded": cut}, layout) == boxes.Box((9, 0), (2, 2))


if __name__ == "__main__":
    decisions()
    with tempfile.TemporaryDirectory() as scratch:
        port, way, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(scratch)
        ranks.run(2 * WAYS[way][0], lambda number: rank(port, way, folder, number))
