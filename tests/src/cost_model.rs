//! What one node of a job costs its etcd, from what the protocol has it do: to look ahead to sizes that no bench here
//! can hold, and to notice where a job costs more than it must. No times: those are the machine's.

use std::ops::Add;
use std::time::Duration;

/// What one node costs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Calls.
    pub requests: f64,
    /// Renewals of its lease.
    pub renewals: f64,
    /// Events told by watches.
    pub events: f64,
    /// Bytes of the messages that etcd receives, without what gRPC and HTTP add.
    pub received: f64,
    /// The same of those that it sends.
    pub sent: f64,
}

impl Add for Load {
    type Output = Load;

    fn add(self, other: Load) -> Load {
        Load {
            requests: self.requests + other.requests,
            renewals: self.renewals + other.renewals,
            events: self.events + other.events,
            received: self.received + other.received,
            sent: self.sent + other.sent,
        }
    }
}

impl Load {
    /// So many of them.
    #[must_use]
    pub fn times(self, count: f64) -> Load {
        Load {
            requests: self.requests * count,
            renewals: self.renewals * count,
            events: self.events * count,
            received: self.received * count,
            sent: self.sent * count,
        }
    }
}

/// Bytes of a job's records.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizes {
    /// A key; a rank's is longer by a round's number and a plan.
    pub key: f64,
    /// A node's record.
    pub node: f64,
    /// A rank's.
    pub rank: f64,
    /// The round's.
    pub round: f64,
    /// The leader's.
    pub leader: f64,
    /// The spec's and the secret's.
    pub joined: f64,
}

/// Operations of one of the leader's transactions that write ranks.
const BATCH: f64 = 100.0;

/// What etcd puts around each answer, event and record: ids, revisions, lengths.
const HEADER: f64 = 28.0;
const RECORD: f64 = 24.0;
const EVENT: f64 = 48.0;
const OPERATION: f64 = 8.0;

impl Sizes {
    fn rank_key(self) -> f64 {
        self.key + 4.0
    }

    /// A node brings its key to what it wants to say. The answer has the round and the leader in it.
    fn own_write(self) -> Load {
        Load {
            requests: 1.0,
            // A guard; the round, the leader and its key in one branch; the same and its tombstone in the other.
            received: 8.0 * (self.key + OPERATION) + self.node,
            sent: 2.0 * HEADER + self.round + self.leader + 2.0 * (self.key + RECORD + HEADER),
            ..Load::default()
        }
    }

    /// It reads its place.
    fn seat(self) -> Load {
        Load {
            requests: 1.0,
            received: self.key + self.rank_key() + 2.0 * OPERATION,
            sent: HEADER + self.round + self.rank + self.key + self.rank_key() + 2.0 * (RECORD + HEADER),
            ..Load::default()
        }
    }

    /// The leader writes its place, with those of others.
    fn rank_write(self) -> Load {
        Load {
            requests: 1.0 / BATCH,
            received: self.rank_key() + self.rank + OPERATION,
            // Each write of a transaction is answered.
            sent: HEADER / 2.0,
            ..Load::default()
        }
    }

    /// The leader sees what the node has written.
    fn told_of_it(self) -> Load {
        Load { events: 1.0, sent: self.key + self.node + EVENT, ..Load::default() }
    }

    /// The node sees a round's record.
    fn told_of_round(self) -> Load {
        Load { events: 1.0, sent: self.key + self.round + EVENT, ..Load::default() }
    }

    /// It joins: reads the job, asks for a lease, opens three watches.
    fn join(self) -> Load {
        let read = Load {
            requests: 1.0,
            received: 6.0 * (self.key + OPERATION),
            sent: HEADER + self.joined + self.round + self.leader + 5.0 * (self.key + RECORD + HEADER),
            ..Load::default()
        };
        let lease = Load { requests: 1.0, received: OPERATION, sent: HEADER + OPERATION, ..Load::default() };
        let watch = Load { received: self.key + OPERATION, sent: HEADER, ..Load::default() };
        read + lease + watch.times(3.0)
    }

    /// What belongs to the whole job, whatever its size: the leader's records of a round, its proofs, its reads.
    fn whole(self, nodes: u32) -> Load {
        let few = Load { requests: 8.0, received: 8.0 * (8.0 * self.key + self.round), ..Load::default() };
        few.times(1.0 / f64::from(nodes))
    }

    /// A node of a job of so many comes, and its workers start in the first round.
    #[must_use]
    pub fn start(self, nodes: u32) -> Load {
        let said = (self.own_write() + self.told_of_it()).times(2.0);
        self.join() + said + self.rank_write() + self.told_of_round() + self.seat() + self.whole(nodes)
    }

    /// The next round: its workers stop and start again.
    #[must_use]
    pub fn round(self, nodes: u32) -> Load {
        let said = (self.own_write() + self.told_of_it()).times(2.0);
        said + self.rank_write() + self.told_of_round().times(2.0) + self.seat() + self.whole(nodes)
    }

    /// A second in which nothing happens, where leases are renewed so often.
    #[must_use]
    pub fn second(self, nodes: u32, renewal: Duration) -> Load {
        let each = 1.0 / renewal.as_secs_f64();
        let renewed =
            Load { renewals: 1.0, received: OPERATION + 2.0, sent: HEADER + 2.0 * OPERATION, ..Load::default() };
        let proof = Load { requests: 1.0, received: 2.0 * self.key, sent: HEADER, ..Load::default() };
        (renewed + proof.times(1.0 / f64::from(nodes))).times(each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { key: 50.0, node: 400.0, rank: 200.0, round: 500.0, leader: 100.0, joined: 500.0 };

    #[test]
    fn a_node_costs_the_same_in_a_job_of_any_size() {
        for (nodes, of) in [(100, 1_000), (1_000, 4_000), (4_000, 10_000)] {
            let pairs = [
                (SIZES.start(nodes), SIZES.start(of)),
                (SIZES.round(nodes), SIZES.round(of)),
                (SIZES.second(nodes, Duration::from_secs(2)), SIZES.second(of, Duration::from_secs(2))),
            ];
            for (fewer, more) in pairs {
                for (fewer, more) in [(fewer.events, more.events), (fewer.renewals, more.renewals)] {
                    assert_eq!(fewer, more);
                }
                // What belongs to the whole job is shared by more.
                assert!(more.requests <= fewer.requests && more.requests > fewer.requests - 0.1, "{fewer:?} {more:?}");
                assert!(more.received <= fewer.received && more.received > fewer.received * 0.9, "{fewer:?} {more:?}");
            }
        }
    }

    #[test]
    fn calls_and_events_are_those_of_the_protocol() {
        let rounded = |load: Load| (load.requests.round(), load.events, load.renewals);
        // Joins, asks for a lease, waits, reads its place, runs; the leader sees two changes, the node sees the round.
        assert_eq!(rounded(SIZES.start(10_000)), (5.0, 3.0, 0.0));
        // Waits, reads its place, runs; it sees that the round forms and that it runs.
        assert_eq!(rounded(SIZES.round(10_000)), (3.0, 4.0, 0.0));
        assert_eq!(rounded(SIZES.second(10_000, Duration::from_secs(2))), (0.0, 0.0, 0.5));
    }
}
