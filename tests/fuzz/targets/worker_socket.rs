#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| elastic_tests::hostile::streams::worker_socket(bytes));
