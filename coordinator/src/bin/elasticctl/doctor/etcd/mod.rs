//! Judges what etcd's members showed. Pure: `look` asks them.

use std::collections::BTreeSet;
use std::time::Duration;

use elastic_store::StoreError;
use elastic_store::etcd::{Alarm, MemberStatus, faults_of, lowest_fit};

use super::finding::Finding;
use super::look::{Cluster, Endpoint};

/// The smallest `lease_ttl` that fits the default margin of a second.
pub(super) const SMALLEST_LEASE: Duration = Duration::from_secs(4);

/// etcd's quota where it is not told: its default.
const DEFAULT_QUOTA: u64 = 2 * 1024 * 1024 * 1024;

/// Percent of the quota from which a database is worth a warning.
const NEARLY_FULL: u64 = 80;

const CLUSTER: &str = "the cluster";

/// All findings: each endpoint's, then the cluster's. `lease` is how long a silent node stays a member.
pub(super) fn judge(cluster: &Cluster, lease: Duration) -> Vec<Finding> {
    let mut findings: Vec<_> =
        cluster.endpoints.iter().flat_map(|endpoint| one(endpoint, lease, cluster.users)).collect();
    findings.extend(leader(cluster));
    findings.extend(members(cluster));
    findings.extend(alarms(cluster));
    findings
}

/// An endpoint's findings, up to the first that leaves no sense in the rest.
fn one(endpoint: &Endpoint, lease: Duration, users: bool) -> Vec<Finding> {
    let address = &endpoint.address;
    let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
    let mut findings = Vec::new();
    match &endpoint.resolved {
        Err(why) => {
            let unresolved = Finding::failed("name", address, format!("{host} does not resolve: {why}"));
            findings.push(unresolved.advise(format!("getent hosts {host}; correct DNS, /etc/hosts or --etcd")));
        }
        Ok(found) => {
            let mut addresses: Vec<_> = found.iter().map(|address| address.ip().to_string()).collect();
            addresses.dedup();
            findings.push(Finding::ok("name", address, addresses.join(", ")));
        }
    }
    findings.extend(endpoint.accepted.as_ref().map(|accepted| match accepted {
        Ok(took) => Finding::ok("port", address, format!("accepts, after {}", millis(*took))),
        Err(why) => Finding::failed("port", address, format!("does not accept: {why}")).advise(format!(
            "on {host}: systemctl status etcd; between here and there: a firewall that must let the port through"
        )),
    }));
    findings.extend(endpoint.answers.as_ref().map(|answers| answer(address, answers)));
    match &endpoint.status {
        Some(Ok(status)) => findings.extend([version(address, status, users), size(address, status)]),
        Some(Err(error)) => findings.push(Finding::not_told("status", address, error)),
        None => {}
    }
    findings.extend(endpoint.read.as_ref().map(|took| latency("read", address, took, lease)));
    findings.extend(endpoint.write.as_ref().map(|took| latency("write", address, took, lease)));
    if !endpoint.status.as_ref().is_some_and(|status| status.as_ref().is_ok_and(is_embedded)) {
        findings.extend(endpoint.v2.as_ref().map(|keys| v2(address, keys)));
    }
    findings
}

/// etcd 3.6 panics on what the v2 API wrote, until a snapshot of the member is newer.
fn v2(address: &str, keys: &Result<Vec<String>, StoreError>) -> Finding {
    let only = "only --rdzv-backend=etcd-v2 needs it";
    match keys {
        Ok(keys) if keys.is_empty() => {
            Finding::ok("v2", address, format!("the v2 API answers, and holds nothing; {only}"))
        }
        Ok(keys) => {
            let seen = format!("the v2 API answers, and holds {}; {only}", keys.join(", "));
            Finding::warning("v2", address, seen).advise(
                "before an upgrade to 3.6: end what uses it, start each member without --enable-v2, and wait until each \
                 has made a snapshot since (--snapshot-count): docs/operations.md",
            )
        }
        Err(StoreError::NotV2 { .. }) => Finding::ok("v2", address, format!("the v2 API is off; {only}")),
        Err(error) => Finding::not_told("v2", address, error),
    }
}

fn is_embedded(status: &MemberStatus) -> bool {
    status.version.ends_with("+embedded")
}

