//! Names and their locks, within one process (a lock belongs to an open file) and between two.

use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;

use tempfile::TempDir;

use super::*;

const SHORT: Duration = Duration::from_millis(60);
const LONG: Duration = Duration::from_secs(30);

/// Device and inode of the file that is locked.
fn lock_file(identity: &NodeIdentity) -> (u64, u64) {
    let stat = rustix::fs::fstat(identity.lock_fd()).unwrap();
    (stat.st_dev, stat.st_ino)
}

fn take(base: &Path, node_name: Option<&str>, patience: Duration) -> Result<NodeIdentity, IdentityError> {
    NodeIdentity::claim("J", node_name, &RuntimeDir::under(base), patience)
}

/// Claims as [`take`] does, and sends the log lines.
fn take_telling(
    base: &Path,
    node_name: Option<&str>,
    patience: Duration,
    log: mpsc::Sender<String>,
) -> Result<NodeIdentity, IdentityError> {
    tracing::subscriber::with_default(crate::log_to(log), || take(base, node_name, patience))
}

/// Starts an agent that claims a name while it is held. Returns when the agent has begun to wait.
fn waiting_successor(base: &Path, node_name: Option<&'static str>) -> JoinHandle<Result<String, IdentityError>> {
    let base = base.to_owned();
    let (log, said) = mpsc::channel();
    let successor = std::thread::spawn(move || take_telling(&base, node_name, LONG, log).map(|node| node.name));
    let line = said.recv_timeout(LONG).expect("the successor says that it waits");
    assert!(line.contains("waiting for the previous agent"), "{line}");
    successor
}

#[test]
fn an_identity_names_node_process_machine_and_boot() {
    let base = tempfile::tempdir().unwrap();
    let node = take(base.path(), Some("a"), SHORT).unwrap();
    assert_eq!(node.to_string(), format!("a:{}", node.incarnation));
    assert_eq!(node.boot_id.len(), 36);
    assert_eq!(node.host, hostname());
    assert!(node.machine_id.len() >= 32);
    assert_eq!(node.runtime_dir(), base.path().join("elastic-agent/J"));
    // The file says who holds it.
    let text = fs::read_to_string(node.runtime_dir().join("a.lock")).unwrap();
    assert!(text.starts_with(&format!("{} ", std::process::id())), "{text}");
    assert!(text.ends_with(&format!(" {}\n", node.incarnation)), "{text}");
}

#[test]
fn sockets_of_killed_agents_of_the_node_go_and_those_of_others_stay() {
    let base = tempfile::tempdir().unwrap();
    let (a, b) = (take(base.path(), Some("a"), SHORT).unwrap(), take(base.path(), Some("b"), SHORT).unwrap());
    let (left, others) = (a.fresh_socket(), b.fresh_socket());
    fs::write(&left, "").unwrap();
    fs::write(&others, "").unwrap();
    drop(a);
    let again = take(base.path(), Some("a"), SHORT).unwrap();
    let fresh = again.fresh_socket();
    assert!(!left.exists() && others.exists() && fresh != left && !fresh.exists());
    // Nothing keeps the job's directory when the last is gone.
    fs::write(&fresh, "").unwrap();
    let directory = again.runtime_dir().to_owned();
    again.retire();
    assert!(!fresh.exists() && others.exists() && directory.exists());
    b.retire();
    assert!(!directory.exists());
}

#[test]
fn agents_without_names_take_the_first_free_slots() {
    let base = tempfile::tempdir().unwrap();
    let first = take(base.path(), None, SHORT).unwrap();
    let second = take(base.path(), None, SHORT).unwrap();
    let host = unnamed_here(&RuntimeDir::under(base.path())).unwrap();
    assert_eq!((first.name.as_str(), second.name.as_str()), (host.as_str(), format!("{host}-2").as_str()));
    assert_ne!(lock_file(&first), lock_file(&second));
    // When the first ends, the next takes its slot, and its very lock.
    let lock = lock_file(&first);
    drop(first);
    let third = take(base.path(), None, SHORT).unwrap();
    assert_eq!((third.name.as_str(), lock), (host.as_str(), lock_file(&third)));
    // Each job has its own names.
    let other = NodeIdentity::claim("K", Some("x"), &RuntimeDir::under(base.path()), SHORT).unwrap();
    assert!(take(base.path(), Some("x"), SHORT).is_ok());
    drop(other);
}

