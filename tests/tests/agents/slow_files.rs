//! File systems on which a program takes long to start and a folder long to make: an agent continues meanwhile.

use elastic_tests::prelude::*;

use crate::agents::gpus::lives_and_leaves;

/// Replaces two functions of the C library: `execvp` by the guard's child, and `mkdir` of an attempt's folder or of any
/// folder for logs, take this many seconds.
const SLOW: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static void wait_for(const char *name) { const char *text = getenv(name); if (text) sleep(atoi(text)); }
int execvp(const char *file, char *const argv[]) {
    int (*real)(const char *, char *const[]) = dlsym(RTLD_NEXT, "execvp");
    wait_for("SLOW_EXEC");
    return real(file, argv);
}
int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    if (strstr(path, "/attempt_")) wait_for("SLOW_MKDIR");
    if (strstr(path, "/logs")) wait_for("SLOW_LOGS");
    return real(path, mode);
}
"#;

/// Longer than the lease, so that a node which waits for it loses its workers.
const LONG: Duration = Duration::from_secs(LEASE.as_secs() + 3);

fn slow(job: Job, what: &str, time: Duration) -> Job {
    let (source, library) = (job.path("slow.c"), job.path("slow.so"));
    job.write("slow.c", SLOW);
    compile_library(&source, &library, &[]);
    job.env("LD_PRELOAD", library).env(what, time.as_secs().to_string())
}

/// Both workers of each of two nodes start in the first round, within this time.
async fn start_at_last(what: &str, within: Duration) {
    let job = slow(Job::on_etcd("2").await.flag("--nproc-per-node=2"), what, LONG);
    let begun = Instant::now();
    let mut agents = job.start_all(["a", "b"]);
    let round = job.runs(1, 4).await;
    assert_eq!((round.number, round.restarts()), (1, 0));
    assert!(begun.elapsed() < within, "one worker waited for another: {:?}", begun.elapsed());
    assert_eq!(job.workers().len(), 4, "workers were started more than once");
    job.succeeds(&mut agents).await;
}

#[tokio::test]
async fn programs_that_take_longer_than_the_lease_to_start_are_waited_for() {
    start_at_last("SLOW_EXEC", LONG * 2).await;
}

#[tokio::test]
async fn log_folders_that_take_longer_than_the_lease_to_make_are_waited_for() {
    // The attempt's folder, and one for each worker.
    start_at_last("SLOW_MKDIR", LONG * 4).await;
}

#[tokio::test]
async fn an_agent_whose_log_disk_is_frozen_before_it_joins_lives_and_leaves() {
    lives_and_leaves(slow(Job::met_by(&["--standalone"], "1"), "SLOW_LOGS", LIMIT * 2), "log folder").await;
}

#[tokio::test]
async fn a_program_that_never_starts_meets_the_start_timeout() {
    // Longer than the lease: the wait is ended by a timeout of its own.
    let job = slow(Job::on_etcd("1").await.conf("start_timeout", "7s"), "SLOW_EXEC", LIMIT * 2);
    let mut agents = [job.start("a")];
    agents[0].says("evicted: ", LIMIT).await;
    let said = agents[0].output();
    assert!(said.contains("it did not start its workers in time") && !said.contains("fence point"), "{said}");
    job.leaves(&mut agents).await;
}
