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
    /// Reads the files, and after that each second, on a thread that ends soon after the last copy of this: where a mount
    /// does not answer, nothing else waits. An error: they cannot be used now.
    pub fn new<F>(what: &'static str, files: Vec<PathBuf>, meaning: F) -> Result<Followed<T>, String>
    where
        F: Fn(&[String]) -> Result<T, String> + Send + 'static,
    {
        let mut seen = read(&files);
        let (newest, now) = watch::channel(Arc::new(meaning(&seen.clone()?)?));
        let follow = move || {
            while !newest.is_closed() {
                let read = read(&files);
                if read != seen {
                    match read.clone().and_then(|texts| meaning(&texts)) {
                        Ok(value) => {
                            tracing::info!("{what} have changed and were read again");
                            newest.send_replace(Arc::new(value));
                        }
                        Err(problem) => {
                            tracing::warn!("{what} have changed, and those from before stay in use: {problem}");
                        }
                    }
                    seen = read;
                }
                std::thread::sleep(LOOK);
            }
        };
        let problem = |error| format!("cannot start a thread that reads {what}: {error}");
        std::thread::Builder::new().name("files".into()).spawn(follow).map_err(problem)?;
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

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, OFlags};

    use super::*;

    const WITHIN: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_file_that_does_not_answer_holds_up_nothing_else() {
        // Given a file that is there at first, and then is a pipe into which no one writes
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "1").unwrap();
        let followed = Followed::new("files", vec![file.clone()], |texts| Ok(texts[0].clone())).unwrap();
        std::fs::remove_file(&file).unwrap();
        rustix::fs::mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        // then this task runs on when it is read again, which is when it can be opened to write
        let open = || rustix::fs::open(&file, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
        let read = async {
            loop {
                match open() {
                    Ok(silent) => return silent,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let _silent = tokio::time::timeout(WITHIN, read).await.expect("it is read again");
        // and knows what it said before
        assert_eq!(*followed.now(), "1");
    }
}
