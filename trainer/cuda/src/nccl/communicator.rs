//! A rank's communicator, from round to round.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elastic_collective::tree::SumPlan;
use elastic_collective::{CollectiveError, Group, Patience};
use tracing::{info, warn};

use super::handle::{Failure, Handle};
use super::library::{Library, REMOTE_ERROR, UniqueId};
use super::nccl_thread::{Answer, NcclThread};
use super::ordered;
use super::versions::unlike;
use super::{Device, Span};

/// Time between two checks of the round and its peers while NCCL works.
const LOOK: Duration = Duration::from_millis(5);
/// How long a call of NCCL may take beyond the operation's time until it counts as stuck.
const STUCK_TIME: Duration = Duration::from_secs(10);
/// How long NCCL may take once a peer has gone on to a later operation: there NCCL has ended this one, or has failed.
const LAG_TIME: Duration = Duration::from_secs(3);
/// How long after an error of NCCL's to watch for a peer's connection to end, which shows that the peer is gone.
const NAMING_TIME: Duration = Duration::from_millis(500);

/// The operation's name in records and errors.
const SUM: &str = "ordered sum";

/// Bytes of the round's number, and of the id by which the ranks find each other.
const TICKET: usize = 8 + 128;

/// The result of joining a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Joined {
    /// There is a communicator.
    Made,
    /// No rank has a communicator: the ranks have different versions of NCCL, and NCCL was not called. The group can
    /// still be used.
    Unlike {
        /// Which ranks have which, in words.
        versions: String,
    },
    /// No rank has a communicator: NCCL could not make one for these ranks. The group can still be used.
    Refused {
        /// Who failed.
        ranks: Vec<usize>,
        /// Why, if this rank is one of them.
        cause: Option<String>,
    },
}

/// One rank's communicator. It belongs to the round of the group that it was [joined](Self::join) with, and is used
/// with that group, which watches the peers meanwhile.
///
/// The first error ends the communicator for the round, and the group too: the contents of the buffers are then
/// undefined. When the error is returned, no operation is under way any more.
#[derive(Debug)]
pub struct Communicator {
    library: Arc<Library>,
    thread: NcclThread,
    /// The round that has a communicator, if it can still be used.
    of_round: Option<u64>,
    /// A call of NCCL did not return. Nothing in this process can recover from that.
    stuck: bool,
}

impl Communicator {
    /// A communicator without peers yet.
    pub fn new(library: Arc<Library>, device: Box<dyn Device>) -> io::Result<Communicator> {
        Ok(Communicator { thread: NcclThread::start(library.clone(), device)?, library, of_round: None, stuck: false })
    }

    /// Makes a new communicator of the ranks of `group`. All ranks call it after they have formed the group, and all get
    /// the same result.
    pub fn join(&mut self, group: &mut Group) -> Result<Joined, CollectiveError> {
        self.of_round = None;
        let versions: Vec<i32> =
            group.gather([self.library.version() as u64])?.into_iter().map(|[version]| version as i32).collect();
        if let Some(versions) = unlike(&versions) {
            self.end();
            return Ok(Joined::Unlike { versions });
        }
        let made = self.make(group);
        let cause = made.as_ref().err().map(ToString::to_string);
        let ranks = self.agree(group, made)?;
        if !ranks.is_empty() {
            self.end();
            return Ok(Joined::Refused { ranks, cause });
        }
        self.of_round = Some(group.round());
        info!(round = group.round(), version = self.library.version_text(), "NCCL's communicator is made");
        Ok(Joined::Made)
    }

    /// The ranks for which NCCL has made no communicator. Ranks that are done wait here for the others, since the time
    /// for NCCL is shorter than the time for this exchange.
    fn agree(&mut self, group: &mut Group, made: Result<(), CollectiveError>) -> Result<Vec<usize>, CollectiveError> {
        let well = made.is_ok();
        match made {
            Ok(()) => {}
            Err(error @ CollectiveError::Nccl { .. }) => warn!("cannot make NCCL's communicator: {error}"),
            Err(error) => return Err(error),
        }
        let all = group.gather([u64::from(well)])?;
        Ok((0..all.len()).filter(|&rank| all[rank] == [0]).collect())
    }

