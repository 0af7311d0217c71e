//! Clients that attack, die or never send anything: the store continues, and their cost is bounded.

use std::io::Write;
use std::time::{Duration, Instant};

use super::{Client, HELLO, Served, WorkersStoreLimits, get, request, serve, set, string, wait};

fn small() -> Served {
    serve(WorkersStoreLimits { memory: 4 << 20, connections: 4096, ..WorkersStoreLimits::default() })
}

fn still_serves(store: &Served) {
    let mut client = store.client();
    client.say(&set("/fine", b"yes"));
    assert_eq!(client.ask(&get("/fine"), 11), [&3_u64.to_le_bytes()[..], b"yes"].concat());
}

/// This process's memory, in bytes.
fn memory() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

#[test]
fn a_client_that_breaks_the_protocol_is_cut_off_and_no_other() {
    let store = small();
    let huge = u64::MAX.to_le_bytes();
    let mut witness = store.client();
    let frames: Vec<Vec<u8>> = vec![
        request(99, &[]),
        request(0, &[&[1, 2, 3, 4]]),
        request(3, &[&huge]),
        request(1, &[&string("/k"), &huge]),
        request(6, &[&huge]),
        request(11, &[&huge]),
        [set("/text", b"none"), request(4, &[&string("/text"), &[1; 8]])].concat(),
        [set("/most", i64::MAX.to_string().as_bytes()), request(4, &[&string("/most"), &1_i64.to_le_bytes()])].concat(),
        [set("/text", b"none"), request(18, &[&string("/text"), &[1; 8]])].concat(),
    ];
    for frame in frames {
        let mut client = store.client();
        client.say(&frame);
        assert!(client.is_cut_off(), "{frame:?}");
    }
    let mut stranger = store.connect();
    stranger.say(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n");
    assert!(stranger.is_cut_off());
    witness.ping();
    still_serves(&store);
}

#[test]
fn a_first_request_is_whole_in_time_or_never() {
    let first_request = Duration::from_millis(100);
    let store = serve(WorkersStoreLimits { first_request, ..WorkersStoreLimits::default() });
    let half = &set("/k", b"value")[..9];
    // A client that has completed a request may be slow, and one that sends nothing may wait.
    let mut known = store.client();
    known.say(half);
    let mut silent = store.connect();
    let mut greeted = store.connect();
    greeted.say(&HELLO);
    let begun = Instant::now();
    for greeting in [&HELLO[..], &[]] {
        let mut slow = store.connect();
        slow.say(&[greeting, half].concat());
        assert!(slow.is_cut_off(), "{greeting:?}");
    }
    assert!(begun.elapsed() >= first_request * 2, "cut off after {:?}", begun.elapsed());
    known.say(&set("/k", b"value")[9..]);
    known.ping();
    greeted.ping();
    silent.say(&HELLO);
    silent.ping();
}

#[test]
fn a_first_request_is_short() {
    let store = small();
    let long = set("/k", &vec![7; 1 << 20]);
    let mut stranger = store.connect();
    stranger.say(&HELLO);
    // It is cut off in the middle, perhaps while it is still sending.
    let said = stranger.stream.write_all(&long[..long.len() - 1]);
    assert!(said.is_err() || stranger.is_cut_off());
    let mut known = store.client();
    known.say(&long);
    known.ping();
}

#[test]
fn half_a_message_waits_and_costs_only_itself() {
    let store = small();
    let before = memory();
    // Each client announces 8 MiB and never sends them.
    let mut halves: Vec<Client> = (0..200).map(|_| store.client()).collect();
    for half in &mut halves {
        half.say(&request(1, &[&string("/k"), &(8_u64 << 20).to_le_bytes(), b"begun"]));
    }
    still_serves(&store);
    assert!(memory() < before + (16 << 20), "what was announced is not reserved");
    drop(halves);
    still_serves(&store);
}

#[test]
fn the_budget_holds_whatever_takes_it_up() {
    let store = small();
    let megabyte = vec![b'x'; 1 << 20];
    type Frame<'a> = Box<dyn Fn(u64) -> Vec<u8> + 'a>;
    let greedy: [(&str, Frame<'_>); 5] = [
        ("keys", Box::new(|n| set(&format!("/{n}"), &megabyte))),
        ("one value", Box::new(|_| request(9, &[&string("/log"), &string(&megabyte)]))),
        ("a queue", Box::new(|_| request(14, &[&string("/queue"), &string(&megabyte)]))),
        ("empty keys", Box::new(|n| (0..9000).flat_map(|m| set(&format!("/{n}/{m}"), b"")).collect())),
        (
            "a wait",
            Box::new(|n| {
                let names: Vec<String> = (0..9000 * n).map(|m| format!("/none/{m}")).collect();
                wait(&names.iter().map(String::as_str).collect::<Vec<_>>())
            }),
        ),
    ];
    for (what, frame) in greedy {
        let store = small();
        let mut client = store.client();
        let said = (1..20).try_for_each(|n| client.stream.write_all(&frame(n)));
        assert!(said.is_err() || client.is_cut_off(), "{what}: the store did not stop it");
        // Clients that only read, or add a little, still can once the offender's own share is freed.
        store.client().ping();
    }
    still_serves(&store);
}

#[test]
fn unsent_answers_are_bounded_and_block_no_other_client() {
    let store = serve(WorkersStoreLimits { memory: 16 << 20, connections: 4096, ..WorkersStoreLimits::default() });
    let mut client = store.client();
    client.say(&set("/blob", &vec![7; 2 << 20]));
    client.ping();
    let before = memory();
    // 200 clients that never read. 200 MiB are owed to each.
    let asked: Vec<u8> = (0..100).flat_map(|_| get("/blob")).collect();
    let mut deaf: Vec<Client> = (0..200).map(|_| store.client()).collect();
    for client in &mut deaf {
        client.say(&asked);
    }
    client.ping();
    assert!(memory() < before + (16 << 20), "a value is kept once for all who are to get it");
    // One of them begins to read, and gets everything.
    let mut left = 100_u64 * (8 + (2 << 20));
    while left > 0 {
        left -= deaf[0].hear(left.min(1 << 20) as usize).len() as u64;
    }
    deaf[0].ping();
    drop(deaf);
    still_serves(&store);
}

#[test]
fn thousands_of_idle_connections_cost_nothing() {
    let store = small();
    let before = memory();
    let begun = cpu();
    let mut idle: Vec<Client> = (0..2000).map(|_| store.client()).collect();
    for client in &mut idle {
        client.ping();
    }
    // Memory of this process, which holds both ends of each connection.
    let each = memory().saturating_sub(before) / idle.len();
    assert!(each < 4096, "{each} bytes a connection");
    let connecting = cpu() - begun;
    assert!(connecting < 5.0, "{connecting} s of CPU to take 2,000 clients in");
    let mut client = store.client();
    let started = Instant::now();
    for _ in 0..200 {
        client.ping();
    }
    assert!(started.elapsed().as_secs() < 10, "200 pings during them took {:?}", started.elapsed());
    drop(idle);
    still_serves(&store);
}

/// CPU time of this process, in seconds.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[test]
fn silent_strangers_make_way_when_there_is_no_room() {
    let store = serve(WorkersStoreLimits { memory: 4 << 20, connections: 8, ..WorkersStoreLimits::default() });
    let mut speakers: Vec<Client> = (0..4).map(|_| store.client()).collect();
    speakers.iter_mut().for_each(Client::ping);
    let mut silent: Vec<Client> = (0..20).map(|_| store.connect()).collect();
    let mut client = store.client();
    client.ping();
    assert!(silent[0].is_cut_off());
    speakers.iter_mut().for_each(Client::ping);
}

#[test]
fn a_full_house_of_speakers_makes_newcomers_wait_not_fail() {
    let store = serve(WorkersStoreLimits { memory: 4 << 20, connections: 4, ..WorkersStoreLimits::default() });
    let mut speakers: Vec<Client> = (0..4).map(|_| store.client()).collect();
    speakers.iter_mut().for_each(Client::ping);
    let mut newcomer = store.connect();
    newcomer.say(&HELLO);
    speakers.pop();
    newcomer.ping();
}

#[test]
fn a_client_that_dies_in_a_wait_leaves_nothing() {
    let store = small();
    for _ in 0..50 {
        let mut client = store.client();
        client.say(&wait(&["/never"]));
    }
    let mut client = store.client();
    client.say(&wait(&["/never"]));
    store.client().say(&set("/never", b""));
    assert_eq!(client.hear(1), [0]);
}

#[test]
fn a_dropped_store_cuts_its_clients_off_and_refuses() {
    let store = small();
    let mut client = store.client();
    client.ping();
    let port = store.port;
    drop(store.store);
    assert!(client.is_cut_off());
    let refused = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}
