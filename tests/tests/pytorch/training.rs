//! What single scripts have of their own: checkpoints that lie on one node alone, and checkpoints in shards.

use elastic_tests::prelude::*;

use crate::pytorch::trace::{LIMIT, continues, finish, last_epoch, lines, resumes_what_was_saved, used_once, works};

#[tokio::test]
async fn a_joiner_without_a_checkpoint_gets_the_groups_state() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:3").await.flag("--max-restarts=0").script(&torch, "train_imagenet.py", &[]);
    let mut a = job.start("a");
    let alone = works(&job, "step", 1, 1).await;

    // Given checkpoints on one node's own disk, when another node joins, then both begin where the first was
    let mut b = job.start("b");
    let both = works(&job, "step", alone + 1, 2).await;
    let told = lines(&job);
    let begins: Vec<_> = told.iter().filter(|line| line.is("begin") && line.number("round") == both).collect();
    assert!(begins.iter().any(|line| line.text("node") == "b" && !line.flag("own") && line.number("step") > 0));
    assert!(begins.iter().any(|line| line.text("node") == "a" && line.flag("own")));

    // When the first dies, with its disk, then the joiner continues from its own, in the middle of the epoch
    a.kill();
    std::fs::remove_dir_all(job.path("disk-a")).unwrap();
    works(&job, "step", both + 1, 1).await;
    a = job.start("a");
    works(&job, "step", both + 2, 2).await;
    let third = async || lines(&job).iter().any(|line| line.is("step") && line.number("epoch") == 2).then_some(());
    eventually("the third epoch begins", LIMIT, third).await;
    finish(&job);
    assert_eq!(exits_within(LIMIT, [&mut a, &mut b]).await, [0, 0]);

    let lines = lines(&job);
    used_once(&lines, "step", "step", 1, |epoch| epoch < last_epoch(&lines, "step"));
}

#[tokio::test]
async fn shards_are_read_by_a_group_of_another_size() {
    let Some(torch) = Torch::find() else { return };
    let job = Job::on_etcd("1:2").await.flag("--max-restarts=0").script(&torch, "train_fsdp.py", &[]);
    let mut a = job.start("a");
    let alone = works(&job, "saved", 1, 1).await;
    let mut b = job.start("b");
    let both = works(&job, "saved", alone + 1, 2).await;
    b.kill();
    works(&job, "saved", both + 1, 1).await;
    finish(&job);
    assert_eq!(a.exit(LIMIT).await, 0);

    // Then each group begins with the very parameters that some group saved at that step
    let lines = lines(&job);
    assert!(resumes_what_was_saved(&lines) >= 2, "{lines:#?}");
    continues(&lines, "saved", "step", 1);
}