    /// Gives up the communicator, for a round that does not use it. Its ranks have no operation under way.
    pub fn end(&mut self) {
        self.of_round = None;
        let retire = |handle: &mut Handle| {
            handle.retire();
            Ok(())
        };
        if !self.stuck && self.thread.ask(retire).wait(STUCK_TIME).is_none() {
            self.give_up();
        }
    }

    /// Whether a call of NCCL does not return. Then NCCL cannot be used again in this process.
    pub fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// Notes that a call of NCCL does not return.
    fn give_up(&mut self) {
        self.stuck = true;
        self.thread.give_up();
    }

    fn make(&mut self, group: &mut Group) -> Result<(), CollectiveError> {
        let place = (group.rank(), group.world_size());
        let id = self.hand_out(group)?;
        let started = group.note("nccl", "joining", 0);
        let init = move |handle: &mut Handle, deadline| handle.init(id, place, deadline);
        let result = self.ask(group, "joining", started, forming_time(group), init);
        group.ended(result)
    }

    /// Rank 0 makes an id and sends it to all ranks, with the round's number, through the round's group.
    fn hand_out(&mut self, group: &mut Group) -> Result<UniqueId, CollectiveError> {
        let mut ticket = [0; TICKET];
        let mut made = Ok(());
        if group.rank() == 0 {
            let time = forming_time(group);
            let id = self.ask(group, "minting", Instant::now(), time, |handle, _| handle.mint());
            // If there is no id, rank 0 sends an id of zeros to the other ranks.
            let id = id.unwrap_or_else(|error| {
                made = Err(error);
                UniqueId([0; 128])
            });
            ticket = write_ticket(group.round(), &id);
        }
        group.broadcast(&mut ticket)?;
        made?;
        read_ticket(&ticket, group.round()).map_err(|cause| CollectiveError::Nccl { cause, remote: false })
    }

    /// Writes into `sum` the sum of the shards' buffers in the order of [`tree`](elastic_collective::tree): the bits
    /// are the same for every number of ranks. `partials` are the sums of this rank's
    /// [nodes](elastic_collective::tree::nodes_of), in their order; `staging` has room for
    /// [`staging_elements`](Self::staging_elements). The device makes the additions. Fails if a peer is gone
    /// or late, a later round forms, or NCCL fails. Panics when a length does not fit.
    pub fn ordered_sum(
        &mut self,
        group: &mut Group,
        shards: u32,
        partials: &[Span],
        sum: Span,
        staging: Span,
    ) -> Result<(), CollectiveError> {
        let plan = SumPlan { world_size: group.world_size(), shards, elements: sum.elements() };
        let steps = ordered::steps(plan, group.rank(), partials, sum, staging);
        let started = group.note("nccl", SUM, sum.bytes());
        let result = match self.of_round == Some(group.round()) || self.stuck {
            true => {
                let time = time_of(group.patience().operation);
                self.ask(group, SUM, started, time, move |handle, deadline| handle.sum(steps, deadline))
            }
            false => {
                let cause = format!("there is no communicator of round {}", group.round());
                Err(CollectiveError::Nccl { cause, remote: false })
            }
        };
        let result = match result {
            Err(error) => {
                self.calm();
                Err(match error {
                    CollectiveError::Stuck { what } => CollectiveError::Stuck { what },
                    // Its device may still use the buffers.
                    _ if self.stuck => CollectiveError::Stuck { what: SUM },
                    error => error,
                })
            }
            result => result,
        };
        group.ended(result)
    }

    /// How many numbers of other ranks this rank holds during an ordered sum of `elements`.
    pub fn staging_elements(group: &Group, shards: u32, elements: usize) -> usize {
        let plan = SumPlan { world_size: group.world_size(), shards, elements };
        ordered::staging_elements(plan, group.rank())
    }

    /// Gives up the communicator, and waits until its operation has ended.
    fn calm(&mut self) {
        if self.of_round.take().is_none() || self.stuck {
            return;
        }
        match self.thread.ask(|handle| Ok(handle.calm())).wait(STUCK_TIME) {
            Some(Ok(false)) | None => self.give_up(),
            Some(_) => {}
        }
    }

