//! Bytes that nobody meant to send: samples of what each parser reads, changed. `fuzz/` plays to the same parsers what
//! libFuzzer finds.

use elastic_tests::hostile::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Conversations, records and words in which each parser finds something.
fn samples(target: &str) -> Vec<Vec<u8>> {
    let words = |text: &str| text.replace(' ', "\0").into_bytes();
    match target {
        // Which record, how, and what is changed in it, by place and value.
        "records" => (0..12).map(|record| vec![record, 1]).collect(),
        "workers_store" => vec![
            [&[1_u8, 1, 0, 0, 0, 0, 0, 0, 0, b'k', 1, 0, 0, 0, 0, 0, 0, 0, b'v'][..], &[7]].concat(),
            [&[5_u8, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, b'k'][..], &[2, 3, 4]].concat(),
        ],
        "worker_socket" => [
            r#"{"type":"register","local_rank":0,"pid":7,"round_aware":true}"#,
            r#"{"type":"progress","step":3,"epoch":1,"loss":0.5,"total_steps":9}"#,
            r#"{"type":"barrier","id":1,"name":"b"}"#,
            r#"{"type":"commit","id":2,"checkpoint":{"step":3,"path":"/c"}}"#,
            r#"{"type":"memory","id":3,"bytes":4096,"rescue":["sh"]}"#,
            r#"{"type":"quiesced","round":2,"step":3}"#,
            r#"{"type":"request_round","id":4,"round":1,"reason":"r"}"#,
            r#"{"type":"failing","class":"own","message":"m"}"#,
        ]
        .map(|line| format!("{{\"type\":\"register\",\"local_rank\":0,\"pid\":7}}\n{line}\n").into_bytes())
        .to_vec(),
        "etcd_v2" => {
            let answer = |body: &str| {
                let head =
                    "HTTP/1.1 200 OK\r\nX-Etcd-Cluster-Id: a\r\nX-Etcd-Index: 7\r\nContent-Type: application/json\r\n";
                format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
            };
            let node = r#"{"key":"/k","value":"v","modifiedIndex":7,"createdIndex":7}"#;
            vec![
                answer(r#"{"etcdserver":"3.5.0","etcdcluster":"3.5.0"}"#),
                answer(&format!(r#"{{"action":"get","node":{{"dir":true,"nodes":[{node}]}}}}"#)),
                answer(r#"{"errorCode":401,"message":"m","cause":"c","index":7}"#),
            ]
        }
        "checkpoint" => vec![vec![0, b'{'], vec![1], vec![2, 0, 0], vec![3, 0, 0]],
        _ => [
            "--rdzv-backend=etcd --rdzv-endpoint=h:2379 --rdzv-id=J --nnodes=1:4 --nproc-per-node=8 train.py --lr 1",
            "--standalone --rdzv-conf=lease_ttl=5,prefix=/a --redirects=0:1,1:3 --log-rotate=1M:3 -m module",
            "--nnodes 2 --node-rank 1 --master-addr h --master-port 1 --local-ranks-filter 0,1 --tee 3 t.py",
        ]
        .map(words)
        .to_vec(),
    }
}

/// A sample of which some bytes are others, are gone, or come twice, or any bytes at all.
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
        let cases = if name == "etcd_v2" || name == "worker_socket" { 60 } else { 400 };
        let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
        let outcome = runner.run(&changed(samples(name)), |bytes| {
            play(&bytes);
            let panics = std::mem::take(&mut *panics.lock().unwrap());
            prop_assert!(panics.is_empty(), "{panics:?}");
            Ok(())
        });
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