/// Whether it speaks etcd's API, lets us in and can serve.
fn answer(address: &str, answers: &Result<(), StoreError>) -> Finding {
    let error = match answers {
        Ok(()) => return Finding::ok("answer", address, "lets us in and has a quorum"),
        Err(error) => error,
    };
    let failed = Finding::failed("answer", address, error.to_string());
    failed.advise(match error {
        StoreError::Tls { .. } => format!(
            "openssl s_client -connect {address} -showcerts </dev/null shows its certificate: compare name, dates and \
             issuer with --cacert, and --cert with the CA that etcd trusts"
        ),
        StoreError::Denied { .. } => {
            "etcdctl user get USER tells whether it exists; give --user and --password-file".to_owned()
        }
        StoreError::NotV3 { .. } => "name etcd's client port in --etcd; etcd's default is 2379".to_owned(),
        StoreError::Unavailable { cause, .. } if cause.contains("no leader") => {
            format!(
                "this member sees no leader: etcdctl --endpoints={address} endpoint status --cluster; start the \
                     other members, and open port 2380 between them"
            )
        }
        _ => format!("etcdctl --endpoints={address} endpoint health; look at its log with journalctl -u etcd"),
    })
}

fn version(address: &str, status: &MemberStatus, users: bool) -> Finding {
    let version = &status.version;
    if is_embedded(status) {
        let seen = "the embedded store: in one process, for one machine and trials";
        return Finding::ok("version", address, seen);
    }
    let Some(mut faults) = faults_of(version) else {
        return Finding::unknown("version", address, format!("{version}: no version that is known here"));
    };
    faults.retain(|fault| users || !fault.with_users);
    if faults.is_empty() {
        return Finding::ok("version", address, format!("{version}, without faults that matter here"));
    }
    let told: Vec<_> = faults.iter().map(|fault| format!("{} (before {})", fault.fault, fault.fixed_in())).collect();
    let to = match lowest_fit(version, users) {
        Some(lowest) => format!("{lowest} or newer"),
        None => "a newer line, since no release of this one is without".to_owned(),
    };
    let until = faults.iter().map(|fault| fault.advice).filter(|advice| !advice.is_empty());
    let advice = [format!("upgrade etcd, one member at a time, to {to}")];
    let advice: Vec<_> = advice.iter().map(String::as_str).chain(until).collect();
    Finding::warning("version", address, format!("{version}: {}", told.join("; "))).advise(advice.join("; "))
}

fn size(address: &str, status: &MemberStatus) -> Finding {
    let quota = status.quota.unwrap_or(DEFAULT_QUOTA);
    let of = if status.quota.is_some() { "" } else { " by default (this release does not tell its own)" };
    let seen = format!("{} of {}{of}, {} in use", mebi(status.size), mebi(quota), mebi(status.in_use));
    if status.size < quota / 100 * NEARLY_FULL {
        return Finding::ok("size", address, seen);
    }
    let holes = status.in_use < status.size / 2;
    let advice = if holes {
        format!("etcdctl --endpoints={address} defrag, one member at a time")
    } else {
        format!("etcdctl compact, then etcdctl --endpoints={address} defrag; or a higher --quota-backend-bytes")
    };
    Finding::warning("size", address, seen).advise(advice)
}

/// A node renews its lease five times a TTL: a store that takes a tenth of it for one request leaves little.
fn latency(check: &'static str, address: &str, took: &Result<Duration, StoreError>, lease: Duration) -> Finding {
    let limit = lease / 10;
    match took {
        Ok(took) if *took <= limit => Finding::ok(check, address, format!("{} (median)", millis(*took))),
        Ok(took) => Finding::warning(
            check,
            address,
            format!("{} (median), above a tenth of a lease of {} s", millis(*took), lease.as_secs_f64()),
        )
        .advise("give etcd a disk and a network of its own (etcdctl check perf), or the jobs a longer lease_ttl"),
        Err(error @ StoreError::Denied { .. }) => {
            // Whose user it is is not known here, and one of a single job needs no more than that job's keys.
            let seen = format!("not timed, since this user may not {check} where doctor does: {error}");
            Finding::unknown(check, address, seen).advise(
                "for a user of one job that is as it should be; agents of any job need it: docs/operations.md, and \
                 etcdctl role grant-permission ROLE readwrite --prefix=true PREFIX/",
            )
        }
        Err(error) => Finding::failed(check, address, error.to_string())
            .advise(format!("etcdctl --endpoints={address} endpoint health; etcdctl alarm list")),
    }
}

/// Those that told how they are.
fn told(cluster: &Cluster) -> impl Iterator<Item = (&Endpoint, &MemberStatus)> {
    cluster.endpoints.iter().filter_map(|endpoint| Some((endpoint, endpoint.status.as_ref()?.as_ref().ok()?)))
}

