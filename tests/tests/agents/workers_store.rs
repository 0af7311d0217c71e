//! The store that workers find each other through, as the agents serve it.

use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;

use elastic_agent::for_tests::{ADMITTED, INTRODUCTION, Known, NONCE};
use elastic_tests::prelude::*;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// A client as torch up to 2.0 is one: it needs no greeting.
struct Client(TcpStream);

impl Client {
    fn of(round: &Round) -> Client {
        let stream = TcpStream::connect(&round.workers[0].master).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Client(stream)
    }

    /// One from another address, which is no node's.
    fn stranger(round: &Round) -> Client {
        let master: SocketAddr = round.workers[0].master.parse().unwrap();
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), 0))).unwrap();
        connect(&socket, &master).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Client(stream)
    }

    fn introduce(&mut self, known: &Known) {
        self.0.write_all(INTRODUCTION).unwrap();
        let mut nonce = [0; NONCE];
        self.0.read_exact(&mut nonce).unwrap();
        self.0.write_all(&known.prove(&nonce)).unwrap();
        let mut answer = [0];
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [ADMITTED]);
    }

    fn set_a_key(&mut self) {
        self.0.write_all(b"\x00\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v").unwrap();
    }

    fn keys(&mut self) -> i64 {
        self.0.write_all(b"\x06").unwrap();
        let mut answer = [0; 8];
        self.0.read_exact(&mut answer).unwrap();
        i64::from_le_bytes(answer)
    }
}

#[tokio::test]
async fn each_round_has_a_fresh_store_and_the_old_one_is_gone() {
    let job = Job::on_etcd("2").await.flag("--max-restarts=3");
    let mut agents = job.start_all(["a", "b"]);
    let mut before: Option<(Round, Client)> = None;
    for number in 1..=4 {
        let round = job.runs(number, 2).await;
        let mut client = Client::of(&round);
        assert_eq!(client.keys(), 0, "round {number} begins empty");
        client.set_a_key();
        assert_eq!(client.keys(), 1);
        if let Some((old, mut stale)) = before.take() {
            assert_ne!(old.workers[0].master, round.workers[0].master);
            assert!(matches!(stale.0.read(&mut [0]), Ok(0) | Err(_)), "a client of the round before is cut off");
            let refused = TcpStream::connect(&old.workers[0].master).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        }
        if number < 4 {
            round.workers[(number % 2) as usize].kill();
            before = Some((round, client));
        } else {
            round.exit(0);
        }
    }
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

#[tokio::test]
async fn the_store_outlives_worker_rank_0() {
    let job = Job::on_etcd("2").await;
    let mut agents = job.start_all(["a", "b"]);
    let round = job.runs(1, 2).await;
    let mut client = Client::of(&round);
    client.set_a_key();

    round.workers[0].exit(0);
    let says = "worker done";
    agents[if round.workers[0].node == "a" { 0 } else { 1 }].says(says, LIMIT).await;
    assert_eq!(client.keys(), 1, "who is connected stays so");
    assert_eq!(Client::of(&round).keys(), 1, "and others may come");
    round.workers[1].exit(0);
    assert_eq!(exits(&mut agents).await, [0, 0]);
}

#[tokio::test]
async fn where_workers_serve_it_the_port_is_theirs() {
    let job = Job::on_etcd("1").await.conf("workers_store", "workers");
    let mut agent = job.start("a");
    let round = job.runs(1, 1).await;
    let refused = TcpStream::connect(&round.workers[0].master).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    drop(TcpListener::bind(&round.workers[0].master).expect("rank 0 can listen there"));
    job.succeeds([&mut agent]).await;
}

#[tokio::test]
async fn a_client_that_is_no_node_of_the_round_is_not_served_before_it_proves_that_it_may_read_the_job() {
    let job = Job::on_etcd("2").await;
    let mut agents = job.start_all(["a", "b"]);
    let round = job.runs(1, 2).await;
    let mut stranger = Client::stranger(&round);
    stranger.set_a_key();
    let mut client = Client::of(&round);
    // What the stranger sent has arrived, and this comes after it.
    assert_eq!(client.keys(), 0);

    let secret = job.record("secret").await.expect("the job's secret");
    let known = Known { secret: serde_json::from_value(secret).unwrap(), job: "job".into(), round: round.number };
    Client::stranger(&round).introduce(&known);
    assert_eq!(stranger.keys(), 1, "now its host is let in");
    assert_eq!(client.keys(), 1);
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn every_client_is_served_where_a_node_does_not_introduce_itself() {
    let etcd = EtcdServer::start(EtcdOptions::default()).await;
    let mut job = Job::on(&etcd, "2");
    let a = job.start("a");
    job = job.conf("workers_store_open", "true");
    let mut agents = [a, job.start("b")];
    let round = job.runs(1, 2).await;
    let mut stranger = Client::stranger(&round);
    stranger.set_a_key();
    assert_eq!(stranger.keys(), 1);
    job.succeeds(&mut agents).await;
}
