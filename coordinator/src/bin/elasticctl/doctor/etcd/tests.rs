//! Given what was seen, what is said of it.

use super::super::finding::State;
use super::*;

const GIB: u64 = 1024 * 1024 * 1024;

fn status() -> MemberStatus {
    MemberStatus {
        version: "3.6.9".to_owned(),
        cluster: 7,
        member: 1,
        leader: Some(1),
        size: 1 << 20,
        in_use: 1 << 20,
        quota: Some(2 * GIB),
    }
}

fn listed(count: u64) -> Vec<Vec<String>> {
    (1..=count).map(|id| vec![format!("http://m{id}:2379")]).collect()
}

/// One that is well, of a cluster of three.
fn well(id: u64) -> Endpoint {
    let mut endpoint = Endpoint::unseen(&format!("m{id}:2379"));
    endpoint.resolved = Ok(vec![([10, 0, 0, id as u8], 2379).into()]);
    endpoint.accepted = Some(Ok(Duration::from_micros(250)));
    endpoint.answers = Some(Ok(()));
    endpoint.status = Some(Ok(MemberStatus { member: id, ..status() }));
    endpoint.members = Some(Ok(listed(3)));
    endpoint.alarms = Some(Ok(Vec::new()));
    endpoint.read = Some(Ok(Duration::from_millis(1)));
    endpoint.write = Some(Ok(Duration::from_millis(4)));
    let endpoints = endpoint.address.clone();
    endpoint.v2 = Some(Err(StoreError::NotV2 { endpoints, cause: "off".to_owned() }));
    endpoint
}

fn three() -> Cluster {
    Cluster { endpoints: (1..=3).map(well).collect(), ..Cluster::default() }
}

fn told(cluster: &Cluster) -> Vec<Finding> {
    judge(cluster, SMALLEST_LEASE)
}

/// The only finding that is not ok.
#[track_caller]
fn only(findings: &[Finding]) -> &Finding {
    let mut bad = findings.iter().filter(|finding| finding.state != State::Ok);
    let first = bad.next().unwrap_or_else(|| panic!("all is ok: {findings:#?}"));
    assert!(bad.next().is_none(), "{findings:#?}");
    first
}

#[track_caller]
fn is(findings: &[Finding], state: State, check: &str, of: &str, seen: &str, advice: &str) {
    let found = only(findings);
    let advised = found.advice.clone().unwrap_or_default();
    assert_eq!((found.state, found.check, found.of.as_str()), (state, check, of), "{found:#?}");
    assert!(found.seen.contains(seen) && advised.contains(advice), "{found:#?}");
}

#[test]
fn a_cluster_that_is_well_has_only_good_lines() {
    let findings = told(&three());
    assert!(findings.iter().all(|finding| finding.state == State::Ok && finding.advice.is_none()), "{findings:#?}");
    let line = |check: &str, of: &str| {
        let found = findings.iter().find(|finding| finding.check == check && finding.of == of);
        found.unwrap_or_else(|| panic!("no {check} of {of}: {findings:#?}")).seen.clone()
    };
    assert_eq!(line("name", "m2:2379"), "10.0.0.2");
    assert_eq!(line("port", "m2:2379"), "accepts, after 0.2 ms");
    assert_eq!(line("version", "m2:2379"), "3.6.9, without faults that matter here");
    assert_eq!(line("size", "m2:2379"), "1.0 MiB of 2048.0 MiB, 1.0 MiB in use");
    assert_eq!(line("write", "m2:2379"), "4.0 ms (median)");
    assert_eq!(line("leader", "the cluster"), "m1:2379; all that answer agree");
    assert_eq!(line("members", "the cluster"), "3 members, all named");
    assert_eq!(line("alarm", "the cluster"), "none");
}