fn leader(cluster: &Cluster) -> Option<Finding> {
    let clusters: BTreeSet<_> = told(cluster).map(|(_, status)| status.cluster).collect();
    if clusters.len() > 1 {
        let all: Vec<_> = told(cluster)
            .map(|(endpoint, status)| format!("{} is of cluster {:x}", endpoint.address, status.cluster))
            .collect();
        let seen = format!("the endpoints name different clusters: {}", all.join(", "));
        return Some(Finding::failed("leader", CLUSTER, seen).advise("name members of one cluster in --etcd"));
    }
    let leaders: BTreeSet<_> = told(cluster).map(|(_, status)| status.leader).collect();
    let seen = match leaders.len() {
        0 => return None,
        1 => match leaders.first().copied().flatten() {
            Some(leader) => {
                let at = told(cluster).find(|(_, status)| status.member == leader);
                let at = at.map_or_else(|| format!("member {leader:x}"), |(endpoint, _)| endpoint.address.clone());
                return Some(Finding::ok("leader", CLUSTER, format!("{at}; all that answer agree")));
            }
            None => {
                let none = Finding::failed("leader", CLUSTER, "no member knows a leader");
                return Some(none.advise("start the members that are missing: etcdctl endpoint status --cluster"));
            }
        },
        _ => told(cluster).map(|(endpoint, status)| {
            let follows = status.leader.map_or_else(|| "no member".to_owned(), |leader| format!("{leader:x}"));
            format!("{} follows {follows}", endpoint.address)
        }),
    };
    let seen = format!("the members do not agree: {}", seen.collect::<Vec<_>>().join(", "));
    let advice = "run it again: an election may be under way. If it stays, open port 2380 between the members";
    Some(Finding::warning("leader", CLUSTER, seen).advise(advice))
}

fn members(cluster: &Cluster) -> Option<Finding> {
    let lists: Vec<_> = cluster.endpoints.iter().filter_map(|endpoint| endpoint.members.as_ref()).collect();
    let Some(list) = lists.iter().find_map(|list| list.as_ref().ok()) else {
        return lists.first().and_then(|list| Some(Finding::not_told("members", CLUSTER, list.as_ref().err()?)));
    };
    if told(cluster).any(|(_, status)| is_embedded(status)) {
        return None;
    }
    let warn = |seen: String, advice: &str| Some(Finding::warning("members", CLUSTER, seen).advise(advice));
    let named = cluster.endpoints.len();
    match list.len() {
        1 => warn(
            "1 member: when it is away, nothing about any job can change".to_owned(),
            "use three or five members, on machines that do not fail together",
        ),
        even if even % 2 == 0 => {
            let seen = format!("{even} members bear no more losses than {}", even - 1);
            warn(seen, "an odd number is cheaper and as safe: etcdctl member add, or etcdctl member remove")
        }
        all if named < all => {
            let urls: Vec<_> = list.iter().flatten().map(String::as_str).collect();
            let seen = format!("{all} members, and only {named} of them named: {}", urls.join(", "));
            warn(seen, "name all in --etcd, and in the agents' --rdzv-endpoint, so that each may fail")
        }
        all => Some(Finding::ok("members", CLUSTER, format!("{all} members, all named"))),
    }
}

fn alarms(cluster: &Cluster) -> Vec<Finding> {
    let lists: Vec<_> = cluster.endpoints.iter().filter_map(|endpoint| endpoint.alarms.as_ref()).collect();
    let raised: BTreeSet<_> = lists.iter().filter_map(|list| list.as_ref().ok()).flatten().copied().collect();
    let one = |(member, alarm): &(u64, Alarm)| {
        let (name, advice) = match alarm {
            Alarm::NoSpace => (
                "NOSPACE: its database reached the quota, and the cluster takes no writes",
                "etcdctl compact REVISION; etcdctl defrag --cluster; etcdctl alarm disarm; then a higher \
                 --quota-backend-bytes. REVISION is in etcdctl endpoint status -w json",
            ),
            Alarm::Corrupt => (
                "CORRUPT: its data differ from the other members'",
                "etcdctl member remove it, empty its data directory, etcdctl member add it; then etcdctl alarm disarm",
            ),
        };
        Finding::failed("alarm", format!("member {member:x}"), name).advise(advice)
    };
    if !raised.is_empty() {
        return raised.iter().map(one).collect();
    }
    if lists.iter().any(|list| list.is_ok()) {
        return vec![Finding::ok("alarm", CLUSTER, "none")];
    }
    let error = lists.iter().find_map(|list| list.as_ref().err());
    error.map(|error| Finding::not_told("alarm", CLUSTER, error)).into_iter().collect()
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn mebi(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1024.0 * 1024.0))
}

#[cfg(test)]
mod tests;
