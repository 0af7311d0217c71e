//! Sums over NCCL that begin while the GPU still computes, on the doubles of the driver and of NCCL. They show what may
//! run at the same time, and nothing of a real GPU's speed. How workers continue when NCCL fails is also in `nccl`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::nccl::{Variables, Worker, all_end, start, with_nccl};
use crate::training::{GPT, SHORT, checksum, printed, refused_by_rank_0};

/// Buckets of 500 of the 2,778 parameters of [`SHORT`]'s perceptron: six buckets. The first layer fills the last one,
/// and the other layers fill the first two.
const IN_BUCKETS: &str = "--bucket-mb 0.0019";

const PLAIN: Variables<'_> = &[];

/// Asserts that no log says that NCCL failed.
fn undisturbed(logs: &[String]) {
    assert!(logs.iter().all(|logged| logged.matches("NCCL's communicator is made").count() == 1), "{logs:#?}");
    assert!(!logs.concat().contains("WARN"), "{logs:#?}");
}

#[test]
fn the_gpu_computes_on_while_nccl_sums_what_is_final() {
    // Given GPUs on which the work after a bucket waits until NCCL has reached that bucket
    let waits: Variables<'_> = &[("FAKE_CUDA", "devices=1,overlap=1")];
    // in so many steps that graphs are replayed
    let perceptron = SHORT.replace("--epochs 1", "--epochs 4");
    for (flags, bucket) in [(perceptron, IN_BUCKETS), (GPT.replace("--epochs 2", "--epochs 6"), "--bucket-mb 0.005")] {
        let flags = format!("{} --collectives nccl", with_nccl(&flags));
        let whole = all_end(start(&format!("{flags} --bucket-mb 0"), &[PLAIN; 2])).0;
        // Then they still end, with the same bits as sums that wait for the whole gradient.
        let (printed, logs) = all_end(start(&format!("{flags} {bucket}"), &[waits; 2]));
        undisturbed(&logs);
        assert_eq!(checksum(&printed), checksum(&whole), "{flags}");
    }
}

#[test]
fn bits_do_not_depend_on_buckets_nor_on_who_has_how_many_shards() {
    let cases: [(&str, &[&str], &[usize]); 4] = [
        // Several pieces to a shard, and several nodes to a worker
        (SHORT, &["0.0019", "0.004", "0.0001"], &[2, 3]),
        // One piece each
        (&SHORT.replace("--micro-batch 30", "").replace("--shards 6", "--shards 2"), &["0.0019"], &[2]),
        // Workers without a shard, and shards without a sample in an epoch's last step
        (&SHORT.replace("--shards 6", "--shards 2").replace("--batch 300", "--batch 719"), &["0.0019"], &[3]),
        (GPT, &["0.005"], &[2, 3]),
    ];
    for (flags, buckets, world_sizes) in cases {
        let alone = printed(&format!("{flags} --device cuda:0"), "");
        for &workers in world_sizes {
            for bucket in buckets {
                let flags = format!("{} --collectives nccl --bucket-mb {bucket}", with_nccl(flags));
                let (printed, logs) = all_end(start(&flags, &vec![PLAIN; workers]));
                assert_eq!(checksum(&printed), checksum(&alone), "{workers} workers, {flags}");
                undisturbed(
                    &logs.into_iter().filter(|logged| !logged.contains("some have no work")).collect::<Vec<_>>(),
                );
            }
        }
    }
}

#[test]
fn workers_with_other_buckets_refuse_one_another() {
    let flags = with_nccl("");
    let [first, second] = ["0", "0.0019"].map(|bucket| format!("{flags} --bucket-mb {bucket}"));
    let logged = refused_by_rank_0(&first, &second, "devices=1");
    assert!(logged.contains("--bucket-mb 0.0019"), "{logged}");
}

/// The number of the `ncclGroupEnd` call for a stage of a bucket in a step, all counted from 0. There are two calls for
/// each of six buckets.
fn call(step: usize, bucket: usize, stage: usize) -> usize {
    1 + 12 * step + 2 * bucket + stage
}