#[test]
fn what_cannot_be_reached_is_named_with_the_step_that_fails() {
    let at = "m1:2379".to_owned();
    let unavailable = |cause: &str| StoreError::Unavailable { endpoints: at.clone(), cause: cause.to_owned() };
    let mut cluster = three();
    cluster.endpoints[0] = Endpoint { resolved: Err("unknown".to_owned()), ..Endpoint::unseen(&at) };
    is(&told(&cluster), State::Failed, "name", &at, "m1 does not resolve: unknown", "getent hosts m1");

    cluster.endpoints[0] = Endpoint { accepted: Some(Err("refused".to_owned())), ..Endpoint::unseen(&at) };
    is(&told(&cluster), State::Failed, "port", &at, "does not accept: refused", "systemctl status etcd");

    for (error, advice) in [
        (StoreError::Tls { endpoints: at.clone(), cause: "wrong CA".into() }, "openssl s_client -connect m1:2379"),
        (StoreError::Denied { endpoints: at.clone(), cause: "who?".into() }, "--password-file"),
        (StoreError::NotV3 { endpoints: at.clone(), cause: "a printer".into() }, "2379"),
        (unavailable("etcdserver: no leader"), "2380"),
        (unavailable("does not answer"), "endpoint health"),
    ] {
        let cause = error.to_string();
        cluster.endpoints[0] = Endpoint { answers: Some(Err(error)), ..Endpoint::unseen(&at) };
        is(&told(&cluster), State::Failed, "answer", &at, &cause, advice);
    }
}

#[test]
fn what_is_not_reported_is_unknown_and_fails_nothing() {
    let denied = || StoreError::Denied { endpoints: "m1".to_owned(), cause: "only root".to_owned() };
    let mut cluster = Cluster { endpoints: vec![well(1)], ..Cluster::default() };
    for endpoint in &mut cluster.endpoints {
        endpoint.status = Some(Err(denied()));
        endpoint.members = Some(Err(denied()));
        endpoint.alarms = Some(Err(denied()));
        endpoint.v2 = Some(Err(denied()));
    }
    let findings = told(&cluster);
    let unknown: Vec<_> =
        findings.iter().filter(|finding| finding.state == State::Unknown).map(|finding| finding.check).collect();
    assert_eq!(unknown, ["status", "v2", "members", "alarm"]);
    assert!(!super::super::finding::any_failed(&findings));
}

#[test]
fn releases_sizes_and_times_have_their_bounds() {
    let judged = |change: &dyn Fn(&mut MemberStatus)| {
        let mut cluster = three();
        let mut changed = MemberStatus { member: 2, ..status() };
        change(&mut changed);
        cluster.endpoints[1].status = Some(Ok(changed));
        told(&cluster)
    };
    let at = "m2:2379";
    let old = judged(&|status| status.version = "3.5.27".to_owned());
    is(&old, State::Warning, "version", at, "stale after a pause (before 3.4.42, 3.5.28, 3.6.9)", "to 3.5.28 or newer");
    let strange = judged(&|status| status.version = "main".to_owned());
    is(&strange, State::Unknown, "version", at, "main", "");

    let full = |size: u64, in_use: u64, quota: Option<u64>| {
        judged(&|status| (status.size, status.in_use, status.quota) = (size, in_use, quota))
    };
    is(&full(800, 700, Some(1000)), State::Warning, "size", at, "in use", "etcdctl compact");
    is(&full(800, 300, Some(1000)), State::Warning, "size", at, "in use", "defrag, one member at a time");
    is(&full(2 * GIB, GIB, None), State::Warning, "size", at, "2048.0 MiB by default", "defrag");
    assert!(full(799, 1, Some(1000)).iter().all(|finding| finding.state == State::Ok));

    for (check, at_most) in [("read", true), ("read", false), ("write", true), ("write", false)] {
        let mut cluster = three();
        let took = Some(Ok(Duration::from_millis(if at_most { 400 } else { 401 })));
        let endpoint = &mut cluster.endpoints[1];
        if check == "read" {
            endpoint.read = took
        } else {
            endpoint.write = took
        }
        if at_most {
            assert!(told(&cluster).iter().all(|finding| finding.state == State::Ok));
        } else {
            is(&told(&cluster), State::Warning, check, at, "above a tenth of a lease of 4 s", "lease_ttl");
        }
    }
}