#[test]
fn a_name_started_twice_is_refused_with_the_holder_named() {
    let base = tempfile::tempdir().unwrap();
    let holder = take(base.path(), Some("a"), SHORT).unwrap();
    let error = take(base.path(), Some("a"), SHORT).unwrap_err().to_string();
    for part in ["`a`", &std::process::id().to_string(), &holder.incarnation.to_string(), "twice by mistake"] {
        assert!(error.contains(part), "{error:?} should hold {part:?}");
    }
}

#[test]
fn a_name_is_free_only_when_the_guards_duplicate_is_closed_too() {
    let base = tempfile::tempdir().unwrap();
    let agent = take(base.path(), Some("a"), SHORT).unwrap();
    let guard = agent.lock_fd().try_clone_to_owned().unwrap();
    drop(agent);
    assert!(matches!(take(base.path(), Some("a"), SHORT), Err(IdentityError::NameHeld { .. })));

    // When the guard ends while a successor waits, the successor gets the name.
    let successor = waiting_successor(base.path(), Some("a"));
    drop(guard);
    assert_eq!(successor.join().unwrap().unwrap(), "a");
}

#[test]
fn waiting_is_said_once() {
    let base = tempfile::tempdir().unwrap();
    let _holder = take(base.path(), Some("a"), SHORT).unwrap();
    let (log, said) = mpsc::channel();
    take_telling(base.path(), Some("a"), RETRY * 10, log).unwrap_err();
    let lines: Vec<String> = said.iter().collect();
    let expected = format!("waiting for the previous agent of this name (pid {}) to end", std::process::id());
    assert!(lines.len() == 1 && lines[0].contains(&expected), "{lines:?}");
}

#[test]
fn the_lock_does_not_leak_into_programs() {
    let base = tempfile::tempdir().unwrap();
    let node = take(base.path(), Some("a"), SHORT).unwrap();
    let flags = rustix::io::fcntl_getfd(node.lock_fd()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "descriptor {}", node.lock_fd().as_raw_fd());
}

#[test]
fn a_dead_agents_slot_is_waited_for_and_a_living_ones_is_not() {
    let base = tempfile::tempdir().unwrap();
    let host = unnamed_here(&RuntimeDir::under(base.path())).unwrap();
    // The slot's agent is dead and its guard is at work: the lock is held, and the file names a process that has ended.
    let guard = take(base.path(), None, SHORT).unwrap();
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let stale = format!("{} 1 {}\n", ended.id(), Uuid::new_v4());
    fs::write(guard.runtime_dir().join(format!("{host}.lock")), stale).unwrap();

    // When the guard does not finish, the next slot is taken after all.
    let next = take(base.path(), None, SHORT).unwrap();
    assert_eq!(next.name, format!("{host}-2"));
    drop(next);

    // When the guard finishes, the waiting successor gets the predecessor's name.
    let successor = waiting_successor(base.path(), None);
    drop(guard);
    assert_eq!(successor.join().unwrap().unwrap(), host);
}

#[test]
fn a_planted_link_or_pipe_is_not_opened() {
    let base = tempfile::tempdir().unwrap();
    let directory = RuntimeDir::under(base.path()).open("J").unwrap().path;
    let target = base.path().join("target");
    fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, directory.join("a.lock")).unwrap();
    assert!(matches!(take(base.path(), Some("a"), SHORT), Err(IdentityError::Runtime { .. })));
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");

    let made = Command::new("mkfifo").arg(directory.join("b.lock")).status().unwrap();
    assert!(made.success());
    let error = take(base.path(), Some("b"), SHORT).unwrap_err().to_string();
    assert!(error.contains("not a plain file"), "{error}");
}

#[test]
fn a_file_that_was_swept_away_leaves_no_two_holders_of_one_lock() {
    // Somebody deleted the lock's file. A new agent gets a lock whose id differs from that of the old lock.
    let base = tempfile::tempdir().unwrap();
    let old = take(base.path(), Some("a"), SHORT).unwrap();
    fs::remove_file(old.runtime_dir().join("a.lock")).unwrap();
    let new = take(base.path(), Some("a"), SHORT).unwrap();
    assert_ne!(lock_file(&old), lock_file(&new));
}

#[test]
fn a_directory_that_is_gone_is_made_again_with_the_lock() {
    let base = tempfile::tempdir().unwrap();
    let mut node = take(base.path(), Some("a"), SHORT).unwrap();
    let mut again = || node.settle_again(&RuntimeDir::under(base.path()));
    again().expect("the lock that is there is its own");
    let all = base.path().join("elastic-agent");
    fs::remove_dir_all(&all).unwrap();
    again().unwrap();
    let error = take(base.path(), Some("a"), SHORT).unwrap_err().to_string();
    assert!(error.contains("is in use on this host"), "{error}");
    fs::remove_dir_all(&all).unwrap();
    again().unwrap();
    assert!(all.join("J/a.lock").exists());
}

