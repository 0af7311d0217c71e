//! Sends the same bytes to torch's server and to ours: all clients must get the same answers. Left out are what ours
//! does better on purpose (see `elastic_agent::workers_store::state`) and the order of a list of keys.

use std::io::{Read, Write};

use elastic_tests::prelude::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::{script, serve};

const CLIENTS: usize = 3;
const STEPS: usize = 40;

struct Client(TcpStream);

impl Client {
    fn of(port: u16) -> Client {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut client = Client(stream);
        client.0.write_all(&[0, 0xce, 0xf7, 0x85, 0x3c]).unwrap();
        client
    }

    /// All that it was sent, up to the answer of a PING that goes out now; `None`: it was cut off.
    fn hear(&mut self, nonce: u32) -> Option<Vec<u8>> {
        let mark = nonce.to_le_bytes();
        self.0.write_all(&[&[13][..], &mark].concat()).ok()?;
        let mut heard = Vec::new();
        while !heard.ends_with(&mark) {
            let mut chunk = [0; 4096];
            match self.0.read(&mut chunk) {
                Ok(0) | Err(_) => return None,
                Ok(count) => heard.extend_from_slice(&chunk[..count]),
            }
        }
        heard.truncate(heard.len() - mark.len());
        Some(heard)
    }
}

fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// Keys with values, and one with a queue: torch miscounts a wait for several keys if one is a queue's.
fn step() -> impl Strategy<Value = (usize, Vec<u8>)> {
    let key = || prop::sample::select(vec!["/a", "/b", "/c"]).prop_map(string);
    let keys = prop::collection::vec(prop::sample::select(vec!["/a", "/b", "/c"]), 0..3)
        .prop_map(|keys| [(keys.len() as u64).to_le_bytes().to_vec(), keys.iter().flat_map(string).collect()].concat());
    let value = || prop_oneof![Just(string("")), Just(string("12")), Just(string(" 7x")), Just(string(vec![9; 700]))];
    let number = (0_i64..4).prop_map(|n| n.to_le_bytes().to_vec());
    let queue = string("/queue");
    let said = prop_oneof![
        (prop::sample::select(vec![3_u8, 8]), key()).prop_map(|(op, key)| [vec![op], key].concat()),
        (prop::sample::select(vec![1_u8, 9]), key(), value()).prop_map(|(op, a, b)| [vec![op], a, b].concat()),
        // Only on a key that no one waits for: torch wakes waiting clients even if nothing was stored.
        (value(), value()).prop_map(|(a, b)| [vec![2], string("/compared"), a, b].concat()),
        (prop::sample::select(vec![4_u8, 18]), key(), number).prop_map(|(op, a, b)| [vec![op], a, b].concat()),
        (prop::sample::select(vec![5_u8, 6, 10]), keys).prop_map(|(op, keys)| [vec![op], keys].concat()),
        prop::sample::select(vec![7_u8, 12]).prop_map(|op| vec![op]),
        (prop::sample::select(vec![15_u8, 16]), Just(queue.clone())).prop_map(|(op, key)| [vec![op], key].concat()),
        (value(), Just(queue)).prop_map(|(value, key)| [vec![14], key, value].concat()),
    ];
    (0..CLIENTS, said)
}

#[test]
fn torchs_server_answers_the_same() {
    let Some(torch) = Torch::find() else { return };
    let server = torch.serve(&script("server.py"));
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    let result = runner.run(&prop::collection::vec(step(), 1..STEPS), |steps| {
        let (port, _store) = serve();
        clear(server.port);
        let mut ours: Vec<Client> = (0..CLIENTS).map(|_| Client::of(port)).collect();
        let mut theirs: Vec<Client> = (0..CLIENTS).map(|_| Client::of(server.port)).collect();
        let mut waiting = [false; CLIENTS];
        for (at, (who, said)) in steps.iter().enumerate() {
            // A client of torch says nothing but CANCEL_WAIT while it waits.
            let said = if waiting[*who] { vec![12] } else { said.clone() };
            ours[*who].0.write_all(&said).unwrap();
            theirs[*who].0.write_all(&said).unwrap();
            // The client that sent something is asked first, so that all its requests are done.
            let order = std::iter::once(*who).chain((0..CLIENTS).filter(|other| other != who));
            for client in order {
                let nonce = 0xfeed_0000 | at as u32;
                let (mine, torchs) = (ours[client].hear(nonce), theirs[client].hear(nonce));
                prop_assert_eq!(&mine, &torchs, "step {}, client {}", at, client);
                match mine {
                    None => {
                        // Both servers cut it off: as if it had left and another client had come.
                        ours[client] = Client::of(port);
                        theirs[client] = Client::of(server.port);
                        waiting[client] = false;
                    }
                    Some(heard) if client == *who => {
                        waiting[client] = heard.is_empty() && matches!(said[0], 6 | 18);
                    }
                    Some(heard) => waiting[client] &= heard.is_empty(),
                }
            }
        }
        Ok(())
    });
    result.unwrap();
}

/// torch's server runs through all cases, so what the last case left is deleted.
fn clear(port: u16) {
    let mut client = Client::of(port);
    for key in ["/a", "/b", "/c", "/compared"] {
        client.0.write_all(&[vec![8], string(key)].concat()).unwrap();
    }
    // No case pushes more than it has steps.
    let pops = [vec![15], string("/queue")].concat().repeat(STEPS);
    client.0.write_all(&pops).unwrap();
    client.hear(1).unwrap();
}
