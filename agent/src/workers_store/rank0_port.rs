//! Where the ranks of a round find each other: the port that becomes `MASTER_PORT` if this node holds rank 0. The store
//! that is served there is [`crate::workers_store`].
//!
//! ```text
//!  offer ──▶ offered: listens, serves nothing ──▶ begin: serves round n ──▶ past: held, refuses
//!               ▲    │ another round forms: connections that wait are closed
//!               └────┘
//! ```
//!
//! Other nodes learn of a port before this node knows whether its round will run, and clients may connect before this
//! node has begun the round. They wait without being served. If another round forms instead, they belong to a
//! round that never ran here, and must leave nothing behind.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, TcpListener};

use elastic_rendezvous::job::Endpoint;
use tokio::sync::watch;

use crate::machine::shortage::is_shortage;
use crate::store::ports::{Reservation, ReserveError, reserve_any_port, reserve_port};
use crate::workers_store::fence::Known;
use crate::workers_store::introduction::Introduction;
use crate::workers_store::{TcpStore, WorkersStoreLimits};

/// How many ports of past rounds stay held but refuse connections, so that a client which outlived its round is
/// refused.
const PAST: usize = 64;

/// The process that serves the store that workers find each other through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreHost {
    /// The agent of rank 0's node, as torchrun does with its `c10d` backend.
    Agent(WorkersStoreLimits),
    /// Worker rank 0, on the port that its agent reserves, as torchrun does with
    /// `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`.
    Workers,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("cannot serve the workers' store: {0}; are there descriptors and threads left?")]
    System(#[from] io::Error),
    #[error("this node has rank 0, but could not open a port for it; are there descriptors left?")]
    NoPort,
}

impl ServeError {
    /// Whether the host is short of resources for now.
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            ServeError::System(error) => is_shortage(error.raw_os_error()),
            ServeError::NoPort => true,
        }
    }
}

#[derive(Debug)]
struct Offered {
    reservation: Reservation,
    /// `None` if workers listen themselves.
    listener: Option<TcpListener>,
}

#[derive(Debug)]
struct Serving {
    round: u64,
    reservation: Reservation,
    _store: Option<TcpStore>,
}

/// This node's port for the next round, and for the current round if rank 0 is here.
#[derive(Debug)]
pub(crate) struct Rank0Port {
    host: StoreHost,
    address: String,
    bind: Option<IpAddr>,
    endpoint: watch::Sender<Option<Endpoint>>,
    offered: Option<Offered>,
    serving: Option<Serving>,
    /// This node to the round's store, wherever that is.
    introduction: Option<Introduction>,
    past: VecDeque<Reservation>,
}

impl Rank0Port {
    /// A node that has offered no port yet. Peers reach it at `address`. It listens on `bind` alone, where that is given.
    pub(crate) fn new(host: StoreHost, address: String, bind: Option<IpAddr>) -> Rank0Port {
        let endpoint = watch::Sender::new(None);
        Rank0Port {
            host,
            address,
            bind,
            endpoint,
            offered: None,
            serving: None,
            introduction: None,
            past: VecDeque::new(),
        }
    }

    pub(crate) fn is_agent(&self) -> bool {
        matches!(self.host, StoreHost::Agent(_))
    }

    pub(crate) fn latest(&self) -> watch::Receiver<Option<Endpoint>> {
        self.endpoint.subscribe()
    }

    /// Offers a port for the next round, on which no round was served. It is bound, and it listens if the agent is to
    /// serve it. Until a round begins it is the same one: others may know it already, and the next round be sealed with
    /// it.
    pub(crate) fn offer(&mut self) -> Option<Endpoint> {
        if self.offered.is_none() {
            let opened = self.open().inspect_err(|error| tracing::error!(%error, "cannot open a port for rank 0"));
            self.offered = opened.ok();
        }
        let port = self.offered.as_ref().map(|offered| offered.reservation.port());
        let endpoint = port.map(|port| Endpoint { host: self.address.clone(), port });
        self.endpoint.send_replace(endpoint.clone());
        endpoint
    }

    fn open(&self) -> Result<Offered, ReserveError> {
        // A job on a loopback address runs on this machine alone. No other host may talk to it, because the protocol
        // knows no passwords.
        let own = self.bind.or_else(|| self.address.parse::<IpAddr>().ok().filter(IpAddr::is_loopback));
        let reservation = own.map_or_else(reserve_any_port, reserve_port)?;
        let listener = self.is_agent().then(|| reservation.listen()).transpose()?;
        Ok(Offered { reservation, listener })
    }

    /// Begins a round. The previous round is over on all nodes. Serves the round's store if `rank_0` is on this node.
    /// With `members` it serves only the hosts of nodes, and this node introduces its own to it, at `store`.
    pub(crate) fn begin(
        &mut self,
        round: u64,
        rank_0: bool,
        store: Option<&Endpoint>,
        members: Option<Known>,
    ) -> Result<(), ServeError> {
        self.end();
        self.introduction =
            store.zip(members.clone()).map(|(store, members)| Introduction::begin(store.clone(), members));
        let offered = self.offered.take();
        if !rank_0 {
            return Ok(());
        }
        let Offered { reservation, listener } = offered.ok_or(ServeError::NoPort)?;
        let store = match (self.host, listener) {
            (StoreHost::Agent(limits), Some(listener)) => Some(TcpStore::serve(listener, limits, members)?),
            _ => None,
        };
        self.serving = Some(Serving { round, reservation, _store: store });
        Ok(())
    }

    pub(crate) fn forming(&mut self, round: u64) {
        self.introduction = None;
        // Once a round has formed, all members of the previous round have stopped. So a forming round means that all
        // rounds before the previous one are over.
        if self.serving.as_ref().is_some_and(|serving| serving.round + 1 < round) {
            self.end();
        }
        if let Some(listener) = self.offered.as_ref().and_then(|offered| offered.listener.as_ref()) {
            turn_away(listener);
        }
    }

