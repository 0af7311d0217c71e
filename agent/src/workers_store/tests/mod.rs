//! The store as its clients see it: the bytes they send, its answers, and how it treats malicious clients.

mod against_model;
mod fenced;
mod hostile;
mod recorded;
mod wire;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use super::{TcpStore, WorkersStoreLimits};

/// Nothing takes longer, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// A VALIDATE request.
const HELLO: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

struct Served {
    port: u16,
    store: TcpStore,
}

fn serve(limits: WorkersStoreLimits) -> Served {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    Served { port, store: TcpStore::serve(listener, limits, None).unwrap() }
}

impl Served {
    /// A connection that has sent nothing.
    fn connect(&self) -> Client {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Client { stream }
    }

    /// A client of torch 2.1 or later: it begins with VALIDATE.
    fn client(&self) -> Client {
        let mut client = self.connect();
        client.say(&HELLO);
        client.ping();
        client
    }
}

struct Client {
    stream: TcpStream,
}

impl Client {
    fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn hear(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn ask(&mut self, request: &[u8], answer: usize) -> Vec<u8> {
        self.say(request);
        self.hear(answer)
    }

    /// Checks that all earlier requests have been carried out and that the connection lives.
    fn ping(&mut self) {
        assert_eq!(self.ask(b"\x0d\x01\x02\x03\x04", 4), b"\x01\x02\x03\x04");
    }

    /// Waits for the end of the connection, and drops what still arrives.
    fn is_cut_off(&mut self) -> bool {
        match self.stream.read_to_end(&mut Vec::new()) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// A request of torch 2.1 or later.
fn request(op: u8, fields: &[&[u8]]) -> Vec<u8> {
    [&[op][..], &fields.concat()].concat()
}

fn set(key: &str, value: &[u8]) -> Vec<u8> {
    request(1, &[&string(key), &string(value)])
}

fn get(key: &str) -> Vec<u8> {
    request(3, &[&string(key)])
}

fn wait(keys: &[&str]) -> Vec<u8> {
    let keys: Vec<Vec<u8>> = keys.iter().map(string).collect();
    request(6, &[&(keys.len() as u64).to_le_bytes(), &keys.concat()])
}
