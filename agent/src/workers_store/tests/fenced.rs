//! A store that serves only hosts whose agent has introduced itself.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use elastic_rendezvous::job::{Endpoint, JobSecret};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

use super::{Client, HELLO, LIMIT, TcpStore, WorkersStoreLimits};
use crate::workers_store::fence::{ADMITTED, INTRODUCTION, Known, NONCE};
use crate::workers_store::introduction::Introduction;

fn known() -> Known {
    Known { secret: JobSecret::of([7; JobSecret::LENGTH]), job: "job".into(), round: 1 }
}

fn serve(first_request: Duration) -> (SocketAddr, TcpStore) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let limits = WorkersStoreLimits { first_request, ..WorkersStoreLimits::default() };
    (listener.local_addr().unwrap(), TcpStore::serve(listener, limits, Some(known())).unwrap())
}

/// A client on the host 127.0.0.`host`.
fn client(host: u8, store: SocketAddr) -> Client {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), 0))).unwrap();
    connect(&socket, &store).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    Client { stream }
}

fn introduced(host: u8, store: SocketAddr, known: &Known) -> bool {
    let mut agent = client(host, store);
    let nonce = agent.ask(INTRODUCTION, NONCE);
    agent.say(&known.prove(&nonce));
    let mut answer = Vec::new();
    let _ = std::io::Read::read_to_end(&mut std::io::Read::take(&agent.stream, 1), &mut answer);
    answer == [ADMITTED]
}

#[test]
fn workers_wait_for_their_agent_and_are_served_from_then_on() {
    let (store, _served) = serve(LIMIT);
    let mut early: Vec<Client> = (0..3).map(|_| client(2, store)).collect();
    early.iter_mut().for_each(|client| client.say(&HELLO));
    assert!(introduced(2, store, &known()));
    early.iter_mut().for_each(Client::ping);
    let mut late = client(2, store);
    late.say(&HELLO);
    late.ping();
    // Introduced once more, as agents do each minute
    assert!(introduced(2, store, &known()));
    late.ping();
}

#[test]
fn a_host_without_an_agent_is_cut_off() {
    let first_request = Duration::from_millis(200);
    let (store, _served) = serve(first_request);
    let begun = Instant::now();
    let mut worker = client(2, store);
    worker.say(&HELLO);
    assert!(introduced(3, store, &known()));
    let mut served = client(3, store);
    served.say(&HELLO);
    served.ping();
    assert!(worker.is_cut_off());
    assert!(begun.elapsed() >= first_request);
    assert!(!introduced(2, store, &Known { secret: JobSecret::of([8; 32]), ..known() }));
    served.ping();
}

#[test]
fn what_waits_is_bounded() {
    let (store, _served) = serve(LIMIT);
    let mut stranger = client(2, store);
    let much = vec![1; 64 << 20];
    // It is not read from, so that what it sends fills the kernel's buffers and no more.
    stranger.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(std::io::Write::write_all(&mut stranger.stream, &much).is_err());
    assert!(introduced(3, store, &known()));
}

#[tokio::test]
async fn an_agent_introduces_its_host() {
    let (store, _served) = serve(LIMIT);
    let mut worker = client(1, store);
    worker.say(&HELLO);
    let at = Endpoint { host: "localhost".into(), port: store.port() };
    let _introduction = Introduction::begin(at, known());
    tokio::task::spawn_blocking(move || worker.ping()).await.unwrap();
}
