//! Given certificates, what is said of them.

use std::time::{Duration, UNIX_EPOCH};

use rcgen::{CertificateParams, DnType, KeyPair};

use super::*;

/// 2026-11-25 12:00:00 UTC
const NOW: u64 = 1_795_608_000;

/// A certificate of this name, good from and until so many seconds after now.
fn certificate(name: &str, from: i64, until: i64) -> CertificateDer<'static> {
    let at = |after: i64| (UNIX_EPOCH + Duration::from_secs(NOW.checked_add_signed(after).unwrap())).into();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    (params.not_before, params.not_after) = (at(from), at(until));
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
}

fn judged(whose: Whose, of: &str, certificates: Vec<CertificateDer<'static>>) -> Vec<Finding> {
    judge(&Shown { whose, of: of.to_owned(), certificates }, NOW * 1000 + 999)
}

const DAYS: i64 = DAY as i64;

#[test]
fn a_certificate_is_well_until_a_month_before_its_end() {
    for (from, until, state, seen) in [
        (-1, 797 * DAYS, State::Ok, "is good until 2029-01-30 12:00 UTC, 797 days"),
        (0, 30 * DAYS, State::Ok, "is good until 2026-12-25 12:00 UTC, 30 days"),
        (-1, 30 * DAYS - 1, State::Warning, "is good until 2026-12-25 11:59 UTC, 29 days"),
        (-1, 1, State::Warning, "is good until 2026-11-25 12:00 UTC, 0 days"),
        (-9, 0, State::Failed, "has ended, 2026-11-25 12:00 UTC"),
        (-9, -1, State::Failed, "has ended, 2026-11-25 11:59 UTC"),
        (1, 797 * DAYS, State::Failed, "is good only from 2026-11-25 12:00 UTC on"),
    ] {
        let found = judged(Whose::Etcds, "etcd0:2379", vec![certificate("etcd0", from, until)]);
        let [found] = &found[..] else { panic!("one line: {found:?}") };
        assert_eq!((found.state, found.check, found.of.as_str()), (state, "certificate", "etcd0:2379"), "{found:?}");
        assert!(found.seen.contains("CN=etcd0") && found.seen.ends_with(seen), "{seen}: {found:?}");
        assert_eq!(found.advice.is_none(), state == State::Ok, "{found:?}");
    }
}

#[test]
fn what_to_type_fits_whose_it_is() {
    for (whose, name, of, advice) in [
        (Whose::Etcds, "etcd0.example.org", "etcd0.example.org:2379", "renew DIRECTORY etcd0.example.org,"),
        (Whose::Ours, "client agents", "/etc/elastic/agents.pem", "renew DIRECTORY agents,"),
        (Whose::Ours, "client agents", "/etc/elastic/agents.pem", "Copy it to /etc/elastic/agents.pem"),
        (Whose::Cas, "elastic etcd CA", "/etc/elastic/ca.pem", "certificates.sh new DIRECTORY"),
    ] {
        for until in [DAYS, -DAYS] {
            let found = judged(whose, of, vec![certificate(name, -9 * DAYS, until)]);
            let advised = found[0].advice.as_deref().unwrap();
            assert!(advised.contains(advice), "{advice}: {advised}");
        }
    }
}

#[test]
fn each_of_several_counts_but_a_ca_that_another_follows() {
    let (old, new) = (|| certificate("old", -9 * DAYS, -DAYS), || certificate("new", -DAYS, 99 * DAYS));
    let states = |whose, certificates| -> Vec<State> {
        judged(whose, "ca.pem", certificates).iter().map(|found| found.state).collect()
    };
    assert_eq!(states(Whose::Cas, vec![old(), new()]), [State::Warning, State::Ok]);
    assert_eq!(states(Whose::Cas, vec![old(), old()]), [State::Failed, State::Failed]);
    assert_eq!(states(Whose::Etcds, vec![new(), old()]), [State::Ok, State::Failed]);
    assert_eq!(states(Whose::Etcds, Vec::new()), []);
}

#[test]
fn what_is_no_certificate_is_unknown() {
    let found = judged(Whose::Cas, "ca.pem", vec![CertificateDer::from(vec![0x30, 3, 1])]);
    assert_eq!((found[0].state, found[0].of.as_str()), (State::Unknown, "ca.pem"));
}
