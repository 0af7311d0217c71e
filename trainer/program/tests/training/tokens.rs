//! Texts and files of tokens as users have them, and runs of a number of steps.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use crate::worker::{Worker, environment, free_port, last_step, run, train, wait_for};

/// A network that takes a millisecond a step.
const SMALL: &str = "gpt --context 8 --layers 1 --heads 2 --width 8 --batch 12 --shards 6";

/// A text of about 4,000 bytes.
fn text(folder: &Path) -> PathBuf {
    let path = folder.join("text");
    let lines = (0..200).map(|line| format!("Line {line} of a text.\n")).collect::<String>();
    fs::write(&path, lines).unwrap();
    path
}

#[test]
fn a_text_and_its_tokens_in_a_file_are_the_same_for_every_number_of_workers() {
    let folder = tempfile::tempdir().unwrap();
    let path = text(folder.path());
    let flags = format!("{SMALL} --max-steps 20 --eval-every 10");
    let by_text = train(&format!("{flags} --text {}", path.display()), 1, 0);
    let by_three = train(&format!("{flags} --text {}", path.display()), 3, 0);
    assert!(by_text == by_three && by_text.step == 20);

    let tokens: Vec<u8> = fs::read(&path).unwrap().into_iter().flat_map(|byte| u16::from(byte).to_le_bytes()).collect();
    let (train_bin, val_bin) = (folder.path().join("train.bin"), folder.path().join("val.bin"));
    fs::write(&train_bin, &tokens).unwrap();
    fs::write(&val_bin, &tokens[..500]).unwrap();
    let flags = format!("{flags} --vocabulary 256 --tokens {}", train_bin.display());
    assert!(train(&flags, 2, 0) == by_text);
    // With a file of its own for what is held out, all of this one is trained on.
    let apart = train(&format!("{flags} --val-tokens {}", val_bin.display()), 1, 0);
    assert!(apart != by_text && apart.step == 20);
}

#[test]
fn workers_with_other_files_do_not_train_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = text(folder.path());
    let other = folder.path().join("other");
    fs::write(&other, fs::read_to_string(&path).unwrap().replace("Line 7 ", "Line 8 ")).unwrap();
    let port = free_port();
    let errors: Vec<String> = thread::scope(|scope| {
        let start = |(rank, path): (u32, &PathBuf)| {
            let flags = format!("{SMALL} --max-steps 20 --form-timeout 10 --text {}", path.display());
            scope.spawn(move || run(&flags, environment(rank, 2, 0, port)).unwrap_err().to_string())
        };
        let threads: Vec<_> = [(0, &path), (1, &other)].map(start).into();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let names_both = |error: &String| error.contains("instead of (") && error.matches("tokens, crc32c").count() == 2;
    assert!(errors.iter().any(names_both), "{errors:?}");
}

#[test]
fn a_file_that_is_cut_short_during_training_ends_it_with_one_error() {
    let folder = tempfile::tempdir().unwrap();
    let (path, trace) = (text(folder.path()), folder.path().join("trace"));
    let flags = format!("{SMALL} --epochs 1000000 --text {} --trace {}", path.display(), trace.display());
    let worker = Worker::start(&flags, &environment(0, 1, 0, 0), None);
    wait_for("some steps", || last_step(&trace, "step").filter(|step| *step > 5));
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    let (status, _, logged) = worker.end();
    assert_eq!(status.code(), Some(1), "{logged}");
    assert_eq!(logged.matches("has changed since training began with it").count(), 1, "{logged}");
    assert!(logged.contains(path.to_str().unwrap()), "{logged}");
}

#[test]
fn a_run_ends_after_its_steps_whatever_epochs_these_are() {
    // Given 23 steps in an epoch
    let flags = "--hidden 8 --checkpoint-every 1000000";
    assert!(train(&format!("{flags} --max-steps 46"), 1, 0) == train(&format!("{flags} --epochs 2"), 2, 0));
    let folder = tempfile::tempdir().unwrap();
    let flags = format!("{flags} --checkpoint-dir {}", folder.path().display());
    let longer = train(&format!("{flags} --max-steps 30"), 1, 0);
    assert_eq!(longer.step, 30, "in the second epoch");
    // A checkpoint behind the last step is the result.
    assert!(train(&format!("{flags} --max-steps 7"), 1, 1) == longer);
    assert_eq!(train(&format!("{flags} --max-steps 31"), 1, 2).step, 31);
}
