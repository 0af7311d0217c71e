//! Communicators between processes, on the stand-in for NCCL (`trainer/fake-nccl`): right sums, clear errors when ranks
//! die or hang, and a working communicator in the next round. What passes here is no result of NCCL's.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // The harness may panic as its tests may.

use std::ffi::c_void;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use elastic_trainer::collective::recorder::Recorder;
use elastic_trainer::collective::tree::{cover, shards_of};
use elastic_trainer::collective::{Group, Patience, Place};
use elastic_trainer::cuda::Surroundings;
use elastic_trainer::nccl::{Added, Communicator, Device, Joined, Library, LibraryError, Span};
use elastic_trainer::random::unit;
use elastic_trainer::stop::Stop;

/// Nothing here takes this long.
const DEADLINE: Duration = Duration::from_secs(60);

/// Numbers that a rank sums: enough that no socket holds them all.
const NUMBERS: usize = 300_000;

/// The stand-in, built beside this test.
fn fake() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libfake_nccl.so")
}

fn open(file: &Path) -> Result<std::sync::Arc<Library>, LibraryError> {
    Library::open(Some(file), &Surroundings::default())
}

/// The stand-in's stream: see `fake_nccl::Stream`.
#[repr(C)]
#[derive(Default)]
struct Counters {
    enqueued: AtomicU64,
    ended: AtomicU64,
}

/// Host memory in place of a GPU's.
struct Host {
    counters: &'static Counters,
    mark: u64,
}

impl Device for Host {
    fn bind(&mut self) -> Result<(), String> {
        Ok(())
    }
    fn stream(&self) -> *mut c_void {
        std::ptr::from_ref(self.counters).cast_mut().cast()
    }
    fn mark(&mut self) -> Result<(), String> {
        self.mark = self.counters.enqueued.load(Ordering::SeqCst);
        Ok(())
    }
    fn add(&mut self, Added { left, right, into }: Added) -> Result<(), String> {
        // SAFETY: the communicator adds only in the spans that it was given, one addition at a time.
        let slice = |span: Span| unsafe { std::slice::from_raw_parts(span.address() as *const f32, span.elements()) };
        let (left, right) = (slice(left), right.map(slice));
        let sum: Vec<f32> = (0..into.elements()).map(|i| right.map_or(left[i], |right| left[i] + right[i])).collect();
        // SAFETY: as above; nothing else of them is read any more.
        unsafe { std::ptr::copy_nonoverlapping(sum.as_ptr(), into.address() as *mut f32, sum.len()) };
        Ok(())
    }
    fn is_done(&mut self) -> Result<bool, String> {
        Ok(self.counters.ended.load(Ordering::SeqCst) >= self.mark)
    }
}

/// A rank as its process sees it.
struct Rank {
    communicator: Communicator,
    group: Option<Group>,
    place: Option<Place>,
    stop: Stop,
    recorder: Recorder,
}

