//! A rank's communicator, from round to round.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elastic_collective::tree::SumPlan;
use elastic_collective::{CollectiveError, Group, Patience};
use tracing::{info, warn};

use super::handle::{Failure, Handle, Operation, Remains};
use super::library::{Library, REMOTE_ERROR, UniqueId};
use super::nccl_thread::{Answer, NcclThread};
use super::ordered;
use super::recovery::{Held, RankState, Way, decide, unlike};
use super::{Device, Span};

/// Time between two checks of the round and its peers while NCCL works.
const LOOK: Duration = Duration::from_millis(5);
/// How long a call of NCCL may take beyond the operation's time until it counts as stuck.
const STUCK_TIME: Duration = Duration::from_secs(10);
/// How long NCCL may take once a peer has gone on to a later operation: there NCCL has ended this one, or has failed.
const LAG_TIME: Duration = Duration::from_secs(3);
/// How long after an error of NCCL's to watch for a peer's connection to end, which shows that the peer is gone.
const NAMING_TIME: Duration = Duration::from_millis(500);

/// Bytes of the round's number, and of the id by which the ranks find each other.
const TICKET: usize = 8 + 128;

/// The result of joining a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Joined {
    /// There is a communicator, and this is how it was made.
    By(Way),
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
    held: Option<Held>,
    /// A call of NCCL did not return. Nothing in this process can recover from that.
    stuck: bool,
}

impl Communicator {
    /// A communicator without peers yet.
    pub fn new(library: Arc<Library>, device: Box<dyn Device>) -> io::Result<Communicator> {
        Ok(Communicator { thread: NcclThread::start(library.clone(), device)?, library, held: None, stuck: false })
    }

    /// Connects to the ranks of `group`, in the quickest way that the change of members and all ranks' NCCL allow. All
    /// ranks call it after they have formed the group, and all get the same result.
    pub fn join(&mut self, group: &mut Group) -> Result<Joined, CollectiveError> {
        self.drop_broken();
        let own = RankState { held: self.held, can: self.library.capabilities(), version: self.library.version() };
        let all: Vec<RankState> = group.gather(own.to_words())?.into_iter().map(RankState::from_words).collect();
        if let Some(versions) = unlike(&all) {
            self.end();
            return Ok(Joined::Unlike { versions });
        }
        let mut way = decide(&all);
        if way != Way::Renew {
            // In a communicator that grows, rank 0 is one of the old members.
            let made = self.keep(group, &way, all[0].held.map(|held| held.round));
            if !self.agree(group, made)?.is_empty() {
                way = Way::Renew;
            }
        }
        if way == Way::Renew {
            let made = self.renew(group);
            let cause = made.as_ref().err().map(ToString::to_string);
            let ranks = self.agree(group, made)?;
            if !ranks.is_empty() {
                self.end();
                return Ok(Joined::Refused { ranks, cause });
            }
        }
        let (round, rank, world_size) = (group.round(), group.rank(), group.world_size());
        self.held = Some(Held { round, rank, world_size, revoked: false });
        info!(round, ?way, version = self.library.version_text(), "NCCL's communicator is made");
        Ok(Joined::By(way))
    }

    /// Gives up a communicator that can neither shrink nor grow.
    fn drop_broken(&mut self) {
        let check = |handle: &mut Handle| {
            let sound = handle.is_sound();
            if !sound {
                handle.retire();
            }
            Ok(sound)
        };
        if self.held.is_none() || self.stuck {
            return;
        }
        match self.thread.ask(check).wait(STUCK_TIME) {
            Some(Ok(true)) => {}
            Some(_) => self.held = None,
            None => self.give_up(),
        }
    }

    /// The ranks for which NCCL has made no communicator. Ranks that are done wait here for the others, since the time
    /// for NCCL is shorter than the time for this exchange.
    fn agree(&mut self, group: &mut Group, made: Result<(), CollectiveError>) -> Result<Vec<usize>, CollectiveError> {
        let well = made.is_ok();
        match made {
            Ok(()) => {}
            Err(error @ CollectiveError::Nccl { .. }) => warn!("cannot make or keep NCCL's communicator: {error}"),
            Err(error) => return Err(error),
        }
        let all = group.gather([u64::from(well)])?;
        Ok((0..all.len()).filter(|&rank| all[rank] == [0]).collect())
    }