#[test]
fn what_matters_only_with_users_is_shown_only_then() {
    let mut cluster = three();
    assert!(told(&cluster).iter().all(|finding| finding.state == State::Ok));
    cluster.users = true;
    cluster.endpoints.truncate(1);
    cluster.endpoints[0].members = Some(Ok(listed(1)));
    let findings = told(&cluster);
    let version = findings.iter().find(|finding| finding.check == "version").expect("the version");
    let advice = version.advice.clone().unwrap_or_default();
    assert!(version.seen.contains("one key can watch all later ones (before 3.5.33, 3.6.14, 3.7.1)"), "{version:#?}");
    assert!(advice.contains("to 3.6.14 or newer; grant reads by prefix"), "{version:#?}");
}

#[test]
fn what_the_v2_api_holds_is_warned_of_before_an_upgrade() {
    let mut cluster = three();
    cluster.endpoints[1].v2 = Some(Ok(Vec::new()));
    assert!(told(&cluster).iter().all(|finding| finding.state == State::Ok));
    cluster.endpoints[1].v2 = Some(Ok(vec!["/torchelastic".to_owned()]));
    let held = "the v2 API answers, and holds /torchelastic";
    is(&told(&cluster), State::Warning, "v2", "m2:2379", held, "before an upgrade to 3.6");
}

#[test]
fn a_user_without_rights_may_be_of_one_job_and_a_write_that_fails_is_a_failure() {
    let at = "m2:2379";
    for (error, state, advice) in [
        (StoreError::Denied { endpoints: at.into(), cause: "no".into() }, State::Unknown, "grant-permission"),
        (StoreError::NoSpace { endpoints: at.into() }, State::Failed, "alarm list"),
    ] {
        let mut cluster = three();
        cluster.endpoints[1].write = Some(Err(error));
        is(&told(&cluster), state, "write", at, "", advice);
    }
}

#[test]
fn leaders_members_and_alarms_are_the_clusters() {
    let the = "the cluster";
    let with = |change: &dyn Fn(usize, &mut MemberStatus)| {
        let mut cluster = three();
        for (n, endpoint) in cluster.endpoints.iter_mut().enumerate() {
            let mut changed = MemberStatus { member: n as u64 + 1, ..status() };
            change(n, &mut changed);
            endpoint.status = Some(Ok(changed));
        }
        told(&cluster)
    };
    let none = with(&|_, status| status.leader = None);
    is(&none, State::Failed, "leader", the, "no member knows a leader", "endpoint status");
    let split = with(&|n, status| status.leader = (n > 0).then_some(2));
    is(&split, State::Warning, "leader", the, "m1:2379 follows no member, m2:2379 follows 2", "run it again");
    let two = with(&|n, status| status.cluster = n as u64);
    is(&two, State::Failed, "leader", the, "m3:2379 is of cluster 2", "one cluster");

    for (count, named, seen) in [
        (1, 1, "1 member"),
        (2, 2, "2 members bear"),
        (4, 3, "4 members bear"),
        (3, 1, "only 1 of them named: http://m1"),
    ] {
        let mut cluster = three();
        cluster.endpoints.truncate(named);
        cluster.endpoints.iter_mut().for_each(|endpoint| endpoint.members = Some(Ok(listed(count))));
        is(&told(&cluster), State::Warning, "members", the, seen, "");
    }

    for (alarm, seen) in [(Alarm::NoSpace, "NOSPACE"), (Alarm::Corrupt, "CORRUPT")] {
        let mut cluster = three();
        // All members tell the same alarms.
        cluster.endpoints.iter_mut().for_each(|endpoint| endpoint.alarms = Some(Ok(vec![(0xab, alarm)])));
        is(&told(&cluster), State::Failed, "alarm", "member ab", seen, "alarm disarm");
    }
}

#[test]
fn the_embedded_store_is_no_cluster_and_has_no_faulty_release() {
    let mut embedded = well(1);
    embedded.status = Some(Ok(MemberStatus { version: "3.6.9+embedded".to_owned(), ..status() }));
    embedded.members = Some(Ok(listed(1)));
    let findings = told(&Cluster { endpoints: vec![embedded], ..Cluster::default() });
    assert!(findings.iter().all(|finding| finding.state == State::Ok), "{findings:#?}");
    assert!(findings.iter().any(|finding| finding.seen.contains("trials")));
    assert!(findings.iter().all(|finding| finding.check != "members" && finding.check != "v2"));
}