impl Rank {
    /// Does what a line asks for and answers in a line.
    fn obey(&mut self, line: &str) -> Result<String, String> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "set" => {
                // SAFETY: the stand-in reads the environment with Rust's own functions, which take turns with this.
                unsafe { std::env::set_var(words[1], words.get(2).unwrap_or(&"")) };
                Ok("set".to_owned())
            }
            "records" => {
                self.recorder = Recorder::new(Some(Path::new(words[1])));
                Ok("set".to_owned())
            }
            "forming" => {
                self.stop.forms(number(1), Duration::from_millis(number(2)));
                Ok("set".to_owned())
            }
            "join" => {
                let place = Place {
                    job: "test".to_owned(),
                    round: number(1),
                    rank: number(2) as u32,
                    world_size: number(3) as u32,
                    master_addr: "127.0.0.1".to_owned(),
                    master_port: number(4) as u16,
                    agent_store: false,
                    settings: String::new(),
                };
                self.group = None;
                let time = Duration::from_millis(number(5));
                let patience = Patience { form: DEADLINE, operation: DEADLINE };
                let group = Group::form(&place, patience, self.stop.clone());
                self.place = Some(place);
                let group = group.map_err(|error| error.to_string())?.recorded_by(&self.recorder);
                let group = self.group.insert(group.with_patience(Patience { form: time, operation: time }));
                match self.communicator.join(group).map_err(|error| error.to_string())? {
                    Joined::By(way) => Ok(format!("{way:?}")),
                    Joined::Refused { ranks, cause } => Err(format!("refused by {ranks:?}: {cause:?}")),
                }
            }
            "sum" => {
                let group = self.group.as_mut().unwrap();
                let mut data: Vec<f32> = (0..NUMBERS).map(|i| (i % 100) as f32 + group.rank() as f32).collect();
                // SAFETY: the numbers outlive the call.
                let span = unsafe { Span::new(data.as_mut_ptr() as usize, data.len()) };
                let result = self.communicator.all_reduce(group, span);
                let ranks = group.world_size();
                let right = |(i, sum): (usize, &f32)| {
                    *sum == (ranks as usize * (i % 100)) as f32 + (ranks * (ranks - 1) / 2) as f32
                };
                if let Err(error) = &result {
                    self.recorder.write(self.place.as_ref().unwrap(), &error.to_string()).unwrap();
                }
                result.map_err(|error| error.to_string())?;
                if data.iter().enumerate().all(right) { Ok("right".to_owned()) } else { Err("wrong sums".to_owned()) }
            }
            "others" => self.other_operations().map(|()| "right".to_owned()),
            "ordered" => self.ordered_sums().map(|()| "right".to_owned()),
            "leave" => {
                let mut group = self.group.take().unwrap();
                let device = Box::new(host());
                let next = Communicator::new(open(&fake()).unwrap(), device).unwrap();
                let communicator = std::mem::replace(&mut self.communicator, next);
                communicator.close(&mut group).map_err(|error| error.to_string())?;
                group.leave();
                Ok("left".to_owned())
            }
            other => panic!("`{other}` is no task"),
        }
    }

    /// The ordered sum, whose bits must be those of the same sum over TCP.
    fn ordered_sums(&mut self) -> Result<(), String> {
        let group = self.group.as_mut().unwrap();
        let (rank, ranks) = (group.rank(), group.world_size());
        for (shards, length) in [(8, 10_001), (5, 3), (1, 100), (7, 1), (12, 70_000)] {
            let nodes = cover(shards, &shards_of(rank, ranks, shards));
            let number = |seed: u32, i: usize| unit((u64::from(seed) << 32) + i as u64) - 0.5;
            let mut partials: Vec<Vec<f32>> =
                nodes.iter().map(|node| (0..length).map(|i| number(node.first, i)).collect()).collect();
            let rest: Vec<&[f32]> = partials.iter().skip(1).map(Vec::as_slice).collect();
            let mut expected = partials.first().cloned().unwrap_or(vec![0.0; length]);
            group.ordered_sum(shards, &rest, &mut expected, 0).map_err(|error| error.to_string())?;

            let mut sum = vec![0.0; length];
            let mut staging = vec![0.0; Communicator::staging_elements(group, shards, length)];
            // SAFETY: the numbers outlive the call.
            let span = |data: &mut [f32]| unsafe { Span::new(data.as_mut_ptr() as usize, data.len()) };
            let spans: Vec<Span> = partials.iter_mut().map(|partial| span(partial)).collect();
            let (into, room) = (span(&mut sum), span(&mut staging));
            let result = self.communicator.ordered_sum(group, shards, &spans, into, room);
            result.map_err(|error| error.to_string())?;
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            if bits(&sum) != bits(&expected) {
                return Err(format!("other bits in {shards} shards of {length}"));
            }
        }
        Ok(())
    }

    fn other_operations(&mut self) -> Result<(), String> {
        let group = self.group.as_mut().unwrap();
        let (rank, ranks) = (group.rank(), group.world_size());
        // SAFETY: the numbers outlive the calls that they are given to.
        let span = |data: &mut [f32]| unsafe { Span::new(data.as_mut_ptr() as usize, data.len()) };
        let text = |error: elastic_trainer::collective::CollectiveError| error.to_string();

        let mut told = vec![rank as f32; 1000];
        self.communicator.broadcast(group, span(&mut told), ranks - 1).map_err(text)?;
        let (mut own, mut all) = (vec![rank as f32; 10], vec![0.0; 10 * ranks as usize]);
        self.communicator.all_gather(group, span(&mut own), span(&mut all)).map_err(text)?;
        // To each peer a number of one's own and the peer's.
        let peers: Vec<u32> = (0..ranks).filter(|&peer| peer != rank).collect();
        let mut out: Vec<[f32; 1]> = peers.iter().map(|&peer| [(10 * rank + peer) as f32]).collect();
        let mut into = vec![[0.0; 1]; peers.len()];
        let sends = peers.iter().zip(&mut out).map(|(&peer, data)| (peer, span(data))).collect();
        let receives = peers.iter().zip(&mut into).map(|(&peer, data)| (peer, span(data))).collect();
        self.communicator.exchange(group, sends, receives).map_err(text)?;

        let gathered = all.iter().enumerate().all(|(i, &value)| value == (i / 10) as f32);
        let exchanged = peers.iter().zip(&into).all(|(peer, &[value])| value == (10 * peer + rank) as f32);
        let told = told.iter().all(|&value| value == (ranks - 1) as f32);
        (gathered && exchanged && told).then_some(()).ok_or_else(|| format!("{gathered} {exchanged} {told}"))
    }
}

