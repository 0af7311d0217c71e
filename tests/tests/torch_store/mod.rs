//! The agent's store and real torch: every method of its client, its server's answers to the same bytes, and process
//! groups that begin again. Skipped where `ELASTIC_TORCH_PYTHON` names no Python with torch.

mod against_torch;

use std::net::Ipv6Addr;

use elastic_agent::for_tests::{TcpStore, WorkersStoreLimits};
use elastic_tests::prelude::*;

/// Failures of a process group, one after the other.
const RESTARTS: u32 = 1;

/// Twice four imports of torch on a busy machine.
const RUN: Duration = Duration::from_secs(120);

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_store").join(name)
}

/// On all addresses, IPv4 and IPv6.
fn serve() -> (u16, TcpStore) {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind("0.0.0.0:0")).unwrap();
    (listener.local_addr().unwrap().port(), TcpStore::serve(listener, WorkersStoreLimits::default(), None).unwrap())
}

fn answers_every_method(torch: &Torch, script: &Path, hosts: &[&str]) {
    let (port, _store) = serve();
    let output = torch.run(script).arg(port.to_string()).args(hosts).output().unwrap();
    let (said, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && said.contains("every method answered"),
        "{}\n{said}\n{complaint}",
        output.status
    );
}

#[test]
fn every_method_of_torchs_client_is_answered() {
    let Some(torch) = Torch::find() else { return };
    // One client by IPv4, and one by IPv6 where there is one.
    let other = if TcpListener::bind("[::1]:0").is_ok() { "::1" } else { "127.0.0.1" };
    answers_every_method(&torch, &script("every_method.py"), &["127.0.0.1", other]);
}

#[test]
fn every_method_of_torch_1_13_is_answered() {
    let Some(torch) = Torch::old() else { return };
    answers_every_method(&torch, &script("old_methods.py"), &["127.0.0.1"]);
}

/// torchrun 2.15 hands the same store to every attempt, and its stale keys break the next one.
#[tokio::test]
async fn gloo_begins_again_and_outlives_rank_0() {
    let Some(torch) = Torch::find() else { return };
    let flags = ["--standalone", "--nproc-per-node=4", &format!("--max-restarts={RESTARTS}"), "--redirects=1"];
    let program = torch.program(&script("all_reduce.py"));
    let with_restarts = [program[0].clone(), format!("ELASTIC_TEST_RESTARTS={RESTARTS}")];
    let job = Job::met_by(&flags, "1").program(with_restarts.into_iter().chain(program[1..].iter().cloned()));
    let mut agent = job.start("a");
    assert_eq!(agent.exit(RUN).await, 0, "{}", agent.output());

    let mut said: Vec<String> =
        logs(&job.path("logs")).iter().flat_map(|log| log.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    said.sort();
    for round in 1..=RESTARTS + 1 {
        let sums = said.iter().filter(|line| line.starts_with(&format!("round {round} rank "))).count();
        assert_eq!(sums, 4, "round {round}: {said:#?}");
    }
    assert_eq!(said.iter().filter(|line| line.ends_with("continued without rank 0")).count(), 3, "{said:#?}");
}

/// What all workers of all rounds have written.
fn logs(dir: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            texts.extend(logs(&path));
        } else if path.ends_with("stdout.log") {
            texts.push(std::fs::read_to_string(path).unwrap());
        }
    }
    texts
}