    /// Gives up the communicator, for a round that does not use it. Its ranks have no operation under way.
    pub fn end(&mut self) {
        self.held = None;
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

    /// Keeps the communicator of the members that stay.
    fn keep(&mut self, group: &mut Group, way: &Way, newest: Option<u64>) -> Result<(), CollectiveError> {
        let (held, place) = (self.held.take(), (group.rank(), group.world_size()));
        match way {
            Way::Renew => Ok(()),
            Way::Shrink { without, revoke } => {
                let revoke = *revoke && held.is_some_and(|held| !held.revoked);
                let without = without.clone();
                self.form(group, "shrinking", move |handle, deadline| handle.shrink(&without, revoke, place, deadline))
            }
            Way::Grow => {
                let stays = held.is_some() && held.map(|held| held.round) == newest;
                if !stays {
                    // A joiner's communicator of an earlier round is of no use.
                    self.ask(group, "parting", forming_time(group), |handle, _| {
                        handle.retire();
                        Ok(())
                    })?;
                }
                let id = self.hand_out(group, Handle::mint_for_joiners)?;
                // NCCL itself hands the id from rank 0 to the other old members.
                let id = (place.0 == 0 || !stays).then_some(id);
                self.form(group, "growing", move |handle, deadline| handle.grow(id, place, deadline))
            }
        }
    }

    fn renew(&mut self, group: &mut Group) -> Result<(), CollectiveError> {
        self.held = None;
        let (rank, ranks) = (group.rank(), group.world_size());
        let id = self.hand_out(group, Handle::mint)?;
        self.form(group, "joining", move |handle, deadline| handle.init(id, (rank, ranks), deadline))
    }

    /// Rank 0 makes an id and sends it to all ranks, with the round's number, through the round's group.
    fn hand_out(
        &mut self,
        group: &mut Group,
        mint: impl FnOnce(&mut Handle) -> Result<UniqueId, Failure> + Send + 'static,
    ) -> Result<UniqueId, CollectiveError> {
        let mut ticket = [0; TICKET];
        let mut made = Ok(());
        if group.rank() == 0 {
            let id = self.ask(group, "minting", forming_time(group), |handle, _| mint(handle));
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

    fn form(
        &mut self,
        group: &mut Group,
        name: &'static str,
        work: impl FnOnce(&mut Handle, Instant) -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), CollectiveError> {
        let time = forming_time(group);
        let started = group.note("nccl", name, 0);
        let result = self.ask_since(group, name, started, time, work);
        group.ended(result)
    }

    /// Replaces `data` by its sum over all ranks. NCCL chooses the order of the sum. Fails if a peer is gone or late, a
    /// later round forms, or NCCL fails.
    pub fn all_reduce(&mut self, group: &mut Group, data: Span) -> Result<(), CollectiveError> {
        self.run(group, "sum", data.bytes(), Operation::AllReduce { data })
    }

    /// Writes into `sum` the sum of the shards' buffers in the order of [`tree`](elastic_collective::tree): the bits
    /// are the same for every number of ranks. `partials` are the sums of this rank's
    /// [nodes](elastic_collective::tree::nodes_of), in their order; `staging` has room for
    /// [`staging_elements`](Self::staging_elements). The device makes the additions. Fails as
    /// [`all_reduce`](Self::all_reduce), and panics when a length does not fit.
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
        self.run(group, "ordered sum", sum.bytes(), Operation::OrderedSum(steps))
    }

    /// How many numbers of other ranks this rank holds during an ordered sum of `elements`.
    pub fn staging_elements(group: &Group, shards: u32, elements: usize) -> usize {
        let plan = SumPlan { world_size: group.world_size(), shards, elements };
        ordered::staging_elements(plan, group.rank())
    }

    fn run(
        &mut self,
        group: &mut Group,
        name: &'static str,
        bytes: u64,
        operation: Operation,
    ) -> Result<(), CollectiveError> {
        let started = group.note("nccl", name, bytes);
        let of_round = self.held.is_some_and(|held| held.round == group.round() && !held.revoked);
        let result = match of_round || self.stuck {
            true => {
                let time = time_of(group.patience().operation);
                self.ask_since(group, name, started, time, move |handle, deadline| handle.run(operation, deadline))
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
                    _ if self.stuck => CollectiveError::Stuck { what: name },
                    error => error,
                })
            }
            result => result,
        };
        group.ended(result)
    }

    /// Ends the operation under way, and keeps the communicator if the next round can use it.
    fn calm(&mut self) {
        let Some(held) = self.held.take().filter(|held| !self.stuck && !held.revoked) else { return };
        match self.thread.ask(|handle| Ok(handle.calm())).wait(STUCK_TIME) {
            Some(Ok(Remains::Revoked)) => self.held = Some(Held { revoked: true, ..held }),
            Some(Ok(Remains::Busy)) | None => self.give_up(),
            Some(_) => {}
        }
    }

    fn ask<T: Send + 'static>(
        &mut self,
        group: &mut Group,
        what: &'static str,
        time: Duration,
        work: impl FnOnce(&mut Handle, Instant) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, CollectiveError> {
        self.ask_since(group, what, Instant::now(), time, work)
    }

    /// Has NCCL's thread do `work`, and watches the round meanwhile.
    fn ask_since<T: Send + 'static>(
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
