//! Machines, each as a network namespace and a mount namespace: with names and addresses on one network, and an `/etc`,
//! `/run`, `/srv`, `/usr/local` and `/var/lib/etcd` of its own. They reach one another by `ssh` and `scp`, which are
//! small scripts here, and have a `systemctl` that notes what it is asked for.

use elastic_tests::prelude::*;
use elastic_tests::processes::dies_with_test;

const SSH: &str = r#"#!/bin/sh
# ssh [OPTION]... [root@]HOST COMMAND...
while :; do case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=${1#root@}; shift
pid=$(cat "/run/machines/$host") || { echo "ssh: there is no machine $host" >&2; exit 255; }
exec nsenter -t "$pid" -m -n -u -- sh -c "cd /root && $*"
"#;

const SCP: &str = r#"#!/bin/sh
# scp FILE... root@HOST:PATH; as the real one, it gives new files the mode of the old, and leaves that of others.
set -eu
for last; do :; done
host=${last%%:*}; host=${host#root@}; path=${last#*:}
pid=$(cat "/run/machines/$host")
while [ $# -gt 1 ]; do
    case $path in */) to=$path$(basename "$1") ;; *) to=$path ;; esac
    nsenter -t "$pid" -m -n -u -- sh -c 'test -e "$0" && cat > "$0" || { cat > "$0" && chmod "$1" "$0"; }' \
        "$to" "$(stat -L -c %a "$1")" < "$1"
    shift
done
"#;

const SYSTEMCTL: &str = r#"#!/bin/sh
# Notes what it is asked to do, and reports it as done when a script asks for the state of a unit.
case "$*" in
*show\ *)
    grep -Eqs '^(re)?start ' /run/asked && state=active || state=inactive
    echo LoadState=loaded && echo "ActiveState=$state" ;;
*is-enabled\ *) grep -qs '^enable ' /run/asked ;;
*) echo "$*" | tee -a /run/asked >> /run/systemctl ;;
esac
"#;

/// What is done in a machine's own namespaces before anything else. Its files are in `$0`.
const SET_UP: &str = r#"
set -e
hostname "$1"
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/lock
for folder in etc srv usr/local/bin usr/local/sbin var/lib/etcd root; do
    mount --bind "$0/$folder" "/$folder"
done
echo ready
exec sleep infinity
"#;

/// All machines of a test, on one network.
pub(super) struct Machines {
    pub(super) all: Vec<Machine>,
    dir: TempDir,
    bridge: String,
}

/// One machine. Its namespaces are held by a process that sleeps.
pub(super) struct Machine {
    pub(super) name: String,
    dir: PathBuf,
    netns: String,
    holder: Option<Child>,
}

impl Machines {
    /// None, with the reason printed, where namespaces may not be made; `ELASTIC_REQUIRE_NETNS` makes that a failure.
    pub(super) fn new(names: &[(&str, &str)]) -> Option<Machines> {
        let dir = tempfile::Builder::new().prefix("elastic-machines-").tempdir().unwrap();
        let id = std::process::id();
        let mut machines = Machines { all: Vec::new(), dir, bridge: format!("elastic-net-{id}") };
        match machines.set_up(names) {
            Ok(()) => Some(machines),
            Err(why) => {
                skip("NETNS", format_args!("no machines can be made of namespaces: {why}"));
                None
            }
        }
    }

