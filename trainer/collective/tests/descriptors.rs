//! Many ranks in few processes: what the limit on open files allows, and what is said where it does not.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // The harness may do what its tests may.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use elastic_collective::stop::Stop;
use elastic_collective::{CollectiveError, Group, GroupConfig, Patience};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Nothing in these tests takes this long.
const DEADLINE: Duration = Duration::from_secs(60);
const PLACE: &str = "PLACE_OF_TEST";

/// A process that runs an ignored test of this file, with the world's size and rank 0's port.
fn role(name: &str, ranks: u32, port: u16) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", name, "--nocapture"]).env(PLACE, format!("{ranks} {port}"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn place() -> (u32, u16) {
    let place = std::env::var(PLACE).unwrap();
    let (ranks, port) = place.split_once(' ').unwrap();
    (ranks.parse().unwrap(), port.parse().unwrap())
}

fn limit(current: u64, maximum: Option<u64>) {
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum }).unwrap();
}

fn form(rank: u32) -> Result<Group, CollectiveError> {
    let (world_size, master_port) = place();
    let (job, master_addr, settings) = ("test".to_owned(), "127.0.0.1".to_owned(), String::new());
    let config =
        GroupConfig { job, round: 3, rank, world_size, master_addr, master_port, agent_store: false, settings };
    Group::form(&config, Patience { form: DEADLINE / 2, operation: DEADLINE / 2 }, Stop::default())
}

/// The processes' ends: whether they succeeded, and what they said. All must come in time.
fn ends<const COUNT: usize>(mut roles: [Child; COUNT]) -> [(bool, String); COUNT] {
    let begun = Instant::now();
    while roles.iter_mut().any(|role| role.try_wait().unwrap().is_none()) && begun.elapsed() < DEADLINE {
        thread::sleep(Duration::from_millis(10));
    }
    roles.map(|mut role| {
        let _ = role.kill();
        let output = role.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    })
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn a_thousand_ranks_meet_where_fewer_files_may_be_open_at_first() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if maximum.is_some_and(|maximum| maximum < 4096) {
        return eprintln!("left out: no process may open 4,096 files here");
    }
    let (ranks, port) = (1100, free_port());
    let ended = ends(["the_first", "the_last", "all_others"].map(|name| role(name, ranks, port)));
    assert!(ended.iter().all(|(well, _)| *well), "{ended:#?}");
}

#[test]
fn too_few_files_are_named_at_once_and_so_are_enough() {
    let (ranks, port) = (100, free_port());
    let begun = Instant::now();
    let [(well, said), _] = ends(["the_first_of_too_many", "all_others"].map(|name| role(name, ranks, port)));
    assert!(well, "{said}");
    assert!(begun.elapsed() < DEADLINE / 4, "{:?}", begun.elapsed());
}

#[test]
#[ignore = "a part of the other tests"]
fn the_first() {
    limit(256, getrlimit(Resource::Nofile).maximum);
    form(0).unwrap();
}

#[test]
#[ignore = "a part of the other tests"]
fn the_last() {
    limit(256, getrlimit(Resource::Nofile).maximum);
    form(place().0 - 1).unwrap();
}

#[test]
#[ignore = "a part of the other tests"]
fn the_first_of_too_many() {
    limit(64, Some(64));
    let error = form(0).map(drop).unwrap_err();
    assert!(matches!(error, CollectiveError::Descriptors { limit: 64, needed: 356, .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("Too many open files") && said.contains("the limit is 64, and 356 are enough"), "{said}");
}

/// All ranks but the first and the last, as far as these two see them: they say hello, and answer the last one's.
#[test]
#[ignore = "a part of the other tests"]
fn all_others() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    limit(maximum.unwrap_or(1 << 16), maximum);
    let (world_size, master) = place();
    let message = |body: String| [&b"ELASTIC1"[..], &(body.len() as u32).to_le_bytes(), body.as_bytes()].concat();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let welcome = message("{\"welcome\":[]}".to_owned());
    let answered = thread::spawn(move || {
        let came = listener.incoming().map_while(Result::ok).take(world_size as usize - 2);
        let mut kept: Vec<TcpStream> = came.inspect(|mut last| drop(last.write_all(&welcome))).collect();
        kept.iter_mut().for_each(|last| drop(last.read_to_end(&mut Vec::new())));
    });
    let begun = Instant::now();
    let mut links: Vec<TcpStream> = Vec::new();
    while links.len() + 2 < world_size as usize {
        match TcpStream::connect(("127.0.0.1", master)) {
            Ok(mut link) => {
                let rank = links.len() + 1;
                let place = format!("\"round\":3,\"rank\":{rank},\"world_size\":{world_size},\"port\":{port}");
                let _ = link.write_all(&message(format!("{{\"job\":\"test\",\"settings\":\"\",{place}}}")));
                links.push(link);
            }
            // The first one has left.
            Err(_) if !links.is_empty() => break,
            Err(error) => assert!(begun.elapsed() < DEADLINE / 2, "{error}"),
        }
    }
    // Until the first one leaves, and the last one too if it was welcomed.
    let mut said = Vec::new();
    links.iter_mut().for_each(|link| drop(link.read_to_end(&mut said)));
    if !said.is_empty() {
        answered.join().unwrap();
    }
}
