//! Faults that the environment asks for: see the crate's front page.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::REMOTE_ERROR;

/// How often each function was called.
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// A call, for which the environment may ask a fault.
pub(crate) struct Fault {
    name: &'static str,
    /// Which call of its function this is, counted from 1.
    number: u64,
}

impl Fault {
    /// The fault of a function's last call.
    pub(crate) fn of(name: &'static str) -> Fault {
        Fault { name, number: CALLS.lock().unwrap().get(name).copied().unwrap_or(0) }
    }

    /// Whether `text` names this call.
    fn is(&self, text: &str) -> bool {
        let (name, number) = text.split_once('#').unwrap_or((text, ""));
        name == self.name && (number.is_empty() || number.parse() == Ok(self.number))
    }

    /// Whether the environment's `variable` lists this call.
    fn asked(&self, variable: &str) -> bool {
        std::env::var(variable).is_ok_and(|list| list.split(',').any(|listed| self.is(listed)))
    }

    /// If this call must hang, waits until it is cancelled.
    pub(crate) fn hang(&self, cancel: &AtomicBool) -> Result<(), c_int> {
        let once = once("FAKE_NCCL_HANG", |fault| self.is(fault).then_some(())).is_some();
        if (once || self.asked("FAKE_NCCL_HANG")) && std::env::var_os("FAKE_NCCL_TELLS").is_some() {
            eprintln!("fake-nccl: hangs in call {} of {}", self.number, self.name);
        }
        while once || self.asked("FAKE_NCCL_HANG") {
            if cancel.load(Ordering::SeqCst) {
                return Err(REMOTE_ERROR);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// If this call must stall, stays in progress until it is cancelled.
    pub(crate) fn stall(&self, cancel: &AtomicBool) -> Result<(), c_int> {
        while self.asked("FAKE_NCCL_STALL") {
            if cancel.load(Ordering::SeqCst) {
                return Err(REMOTE_ERROR);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Flips a bit of what arrives, if this call must.
    pub(crate) fn flip(&self, received: &mut [Vec<u8>]) {
        if self.asked("FAKE_NCCL_FLIP") {
            received[0][2] ^= 0x40;
        }
    }

    /// Blocks for ever, or fails with a code, if this call must.
    fn enter(&self) -> Result<(), c_int> {
        while self.asked("FAKE_NCCL_BLOCK") {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.code("FAKE_NCCL_FAIL").map_or(Ok(()), Err)
    }

    /// The code with which it fails after it has done everything.
    pub(crate) fn late(&self) -> Option<c_int> {
        self.code("FAKE_NCCL_LATE")
    }

    fn code(&self, variable: &str) -> Option<c_int> {
        let failures = std::env::var(variable).unwrap_or_default();
        let code = |failure: &str| {
            let (named, code) = failure.split_once(':')?;
            self.is(named).then(|| code.parse().ok()).flatten()
        };
        failures.split(',').find_map(code).or_else(|| once(variable, code))
    }
}

/// The result of `fits` for a fault of this kind in the fault file that names this process. The fault is removed: it
/// happens once.
fn once<T>(variable: &str, fits: impl Fn(&str) -> Option<T>) -> Option<T> {
    let path = std::env::var_os("FAKE_NCCL_FAULT")?;
    let text = std::fs::read_to_string(&path).ok()?;
    let fault = text.trim().strip_prefix(&format!("{} {variable}=", std::process::id()))?;
    let found = fits(fault)?;
    std::fs::remove_file(path).ok().map(|()| found)
}

/// Counts a call that begins. Fails if a fault says so.
pub(crate) fn enter(name: &'static str) -> Result<(), c_int> {
    *CALLS.lock().unwrap().entry(name).or_default() += 1;
    Fault::of(name).enter()
}

/// Waits for the time that the environment gives, else for `otherwise`. Ends early when cancelled.
pub(crate) fn take_a_while(otherwise: Duration, cancel: &AtomicBool) -> Result<(), c_int> {
    let asked = std::env::var("FAKE_NCCL_SLOW").ok().and_then(|time| time.parse().ok()).map(Duration::from_millis);
    let begun = Instant::now();
    while begun.elapsed() < asked.unwrap_or(otherwise) {
        if cancel.load(Ordering::SeqCst) {
            return Err(REMOTE_ERROR);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
