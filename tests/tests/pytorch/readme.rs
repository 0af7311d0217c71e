//! What README.md and examples/ tell a newcomer to type, typed.

use elastic_tests::prelude::*;
use tokio::process::Command;

/// Long enough for two workers to import torch, twice, on a busy machine.
const LIMIT: Duration = Duration::from_secs(150);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The block in this language that holds `mark`.
fn block<'a>(page: &'a str, language: &str, mark: &str) -> &'a str {
    let fence = format!("```{language}\n");
    let mut blocks = page.split(&fence).skip(1).filter_map(|rest| rest.split("\n```").next());
    blocks
        .find(|block| block.contains(mark))
        .unwrap_or_else(|| panic!("nothing in README.md's {language} has {mark:?}"))
}

/// Commands that run with the whole of PyTorch, as on a reader's machine.
fn with_all_of_pytorch(commands: &str) -> String {
    format!("export PYTHONPATH={}\n{commands}", root().join("agent/python").display())
}

/// Runs commands with a shell in `folder`, with the built programs, PyTorch's Python and the agent's package on its
/// paths. Programs in `folder` are found before all others. Returns what the commands print.
async fn typed(torch: &Torch, folder: &Path, commands: &str) -> String {
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    let agent = binary("elastic-agent");
    let first = [folder, agent.parent().unwrap(), torch.python().parent().unwrap()].map(PathBuf::from);
    let path = std::env::join_paths(first.into_iter().chain(std::env::split_paths(&inherited))).unwrap();
    let mut shell = Command::new("bash");
    shell.args(["-e", "-c", commands]).current_dir(folder).envs(torch.environment()).env("PATH", path);
    shell.env("EXAMPLES", root().join("examples")).kill_on_drop(true);
    let ended = tokio::time::timeout(LIMIT, shell.output()).await.expect("it ends").unwrap();
    let (out, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{out}\n{errors}");
    out.into_owned()
}

#[tokio::test]
async fn the_trial_works_as_typed() {
    let Some(torch) = Torch::find() else { return };
    let page = std::fs::read_to_string(root().join("README.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = typed(&torch, folder.path(), &with_all_of_pytorch(block(&page, "sh", "cat > train.py"))).await;
    let steps: Vec<&str> = out.lines().filter_map(|line| line.split_once(": loss ")).map(|(step, _)| step).collect();
    assert_eq!(steps, ["step 100", "step 200", "step 300", "step 400", "step 500"], "{out}");
    assert!(folder.path().join("shared/last.pt").is_file());
}

#[tokio::test]
async fn the_session_keeps_its_process_when_a_worker_is_killed() {
    let Some(torch) = Torch::find() else { return };
    let page = std::fs::read_to_string(root().join("README.md")).unwrap();
    let lines = block(&page, "python", "elastic.Session");
    assert!(lines.lines().count() <= 10, "ten lines were promised");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ten_lines.py"), lines).unwrap();
    // Given all that is the reader's own, and rank 1 that is killed in the 13th of 40 steps
    let train = r#"
cat > own.py <<'EOF'
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dataset = TensorDataset(torch.randn(1024, 16), torch.randint(10, (1024,)))
model = torch.nn.Linear(16, 10)
optimizer = torch.optim.AdamW(model.parameters())
batches = 0

def loss_of(scores, labels):
    global batches
    batches += 1
    if batches == 13 and os.environ["RANK"] == "1" and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(scores, labels)
EOF
cat > train.py <<'EOF'
import os, sys
import own
from own import *
first = os.environ["TORCHELASTIC_RESTART_COUNT"]
exec(open("ten_lines.py").read())
done = f"{session.step_number} steps, {own.batches} batches"
# In one write: workers share the agent's output.
sys.stdout.write(f"rank {session.rank}, begun after {first} restarts: {done}\n")
EOF
elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 train.py"#;
    let out = typed(&torch, folder.path(), &with_all_of_pytorch(train)).await;
    // Rank 0 did each step, one of them twice; the other began with its state.
    assert!(out.contains("rank 0, begun after 0 restarts: 40 steps, 41 batches"), "{out}");
    let other = out.lines().find(|line| line.contains("rank 1, begun after 1 restarts: 40 steps, "));
    let batches: u64 = other.unwrap_or_else(|| panic!("{out}")).rsplit(' ').nth(1).unwrap().parse().unwrap();
    assert!((27..=28).contains(&batches), "{out}");
}

#[tokio::test]
async fn the_ddp_example_continues_from_its_checkpoint() {
    let Some(torch) = Torch::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    let train = r#"elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 "$EXAMPLES/train_ddp.py""#;
    let out = typed(&torch, folder.path(), &format!("{train} --epochs=2; {train} --epochs=4")).await;
    // PyTorch may abort a worker that has done all, which is then started again for nothing.
    let (before, after) = out.split_once("continues with epoch 2, 2 workers").expect("it continues");
    let epochs = |out: &str| out.lines().filter(|line| line.contains(": loss ")).count();
    assert_eq!((epochs(before), epochs(after)), (2, 2), "{out}");
    assert!(out.contains("epoch 3: loss "), "{out}");
}

#[tokio::test]
async fn the_imagenet_example_continues_after_a_kill() {
    the_imagenet_example_continues("").await;
}

#[tokio::test]
async fn the_imagenet_example_continues_from_a_nodes_own_disk() {
    the_imagenet_example_continues("--own-disks").await;
}

async fn the_imagenet_example_continues(disks: &str) {
    let Some(torch) = Torch::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    let train = r#"
        elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 "$EXAMPLES/train_imagenet.py" \
            --images=512 --batch=8 --epochs=5 --save-every=5 --folder="$PWD/checkpoints" DISKS &
        until [ -e checkpoints/step-5.pt ]; do sleep 0.05; done
        kill -KILL "$(pgrep -n -f "python.*train_imagenet.py.*$PWD")"
        wait %1"#;
    let out = typed(&torch, folder.path(), &train.replace("DISKS", disks)).await;
    assert!(out.lines().any(|line| line.starts_with("continues after step ") && line.ends_with(" 2 workers")), "{out}");
    assert!(out.contains("epoch 4, step 160: loss "), "{out}");
}

#[tokio::test]
async fn the_snapshots_example_continues_after_a_kill() {
    let Some(torch) = Torch::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    // PyTorch may abort a worker that has done all, which is then started again for nothing.
    let train = r#"
        elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 "$EXAMPLES/train_snapshots.py" \
            --epochs=10 --checkpoints="$PWD/none" > out 2>&1 &
        until grep -q "step 100," out; do kill -0 $! || { cat out; exit 1; }; sleep 0.05; done
        kill -KILL "$(pgrep -n -f "python.*train_snapshots.py.*$PWD")"
        wait $! || { cat out; exit 1; }
        cat out"#;
    let out = typed(&torch, folder.path(), train).await;
    let resumed = out.lines().find_map(|line| line.split_once("resumes after step ")?.1.split_once(", from memory"));
    let step: u64 = resumed.unwrap_or_else(|| panic!("it begins again: {out}")).0.parse().unwrap();
    assert!((100..930).contains(&step) && out.contains("step 900, 2 workers: loss "), "{out}");
}

#[tokio::test]
async fn the_slurm_example_starts_an_agent_on_each_node() {
    use std::os::unix::fs::PermissionsExt;
    let Some(torch) = Torch::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Given a Slurm whose two nodes are this machine.
    let stand_ins = [
        ("scontrol", "#!/bin/sh\necho node0\necho node1\n"),
        ("srun", "#!/bin/sh\nshift\n\"$@\" & first=$!\n\"$@\"\ncode=$?\nwait $first && exit $code\n"),
    ];
    for (name, text) in stand_ins {
        std::fs::write(folder.path().join(name), text).unwrap();
        std::fs::set_permissions(folder.path().join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let port = free_port();
    let submit = format!(
        "export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node[0-1] SLURM_JOB_NUM_NODES=2 WORKERS=1 XDG_RUNTIME_DIR=$PWD\n\
         ENDPOINT=127.0.0.1:{port} bash \"$EXAMPLES/train.sbatch\" \"$EXAMPLES/train_ddp.py\" --epochs=2"
    );
    let out = typed(&torch, folder.path(), &submit).await;
    let epochs: Vec<&str> = out.lines().filter_map(|line| line.split_once(": loss ")).map(|(epoch, _)| epoch).collect();
    assert_eq!(epochs, ["epoch 0", "epoch 1"], "{out}");
}

#[tokio::test]
async fn the_session_example_trains_with_and_without_an_agent() {
    let Some(torch) = Torch::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    let train = r#""$EXAMPLES/train_session.py" --checkpoints="$PWD" --epochs"#;
    // The second continues what the first has saved.
    let commands = format!("python3 {train}=4; elastic-agent --standalone --nproc-per-node=2 {train}=7");
    let out = typed(&torch, folder.path(), &commands).await;
    let of = |workers: u32| -> Vec<f64> {
        let mark = format!(", {workers} workers: loss ");
        out.lines().filter_map(|line| line.split_once(&mark)).map(|(_, loss)| loss.parse().unwrap()).collect()
    };
    // Of 32 batches an epoch.
    assert_eq!((of(1).len(), of(2).len()), (2, 2), "{out}");
    assert!(out.contains("step 150, 2 workers") && of(2)[1] < of(1)[0], "{out}");
}