    fn end(&mut self) {
        if let Some(Serving { reservation, .. }) = self.serving.take() {
            self.past.truncate(PAST - 1);
            self.past.push_front(reservation);
        }
    }
}

/// Closes the connections that wait to be accepted.
fn turn_away(listener: &TcpListener) {
    if listener.set_nonblocking(true).is_ok() {
        while listener.accept().is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use super::*;

    fn master() -> Rank0Port {
        Rank0Port::new(StoreHost::Agent(WorkersStoreLimits::default()), "127.0.0.1".into(), None)
    }

    fn begin(master: &mut Rank0Port, round: u64, rank_0: bool) -> Result<(), ServeError> {
        master.begin(round, rank_0, None, None)
    }

    fn connect(endpoint: &Endpoint) -> io::Result<TcpStream> {
        let client = TcpStream::connect((endpoint.host.as_str(), endpoint.port))?;
        client.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(client)
    }

    /// SET /k v, in torch 1.13's dialect.
    const SET: &[u8] = b"\x00\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v";
    /// GETNUMKEYS.
    const NUM_KEYS: &[u8] = b"\x06";

    fn keys(client: &mut TcpStream) -> io::Result<i64> {
        client.write_all(NUM_KEYS)?;
        let mut answer = [0; 8];
        client.read_exact(&mut answer)?;
        Ok(i64::from_le_bytes(answer))
    }

    #[test]
    fn who_comes_before_the_round_begins_here_is_served_once_it_does() {
        let mut master = master();
        let endpoint = master.offer().unwrap();
        let mut early = connect(&endpoint).expect("it listens before the round begins");
        early.write_all(SET).unwrap();
        begin(&mut master, 1, true).unwrap();
        assert_eq!(keys(&mut early).unwrap(), 1);
    }

    #[test]
    fn a_round_is_served_on_the_port_that_was_announced_first() {
        // Workers come to rest, and die at rest: a round may be sealed with what was offered before they did.
        let mut master = master();
        let told = master.offer().unwrap();
        assert_eq!(master.offer().unwrap(), told);
        let mut client = connect(&told).unwrap();
        begin(&mut master, 1, true).unwrap();
        assert_eq!(keys(&mut client).unwrap(), 0);
        assert_ne!(master.offer().unwrap(), told, "the next round has a port of its own");
    }

    #[test]
    fn a_round_that_is_formed_again_finds_nothing_of_the_try_before_it() {
        let mut master = master();
        let endpoint = master.offer().unwrap();
        // Round 1 ran on another node, and its worker set a key here. Then round 2 forms before this node has begun
        // round 1.
        let mut old = connect(&endpoint).unwrap();
        old.write_all(SET).unwrap();
        master.forming(2);
        // Another worker of round 1 sets a key before it is stopped.
        let mut late = connect(&endpoint).unwrap();
        late.write_all(SET).unwrap();
        drop(late);
        begin(&mut master, 2, true).unwrap();
        assert!(keys(&mut old).is_err(), "turned away");
        assert_eq!(keys(&mut connect(&endpoint).unwrap()).unwrap(), 0);
    }

    #[test]
    fn each_round_has_a_port_of_its_own_and_the_ports_of_past_ones_refuse() {
        let mut master = master();
        let mut ports = Vec::new();
        for round in 1..=5 {
            let endpoint = master.offer().unwrap();
            assert!(!ports.contains(&endpoint), "{endpoint:?} again");
            let mut stale: Option<TcpStream> = ports.last().map(|last| connect(last).unwrap());
            begin(&mut master, round, true).unwrap();
            assert_eq!(keys(&mut connect(&endpoint).unwrap()).unwrap(), 0, "round {round} begins empty");
            connect(&endpoint).unwrap().write_all(SET).unwrap();
            assert!(stale.as_mut().is_none_or(|stale| keys(stale).is_err()), "a client of the round before is cut off");
            for past in &ports {
                assert_eq!(connect(past).unwrap_err().kind(), ErrorKind::ConnectionRefused);
            }
            ports.push(endpoint);
        }
    }

    #[test]
    fn a_store_stays_while_its_round_may_have_members_and_goes_when_it_cannot() {
        let mut master = master();
        let endpoint = master.offer().unwrap();
        begin(&mut master, 1, true).unwrap();
        // This node's workers are done, and the next round forms. Workers of other nodes may still be stopping.
        master.offer().unwrap();
        master.forming(2);
        assert!(connect(&endpoint).is_ok());
        // Round 3 forms, so round 2 has run, and no worker is left in round 1.
        master.forming(3);
        assert_eq!(connect(&endpoint).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn without_rank_0_nothing_is_served() {
        let mut master = master();
        let endpoint = master.offer().unwrap();
        begin(&mut master, 1, false).unwrap();
        assert_eq!(connect(&endpoint).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn where_workers_serve_themselves_the_port_is_held_and_free_for_rank_0() {
        let mut master = Rank0Port::new(StoreHost::Workers, "127.0.0.1".into(), None);
        let endpoint = master.offer().unwrap();
        begin(&mut master, 1, true).unwrap();
        assert_eq!(connect(&endpoint).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let _rank_0 = TcpListener::bind((endpoint.host.as_str(), endpoint.port)).expect("rank 0 may listen");
    }

    #[test]
    fn what_was_offered_last_can_be_looked_up() {
        let mut master = master();
        let latest = master.latest();
        assert_eq!(*latest.borrow(), None);
        let (_, second) = (master.offer(), master.offer());
        assert_eq!(*latest.borrow(), second);
    }
}
