//! The store contract on real etcd servers. Faults are in `etcd_faults`.

/// The contract on a release, if it is there.
macro_rules! on_release {
    ($name:ident, $release:literal) => {
        mod $name {
            use elastic_tests::contract::{Case, compaction, lease, run_group, txn, watch};
            use elastic_tests::etcd;

            fn group(cases: &[Case], width: usize) {
                if let Some(binary) = etcd::etcd_of($release) {
                    run_group(|| etcd::subject(Some(binary)), cases, width);
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
    };
}

on_release!(on_etcd_3_4, "3.4");
on_release!(on_etcd_3_5, "3.5");
on_release!(on_etcd_3_6, "3.6");
on_release!(on_etcd_3_7, "3.7");
