//! Hosts that fail together: nodes whose tasks share one thread, which can be frozen, or ended at once.

use std::thread::JoinHandle;

use anyhow::{Context, Result};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::processor;

/// A thread with a runtime of its own. Dropped, it ends as a process does that is killed: its connections and ports
/// close, and no one says goodbye.
pub struct Rack {
    handle: Handle,
    thread: i32,
    /// What the thread waits for, one after the other; it ends when this is gone.
    freezes: Option<mpsc::UnboundedSender<std::sync::mpsc::Receiver<()>>>,
    running: Option<JoinHandle<()>>,
}

/// Holds a rack frozen. Dropped, it lets it continue.
pub struct Frozen {
    _held: std::sync::mpsc::Sender<()>,
}

impl Rack {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread, or its runtime no descriptors.
    pub fn start() -> Result<Rack> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (tell, told) = std::sync::mpsc::channel();
        let (freezes, mut asked) = mpsc::unbounded_channel::<std::sync::mpsc::Receiver<()>>();
        let running = std::thread::Builder::new().name("rack".into()).spawn(move || {
            let _ = tell.send(rustix::thread::gettid().as_raw_nonzero().get());
            runtime.block_on(async {
                while let Some(until) = asked.recv().await {
                    // Nothing of this runtime continues meanwhile: that is what it is for.
                    let _ = until.recv();
                }
            });
            runtime.shutdown_background();
        })?;
        let thread = told.recv().context("the thread has started")?;
        Ok(Rack { handle, thread, freezes: Some(freezes), running: Some(running) })
    }

    /// Where tasks of this rack are started.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Stops all that runs here, as a host whose power is gone, or a frozen process: connections stay open, and nothing
    /// answers.
    pub fn freeze(&self) -> Frozen {
        let (held, until) = std::sync::mpsc::channel();
        if let Some(freezes) = &self.freezes {
            // It fails only where the thread has ended already.
            let _ = freezes.send(until);
        }
        Frozen { _held: held }
    }

    /// How long its thread has been on a processor.
    ///
    /// # Errors
    /// It has ended.
    pub fn used(&self) -> Result<std::time::Duration> {
        processor::thread(self.thread)
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        self.freezes = None;
        if let Some(running) = self.running.take() {
            let _ = running.join();
        }
    }
}
