"""The workers that hold one replica of a model: one worker, or all workers of a node or of several if the model is
sharded. None of these can compute without the others: they live and die together."""

from __future__ import annotations

import math
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import worker
from .boxes import Layout, is_sharded, part_of, sharded_dimension
from .group import GroupLost, meet
from .keeper import say
from .snapshots import fingerprint

# Seconds to wait for news of a node that served the store, and is gone.
_NEWS = 15.0

# Seconds in which the agent has noticed the end of a worker.
_LOOK_AROUND = 1.0
_LOST = (
    "another worker of this replica is gone, and with it a part of the model. This worker ends, too; the "
    "agents start all of them again, and they get the state from another replica"
)

# How to train a model that no session trains.
_OTHERWISE = "Train it in a loop of your own with elastic_agent.torch.Snapshots: it loses no step either"

# The most numbers that an operation between peers returns.
_NUMBERS = 6

_mesh: Any = None


class ReplicaLost(RuntimeError):
    """Another worker of this replica is gone, and with it a part of the model."""


def node_mesh(device_type: str = "cpu", *, replicate: int = 1, tensor: int = 1) -> Any:
    """The device mesh of this node's workers, which hold one replica: `replica_mesh` of one node."""
    return replica_mesh(1, device_type, replicate=replicate, tensor=tensor)


def replica_mesh(
    nodes: int, device_type: str = "cpu", *, replicate: int = 1, tensor: int = 1, pipeline: int = 1
) -> Any:
    """The device mesh of the workers of this replica's nodes. A model that is divided over it is one replica, and
    `elastic_agent.torch.Session` trains one on each `nodes` nodes. The agents have the same number in `--replica-nodes`.

    ::

        mesh = elastic.replica_mesh(nodes=2, tensor=4)       # 16 workers: "shard" has 4, "tensor" 4
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"])

    - tensor: so many workers in a row compute on the same samples, each a part of every layer (tensor parallelism). The
      mesh has then a last dimension of this name, for `parallelize_module`.
    - replicate: so many copies of the model are in the replica (HSDP inside it). The mesh has then a first dimension of
      this name: give `fully_shard` the mesh `mesh["replicate", "shard"]`.
    - The other dimension is named "shard", and has the workers that are left. If they are several, `fully_shard` has to
      divide all that is trained over it.
    - pipeline: into so many stages the model is divided, whose workers read the same samples. The mesh has then a first
      dimension of this name, and "shard" only if workers are left for it. A worker trains `PipelineStage(stage,
      mesh.get_local_rank("pipeline"), …, group=mesh.get_group("pipeline"))` by `Session.backward_pass`. Its stage may be
      divided over the other dimensions.

    Raises ValueError if the workers cannot be divided so.

    Call it after the slow imports: it waits for the worker's place, as `elastic_agent.ready` does, and for the replica's
    other workers. It makes torch.distributed's default group, of these workers and for the life of the process. If one
    of them dies, the agents start all of them again.
    """
    # Older versions of PyTorch, under which whole models train, do not have it.
    from torch.distributed.device_mesh import init_device_mesh

    global _mesh
    if _mesh is None:
        # None: for each kind of device the one that PyTorch takes by itself.
        backend = "gloo" if device_type == "cpu" else None
        if worker.available():
            store, rank, size = _meet_replica(nodes)
        else:
            store, rank, size = dist.HashStore(), 0, 1
        shape = shape_of(size, replicate, tensor, pipeline)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        _mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    return _mesh


