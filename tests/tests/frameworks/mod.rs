//! The examples for Transformers, Lightning and a folder of images, and Accelerate's launcher, with the real packages
//! under kills. `make test-frameworks` installs these and runs the tests.

mod gpt2;

use elastic_tests::prelude::*;
use tokio::process::Command;

/// Two workers import a framework, twice, on a busy machine.
const LIMIT: Duration = Duration::from_secs(280);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Commands as a user types them in `folder`, with the built programs and the frameworks' Python on the path.
fn shell(python: &Torch, folder: &Path, commands: &str) -> Command {
    let first = [binary("elastic-agent").parent().unwrap(), python.python().parent().unwrap()].map(PathBuf::from);
    let inherited = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(first.into_iter().chain(std::env::split_paths(&inherited))).unwrap();
    let mut shell = Command::new("bash");
    shell.args(["-e", "-c", commands]).current_dir(folder).envs(python.environment()).env("PATH", path);
    shell.env("PYTHONPATH", root().join("agent/python")).env("EXAMPLES", root().join("examples"));
    shell.env("SCRIPTS", script(".")).env("OMP_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1").kill_on_drop(true);
    shell
}

/// What the commands print, when they have succeeded.
async fn typed(python: &Torch, folder: &Path, commands: &str) -> String {
    let ended = tokio::time::timeout(LIMIT, shell(python, folder, commands).output()).await.expect("it ends").unwrap();
    let text = [&ended.stdout[..], &ended.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(ended.status.success(), "{text}");
    text
}

/// The steps that groups continued from, out of memory.
fn resumed(out: &str) -> Vec<u64> {
    let after = |line: &str| {
        let (_, rest) = line.split_once("resumes after step ")?;
        rest.split_once(", from memory")?.0.parse().ok()
    };
    out.lines().filter_map(after).collect()
}

#[tokio::test]
#[ignore = "needs the frameworks: make test-frameworks"]
async fn transformers_continues_from_memory() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Given a checkpoint that a kill has left half written, which is newer than any
    let train = r#"
        mkdir -p checkpoints/checkpoint-999 && echo '{}' > checkpoints/checkpoint-999/config.json
        elastic-agent --standalone --nproc-per-node=2 --max-restarts=1 "$EXAMPLES/train_transformers.py" \
            --epochs=2 --folder="$PWD/checkpoints" > out 2>&1 &
        until grep -q "'loss'" out; do kill -0 $! || { cat out; exit 1; }; sleep 0.05; done
        kill -KILL "$(pgrep -n -f "python.*train_transformers.py.*$PWD")"
        wait $! || { cat out; exit 1; }
        cat out"#;
    let out = typed(&python, folder.path(), train).await;
    // Before the first of the Trainer's own checkpoints.
    assert!(matches!(resumed(&out)[..], [20..100]), "{:?} in {out}", resumed(&out));
    assert!(out.contains("step 100: mean loss "), "{out}");

    // When the agent is gone, and its memory with it, then the newest whole checkpoint is what counts
    let again = r#"elastic-agent --standalone --nproc-per-node=2 "$EXAMPLES/train_transformers.py" \
        --epochs=3 --folder="$PWD/checkpoints""#;
    std::fs::create_dir_all(folder.path().join("checkpoints/checkpoint-999")).unwrap();
    let out = typed(&python, folder.path(), again).await;
    assert!(resumed(&out).is_empty() && out.contains("step 150: mean loss "), "{out}");
    assert!(out.contains("'epoch': '2.4'") && !out.contains("'epoch': '1.6'"), "it continued from step 100: {out}");
}

/// The Trainer handles the signal itself, and ends if a process that reads its batches does.
#[tokio::test]
#[ignore = "needs the frameworks: make test-frameworks"]
async fn transformers_with_loader_processes_saves_when_it_is_asked_to_stop() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    let train = r#"
        sed "s/disable_tqdm=True,/disable_tqdm=True, enable_jit_checkpoint=True, dataloader_num_workers=2,/" \
            "$EXAMPLES/train_transformers.py" > train.py
        elastic-agent --standalone --nproc-per-node=2 train.py --epochs=1000 --save-steps=1000000 > out 2>&1 &
        until grep -q "'loss'" out; do kill -0 $! || { cat out; exit 1; }; sleep 0.05; done
        kill -TERM $!
        code=0; wait $! || code=$?
        cat out; echo "exit code $code"
        ls checkpoints/checkpoint-*/trainer_state.json checkpoints/checkpoint-*/optimizer.pt"#;
    let out = typed(&python, folder.path(), train).await;
    assert!(out.contains("exit code 3") && !out.contains("is killed by signal"), "{out}");
}

