//! Disks: files with an ext4 in them, mounted. They can be full, read-only, or frozen.

use elastic_tests::prelude::*;

use anyhow::{Context, Result, bail};

#[derive(Debug)]
pub(crate) struct Disk {
    at: PathBuf,
    image: PathBuf,
    frozen: bool,
}

impl Disk {
    /// Makes a disk of so many MiB, and mounts it at `at`.
    pub(crate) fn new(at: &Path, mib: u64) -> Result<Disk> {
        let image = at.with_extension("disk");
        std::fs::File::create(&image)?.set_len(mib << 20)?;
        std::fs::create_dir_all(at)?;
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "lazy_itable_init=1,nodiscard"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(at))?;
        Ok(Disk { at: at.to_owned(), image, frozen: false })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.at
    }

    /// Fills it up, to the last block.
    pub(crate) fn fill(&self) -> Result<()> {
        let mut file = std::fs::File::create(self.filler())?;
        match std::io::copy(&mut std::io::repeat(1), &mut file) {
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => Ok(()),
            Err(error) => Err(error).context("fill a disk"),
            Ok(_) => bail!("a disk without an end"),
        }
    }

    fn filler(&self) -> PathBuf {
        self.at.join(".filler")
    }

    /// Lets nothing be made or deleted in its uppermost folder, or allows that again. (A disk that is written to
    /// cannot be mounted read-only.)
    pub(crate) fn read_only(&self, yes: bool) -> Result<()> {
        run(Command::new("chattr").arg(if yes { "+i" } else { "-i" }).arg(&self.at))
    }

    /// Has all that writes to it wait, from now on.
    pub(crate) fn freeze(&mut self) -> Result<()> {
        run(Command::new("fsfreeze").arg("--freeze").arg(&self.at))?;
        self.frozen = true;
        Ok(())
    }

    pub(crate) fn repair(&mut self) -> Result<()> {
        if std::mem::take(&mut self.frozen) {
            run(Command::new("fsfreeze").arg("--unfreeze").arg(&self.at))?;
        }
        self.read_only(false)?;
        match std::fs::remove_file(self.filler()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.repair();
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
        let _ = std::fs::remove_file(&self.image);
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
