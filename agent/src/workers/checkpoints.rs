//! Checkpoints between the workers, who send them on their socket, and the job's records.

use elastic_proto::worker;
use elastic_rendezvous::job::Checkpoint;

/// The job's record of a worker's checkpoint.
pub(crate) fn record_of(checkpoint: worker::Checkpoint) -> Checkpoint {
    let worker::Checkpoint { step, path, digest, round } = checkpoint;
    Checkpoint { step, path, digest, round }
}

/// What workers read about the checkpoint of a job's record.
pub(crate) fn for_workers(record: Checkpoint) -> worker::Checkpoint {
    let Checkpoint { step, path, digest, round } = record;
    worker::Checkpoint { step, path, digest, round }
}
