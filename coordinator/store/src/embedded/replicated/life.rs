//! How a life begins a cluster, and when it ends.

use std::time::Duration;

use elastic_proto::replication::entry::What;
use elastic_proto::replication::{Entry, Voters};
use elastic_rendezvous::time::Time;

use super::log::Log;
use super::replica::{Heard, Output, RECENT, Replica, Role};

/// How long a fresh life looks for one that has a state before it begins a cluster.
const LOOK: Duration = Duration::from_secs(1);

/// The same where not all are there: a way to the others takes longer than a letter to be there.
const LOOK_FOR_ALL: Duration = Duration::from_secs(3);

/// How long a founder waits for the one that it founds with.
const UNCONFIRMED: Duration = Duration::from_secs(5);

/// How long a life without a leader waits for its cluster where it has no vote in it, or another cluster is there.
const FORSAKEN: Duration = Duration::from_secs(10);

impl Replica {
    /// Begins a cluster with the first of the fresh ones, if none has one already.
    pub(super) fn found(&mut self, now: Time) {
        let there: Vec<usize> = self.others().filter(|&seat| self.is_there(seat, now)).collect();
        let has_cluster = |seat: &usize| self.heard[*seat].is_some_and(|heard| heard.cluster != 0);
        let (Some(&first), false) = (there.first(), there.iter().any(has_cluster)) else { return };
        let long_enough = if there.len() + 1 == self.seats { LOOK } else { LOOK_FOR_ALL };
        if now.since(self.begun) < long_enough || first < self.seat {
            return;
        }
        let mut lives = vec![0; self.seats];
        lives[self.seat] = self.life;
        lives[first] = self.heard[first].map_or(0, |heard| heard.life);
        self.cluster = self.draw();
        self.term = 1;
        self.voted = self.life;
        self.led = now;
        self.log.push(Entry { term: 1, what: Some(What::Voters(Voters { lives, third_comes: 0 })) });
        self.lead(now);
    }

    /// Begins a new life where this one's cluster is lost, or nothing shows that it is not.
    pub(super) fn reconsider(&mut self, now: Time) {
        if self.cluster == 0 {
            return;
        }
        let is_lost = !self.suffice(|life| !self.ended.contains(&life));
        let elsewhere = |heard: &Option<Heard>| {
            heard.is_some_and(|heard| ![0, self.cluster].contains(&heard.cluster) && now.since(heard.at) <= RECENT)
        };
        let gives_up = match &self.role {
            Role::Leader { since, .. } => {
                let (unconfirmed, other) = (self.commit == 0, self.heard.iter().any(elsewhere));
                (unconfirmed && now.since(*since) > UNCONFIRMED) || (other && (unconfirmed || self.is_alone()))
            }
            _ => {
                let for_long = now.since(self.led);
                let has_no_use = !self.decides(self.life) || self.heard.iter().any(elsewhere);
                (self.commit == 0 && for_long > UNCONFIRMED) || (for_long > FORSAKEN && has_no_use)
            }
        };
        if is_lost || gives_up {
            self.begin_again(now);
        }
    }

    /// Begins a new life where the driver cannot do what it is to do.
    pub fn end(&mut self, now: Time) -> Vec<Output> {
        self.begin_again(now);
        std::mem::take(&mut self.out)
    }

    fn begin_again(&mut self, now: Time) {
        self.life = self.draw();
        self.begun = now;
        (self.cluster, self.term, self.voted) = (0, 0, 0);
        self.log = Log::default();
        (self.commit, self.applied) = (0, 0);
        self.role = Role::Fresh;
        self.out.retain(|output| !matches!(output, Output::Send(..)));
        self.out.push(Output::Reset);
    }
}