    fn set_up(&mut self, names: &[(&str, &str)]) -> Result<(), String> {
        let bridge = self.bridge.clone();
        ip(&["netns", "add", &bridge])?;
        ip(&["-n", &bridge, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &bridge, "link", "set", "bridge", "up"])?;
        let hosts: String = names.iter().map(|(name, address)| format!("{address} {name}\n")).collect();
        for (number, (name, address)) in names.iter().enumerate() {
            let machine = Machine {
                name: (*name).to_owned(),
                dir: self.dir.path().join(name),
                netns: format!("{bridge}-{number}"),
                holder: None,
            };
            self.all.push(machine);
            let machine = self.all.last_mut().unwrap();
            let (netns, port) = (&machine.netns, format!("port{number}"));
            ip(&["netns", "add", netns])?;
            ip(&["-n", netns, "link", "set", "lo", "up"])?;
            ip(&["-n", &bridge, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", netns])?;
            ip(&["-n", &bridge, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", netns, "addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
            ip(&["-n", netns, "link", "set", "eth0", "up"])?;
            machine.begin(&format!("127.0.0.1 localhost\n{hosts}"))?;
        }
        for machine in &self.all {
            std::fs::create_dir(machine.path("/run/machines")).unwrap();
            for other in &self.all {
                let holder = other.holder.as_ref().unwrap().id();
                std::fs::write(machine.path(&format!("/run/machines/{}", other.name)), holder.to_string()).unwrap();
            }
        }
        Ok(())
    }

    pub(super) fn named(&self, name: &str) -> &Machine {
        self.all.iter().find(|machine| machine.name == name).unwrap_or_else(|| panic!("no machine {name}"))
    }

    pub(super) fn shared(&self) -> PathBuf {
        self.dir.path().join("shared")
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for machine in &mut self.all {
            if let Some(mut holder) = machine.holder.take() {
                let _ = holder.kill();
                let _ = holder.wait();
            }
            // This fails if the namespace was never made.
            let _ = ip(&["netns", "del", &machine.netns]);
        }
        let _ = ip(&["netns", "del", &self.bridge]);
    }
}

impl Machine {
    fn begin(&mut self, hosts: &str) -> Result<(), String> {
        for folder in ["srv", "usr/local/bin", "usr/local/sbin", "var/lib/etcd", "root"] {
            std::fs::create_dir_all(self.dir.join(folder)).unwrap();
        }
        // etcd's user makes its data's folder; everyone passes through the others.
        let copied = Command::new("cp").arg("-a").arg("/etc").arg(self.dir.join("etc")).output().unwrap();
        assert!(copied.status.success(), "{copied:?}");
        let own = Command::new("chown").args(["-R", "etcd:etcd"]).arg(self.dir.join("var/lib/etcd")).output().unwrap();
        if !own.status.success() {
            return Err("the user etcd is missing: install etcd-server".into());
        }
        let etc = self.dir.join("etc");
        std::fs::write(etc.join("hosts"), hosts).unwrap();
        std::fs::write(etc.join("hostname"), &self.name).unwrap();
        let _ = std::fs::remove_file(etc.join("resolv.conf"));
        std::fs::write(etc.join("resolv.conf"), "nameserver 127.0.0.1\n").unwrap();
        for (name, script) in [("ssh", SSH), ("scp", SCP), ("systemctl", SYSTEMCTL)] {
            let file = self.dir.join("usr/local/bin").join(name);
            std::fs::write(&file, script).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, "unshare", "--uts", "--mount", "sh", "-c", SET_UP]);
        command.arg(&self.dir).arg(&self.name).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        dies_with_test(&mut command);
        let mut holder = command.spawn().map_err(|error| format!("ip: {error}"))?;
        let mut said = [0; 6];
        let read = std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut said);
        if read.is_err() || &said != b"ready\n" {
            let output = holder.wait_with_output().unwrap();
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        self.holder = Some(holder);
        Ok(())
    }

    /// A path on the machine, as seen from outside.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.holder.as_ref().unwrap().id()))
    }

    /// A command that runs this one on the machine, as root and with systemd's PATH.
    pub(super) fn command<A: AsRef<str>>(&self, words: &[A]) -> Command {
        let holder = self.holder.as_ref().unwrap().id().to_string();
        let mut command = Command::new("nsenter");
        command.args(["-t", &holder, "-m", "-n", "-u", "--"]).args(words.iter().map(AsRef::as_ref));
        command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", "/root").env("LANG", "C.UTF-8").stdin(Stdio::null());
        command
    }

    /// Runs a script in a folder of the machine.
    pub(super) fn output(&self, folder: &str, script: &str) -> Output {
        // A script that hangs is ended: no step of the recipe takes this long.
        let words = ["timeout", "60", "sh", "-ec", &format!("cd {folder}\n{script}")];
        self.command(&words).output().expect("nsenter")
    }

    /// Runs a script in `/root`; what it printed, errors last. Panics if it fails.
    pub(super) fn run(&self, script: &str) -> String {
        let output = self.output("/root", script);
        let text = printed(&output);
        assert!(output.status.success(), "on {}: {script}\n{text}", self.name);
        text
    }

    /// What systemctl was asked for since the last call, and that is not done yet.
    pub(super) fn asked(&self) -> Vec<String> {
        let file = self.path("/run/systemctl");
        let asked = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = std::fs::remove_file(file);
        asked.lines().map(str::to_owned).collect()
    }

    /// Mounts a folder from outside on the machine.
    pub(super) fn mount(&self, outside: &Path, inside: &str) {
        // Both ends are seen from within: the temporary folder is the same there.
        self.run(&format!("mkdir -p {inside} && mount --bind {} {inside}", outside.display()));
    }
}

/// What a command printed, errors last.
pub(super) fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}; install iproute2"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", args.join(" "), said.trim())) }
}
