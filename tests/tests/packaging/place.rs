//! A place where something is installed: a root directory, or a folder of programs; and a job of two nodes in it.

use elastic_tests::prelude::*;

/// A training takes some seconds, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Becomes a command within the root `$0`, as in a container that has the host's network: with `/proc` and `/dev`, and
/// processes of its own. The shell stays, as the first of these: with it they all end. A command that has become another
/// user would outlive `unshare`, as that takes a process's death signal away.
const ENTER: &str = r#"
set -e
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
user=$1
shift
status=0
chroot ${user:+--userspec="$user"} "$0" "$@" || status=$?
exit "$status"
"#;

pub(super) struct Place {
    /// A root directory, and the user there; else this machine's own.
    root: Option<(PathBuf, &'static str)>,
    path: String,
    began: Instant,
    logs: TempDir,
}

impl Place {
    pub(super) fn root(directory: &Path, user: &'static str, path: &str) -> Place {
        for folder in ["proc", "dev", "tmp"] {
            std::fs::create_dir_all(directory.join(folder)).unwrap();
        }
        Place { root: Some((directory.to_owned(), user)), ..Place::folder(path) }
    }

    pub(super) fn folder(path: &str) -> Place {
        Place { root: None, path: path.to_owned(), began: Instant::now(), logs: tempfile::tempdir().unwrap() }
    }

    pub(super) fn with_user(mut self, user: &'static str) -> Place {
        self.root = self.root.map(|(directory, _)| (directory, user));
        self
    }

    /// A command there, without any of this process's variables.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command;
        if let Some((directory, user)) = &self.root {
            command = Command::new("unshare");
            command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]).arg(directory);
            command.args([user, program]);
        } else {
            command = Command::new(program);
        }
        // The system's own folders are for what enters the place.
        command.env_clear().env("PATH", &self.path).env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
        command
    }

    fn start(&self, command: Command, log: &str) -> Process {
        Process::spawn(log, command, &self.logs.path().join(log))
    }

    /// Starts a program that is to serve; what it says goes to a log of this name.
    pub(super) fn serve(&self, program: &str, arguments: &[&str], log: &str) -> Process {
        let mut command = self.command(program);
        command.args(arguments);
        self.start(command, log)
    }

    pub(super) fn said(&self, log: &str) -> String {
        std::fs::read_to_string(self.logs.path().join(log)).unwrap_or_default()
    }

    /// Says how long it took from the beginning until now, and what.
    pub(super) fn tell(&self, what: &str) {
        eprintln!("packaging: {what} after {:.1} s", self.began.elapsed().as_secs_f64());
    }

    /// Trains on two nodes that meet by these flags, to the end.
    pub(super) async fn trains(&self, meet: &[&str], what: &str) {
        let agents = ["a", "b"].map(|node| {
            let mut command = self.command("elastic-agent");
            command.args(meet).arg(format!("--node-name={node}"));
            command.args(["--rdzv-id=digits", "--nnodes=2", "--local-addr=127.0.0.1", "--no-python"]);
            self.start(
                {
                    command.args(["elastic-trainer", "digits"]);
                    command
                },
                node,
            )
        });
        for (mut agent, node) in agents.into_iter().zip(["a", "b"]) {
            assert_eq!(
                agent.exit(LIMIT).await,
                0,
                "agent {node}; the agents said:\n{}\n{}",
                self.said("a"),
                self.said("b")
            );
        }
        self.tell(&format!("{what}: a job of two nodes has trained"));
        let said = self.said("a") + &self.said("b");
        assert!(said.contains("world_size=2"), "{said}");
        assert!(said.contains("test accuracy 0.9"), "{said}");
    }

    /// The same with a store that one of the agents serves.
    pub(super) async fn trains_alone(&self, what: &str) {
        let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", free_port());
        self.trains(&["--rdzv-backend=c10d", &endpoint], what).await;
    }
}