fn host() -> Host {
    Host { counters: Box::leak(Box::default()), mark: 0 }
}

/// One rank, told what to do line by line: a process that the tests below start.
#[test]
#[ignore = "a part of the other tests"]
fn rank() {
    let library = open(Path::new(&std::env::var("NCCL_OF_TEST").unwrap())).unwrap();
    let communicator = Communicator::new(library, Box::new(host())).unwrap();
    let (stop, recorder) = (Stop::default(), Recorder::default());
    let mut rank = Rank { communicator, group: None, place: None, stop, recorder };
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        println!("\n> begun");
        match rank.obey(&line) {
            Ok(answer) => println!("\n> {answer}"),
            Err(error) => println!("\n> error: {error}"),
        }
    }
}

struct Process {
    child: Child,
    tasks: ChildStdin,
    answers: Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(library: &Path) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "rank", "--nocapture"])
            .env("NCCL_OF_TEST", library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tasks, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix("> ") {
                    let _ = sender.send(answer.to_owned());
                }
            }
        });
        Process { child, tasks, answers }
    }

    /// Begins a task.
    fn begin(&mut self, task: &str) {
        writeln!(self.tasks, "{task}").unwrap();
        assert_eq!(self.answer(), "begun");
    }

    fn answer(&mut self) -> String {
        self.answers.recv_timeout(DEADLINE).unwrap()
    }

    fn ask(&mut self, task: &str) -> String {
        self.begin(task);
        self.answer()
    }
}

fn start<const N: usize>(library: &Path) -> [Process; N] {
    std::array::from_fn(|_| Process::start(library))
}

/// A port that stays taken, though nobody listens on it.
fn hold_port() -> (std::net::TcpListener, u16) {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port();
    (held, port)
}

/// Has all do a task at once, and returns their answers.
fn all(processes: &mut [&mut Process], task: &str) -> Vec<String> {
    processes.iter_mut().for_each(|process| process.begin(task));
    processes.iter_mut().map(|process| process.answer()).collect()
}

/// Has all join a round, in this order. `time` is what NCCL may take.
fn join(processes: &mut [&mut Process], round: u64, time: Duration) -> Vec<String> {
    let ranks = processes.len();
    let (held, port) = hold_port();
    drop(held);
    for (rank, process) in processes.iter_mut().enumerate() {
        process.begin(&format!("join {round} {rank} {ranks} {port} {}", time.as_millis()));
    }
    processes.iter_mut().map(|process| process.answer()).collect()
}

const LONG: Duration = Duration::from_secs(30);

fn every(answers: &[String], expected: &str) {
    assert!(answers.iter().all(|answer| answer == expected), "{answers:?} in place of {expected}");
}

/// The stand-in without some functions, as an older NCCL: their names are changed in a copy of it.
fn without(functions: &[&str], folder: &Path) -> PathBuf {
    let mut bytes = std::fs::read(fake()).unwrap();
    for function in functions {
        let name = [b"\0", function.as_bytes(), b"\0"].concat();
        let places: Vec<usize> =
            bytes.windows(name.len()).enumerate().filter(|(_, window)| *window == name).map(|(at, _)| at).collect();
        assert!(!places.is_empty(), "{function} is there");
        places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    }
    // Not over one that may be loaded.
    let path = folder.join(format!("{}.so", functions.join("-")));
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn old_and_poor_libraries_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let whole = open(&fake()).unwrap();
    assert_eq!(whole.version(), 23_007);
    let can = whole.capabilities();
    assert!(can.shrink && can.revoke && can.grow);
    let poor = open(&without(&["ncclCommRevoke", "ncclCommGrow"], folder.path())).unwrap();
    let can = poor.capabilities();
    assert!(can.shrink && !can.revoke && !can.grow);
    let broken = open(&without(&["ncclAllReduce"], folder.path())).unwrap_err().to_string();
    assert!(broken.contains("no function ncclAllReduce"), "{broken}");
    let says = |version: &str| {
        // SAFETY: no other thread of this test's process is at the environment.
        unsafe { std::env::set_var("FAKE_NCCL_VERSION", version) };
        open(&fake())
    };
    // Those that crash when they shrink
    for (version, well) in [("22803", false), ("22808", false), ("22809", true)] {
        let can = says(version).unwrap().capabilities();
        assert!(can.shrink == well && can.revoke == well && can.grow, "{version}");
    }
    let old = says("21602").unwrap_err().to_string();
    assert!(old.contains("is NCCL 2.16.2, and 2.17 or newer is needed") && old.contains("pip install"), "{old}");
}

