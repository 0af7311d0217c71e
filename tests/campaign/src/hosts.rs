//! Hosts as network namespaces around a router, which is this process's own namespace: what one host sends to another
//! passes through it, and can be dropped or refused, in one direction or in both.

use elastic_tests::prelude::*;
use std::io::Write;

use anyhow::{Context, Result, bail};

/// A host with a name, an address, and files that say which machine it is.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    /// Its host name, which the campaign's name server knows.
    pub(crate) name: String,
    /// Its address is `10.88.<number>.2`, the router's is `10.88.<number>.1`.
    number: u8,
    files: PathBuf,
}

/// What happens to packets on a way that is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    Silent,
    /// The router says that it does not get there.
    Refused,
}

impl Cut {
    fn action(self) -> &'static str {
        match self {
            Cut::Silent => "blackhole",
            Cut::Refused => "unreachable",
        }
    }
}

impl Host {
    /// Makes the host, connected to the router. Its files go into `files`.
    pub(crate) fn new(name: &str, number: u8, files: &Path) -> Result<Host> {
        let files = files.join(name);
        std::fs::create_dir_all(&files)?;
        let host = Host { name: name.to_owned(), number, files };
        let router = host.router();
        let own = host.address();
        ip(&format!(
            "netns add {name}\n\
             link add to-{name} type veth peer name eth0 netns {name}\n\
             addr add {router}/30 dev to-{name}\n\
             link set to-{name} up\n\
             netns exec {name} ip link set lo up\n\
             netns exec {name} ip link set eth0 up\n\
             netns exec {name} ip addr add {own}/30 dev eth0\n\
             netns exec {name} ip route add default via {router}\n"
        ))?;
        let identity = uuid::Uuid::new_v4();
        host.write("resolv.conf", &format!("nameserver {router}\noptions timeout:1 attempts:2\n"))?;
        host.write("hosts", &format!("127.0.0.1 localhost\n{own} {name}\n"))?;
        host.write("machine-id", &format!("{}\n", identity.simple()))?;
        host.reboot()?;
        Ok(host)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        // Written in place: it may be mounted already.
        let mut file = std::fs::File::options().create(true).write(true).truncate(true).open(self.files.join(name))?;
        Ok(file.write_all(text.as_bytes())?)
    }

    /// Gives it another boot id, for those that start from now on.
    fn reboot(&self) -> Result<()> {
        self.write("boot-id", &format!("{}\n", uuid::Uuid::new_v4()))
    }

    /// Ends all that runs there at once.
    pub(crate) fn reset(&self) -> Result<()> {
        self.reboot()?;
        self.signal(Signal::KILL);
        Ok(())
    }

    pub(crate) fn address(&self) -> String {
        format!("10.88.{}.2", self.number)
    }

    fn router(&self) -> String {
        format!("10.88.{}.1", self.number)
    }

    /// A command that runs on this host; its program and arguments follow.
    pub(crate) fn command(&self) -> Command {
        const SCRIPT: &str = r#"mount --bind "$0/resolv.conf" /etc/resolv.conf && mount --bind "$0/hosts" /etc/hosts &&
            { ! [ -e /etc/machine-id ] || mount --bind "$0/machine-id" /etc/machine-id; } &&
            mount --bind "$0/boot-id" /proc/sys/kernel/random/boot_id && exec "$@""#;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, "unshare", "--uts", "sh", "-c"]);
        command.arg(format!("hostname {} && {SCRIPT}", self.name)).arg(&self.files);
        command.stdin(Stdio::null());
        command
    }

    /// Ids of all processes on this host.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let output = Command::new("ip").args(["netns", "pids", &self.name]).output();
        let text = output.map(|output| output.stdout).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// Sends a signal to all its processes.
    pub(crate) fn signal(&self, signal: Signal) {
        self.processes().into_iter().for_each(|pid| send(pid, signal));
    }

    /// Cuts what this host sends to `to`.
    pub(crate) fn cut_to(&self, to: &Host, cut: Cut) -> Result<()> {
        ip(&format!("rule add priority 10 from {} to {} {}\n", self.address(), to.address(), cut.action()))
    }

    /// Switches the router's side of its cable off or on.
    pub(crate) fn link(&self, up: bool) -> Result<()> {
        ip(&format!("link set to-{} {}\n", self.name, if up { "up" } else { "down" }))
    }
}

pub(crate) fn heal_all() -> Result<()> {
    // One after the other, until there is none of this priority.
    for _ in 0..100 {
        if !Command::new("ip").args(["rule", "del", "priority", "10"]).stderr(Stdio::null()).status()?.success() {
            return Ok(());
        }
    }
    bail!("there are always more rules");
}

/// Makes this process's namespace a router, and lets the names of other namespaces be its own.
pub(crate) fn become_router() -> Result<()> {
    std::fs::create_dir_all("/run/netns")?;
    let mounted = Command::new("mount").args(["-t", "tmpfs", "names", "/run/netns"]).status()?;
    if !mounted.success() {
        bail!("a folder for the names of namespaces cannot be mounted; become root");
    }
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("forward packets between hosts")?;
    ip("link set lo up\n")
}

/// Sends a signal; a process that has ended meanwhile is none of our worries.
pub(crate) fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

fn ip(batch: &str) -> Result<()> {
    let mut child = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().context("ip's input")?.write_all(batch.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("ip: {}; in\n{batch}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
