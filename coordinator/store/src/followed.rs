//! Files that are read again while the program runs: users, certificates. What they mean is up to those who name them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// How often the files are checked. They are a few kilobytes.
pub const LOOK: Duration = Duration::from_secs(1);

/// What some files say now. Where what they say cannot be used, what they said before.
#[derive(Debug)]
pub struct Followed<T>(watch::Receiver<Arc<T>>);

impl<T> Clone for Followed<T> {
    fn clone(&self) -> Followed<T> {
        Followed(self.0.clone())
    }
}

impl<T: Send + Sync + 'static> Followed<T> {
    /// Reads the files, and after that each second, on a task that ends with the last copy of this. An error: they
    /// cannot be used now.
    pub fn new<F>(what: &'static str, files: Vec<PathBuf>, meaning: F) -> Result<Followed<T>, String>
    where
        F: Fn(&[String]) -> Result<T, String> + Send + 'static,
    {
        let mut seen = read(&files);
        let (newest, now) = watch::channel(Arc::new(meaning(&seen.clone()?)?));
        tokio::spawn(async move {
            let mut looks = tokio::time::interval(LOOK);
            loop {
                tokio::select! {
                    () = newest.closed() => return,
                    _ = looks.tick() => {}
                }
                let read = read(&files);
                if read == seen {
                    continue;
                }
                match read.clone().and_then(|texts| meaning(&texts)) {
                    Ok(value) => {
                        tracing::info!("{what} have changed and were read again");
                        newest.send_replace(Arc::new(value));
                    }
                    Err(problem) => tracing::warn!("{what} have changed, and those from before stay in use: {problem}"),
                }
                seen = read;
            }
        });
        Ok(Followed(now))
    }

    /// What they say now.
    pub fn now(&self) -> Arc<T> {
        Arc::clone(&self.0.borrow())
    }
}

fn read(files: &[PathBuf]) -> Result<Vec<String>, String> {
    let one = |file: &PathBuf| {
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))
    };
    files.iter().map(one).collect()
}