def shape_of(workers: int, replicate: int = 1, tensor: int = 1, pipeline: int = 1) -> dict[str, int]:
    """The names and sizes of the dimensions of a replica's mesh. Raises ValueError if so many workers do not fill it."""
    known = pipeline * replicate * tensor
    if min(pipeline, replicate, tensor) < 1 or workers % known:
        raise ValueError(
            f"a replica has {workers} workers, which cannot be divided into pipeline={pipeline} stages times "
            f"replicate={replicate} copies of the model times tensor={tensor} parts of a layer: the product of these has "
            "to divide the workers, which are --nproc-per-node times the nodes of a replica"
        )
    shape = {"pipeline": pipeline, "replicate": replicate, "shard": workers // known, "tensor": tensor}
    return {name: size for name, size in shape.items() if size > 1 or (name == "shard" and pipeline == 1)}


def has_foreign_group() -> bool:
    """Whether torch.distributed's default group was made, and not by `replica_mesh`."""
    return _mesh is None and dist.is_available() and dist.is_initialized()


class Replica:
    """One replica of the model, as one of its ranks sees it.

    The ranks that hold the same part in all replicas are peers. An operation between peers may fail for one rank of a
    replica and not for another: `together` brings them to one result.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises ValueError for a model that is divided in a way that no session can train."""
        # Into how many stages a pipeline divides the model.
        self.stages = _size_along(_mesh, "pipeline")
        if _mesh is not None and worker.available():
            stage = _mesh.get_local_rank("pipeline") if self.stages > 1 else 0
            if len(set(_gather((stage, fingerprint(model))))) > self.stages:
                raise ValueError(
                    "the workers of a replica, or of a stage, hold different layers: for the stages of a pipeline call "
                    "elastic_agent.torch.replica_mesh(…, pipeline=STAGES)"
                )
        self.mesh = _mesh_of(model)
        self.size = 1 if self.mesh is None else self.mesh.size()
        # How many of its ranks compute on samples of their own. Those of one pipeline, and those that hold parts of the
        # same layers in a row, read the same samples. The first of them is the one that counts.
        self._tensor = _size_along(self.mesh, "tensor")
        self.readers = self.size // self._tensor // self.stages
        # Which part of the model this rank has. None where it has all of it.
        self.layout = None if self.mesh is None else _layout_on(self.mesh)
        # A value that only the ranks of this replica share, as long as they live.
        self.word = secrets.token_hex(4) if self.mesh is None else _gather(secrets.token_hex(4))[0]

    def is_first(self, rank: int) -> bool:
        """Whether a rank of the round belongs to the first of its replicas."""
        return rank < self.size

    def peers(self, place: dict[str, Any]) -> dict[str, Any]:
        """This rank's place among its peers. Raises ValueError where nodes have different numbers of workers."""
        return place if self.mesh is None else peers_of(place, worker.local_rank(), self.size // _nodes_of(place))

    def among_readers(self, place: dict[str, Any]) -> tuple[int, int]:
        """This rank's place among all ranks of the round that read samples of their own, and how many these are."""
        replica, part = divmod(place["rank"], self.size)
        own = part % (self.size // self.stages) // self._tensor
        return replica * self.readers + own, place["world_size"] // self.size * self.readers

    @property
    def is_reader(self) -> bool:
        """Whether this rank is the one that counts of those that read the same samples."""
        return self.part < self.size // self.stages and self.part % self._tensor == 0

    @property
    def part(self) -> int:
        """Which of the replica's ranks this is."""
        return 0 if self.mesh is None else dist.get_rank()

    def mesh_of(self, sharded: dict[str, Any]) -> Any:
        """The device mesh of what is described as sharded: the replica's, or some of its dimensions."""
        return _along(self.mesh, sharded.get("names"))

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scales the gradient of the whole model down to a norm of `max_norm` at most. Returns what its norm was."""
        if self.mesh is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        # PyTorch adds up no tensors that lie on different meshes.
        held = [one for one in parameters if one.grad is not None]
        parts = [part_of(one.grad) for one in held]
        total = torch.zeros((), dtype=torch.float64)
        for one, norm in zip(held, torch._foreach_norm(parts)):
            total += norm.double().cpu().square() / self._copies(one)
        _exchange(lambda: dist.all_reduce(total))
        norm = total.sqrt()
        torch._foreach_mul_(parts, min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def _copies(self, parameter: torch.nn.Parameter) -> int:
        """How many ranks of the replica hold the same piece of a parameter."""
        pairs = zip(parameter.device_mesh.shape, map(str, parameter.placements)) if is_sharded(parameter) else ()
        pieces = math.prod(size for size, one in pairs if sharded_dimension(one) is not None)
        return self.size // self.stages // pieces

    def together(self, operation: Callable[[], Sequence[float] | None]) -> tuple[float, ...]:
        """Runs what this rank does with its peers, on all ranks of the replica. Returns the sums of the few numbers that
        it returned on each. Raises GroupLost on all of them if one did."""
        if self.mesh is None:
            return tuple(operation() or ())
        told, lost, own = torch.zeros(1 + _NUMBERS, dtype=torch.float64), "", ()
        try:
            own = tuple(operation() or ())
            told[1 : 1 + len(own)] = torch.tensor(own, dtype=torch.float64)
        except GroupLost as error:
            # Not the error itself: with its frames it would keep the group's connections.
            told[0], lost = 1, str(error)
        _exchange(lambda: dist.all_reduce(told))
        failed, *counts = told.tolist()
        if failed:
            raise GroupLost(lost or "another worker of this replica has lost a peer")
        return tuple(counts[: len(own)])

    def end_with_the_others(self, error: RuntimeError) -> None:
        """Ends this process at once if another rank of the replica is lost, which then caused `error`: the interpreter's
        own end takes a second, and all other nodes would wait."""
        if self.mesh is None or not worker.available() or not worker.forms_within(_LOOK_AROUND):
            return
        traceback.print_exception(error)
        if not isinstance(error, ReplicaLost):
            say(_LOST)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def common(self, held: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """The newest snapshot that all ranks of the replica hold, of those `held` here: each a step and a round."""
        mine = list(held)
        return newest_of_all([mine] if self.mesh is None else _gather(mine))


def _gather(mine: Any) -> list[Any]:
    """What each worker of the replica gives."""
    found: list[Any] = [None] * dist.get_world_size()
    _exchange(lambda: dist.all_gather_object(found, mine))
    return found


def _exchange(operation: Callable[[], None]) -> None:
    try:
        operation()
    except RuntimeError as error:
        raise ReplicaLost(f"{_LOST}: {error}") from error


def peers_of(place: dict[str, Any], local_rank: int, local_size: int) -> dict[str, Any]:
    """The place among the ranks that hold the same part: one of each replica."""
    nodes = _nodes_of(place)
    part = _part(place, local_rank, local_size)
    replicas = {"rank": place["group_rank"] // nodes, "world_size": place["group_world_size"] // nodes}
    return {**place, **replicas, "among": f"part {part}"}


def _nodes_of(place: dict[str, Any]) -> int:
    """How many nodes hold one replica. The agent does not say so if it is one."""
    return place.get("nodes_per_replica") or 1


def _part(place: dict[str, Any], local_rank: int, local_size: int) -> int:
    """Which rank of its replica this is: a replica has nodes with ranks in a row."""
    if (place["rank"], place["world_size"]) != (
        place["group_rank"] * local_size + local_rank,
        place["group_world_size"] * local_size,
    ):
        raise ValueError(
            f"the nodes have different numbers of workers ({place['world_size']} on {place['group_world_size']} nodes, "
            f"{local_size} on this one): a sharded model needs the same --nproc-per-node on all, as each replica holds "
            "all of it"
        )
    return place["group_rank"] % _nodes_of(place) * local_size + local_rank


def newest_of_all(held: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int] | None:
    """The newest of what every rank holds. Each is a step and the round in which it was done."""
    return max(set.intersection(*(set(map(tuple, one)) for one in held)), default=None)


def _mesh_of(model: torch.nn.Module) -> Any:
    """What the model is divided over. None if every rank holds all of it."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    sharded = [(name, one) for name, one in model.named_parameters() if is_sharded(one)]
    if not sharded and _size_along(_mesh, "pipeline") == 1:
        return None
    for name, one in sharded:
        if _mesh is None or _along(_mesh, one.device_mesh.mesh_dim_names) != one.device_mesh:
            raise ValueError(
                f"the parameter {name!r} is sharded, and not by fully_shard or parallelize_module over a mesh of "
                "elastic_agent.torch.node_mesh() or replica_mesh(): a session needs whole replicas of the model. "
                f"{_OTHERWISE}"
            )
    # Along these fully_shard takes the mean of the gradients that ranks compute.
    means = {name for name, size in zip(_mesh.mesh_dim_names, _mesh.shape) if size > 1} - {"pipeline", "tensor"}
    for name, one in trained:
        if lacks := means - set(_dimensions_of(one)):
            raise ValueError(
                f"the parameter {name!r} is not sharded over {' and '.join(sorted(lacks))}: call fully_shard on the "
                "whole model, too"
            )
    return _mesh


def _dimensions_of(parameter: Any) -> Iterator[str]:
    """The dimensions of the mesh that a parameter lies on. Raises ValueError for a placement that no state can have."""
    pairs = zip(parameter.device_mesh.mesh_dim_names, parameter.placements) if is_sharded(parameter) else ()
    for name, placement in pairs:
        if sharded_dimension(str(placement)) is not None or name != "shard":
            yield name


def _along(mesh: Any, names: Sequence[str] | None) -> Any:
    """A mesh, or some dimensions of it. None if it has not these."""
    if not names or tuple(names) == mesh.mesh_dim_names:
        return mesh
    return mesh[tuple(names)] if set(names) <= set(mesh.mesh_dim_names) else None


def _size_along(mesh: Any, name: str) -> int:
    return dict(zip(mesh.mesh_dim_names, mesh.shape)).get(name, 1) if mesh is not None else 1


def _layout_on(mesh: Any) -> Layout:
    """Each rank of a replica has a part of its own, also where two of them hold the same."""
    shape = tuple(mesh.shape)
    return Layout(shape, tuple(mesh.get_coordinate()), tuple(range(len(shape))), tuple(mesh.mesh_dim_names))


def _local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _meet_replica(nodes: int) -> tuple[Any, int, int]:
    """A store of this replica's workers, when all of them are there; this worker's rank among them, and how many they
    are."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True":
        raise ValueError("a mesh needs the agent's store: leave TORCHELASTIC_USE_AGENT_STORE as the agent sets it")
    place, size = worker.ready(), nodes * _local_size()
    if nodes != _nodes_of(place):
        worker.give_up(
            f"the script has replicas of {nodes} nodes, and the job of {_nodes_of(place)}: give the agents "
            f"--replica-nodes={nodes}, or call elastic_agent.torch.replica_mesh(nodes={_nodes_of(place)})"
        )
    while True:
        try:
            part = _part(place, worker.local_rank(), _local_size())
            among = {**place, "among": f"replica {place['group_rank'] // nodes}"}
            meet(among, size, lambda: worker.forming() is not None)
            # NCCL's threads ask it, too, to the end of the process.
            store = dist.TCPStore(place["master_addr"], place["master_port"], wait_for_workers=False)
            return dist.PrefixStore(f"{among['among']} of {place['round']}", store), part, size
        except (GroupLost, RuntimeError):
            # The node whose agent serves the store may be gone, or one of this replica's workers.
            if not worker.forms_within(_NEWS):
                raise
            place = worker.quiesce(0)
