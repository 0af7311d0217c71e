#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elastic_tests::hostile::streams::etcd_v2(bytes));