#[test]
fn agents_that_end_leave_nothing_behind() {
    let base = tempfile::tempdir().unwrap();
    let (one, two) = (take(base.path(), Some("a"), SHORT).unwrap(), take(base.path(), Some("b"), SHORT).unwrap());
    let directory = one.runtime_dir().to_owned();
    one.retire();
    assert!(directory.join("b.lock").exists(), "another's lock stays");
    two.retire();
    assert!(!directory.exists());
    assert!(take(base.path(), Some("a"), SHORT).is_ok());
}

#[test]
fn agents_that_come_and_go_at_once_do_not_take_each_others_directory_away() {
    let base = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..200).for_each(|_| take(base.path(), None, LONG).unwrap().retire()));
        }
    });
    let node = take(base.path(), None, LONG).unwrap();
    let directory = node.runtime_dir().to_owned();
    node.retire();
    assert!(!directory.exists());
}

#[test]
fn who_waits_for_a_name_keeps_the_directory() {
    let base = tempfile::tempdir().unwrap();
    let old = take(base.path(), Some("a"), SHORT).unwrap();
    let successor = waiting_successor(base.path(), Some("a"));
    old.retire();
    assert_eq!(successor.join().unwrap().unwrap(), "a");
}

#[test]
fn host_names_become_node_names() {
    for (host, name) in [("node7", "node7"), ("a.b-c", "a.b-c"), ("a b/c", "a-b-c"), ("", "node"), ("..", "node")] {
        assert_eq!(node_name(host), name);
    }
}

#[test]
fn a_name_that_was_not_given_is_this_folders_and_lasts() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let name = |base: &TempDir| take(base.path(), None, SHORT).unwrap().name;
    let first = name(&one);
    assert!(first.starts_with(&format!("{}-", node_name(&hostname()))), "{first}");
    assert_ne!(first, name(&other), "two containers with folders of their own");
    assert_eq!(first, name(&one), "an agent that is started again");
}

#[test]
fn a_machine_without_an_id_is_known_by_its_boot() {
    let dir = tempfile::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good"), dir.path().join("bad"));
    fs::write(&good, "0123456789abcdef0123456789abcdef\n").unwrap();
    fs::write(&bad, "uninitialized\n").unwrap();
    assert_eq!(machine_id(&[&bad, &good]).as_deref(), Some("0123456789abcdef0123456789abcdef"));
    assert_eq!(machine_id(&[&bad, &dir.path().join("absent")]), None);
}

const BASE: &str = "IDENTITY_TEST_BASE";

/// Not a test by itself: the second process of the next test runs it.
#[test]
#[ignore = "runs as another test's child"]
fn child_holds_a_name_until_its_input_ends() {
    let Some(base) = std::env::var_os(BASE) else { return };
    let node = take(Path::new(&base), Some("a"), SHORT);
    let said = node.as_ref().map_or_else(ToString::to_string, |node| format!("holding {}", node.incarnation));
    println!("\nchild: {said}");
    std::io::stdout().flush().unwrap();
    std::io::stdin().lines().for_each(drop);
}

fn child(base: &Path) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "machine::identity::tests::child_holds_a_name_until_its_input_ends",
            "--ignored",
            "--nocapture",
        ])
        .env(BASE, base)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let said = output.lines().map_while(Result::ok).find_map(|line| Some(line.strip_prefix("child: ")?.to_owned()));
    (child, said.expect("the child says what it got"))
}

#[test]
fn two_processes_never_hold_one_name_and_a_killed_ones_name_is_free() {
    let base = tempfile::tempdir().unwrap();
    let (mut first, said) = child(base.path());
    assert!(said.starts_with("holding "), "{said}");
    let error = take(base.path(), Some("a"), SHORT).unwrap_err().to_string();
    assert!(error.contains(&format!("pid {} ", first.id())), "{error}");
    // A second process is refused just as this process was.
    let (mut second, said) = child(base.path());
    assert!(said.contains("twice by mistake"), "{said}");
    drop(second.stdin.take());
    second.wait().unwrap();

    // When the holder is killed, the kernel frees its name.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(take(base.path(), Some("a"), LONG).is_ok());
}
