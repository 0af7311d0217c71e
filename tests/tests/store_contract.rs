//! The store contract on real etcd servers. Faults are in `etcd_faults`.

use elastic_tests::contract::Subject;
use elastic_tests::etcd;

async fn etcd_3_4() -> Subject {
    etcd::subject(None).await
}

elastic_tests::contract_suite!(on_etcd_3_4, etcd_3_4);

/// The same on etcd 3.5, where `scripts/etcd-3.5.sh` has fetched it. Demanded by `ELASTIC_REQUIRE_ETCD35=1`.
mod on_etcd_3_5 {
    use elastic_tests::contract::{Case, compaction, lease, run_group, txn, watch};
    use elastic_tests::etcd;

    fn group(cases: &[Case], width: usize) {
        match etcd::etcd35() {
            Some(binary) => run_group(|| etcd::subject(Some(binary)), cases, width),
            None => eprintln!("not run: no etcd 3.5 here (scripts/etcd-3.5.sh fetches it)"),
        }
    }

    #[test]
    fn transactions() {
        group(txn::CASES, usize::MAX);
    }

    #[test]
    fn watches() {
        group(watch::CASES, usize::MAX);
    }

    #[test]
    fn leases() {
        group(lease::CASES, usize::MAX);
    }

    #[test]
    fn compaction() {
        group(compaction::CASES, 1);
    }
}