#[test]
fn nccl_that_fails_between_two_buckets_is_replaced_and_no_step_is_lost() {
    let flags = format!("{SHORT} --epochs 4 --peer-timeout 4").replace("--epochs 1 ", "");
    let alone = printed(&format!("{flags} --device cuda:0"), "");
    let flags = format!("{} {IN_BUCKETS}", with_nccl(&flags));
    for (variable, code, at, more) in [
        ("FAKE_NCCL_HANG", "", call(0, 1, 0), ""),
        ("FAKE_NCCL_HANG", "", call(11, 5, 1), ""),
        ("FAKE_NCCL_FAIL", ":3", call(7, 3, 1), ""),
        ("FAKE_NCCL_FAIL", ":3", call(13, 0, 1), ""),
        // A failure after which the other rank has what it needs for its next sums.
        ("FAKE_NCCL_LATE", ":3", call(7, 3, 1), ""),
        // After the last bucket the other rank is a step ahead, or asks how many samples were skipped.
        ("FAKE_NCCL_LATE", ":6", call(9, 5, 1), ""),
        ("FAKE_NCCL_LATE", ":6", call(9, 5, 1), "--unreadable skip"),
    ] {
        let fault = format!("ncclGroupEnd#{at}{code}");
        let (printed, logs) = all_end(start(&format!("{flags} {more}"), &[PLAIN, &[(variable, &fault)]]));
        assert_eq!(checksum(&printed), checksum(&alone), "{variable} {fault} {more}");
        assert!(logs[1].matches("NCCL failed in a sum").count() == 1, "{fault} {}", logs[1]);
        for logged in logs {
            assert!(logged.matches("NCCL's communicator is made").count() == 2, "{fault} {logged}");
            assert!(logged.matches("continues from memory").count() == 1, "{fault} {logged}");
        }
    }
}

#[test]
fn a_worker_that_dies_between_two_buckets_is_named_with_the_bucket_that_it_owes() {
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("{} {IN_BUCKETS} --epochs 4 --peer-timeout 60", with_nccl(SHORT)).replace("--epochs 1 ", "");
    let (hangs, records) = (format!("ncclGroupEnd#{}", call(6, 2, 0)), folder.path().to_str().unwrap());
    let recorded: Variables<'_> = &[("ELASTIC_RECORD_DIR", records)];
    let mut workers = start(&flags, &[recorded, &[("FAKE_NCCL_HANG", &hangs), ("FAKE_NCCL_TELLS", "1")]]).into_iter();
    let (first, mut second) = (workers.next().unwrap(), workers.next().unwrap());
    second.says("fake-nccl: hangs");
    second.kill();
    let (well, _, logged) = first.end();
    assert!(!well && logged.contains("lost rank 1"), "{logged}");
    let operations = operations(&folder.path().join("collectives-round-0-rank-0.json"));
    let sums = operations.iter().filter(|line| line["operation"] == "ordered sum");
    let steps: Vec<&Value> = sums.collect();
    assert_eq!(steps.len(), 6 * 6 + 3);
    let bytes = |step: &[&Value]| step.iter().map(|line| line["bytes"].as_u64().unwrap()).sum::<u64>();
    assert!(steps.chunks_exact(6).all(|step| bytes(step) == 4 * 2779), "{steps:?}");
    assert_eq!(steps.last().unwrap()["state"], "given up");
}

fn operations(file: &Path) -> Vec<Value> {
    let report: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    report["operations"].as_array().unwrap().clone()
}

#[test]
fn a_gpu_that_fails_behind_a_bucket_is_not_taken_for_nccl() {
    let flags = format!("{} {IN_BUCKETS}", with_nccl(SHORT));
    // Kernels of the first step's last pass that wait until NCCL is at a bucket, and some around them
    for launch in (98..114).step_by(3) {
        let fails = format!("devices=1,overlap=1,fail={launch}");
        let workers = start(&flags, &[PLAIN, &[("FAKE_CUDA", &fails)]]).into_iter();
        let ends: Vec<_> = workers.map(Worker::end).collect();
        let (well, _, logged) = &ends[1];
        assert!(!well && logged.contains("GPU 0 failed to") && logged.contains("an illegal memory access"), "{logged}");
        assert!(!logged.contains("NCCL failed"), "{launch} {logged}");
        assert!(!ends[0].0 && ends[0].2.contains("lost rank 1"), "{}", ends[0].2);
    }
}