#[test]
fn groups_of_every_size_sum_and_copy() {
    let mut processes: [Process; 4] = start(&fake());
    for ranks in 1..=4 {
        let mut present: Vec<&mut Process> = processes[..ranks].iter_mut().collect();
        let way = if ranks == 1 { "Renew" } else { "Grow" };
        every(&join(&mut present, ranks as u64, LONG), way);
        every(&all(&mut present, "sum"), "right");
        every(&all(&mut present, "others"), "right");
        every(&all(&mut present, "ordered"), "right");
    }
    every(&all(&mut processes.each_mut(), "leave"), "left");
}

/// One of three dies in the middle of a sum; what the survivors say of it, and how they go on.
fn after_a_death(library: &Path, expected: &str) {
    let mut processes: [Process; 3] = start(library);
    every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
    every(&all(&mut processes.each_mut(), "sum"), "right");
    let [a, b, mut c] = processes;
    let mut survivors = [a, b];
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclAllReduce"), "set");
    c.begin("sum");
    survivors.iter_mut().for_each(|process| process.begin("sum"));
    let died = Instant::now();
    drop(c);
    for survivor in &mut survivors {
        let answer = survivor.answer();
        assert!(answer.starts_with("error: lost rank 2"), "{answer}");
    }
    assert!(died.elapsed() < LONG / 3, "noticed after {:?}", died.elapsed());
    every(&join(&mut survivors.each_mut(), 2, LONG), expected);
    every(&all(&mut survivors.each_mut(), "sum"), "right");
    every(&all(&mut survivors.each_mut(), "leave"), "left");
}

#[test]
fn survivors_of_a_death_shrink() {
    after_a_death(&fake(), "Shrink { without: [2], revoke: true }");
}

#[test]
fn survivors_whose_library_cannot_shrink_begin_anew() {
    let folder = tempfile::tempdir().unwrap();
    after_a_death(&without(&["ncclCommShrink", "ncclCommRevoke"], folder.path()), "Renew");
}

#[test]
fn a_shrink_that_fails_for_one_is_made_anew_for_all() {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
    let [mut a, mut b, c] = processes;
    drop(c);
    assert_eq!(a.ask("set FAKE_NCCL_FAIL ncclCommShrink:2"), "set");
    every(&join(&mut [&mut a, &mut b], 2, Duration::from_secs(2)), "Renew");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}