    /// Has NCCL's thread do `work`, and watches the round meanwhile.
    fn ask<T: Send + 'static>(
        &mut self,
        group: &mut Group,
        what: &'static str,
        started: Instant,
        time: Duration,
        work: impl FnOnce(&mut Handle, Instant) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, CollectiveError> {
        if self.stuck {
            return Err(CollectiveError::Stuck { what: "an earlier call" });
        }
        let deadline = started + time;
        let answer: Answer<T> = self.thread.ask(move |handle| work(handle, deadline));
        let (mut cause, mut behind) = (None, None);
        loop {
            match answer.wait(LOOK) {
                Some(Ok(value)) => return Ok(value),
                Some(Err(failure)) => return Err(cause.unwrap_or_else(|| explain(failure, group, started))),
                None if Instant::now() >= deadline + STUCK_TIME => {
                    self.give_up();
                    return Err(CollectiveError::Stuck { what });
                }
                None if cause.is_none() => {
                    cause = group.watch().err();
                    if cause.is_none()
                        && group.is_behind()
                        && behind.get_or_insert_with(Instant::now).elapsed() > LAG_TIME
                    {
                        let cause_here = format!("other ranks have been past {what} for {} s", LAG_TIME.as_secs());
                        cause = Some(CollectiveError::Nccl { cause: cause_here, remote: true });
                    }
                    if cause.is_some() {
                        self.thread.interrupt();
                    }
                }
                None => {}
            }
        }
    }
}

/// How long NCCL may take of an operation's time. A rank for which NCCL fails at once tells the others in the group's
/// next operation, which must not run out of time before the others have given up on NCCL.
fn time_of(operation: Duration) -> Duration {
    operation * 3 / 4
}

/// How long NCCL may take to make a communicator.
fn forming_time(group: &Group) -> Duration {
    let Patience { form, operation } = group.patience();
    form.min(time_of(operation))
}

/// A failure as an error of the round. If a peer is gone, that is the cause, whatever NCCL reports.
fn explain(failure: Failure, group: &mut Group, started: Instant) -> CollectiveError {
    let (cause, remote) = match failure {
        Failure::Late => {
            let waited = started.elapsed().as_secs_f64();
            let cause = format!(
                "it did not end within {waited:.1} s, though no rank is gone; a rank hangs in it, or the network \
                 between the ranks is cut (--peer-timeout sets the limit)"
            );
            (cause, true)
        }
        Failure::Call { function, code, message } => {
            let failed = Instant::now();
            while failed.elapsed() < NAMING_TIME {
                if let Err(error) = group.watch() {
                    return error;
                }
                std::thread::sleep(LOOK);
            }
            (format!("{function} failed with code {code}: {message}"), code == REMOTE_ERROR)
        }
        Failure::Device(cause) => (cause, false),
        Failure::Unfit(cause) => (cause, false),
        Failure::Interrupted => ("it was given up".to_owned(), false),
    };
    CollectiveError::Nccl { cause, remote }
}

fn write_ticket(round: u64, id: &UniqueId) -> [u8; TICKET] {
    let mut ticket = [0; TICKET];
    ticket[..8].copy_from_slice(&round.to_le_bytes());
    ticket[8..].copy_from_slice(&id.0);
    ticket
}

fn read_ticket(ticket: &[u8; TICKET], round: u64) -> Result<UniqueId, String> {
    let theirs = u64::from_le_bytes(std::array::from_fn(|i| ticket[i]));
    if theirs != round {
        return Err(format!("rank 0 gave out an id of round {theirs}, and this is round {round}"));
    }
    if ticket[8..] == [0; 128] {
        return Err("rank 0 has no id to give out".to_owned());
    }
    Ok(UniqueId(std::array::from_fn(|i| ticket[8 + i])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_another_round_is_refused() {
        let ticket = write_ticket(7, &UniqueId([3; 128]));
        assert_eq!(read_ticket(&ticket, 7).unwrap().0, [3; 128]);
        let Err(refusal) = read_ticket(&ticket, 8) else { panic!("it was taken") };
        assert!(refusal.contains("round 7") && refusal.contains("round 8"), "{refusal}");
        let Err(none) = read_ticket(&write_ticket(7, &UniqueId([0; 128])), 7) else { panic!("it was taken") };
        assert!(none.contains("no id"), "{none}");
    }
}
