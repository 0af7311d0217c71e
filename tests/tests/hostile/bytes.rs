//! Bytes that no one meant to send: samples of what each parser reads, unchanged and changed. `make fuzz` gives the
//! same parsers what libFuzzer finds.

use elastic_tests::prelude::*;

use elastic_tests::hostile::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Conversations, records and words in which each parser finds something: what libFuzzer begins with, and what it found.
fn samples(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
}

/// A sample with some bytes changed, lost or doubled, or any bytes at all.
fn changed(samples: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), prop_oneof![Just(0), Just(255), Just(b'9'), any::<u8>()], 0..4_u8);
    let changes = prop::collection::vec(change, 0..6);
    let more = prop::collection::vec(any::<u8>(), 0..24);
    let of_sample = (prop::sample::select(samples), changes, more).prop_map(|(mut bytes, changes, more)| {
        for (at, byte, how) in changes {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, byte),
                _ => bytes.extend_from_within(at..),
            }
        }
        bytes.extend(more);
        bytes
    });
    prop_oneof![9 => of_sample, 1 => prop::collection::vec(any::<u8>(), 0..200)]
}

#[test]
fn whatever_strangers_send_is_refused_and_nothing_ends() {
    // A thread of the product that panics would not fail this test by itself.
    let panics = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = std::sync::Arc::clone(&panics);
    std::panic::set_hook(Box::new(move |panic| seen.lock().unwrap().push(panic.to_string())));
    for (name, play) in TARGETS {
        // Those that start a server each time take longer.
        let cases = match name {
            "embedded_store" | "peer_port" => 30,
            "etcd_v2" | "worker_socket" => 60,
            _ => 400,
        };
        let survives = |bytes: &[u8]| {
            // What it panics with is among the others.
            let _caught = std::panic::catch_unwind(|| play(bytes));
            let panics = std::mem::take(&mut *panics.lock().unwrap());
            prop_assert!(panics.is_empty(), "{} {panics:?}", bytes.escape_ascii());
            Ok(())
        };
        let samples = samples(name);
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let unchanged = samples.iter().try_for_each(|bytes| survives(bytes)).map_err(|error| error.to_string());
        let outcome = unchanged
            .and_then(|()| runner.run(&changed(samples), |bytes| survives(&bytes)).map_err(|error| error.to_string()));
        let _forgotten = std::mem::take(&mut *panics.lock().unwrap());
        if let Err(error) = outcome {
            drop(std::panic::take_hook());
            panic!("{name}: {error}");
        }
    }
}

#[test]
#[ignore = "takes a minute: make chaos"]
fn each_value_of_each_record_may_be_any_other() {
    let mut deadly = Vec::new();
    for record in 0..12 {
        for place in 0..64 {
            for other in 0..24 {
                let bytes = [record, 1, place, other];
                let survived = std::panic::catch_unwind(|| elastic_tests::hostile::records::play(&bytes));
                if survived.is_err() {
                    deadly.push(bytes);
                }
            }
        }
    }
    assert!(deadly.is_empty(), "{deadly:?}");
}