#[tokio::test]
#[ignore = "needs the frameworks: make test-frameworks"]
async fn lightning_continues_from_memory_on_fewer_nodes_than_it_names() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let train = format!(
        r#"
        node() {{
            exec elastic-agent --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --nnodes=1:2 --node-name="$1" \
                --local-addr=127.0.0.1 --max-restarts=1 "$EXAMPLES/train_lightning.py" \
                --nodes=2 --epochs=6 --folder="$PWD/checkpoints" > "$1" 2>&1
        }}
        export XDG_RUNTIME_DIR=$PWD
        # It serves the nodes' store.
        node a & a=$!
        until (: < /dev/tcp/127.0.0.1/{port}) 2>/dev/null; do kill -0 $a || {{ cat a; exit 1; }}; sleep 0.05; done
        node b & b=$!
        until grep -q "^.*step 20: loss" a b; do kill -0 $a && kill -0 $b || {{ cat a b; exit 1; }}; sleep 0.05; done
        kill -KILL $b
        wait $a || {{ cat a b; exit 1; }}
        cat a"#
    );
    let out = typed(&python, folder.path(), &train).await;
    let steps = resumed(&out);
    // An epoch is 94 steps of two nodes.
    assert!(matches!(steps[..], [20..564]), "{steps:?} in {out}");
    assert!(out.contains(" of epoch 6: done"), "{out}");
}

#[tokio::test]
#[ignore = "needs the frameworks: make test-frameworks"]
async fn accelerates_launcher_is_the_agent() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    let launch = r#"
        python -m elastic_agent.accelerate launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no \
            --dynamo_backend=no --max_restarts=1 "$SCRIPTS/accelerates.py" --word "two words""#;
    let out = typed(&python, folder.path(), launch).await;
    for rank in 0..2 {
        assert!(out.contains(&format!("rank {rank} of 2, round 2, sum 3: two words")), "{out}");
    }
    // On two machines, by the words of Accelerate's script for Slurm
    let machines = format!(
        r#"
        machine() {{
            python -m elastic_agent.accelerate launch --multi_gpu --num_processes 4 --num_machines 2 --machine_rank "$1" \
                --rdzv_backend c10d --main_process_ip localhost --main_process_port {} --mixed_precision no \
                --dynamo_backend no --max_restarts 1 "$SCRIPTS/accelerates.py" --word "two words"
        }}
        export XDG_RUNTIME_DIR=$PWD
        machine 0 & first=$!
        machine 1
        wait $first"#,
        free_port()
    );
    let out = typed(&python, folder.path(), &machines).await;
    for rank in 0..4 {
        assert!(out.contains(&format!("rank {rank} of 4, round 2, sum 10: two words")), "{out}");
    }
}

#[tokio::test]
#[ignore = "needs torchvision: make test-frameworks"]
async fn the_imagenet_example_reads_a_folder_of_images() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    let train = r#"
        python - <<'END'
import pathlib, PIL.Image
for number in range(24):
    path = pathlib.Path("images", ("red", "blue")[number % 2], f"{number}.jpeg")
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (80, 60), (250 - number, 0, 0) if number % 2 == 0 else (0, 0, 250 - number)).save(path)
END
        elastic-agent --standalone --nproc-per-node=2 --max-restarts=1 "$EXAMPLES/train_imagenet.py" \
            --data=images --batch=2 --readers=1 --epochs=3 --save-every=2 --folder="$PWD/checkpoints" > out 2>&1 &
        # Then the one before is committed.
        until [ -e checkpoints/step-4.pt ]; do kill -0 $! || { cat out; exit 1; }; sleep 0.05; done
        kill -KILL "$(pgrep -n -f "python.*train_imagenet.py.*$PWD")"
        wait $! || { cat out; exit 1; }
        cat out"#;
    let out = typed(&python, folder.path(), train).await;
    assert!(out.lines().any(|line| line.starts_with("continues after step ") && line.ends_with(" 2 workers")), "{out}");
    assert!(out.contains("epoch 2, step 18: loss "), "{out}");
}
