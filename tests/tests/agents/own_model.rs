//! What `docs/trainer.md` shows under "Your own model", run as it shows it. This suite builds the example; that a crate
//! outside the workspace builds too is shown by `examples/candle`.

use elastic_tests::prelude::*;

const LONG: Duration = Duration::from_secs(180);

/// The program's name on the page, and how long it trains there and here.
const MINE: &str = "target/release/mine";
const EPOCHS: [&str; 2] = ["--epochs=4000", "--epochs=1500"];

/// A command of the page, with this program and this folder.
fn command(words: &str, folder: &Path) -> Command {
    let line = binary("examples/line").display().to_string();
    let words = words.replace(MINE, &line).replace("/tmp/mine", &folder.join("checkpoints").display().to_string());
    let words = words.replace(EPOCHS[0], EPOCHS[1]);
    let mut words = words.split(' ');
    let program = words.next().unwrap_or_default();
    let mut command = if program == line { Command::new(program) } else { Command::new(binary(program)) };
    remove_settings(&mut command);
    command.args(words).current_dir(folder);
    command
}

fn checksum(printed: &str) -> &str {
    let (_, after) = printed.split_once("parameters crc32c:").unwrap_or_else(|| panic!("no checksum: {printed}"));
    after.lines().next().unwrap()
}

#[tokio::test]
async fn the_pages_commands_train_a_model_through_a_kill_to_the_same_bits() {
    let page = include_str!("../../../docs/trainer.md");
    let (_, own) = page.split_once("\n## Your own model\n").unwrap();
    let commands = own.split("```").nth(1).unwrap();
    assert!(commands.contains("\ncp ../elastic/trainer/examples/line.rs src/main.rs\n"), "{commands}");
    let start = commands.lines().find(|line| line.starts_with("elastic-agent ")).unwrap();
    let alone = own.split('`').find(|code| code.starts_with(MINE) && code.contains(EPOCHS[0])).unwrap();

    // Given three workers at work, when one is killed
    let folder = TempDir::new().unwrap();
    let [out, log] = ["out", "log"].map(|name| folder.path().join(name));
    let mut job = tokio::process::Command::from(command(start, folder.path()));
    job.stdout(File::create(&out).unwrap()).stderr(File::create(&log).unwrap()).kill_on_drop(true);
    let mut job = job.spawn().unwrap();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    eventually("three workers train", LONG, async || read(&out).contains("  3 workers").then_some(())).await;
    let logged = read(&log);
    let started = logged.lines().rfind(|line| line.contains("worker started")).unwrap();
    let pid = started.rsplit_once("pid=").unwrap().1.trim().parse().unwrap();
    send(pid, Signal::KILL);
    // Then it comes back, and they end as one worker does that nothing disturbs.
    let status = within("the job ends", LONG, job.wait()).await.unwrap();
    let (printed, logged) = (read(&out), read(&log));
    assert!(status.success(), "{printed}{logged}");
    assert!(logged.contains("signal 9") && logged.contains("running: "), "{printed}{logged}");
    assert!(logged.contains("worker started round=2"), "the kill came too late: {logged}");
    let undisturbed = command(alone, folder.path()).output().unwrap();
    assert_eq!(checksum(&printed), checksum(&String::from_utf8_lossy(&undisturbed.stdout)));
}
