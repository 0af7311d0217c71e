//! Faults that the environment asks for: see the crate's front page.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::REMOTE_ERROR;

/// How often each function was called.
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// A call that is to be disturbed or not.
pub(crate) struct Fault {
    name: &'static str,
    /// Which of its function's calls it is, from 1 on.
    number: u64,
}

impl Fault {
    /// That of a function's last call.
    pub(crate) fn of(name: &'static str) -> Fault {
        Fault { name, number: CALLS.lock().unwrap().get(name).copied().unwrap_or(0) }
    }

    /// Whether it is what `text` names.
    fn is(&self, text: &str) -> bool {
        let (name, number) = text.split_once('#').unwrap_or((text, ""));
        name == self.name && (number.is_empty() || number.parse() == Ok(self.number))
    }

    /// Whether the environment's `variable` lists it.
    fn asked(&self, variable: &str) -> bool {
        std::env::var(variable).is_ok_and(|list| list.split(',').any(|listed| self.is(listed)))
    }

    /// Waits for ever, but for a cancel, if this is to hang.
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

    /// Stays in progress until a cancel, if it is to.
    pub(crate) fn stall(&self, cancel: &AtomicBool) -> Result<(), c_int> {
        while self.asked("FAKE_NCCL_STALL") {
            if cancel.load(Ordering::SeqCst) {
                return Err(REMOTE_ERROR);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Does not return, or fails with a code, if it is to.
    fn enter(&self) -> Result<(), c_int> {
        while self.asked("FAKE_NCCL_BLOCK") {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.code("FAKE_NCCL_FAIL").map_or(Ok(()), Err)
    }

    /// With what it fails once it has done all that was asked of it.
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

/// What `fits` makes of a fault of this kind that is for this process, once.
fn once<T>(variable: &str, fits: impl Fn(&str) -> Option<T>) -> Option<T> {
    let path = std::env::var_os("FAKE_NCCL_FAULT")?;
    let text = std::fs::read_to_string(&path).ok()?;
    let fault = text.trim().strip_prefix(&format!("{} {variable}=", std::process::id()))?;
    let found = fits(fault)?;
    std::fs::remove_file(path).ok().map(|()| found)
}

/// A call begins; it may have to fail.
pub(crate) fn enter(name: &'static str) -> Result<(), c_int> {
    *CALLS.lock().unwrap().entry(name).or_default() += 1;
    Fault::of(name).enter()
}

/// Waits for as long as the environment says, or so long; not after a cancel.
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
