//! What README.md tells a newcomer to type, typed.

use std::path::Path;
use std::time::Duration;

use elastic_tests::binaries::binary;
use elastic_tests::torch::Torch;
use tokio::process::Command;

/// Imports of torch by two workers on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The block of commands that holds `mark`.
fn commands<'a>(page: &'a str, mark: &str) -> &'a str {
    let mut blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("\n```").next());
    blocks.find(|block| block.contains(mark)).unwrap_or_else(|| panic!("no commands in README.md have {mark:?}"))
}

#[tokio::test]
async fn the_trial_works_as_typed() {
    let Some(torch) = Torch::find() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(root.join("README.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let agent = binary("elastic-agent");
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    let path = [agent.parent().unwrap(), torch.python().parent().unwrap()].map(Path::to_owned);
    let path = std::env::join_paths(path.into_iter().chain(std::env::split_paths(&inherited))).unwrap();

    let mut shell = Command::new("bash");
    shell.args(["-e", "-c", commands(&page, "cat > train.py")]).current_dir(folder.path());
    shell.envs(torch.environment()).env("PATH", path).kill_on_drop(true);
    let ended = tokio::time::timeout(LIMIT, shell.output()).await.expect("it ends").unwrap();

    let (out, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{out}\n{errors}");
    let steps: Vec<&str> = out.lines().filter_map(|line| line.split_once(": loss ")).map(|(step, _)| step).collect();
    assert_eq!(steps, ["step 100", "step 200", "step 300", "step 400", "step 500"], "{out}\n{errors}");
    assert!(folder.path().join("shared/last.pt").is_file());
}
