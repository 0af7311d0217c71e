//! How fast workers can write through the built agent: to files alone, to files and a console, and past it on standard
//! error. The console takes everything. Run by `make bench`.

#![allow(clippy::print_stdout)]

use anyhow::{Result, ensure};
use elastic_tests::prelude::*;

const LINE: &str = "step 123456 loss 0.123456 lr 0.000100 grad norm 1.234567 tokens 12345678 seconds 0.123 abcdefgh";
/// Bytes of all workers together.
const TOTAL: u64 = 800 << 20;

fn main() -> Result<()> {
    for workers in [1, 8] {
        run("written to no agent", workers, &["--redirects=1"], "")?;
        run("--tee", workers, &["--tee=1"], "")?;
        run("--tee, rotated", workers, &["--tee=1", "--log-rotate=32M:1"], "")?;
        run("standard error, passed on", workers, &[], " >&2")?;
    }
    Ok(())
}

fn run(name: &str, workers: u64, flags: &[&str], to: &str) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let script = format!("yes '{LINE}' | head -c {}{to}", TOTAL / workers);
    let begun = Instant::now();
    let status = Command::new(binary("elastic-agent"))
        .args(["--standalone", "--no-python"])
        .arg(format!("--nproc-per-node={workers}"))
        .arg(format!("--log-dir={}", directory.path().display()))
        .args(flags)
        .args(["sh", "-c", &script])
        .env("LOGLEVEL", "WARNING")
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(status.success(), "the agent failed: {status}");
    let rate = TOTAL as f64 / 1e6 / seconds;
    println!("{workers} workers, {name}: {rate:.0} MB/s in all, {:.0} MB/s each", rate / workers as f64);
    Ok(())
}
