//! How much of the embedded store one address may have: watches and leases. The bounds of the whole store are
//! [`crate::embedded::mvcc::Limits`].
//!
//! The store knows no users, so anybody who reaches it may use all of it. A quota for each address leaves room for the
//! others: one host alone can neither fill this process's memory nor lock newcomers out. Of an IPv6 address only the
//! network's part counts, since a host chooses the rest itself (RFC 8981).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::{Request, Status};

use crate::listener::Peer;
use crate::store::LeaseId;

/// Watches of one address, each stream of them counted as one more. An agent has three on streams of their own.
const WATCHES: usize = 8192;

/// Leases of one address. An agent has one.
const LEASES: usize = 4096;

/// What each address has.
#[derive(Debug, Clone)]
pub(super) struct Quotas {
    most: Most,
    taken: Arc<Mutex<BTreeMap<Option<IpAddr>, Taken>>>,
}

#[derive(Debug, Clone, Copy)]
struct Most {
    watches: usize,
    leases: usize,
}

#[derive(Debug, Default)]
struct Taken {
    watches: usize,
    /// Some of these may have ended.
    leases: BTreeSet<LeaseId>,
}

impl Default for Quotas {
    fn default() -> Quotas {
        Quotas { most: Most { watches: WATCHES, leases: LEASES }, taken: Arc::default() }
    }
}

impl Quotas {
    /// The quota of whoever sent a request.
    pub(super) fn of<T>(&self, request: &Request<T>) -> Quota {
        let peer = request.extensions().get::<Peer>().and_then(|peer| peer.0);
        Quota { quotas: self.clone(), peer: peer.map(counted) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Option<IpAddr>, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What of an address is counted: all of an IPv4 address, the first 64 bits of an IPv6 one.
fn counted(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) if !v6.is_loopback() => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        ip => ip,
    }
}

/// One address's quota.
#[derive(Debug, Clone)]
pub(super) struct Quota {
    quotas: Quotas,
    peer: Option<IpAddr>,
}

impl Quota {
    /// Room for a watch, or for a stream of them, until it is dropped.
    ///
    /// # Errors
    /// The quota is used up.
    pub(super) fn watch(&self) -> Result<WatchPermit, Status> {
        let mut taken = self.quotas.lock();
        let taken = taken.entry(self.peer).or_default();
        if taken.watches >= self.quotas.most.watches {
            return Err(self.used_up("watches", self.quotas.most.watches));
        }
        taken.watches += 1;
        Ok(WatchPermit { quota: self.clone() })
    }

    /// Has a lease granted by `grant` if there is room for it. `lives` says which leases have not ended.
    ///
    /// # Errors
    /// The quota is used up, or what `grant` returns.
    pub(super) fn lease<T>(
        &self,
        lives: impl Fn(LeaseId) -> bool,
        grant: impl FnOnce() -> Result<(LeaseId, T), Status>,
    ) -> Result<(LeaseId, T), Status> {
        let mut taken = self.quotas.lock();
        let leases = &mut taken.entry(self.peer).or_default().leases;
        if leases.len() >= self.quotas.most.leases {
            leases.retain(|lease| lives(*lease));
        }
        if leases.len() >= self.quotas.most.leases {
            return Err(self.used_up("leases", self.quotas.most.leases));
        }
        let granted = grant()?;
        leases.insert(granted.0);
        Ok(granted)
    }

    fn used_up(&self, what: &str, most: usize) -> Status {
        let who = match self.peer {
            Some(IpAddr::V6(network)) if !network.is_loopback() => format!("{network}/64"),
            Some(address) => address.to_string(),
            None => "this client".to_owned(),
        };
        Status::resource_exhausted(format!(
            "{who} has {most} {what} on the embedded store, which are the most that one address may have"
        ))
    }
}

/// Room for one watch.
#[derive(Debug)]
pub(super) struct WatchPermit {
    quota: Quota,
}

impl Drop for WatchPermit {
    fn drop(&mut self) {
        let mut taken = self.quota.quotas.lock();
        if let Some(of) = taken.get_mut(&self.quota.peer) {
            of.watches -= 1;
            if of.watches == 0 && of.leases.is_empty() {
                taken.remove(&self.quota.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(of: &Quotas, peer: &str) -> Quota {
        let mut request = Request::new(());
        request.extensions_mut().insert(Peer(peer.parse().ok()));
        of.of(&request)
    }

    fn small() -> Quotas {
        Quotas { most: Most { watches: 2, leases: 2 }, taken: Arc::default() }
    }

    #[test]
    fn one_address_takes_no_watch_from_another() {
        let quotas = small();
        let (one, same, other) =
            (quota(&quotas, "10.0.0.1"), quota(&quotas, "::ffff:10.0.0.1"), quota(&quotas, "10.0.0.2"));
        let first = one.watch().unwrap();
        let _second = same.watch().unwrap();
        assert!(one.watch().unwrap_err().message().contains("10.0.0.1 has 2 watches"));
        let _others = other.watch().unwrap();
        drop(first);
        one.watch().unwrap();
    }

    #[test]
    fn a_host_has_one_share_whatever_ipv6_address_it_makes_up() {
        let quotas = small();
        let (one, same) = (quota(&quotas, "2001:db8:0:7::1"), quota(&quotas, "2001:db8:0:7:a:b:c:d"));
        let places = [one.watch().unwrap(), same.watch().unwrap()];
        let refused = same.watch().unwrap_err();
        assert!(refused.message().starts_with("2001:db8:0:7::/64 has 2 watches"), "{}", refused.message());
        // Another network, and this host itself.
        let _others = [quota(&quotas, "2001:db8:0:8::1").watch().unwrap(), quota(&quotas, "::1").watch().unwrap()];
        drop(places);
        one.watch().unwrap();
    }

    #[test]
    fn one_address_takes_no_lease_from_another_and_ended_ones_do_not_count() {
        let quotas = small();
        let (one, other) = (quota(&quotas, "10.0.0.1"), quota(&quotas, "10.0.0.2"));
        let grant = |quota: &Quota, id: i64, ended: &[i64]| {
            let granted = quota.lease(|lease| !ended.contains(&lease.0), || Ok((LeaseId(id), ())));
            granted.is_ok()
        };
        assert!(grant(&one, 1, &[]) && grant(&one, 2, &[]));
        assert!(!grant(&one, 3, &[]));
        assert!(grant(&other, 3, &[]));
        assert!(grant(&one, 4, &[1]) && !grant(&one, 5, &[1]));
        // What is refused takes no room.
        let refused = other.lease::<()>(|_| true, || Err(Status::not_found("")));
        assert!(refused.is_err() && grant(&other, 6, &[]));
    }
}
