//! Workers in Python that use only its standard library, for tests whose workers do more than wait.

use elastic_tests::prelude::*;

/// What every such worker can do: write notes to the job's folder, write down its rank and node, and talk to its agent.
const PRELUDE: &str = r#"
import ctypes, json, os, pathlib, signal, socket, sys, threading, time
e, folder = os.environ, pathlib.Path(sys.argv[1])
node, round, rank, local_rank = e["ELASTIC_NODE"], int(e["ELASTIC_ROUND"]), int(e["RANK"]), int(e["LOCAL_RANK"])
def note(name, line):
    with open(folder / name, "a") as file: file.write(line + "\n")
def here():
    names = "ELASTIC_NODE ELASTIC_ROUND RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    names += " TORCHELASTIC_RESTART_COUNT"
    master = e["MASTER_ADDR"] + ":" + e["MASTER_PORT"]
    note("starts", " ".join([e[name] for name in names.split()] + [str(os.getpid()), master]))
def agent():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(e["ELASTIC_AGENT_SOCKET"])
    def listen():
        for line in connection.makefile(): note(f"heard-{node}", line.strip())
    threading.Thread(target=listen, daemon=True).start()
    def say(**message): connection.sendall((json.dumps(message) + "\n").encode())
    say(type="register", local_rank=local_rank, pid=os.getpid())
    return say
"#;

/// A job whose workers run `script`.
pub(crate) fn python(job: Job, script: &str) -> Job {
    let path = job.path("script.py");
    std::fs::write(&path, format!("{PRELUDE}{script}")).unwrap();
    let folder = job.path("").display().to_string();
    job.program(["python3".to_owned(), path.display().to_string(), folder])
}

/// What workers noted; empty if nothing.
pub(crate) fn noted(job: &Job, name: &str) -> String {
    std::fs::read_to_string(job.path(name)).unwrap_or_default()
}
