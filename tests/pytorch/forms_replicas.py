"""Two nodes of two ranks each hold one replica of a small model on each node, and train it in a Session. With the word
`across`, four nodes of one rank hold two replicas. A sum is broken on one rank alone, and all ranks must come to one
decision, or they would never meet again. In the end the parameters are those of a training on one rank, without shards.
"""

import os
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastic_agent.torch as elastic
import ranks
from elastic_agent.torch.group import GroupLost
from elastic_agent.torch.replica import Replica, ReplicaLost, newest_of_all, peers_of

# Ranks of a replica, and ranks of a node.
SIZE, LOCAL = 2, 1 if "across" in sys.argv[2:] else 2
NODES, SAMPLES, BATCH = 4 // LOCAL, 43, 10


def built(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def train(model, broken=lambda session: False, counted=True):
    """Two epochs, whose last step has fewer samples than there are ranks. Returns the steps in order."""
    pixels = torch.linspace(-1, 1, SAMPLES * 5, dtype=torch.float64).reshape(SAMPLES, 5).sin()
    dataset = TensorDataset(pixels, torch.arange(SAMPLES) % 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = elastic.ElasticBatchSampler(dataset, global_batch=BATCH, micro_batch=2, seed=3)
    begun, applied = [], []
    with elastic.Session(model, optimizer, sampler) as session:
        for inputs, labels in session.steps(DataLoader(dataset, batch_sampler=sampler), epochs=2):
            if session._step.done == 0:
                begun.append(session.step_number)
            if broken(session):
                session._members.group.cut()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum" if counted else "mean")
            session.backward(loss, count=len(labels) if counted else None)
            session.clip(1.0)
            if session.step():
                applied.append(session.step_number)
    assert applied == list(range(1, 11)), applied
    return begun


def rank(port, number):
    os.environ.update(LOCAL_RANK=str(number % LOCAL), LOCAL_WORLD_SIZE=str(LOCAL), RANK=str(number), WORLD_SIZE="4")
    torch.set_num_threads(1)
    agent = ranks.Agent(port, number, NODES, LOCAL)
    agent.place["nodes_per_replica"] = SIZE // LOCAL
    ranks.refused("--replica-nodes=3", lambda: elastic.replica_mesh(3), SystemExit)
    mesh = elastic.replica_mesh(SIZE // LOCAL) if LOCAL == 1 else elastic.node_mesh()
    alone = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("all", "one"))["one"]
    other = fully_shard(built(seed=0), mesh=alone)
    ranks.refused("node_mesh()", lambda: elastic.Session(other, None, None))
    model = built(seed=number // SIZE)
    fully_shard(model[0], mesh=mesh)
    ranks.refused("'2.weight' is not sharded", lambda: elastic.Session(model, None, None))
    fully_shard(model, mesh=mesh)

    # When one rank's sum is broken in step 4, then no rank has applied it, and all do it again
    broken = []

    def breaks(session):
        if number == 1 and session.step_number == 4 and not broken:
            broken.append(True)
            return True
        return False

    begun = train(model, breaks)
    assert [begun.count(step) for step in (3, 4, 5)] == [1, 2, 1], begun
    assert agent.place["round"] == 2, agent.place
    parameters = [one.detach().full_tensor() for one in model.parameters()]

    # When one rank has lost a peer, then all of its replica have, and the other replica gets the sums
    replica = Replica(model)

    def exchange():
        if number == 2:
            raise GroupLost("a peer is gone")
        return number, 1

    try:
        assert replica.together(exchange) == (1, 2) and number < SIZE
    except GroupLost as lost:
        assert number >= SIZE and ("a peer is gone" in str(lost)) == (number == 2), lost

    assert replica.common([(3, 1), (4, 1), (5, number)]) == (4, 1)
    if number == 3:
        os._exit(0)
    if number == 2:
        try:
            replica.together(lambda: None)
        except ReplicaLost as lost:
            assert "is gone, and with it a part of the model" in str(lost), lost
        else:
            raise AssertionError("the other rank of this replica is gone")
    if number == 0:
        ranks.alone()
        whole = built(seed=0)
        train(whole, counted=False)
        for one, other in zip(parameters, whole.parameters()):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), (one, other)
    os._exit(0)


def decisions():
    place = {"rank": 2, "world_size": 4, "group_rank": 1, "group_world_size": 2, "round": 3}
    peers = peers_of(place, 0, 2)
    assert (peers["rank"], peers["world_size"], peers["among"], peers["round"]) == (1, 2, "part 0", 3)
    # Node 5 of 6, where two nodes hold a replica
    place_of_three = {"rank": 11, "world_size": 12, "group_rank": 5, "group_world_size": 6, "nodes_per_replica": 2}
    peers = peers_of(place_of_three, 1, 2)
    assert (peers["rank"], peers["world_size"], peers["among"]) == (2, 3, "part 3"), peers
    # Three workers on one node, and one on the other
    ranks.refused("different numbers of workers", lambda: peers_of({**place, "rank": 3}, 0, 1))
    ranks.refused("different numbers of workers", lambda: peers_of({**place, "group_rank": 0}, 2, 3))
    assert newest_of_all([[(7, 1), (8, 1)], [(8, 1), (9, 1)]]) == (8, 1)
    # The same step of another round is another step
    assert newest_of_all([[(8, 2), (7, 1)], [(8, 1), (7, 1)]]) == (7, 1)
    assert newest_of_all([[(8, 1)], []]) is None


if __name__ == "__main__":
    decisions()
    ranks.run(NODES * LOCAL, lambda number: rank(int(sys.argv[1]), number))
