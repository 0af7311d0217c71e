//! `python -m elastic_agent.torch.check`, on scripts as people write them: each is safe, and names what it does if it is
//! to have a fault.

use elastic_tests::prelude::*;
use tokio::process::Command;

/// What the check must find of each fault, and where; no line where it cannot know one.
const FAULTS: [(&str, &str, &str); 16] = [
    ("ddp_port.py group", "wrapped in DistributedDataParallel", "elastic.Session("),
    ("ddp_port.py unseeded", "torch.manual_seed", ""),
    ("ddp_port.py steps", "the optimizer's step() itself", "optimizer.step()"),
    ("ema.py outside", "average (AveragedModel) changes during training", "average = AveragedModel("),
    ("gan.py own", "have different numbers in critic.", ""),
    ("lora.py unfreezes", "was unfrozen", "session.step()"),
    ("schedule.py outside", "scheduler (StepLR) changes during training", "scheduler = "),
    ("schedule.py pauses", " s passed between steps", "epoch.batches("),
    ("schedule.py hangs", "had not ended", "time.sleep(1)"),
    ("trainer.py clips", "a batch that is not the last of its step", "session.step()"),
    ("trainer.py sums", "the loss is the sum over the batch", ""),
    ("trainer.py counts", "the training is another", ""),
    ("rl.py own", " has left the loop", ""),
    ("fsdp.py plain", "fully_shard", ""),
    ("augments.py mixes", "the loop draws from Python's random", ""),
    ("augments.py clock", "not repeatable", ""),
];

/// Runs the check on a script of `tests/pytorch/checked` and its words. Returns its exit code, and what it says.
async fn check(torch: &Torch, options: &[&str], command: &str) -> (Option<i32>, String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch/checked");
    let agent = binary("elastic-agent");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([agent.parent().unwrap().into()].into_iter().chain(std::env::split_paths(&path)));
    let scratch = tempfile::tempdir().unwrap();
    let mut check = Command::new(torch.python());
    check.envs(torch.environment()).env("PATH", path.unwrap()).env("TMPDIR", scratch.path());
    check.args(["-m", "elastic_agent.torch.check"]).args(options).args(command.split(' '));
    let ended = tokio::time::timeout(Duration::from_secs(600), check.current_dir(folder).kill_on_drop(true).output());
    let ended = ended.await.expect("it ends").unwrap();
    (ended.status.code(), printed(&ended))
}

/// Whether what was said names the line of the script that has `text`.
fn names_the_line(said: &str, script: &str, text: &str) -> bool {
    let script_text = std::fs::read_to_string(script_path(script)).unwrap();
    let mut lines = script_text.lines().zip(1..).filter(|(line, _)| line.contains(text));
    lines.any(|(_, number)| said.contains(&format!(" {script}:{number}: ")))
}

fn script_path(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch/checked").join(script)
}

async fn finds(torch: &Torch, (command, what, line): (&str, &str, &str)) {
    let options = ["--quiesce-timeout=1.5", if command.ends_with("hangs") { "--timeout=25" } else { "--timeout=120" }];
    let (code, said) = check(torch, &options, command).await;
    assert!(code == Some(1) && said.contains("not safe") && said.contains(what), "{command}: {code:?}\n{said}");
    let script = command.split(' ').next().unwrap();
    assert!(line.is_empty() || names_the_line(&said, script, line), "{command}: no line with {line}\n{said}");
}

#[tokio::test]
async fn a_safe_script_differs_from_one_that_is_not() {
    let Some(torch) = Torch::find() else { return };
    // Side by side, because each waits more than it computes.
    let fault = *FAULTS.iter().find(|(command, ..)| *command == "ema.py outside").unwrap();
    let both = async { tokio::join!(check(&torch, &["--timeout=120"], "ema.py"), check(&torch, &[], "no_script.py")) };
    let ((), (safe, none)) = tokio::join!(finds(&torch, fault), both);
    let (code, said) = safe;
    assert!(code == Some(0) && said.contains("Your script is safe to run elastically"), "{code:?}\n{said}");
    assert_eq!(said.matches("the same parameters").count(), 3, "{said}");
    let (code, said) = none;
    assert!(code == Some(2) && said.contains("no_script.py"), "{code:?}\n{said}");
}

#[tokio::test]
#[ignore = "takes ten minutes"]
async fn each_script_is_safe_without_its_fault() {
    let Some(torch) = Torch::find() else { return };
    for script in ["ddp_port", "gan", "lora", "schedule", "trainer", "rl", "fsdp", "augments"] {
        let (code, said) = check(&torch, &["--timeout=120"], &format!("{script}.py")).await;
        assert!(code == Some(0) && said.contains("Your script is safe to run elastically"), "{script}: {said}");
    }
}

#[tokio::test]
#[ignore = "takes ten minutes"]
async fn each_fault_of_a_script_is_found() {
    let Some(torch) = Torch::find() else { return };
    for fault in FAULTS {
        finds(&torch, fault).await;
    }
}
