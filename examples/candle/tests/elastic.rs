//! The example under an agent: the same bits for every number of workers, also when one is killed.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Nothing here takes this long.
const DEADLINE: Duration = Duration::from_secs(300);

/// The lines of a trace. A kill may have cut the last one short.
fn trace(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Trains with so many workers, and kills rank 0 in the middle if told so. Returns the parameters' checksum, and how
/// many rounds it took.
fn train(workers: u32, kills: bool) -> (String, usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let agent = std::env::var("ELASTIC_AGENT").unwrap_or_else(|_| "elastic-agent".to_owned());
    let job = Command::new(agent)
        .args(["--standalone", "--max-restarts=3", "--no-python", &format!("--nproc-per-node={workers}")])
        .args([env!("CARGO_BIN_EXE_candle-digits"), "--epochs=1", "--trace"])
        .arg(&path)
        .stdout(Stdio::piped())
        .spawn()
        .expect("elastic-agent is on the PATH, or named by ELASTIC_AGENT");
    let begun = Instant::now();
    if kills {
        let seen = || Some(trace(&path)).filter(|lines| lines.iter().any(|line| line["step"].as_u64() >= Some(5)));
        let lines = loop {
            if let Some(lines) = seen() {
                break lines;
            }
            assert!(begun.elapsed() < DEADLINE, "waited in vain for some steps");
            sleep(Duration::from_millis(2));
        };
        let pid = lines[0]["pid"].to_string();
        assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    }
    let ended = job.wait_with_output().unwrap();
    let printed = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{printed}");
    let (_, checksum) = printed.split_once("parameters crc32c:").expect("rank 0 prints it");
    (checksum[..8].to_owned(), trace(&path).iter().filter(|line| line["event"] == "begin").count())
}

#[test]
fn every_number_of_workers_gives_the_same_bits_and_so_does_a_kill() {
    let (alone, rounds) = train(1, false);
    assert_eq!(rounds, 1);
    assert_eq!(train(2, false), (alone.clone(), 1));
    let (killed, rounds) = train(3, true);
    assert_eq!(killed, alone, "three workers, one of them killed");
    assert!(rounds > 1, "the kill came too late");
}
