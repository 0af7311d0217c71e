//! Memory that runs out: a control group that a process is put into beside one that asks for more than there is. The
//! kernel then ends the largest.

use elastic_tests::prelude::*;

use anyhow::{Context, Result};

/// Bytes that the group may have; what its processes have already is not counted.
const LIMIT: &str = "2097152";

/// Becomes a member of the group, and asks for eight times as much.
const ASKS: &str = r#"echo $$ > "$0/cgroup.procs" && head -c 16M /dev/zero | tail -c 16M > /dev/null"#;

#[derive(Debug)]
pub(crate) struct Cage {
    parent: PathBuf,
    own: PathBuf,
    limit: &'static str,
    unlimited: &'static str,
    asking: Option<Child>,
}

impl Cage {
    /// Has the kernel end this process, for want of memory.
    pub(crate) fn around(pid: u32) -> Result<Cage> {
        let (old, new) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let (parent, limit, unlimited) = if old.is_dir() {
            (old, "memory.limit_in_bytes", "-1")
        } else {
            // It may be there already.
            let _ = std::fs::write(new.join("cgroup.subtree_control"), "+memory");
            (new, "memory.max", "max")
        };
        let own = parent.join(format!("elastic-campaign-{pid}"));
        std::fs::create_dir_all(&own).with_context(|| format!("make the control group {}", own.display()))?;
        let mut cage = Cage { parent: parent.to_owned(), own, limit, unlimited, asking: None };
        std::fs::write(cage.own.join(limit), LIMIT).context("limit a control group's memory")?;
        std::fs::write(cage.own.join("cgroup.procs"), pid.to_string()).context("move a process to a control group")?;
        let mut command = Command::new("sh");
        command.args(["-c", ASKS]).arg(&cage.own).stdin(Stdio::null()).stderr(Stdio::null());
        cage.asking = Some(command.spawn().context("ask for memory")?);
        Ok(cage)
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        let _ = std::fs::write(self.own.join(self.limit), self.unlimited);
        if let Some(mut asking) = self.asking.take() {
            let _ = asking.wait();
        }
        let left = std::fs::read_to_string(self.own.join("cgroup.procs")).unwrap_or_default();
        for pid in left.lines() {
            let _ = std::fs::write(self.parent.join("cgroup.procs"), pid);
        }
        let _ = std::fs::remove_dir(&self.own);
    }
}
