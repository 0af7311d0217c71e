//! The Debian packages in a root of this machine's own distribution that nothing else was installed into. What it is made
//! of comes from the mirror once (`scripts/setup.sh dist-test`).

use elastic_tests::prelude::*;

use super::place::Place;
use super::{is_root, made, printed, root, succeeds};

/// This machine's, as Debian calls it.
const ARCHITECTURE: &str = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A fresh system, with the packages as files in its `/packages`.
struct System {
    dir: TempDir,
    packages: Vec<String>,
}

impl System {
    fn fresh() -> Option<System> {
        let files = made("DIST", "elastic-train-", &format!("_{ARCHITECTURE}.deb"));
        let archive = root().join("target/packaging/debian.tar");
        if !archive.is_file() {
            skip("DIST", "there is no fresh Debian: run scripts/setup.sh dist-test");
            return None;
        }
        if files.is_empty() || !is_root() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        // The user of the packages must get in.
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        succeeds(Command::new("tar").arg("-xf").arg(archive).arg("--exclude=./dev/*").arg("-C").arg(dir.path()));
        let mut system = System { dir, packages: Vec::new() };
        for file in files {
            system.add(&file);
        }
        Some(system)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file.trim_start_matches('/'))
    }

    fn add(&mut self, package: &Path) {
        let name = format!("/packages/{}", package.file_name().unwrap().to_str().unwrap());
        std::fs::create_dir_all(self.path("packages")).unwrap();
        std::fs::copy(package, self.path(&name)).unwrap();
        self.packages.push(name);
    }

    fn place(&self) -> Place {
        Place::root(self.dir.path(), "", PATH)
    }

    /// All files, links and folders, except for what dpkg and adduser note of what they do.
    fn files(&self) -> BTreeSet<String> {
        let notes = ["./var/lib/dpkg", "./var/log", "./var/cache", "./packages", "./proc", "./dev", "./run", "./tmp"];
        let found = succeeds(Command::new("find").arg(".").current_dir(self.dir.path()));
        let kept = |line: &&str| !notes.iter().any(|note| line.starts_with(note)) && !line.ends_with('-');
        found.lines().filter(kept).map(str::to_owned).collect()
    }
}

#[tokio::test]
#[ignore = "needs dist/: make test-dist"]
async fn a_job_trains_on_a_fresh_system() {
    let Some(system) = System::fresh() else { return };
    let before = system.files();
    let place = system.place();
    succeeds(place.command("dpkg").arg("--install").args(&system.packages));
    place.tell("dpkg has installed both packages");

    // As the user that the package has made, over the store of the packaged coordinator
    let place = place.with_user("elastic:elastic");
    let store = format!("127.0.0.1:{}", free_port());
    let peer = format!("127.0.0.1:{}", free_port());
    let serve = ["--embedded", "--listen", &store, "--peer-listen", &peer];
    let mut coordinator = place.serve("elastic-coordinator", &serve, "coordinator");
    eventually("elasticctl reaches the coordinator", Duration::from_secs(20), async || {
        let output = place.command("elasticctl").args(["--etcd", &store, "jobs"]).output().unwrap();
        output.status.success().then_some(())
    })
    .await;
    place.trains(&["--rdzv-backend=etcd", &format!("--rdzv-endpoint={store}")], "the Debian packages").await;
    let jobs = succeeds(place.command("elasticctl").args(["--etcd", &store, "jobs"]));
    assert!(jobs.contains("digits") && jobs.contains("succeeded"), "{jobs}");
    coordinator.kill();
    let gone = async || std::net::TcpStream::connect(&store).is_err().then_some(());
    eventually("the coordinator is gone", Duration::from_secs(10), gone).await;

    // What services need
    assert!(system.path("/etc/elastic").is_dir());
    for unit in ["elastic-train-agent@.service", "elastic-train-coordinator.service"] {
        let text = std::fs::read_to_string(system.path("/usr/lib/systemd/system").join(unit)).unwrap();
        let starts: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("ExecStart=")).collect();
        for start in &starts {
            let program = start.split_whitespace().next().unwrap();
            assert!(program.starts_with("/usr/bin/") && system.path(program).is_file(), "{unit}: {start}");
        }
        assert!(!starts.is_empty() && !text.contains("/usr/local/"), "{unit}:\n{text}");
    }
    assert!(system.path("/usr/share/man/man1/elastic-agent.1.gz").is_file());
    assert!(system.path("/usr/share/man/man1/elasticctl-drain.1.gz").is_file());
    assert!(system.path("/usr/share/bash-completion/completions/elasticctl").is_file());
    assert!(system.path("/usr/share/doc/elastic-train-coordinator/jobs.proto").is_file());

    let owned = succeeds(place.command("stat").args(["-c", "%U:%G", "/srv/train"]));
    assert_eq!(owned, "elastic:elastic\n", "the unit's folder");

    // And nothing is left of them but the user and its folder
    let place = system.place();
    assert_eq!(
        succeeds(place.command("dpkg").args(["--verify", "elastic-train-agent", "elastic-train-coordinator"])),
        ""
    );
    succeeds(place.command("dpkg").args(["--purge", "elastic-train-agent", "elastic-train-coordinator"]));
    let after = system.files();
    assert_eq!(after.difference(&before).collect::<Vec<_>>(), ["./srv/train"]);
    assert_eq!(before.difference(&after).collect::<Vec<_>>(), Vec::<&String>::new());
    assert!(std::fs::read_to_string(system.path("/etc/passwd")).unwrap().contains("\nelastic:"));
}

#[test]
#[ignore = "needs dist/: make test-dist"]
fn another_vendors_agent_is_not_replaced() {
    let Some(mut system) = System::fresh() else { return };
    // Its package has this name and this program.
    let other = tempfile::tempdir().unwrap();
    let tree = other.path().join("tree");
    std::fs::create_dir_all(tree.join("DEBIAN")).unwrap();
    std::fs::create_dir_all(tree.join("usr/bin")).unwrap();
    std::fs::write(tree.join("usr/bin/elastic-agent"), "theirs").unwrap();
    let control = "Package: elastic-agent\nVersion: 9.0.0\nArchitecture: all\n\
                   Maintainer: them <them@localhost>\nDescription: theirs\n";
    std::fs::write(tree.join("DEBIAN/control"), control).unwrap();
    let package = other.path().join("elastic-agent_9.0.0_all.deb");
    succeeds(Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&tree).arg(&package));
    system.add(&package);

    let place = system.place();
    succeeds(place.command("dpkg").args(["--install", "/packages/elastic-agent_9.0.0_all.deb"]));
    let agent = system.packages.iter().find(|name| name.contains("train-agent")).unwrap();
    let output = place.command("dpkg").arg("--install").arg(agent).output().unwrap();
    let said = printed(&output);
    assert!(!output.status.success() && said.contains("elastic-train-agent conflicts with elastic-agent"), "{said}");
    assert_eq!(std::fs::read_to_string(system.path("/usr/bin/elastic-agent")).unwrap(), "theirs");
    // The operator's tools are no agent.
    let coordinator = system.packages.iter().find(|name| name.contains("train-coordinator")).unwrap();
    succeeds(place.command("dpkg").arg("--install").arg(coordinator));
}
