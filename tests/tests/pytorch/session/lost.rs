//! Sessions whose state no worker, agent or checkpoint holds any more.

use elastic_tests::prelude::*;

use super::promises::each_sample_once_an_epoch;
use super::{SCRIPT, finish, first_step, kill, pid_of};
use crate::pytorch::trace::{LIMIT, lines, works};

#[tokio::test]
async fn a_session_whose_state_is_lost_begins_again_only_if_asked_to() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1").await.flag("--max-restarts=3").script(&torch, SCRIPT, &[]);
    let mut a = job.start("a");
    let first = works(&job, "applied", 1, 1).await;

    // When the only worker that has the state dies, then the job ends, whatever restarts are left
    kill(pid_of(&job, "a", first));
    assert_eq!(a.exit(LIMIT).await, 5);
    let complaint = "no worker has their state any more: the session has no `checkpoint_dir`";
    assert!(a.output().contains(complaint), "{}", a.output());

    // and so does its next start, whose agent knows only from the store how far it was.
    let mut a = job.start("a");
    assert_eq!(a.exit(LIMIT).await, 5);
    assert!(a.output().contains(complaint) && a.output().contains("--fresh"), "{}", a.output());

    // With --fresh it begins again.
    let mut a = job.start_with("a", &["--fresh"]);
    let again = works(&job, "applied", first + 1, 1).await;
    let told = lines(&job);
    assert_eq!(first_step(&told, again), 0);
    assert!(told.iter().all(|line| [first, again].contains(&line.number("round"))), "another round has trained");
    let epochs = finish(&job);
    assert_eq!(a.exit(LIMIT).await, 0);
    let told: Vec<_> = lines(&job).into_iter().filter(|line| line.number("round") == again).collect();
    each_sample_once_an_epoch(&told, epochs);
}