#[test]
fn a_rank_that_hangs_is_given_up_after_the_deadline() {
    let mut processes: [Process; 3] = start(&fake());
    let (short, folder) = (Duration::from_secs(2), tempfile::tempdir().unwrap());
    every(&all(&mut processes.each_mut(), &format!("records {}", folder.path().display())), "set");
    every(&join(&mut processes.each_mut(), 1, short), "Renew");
    every(&all(&mut processes.each_mut(), "sum"), "right");
    let [a, b, mut c] = processes;
    assert_eq!(c.ask("set FAKE_NCCL_HANG ncclAllReduce"), "set");
    let mut survivors = [a, b];
    c.begin("sum");
    survivors.iter_mut().for_each(|process| process.begin("sum"));
    for survivor in &mut survivors {
        let answer = survivor.answer();
        assert!(answer.contains("did not end within"), "{answer}");
    }
    let record = std::fs::read(folder.path().join("collectives-round-1-rank-0.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let [.., done, last] = &record["operations"].as_array().unwrap()[..] else { panic!("{record}") };
    assert_eq!((&done["transport"], &done["state"]), (&"nccl".into(), &"done".into()));
    assert_eq!((&last["transport"], &last["operation"]), (&"nccl".into(), &"sum".into()));
    assert_eq!((&last["state"], &last["bytes"]), (&"given up".into(), &(NUMBERS * 4).into()));
    every(&join(&mut survivors.each_mut(), 2, LONG), "Shrink { without: [2], revoke: true }");
    every(&all(&mut survivors.each_mut(), "sum"), "right");
}

#[test]
fn an_error_of_nccls_names_the_peer_that_is_gone() {
    let mut processes: [Process; 2] = start(&fake());
    every(&all(&mut processes.each_mut(), "set FAKE_NCCL_DEATHS seen"), "set");
    every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
    let [mut a, mut b] = processes;
    assert_eq!(b.ask("set FAKE_NCCL_HANG ncclAllReduce"), "set");
    a.begin("sum");
    b.begin("sum");
    drop(b);
    let answer = a.answer();
    assert!(answer.starts_with("error: lost rank 1"), "{answer}");
    // One that fails though all are there is NCCL's own.
    every(&join(&mut [&mut a], 2, LONG), "Shrink { without: [1], revoke: true }");
    assert_eq!(a.ask("set FAKE_NCCL_FAIL ncclAllReduce:2"), "set");
    assert_eq!(a.ask("sum"), "error: NCCL: ncclAllReduce failed with code 2: an error of the stand-in");
    assert_eq!(a.ask("set FAKE_NCCL_FAIL"), "set");
    every(&join(&mut [&mut a], 3, LONG), "Renew");
    assert_eq!(a.ask("sum"), "right");
}

#[test]
fn a_communicator_that_is_never_made_is_given_up() {
    let mut processes: [Process; 2] = start(&fake());
    assert_eq!(processes[0].ask("set FAKE_NCCL_HANG ncclCommInitRankConfig"), "set");
    let answers = join(&mut processes.each_mut(), 1, Duration::from_secs(1));
    // All learn of it, and the group is as good as before.
    let given_up = |answer: &String| answer.contains("refused by [0, 1]") && answer.contains("did not end within");
    assert!(answers.iter().all(given_up), "{answers:?}");
    assert_eq!(processes[0].ask("set FAKE_NCCL_HANG"), "set");
    every(&join(&mut processes.each_mut(), 2, LONG), "Renew");
    every(&all(&mut processes.each_mut(), "sum"), "right");
}

#[test]
fn whoever_comes_joins_those_who_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let old = without(&["ncclCommGrow"], folder.path());
    for (joiner, way) in [(fake(), "Grow"), (old, "Renew")] {
        let mut processes: [Process; 2] = start(&fake());
        every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
        let ([a, b], mut c) = (&mut processes, Process::start(&joiner));
        every(&join(&mut [&mut *a, &mut *b, &mut c], 2, LONG), way);
        every(&all(&mut [&mut *a, &mut *b, &mut c], "sum"), "right");
        // And without the first one, after all have done their part.
        every(&join(&mut [&mut *b, &mut c], 3, LONG), "Shrink { without: [0], revoke: false }");
        every(&all(&mut [&mut *b, &mut c], "sum"), "right");
        // The first one comes back, with what it has of long ago.
        every(&join(&mut [&mut *b, &mut c, &mut *a], 4, LONG), way);
        every(&all(&mut [b, &mut c, a], "sum"), "right");
    }
}

#[test]
fn a_round_that_forms_ends_a_sum_that_has_had_its_time() {
    let mut processes: [Process; 3] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, LONG), "Renew");
    let [mut a, mut b, c] = processes;
    assert_eq!(a.ask("forming 2 400"), "set");
    // The others never begin: for them nothing has failed.
    let begun = Instant::now();
    assert_eq!(a.ask("sum"), "error: round 2 is forming");
    assert!(begun.elapsed() < LONG / 3);
    drop(c);
    every(&join(&mut [&mut a, &mut b], 2, LONG), "Shrink { without: [2], revoke: true }");
    every(&all(&mut [&mut a, &mut b], "sum"), "right");
}

#[test]
fn a_call_that_never_returns_is_reported() {
    let mut processes: [Process; 2] = start(&fake());
    every(&join(&mut processes.each_mut(), 1, Duration::from_secs(2)), "Renew");
    assert_eq!(processes[0].ask("set FAKE_NCCL_BLOCK ncclAllReduce"), "set");
    let answers = all(&mut processes.each_mut(), "sum");
    assert!(answers[0].contains("NCCL does not come back from sum"), "{answers:?}");
    assert!(answers[1].contains("did not end within"), "{answers:?}");
    assert!(processes[0].ask("sum").contains("NCCL does not come back from an earlier call"));
}
