//! Threads that wait between steps, to compute beside the one that has the work. Not for what is computed.
//!
//! A step of a small model takes a few milliseconds, and a new thread a tenth of one. Products also keep their room for
//! work by thread.
#![allow(unsafe_code)]

use std::any::Any;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};

use tracing::warn;

/// The fewest numbers for which another thread is woken.
const SMALLEST_PIECE: usize = 16 * 1024;

/// What a thread is to do once. Borrowed for so long only: see [`Helper::beside`].
type Job = &'static mut (dyn FnMut() + Send);

/// The thread that calls it, and others.
#[derive(Debug)]
pub struct Team {
    threads: NonZeroUsize,
    helpers: Vec<Helper>,
}

/// A thread that does what it is told until the team goes.
#[derive(Debug)]
struct Helper {
    jobs: Sender<Job>,
    ended: Receiver<()>,
}

impl Team {
    /// A team of so many, the caller's thread among them. Where the system gives fewer, these do all the work.
    pub fn new(threads: NonZeroUsize) -> Team {
        let mut helpers = Vec::new();
        for number in 1..threads.get() {
            let (jobs, inbox) = channel::<Job>();
            let (end, ended) = channel();
            let work = move || {
                for job in inbox {
                    job();
                    // Nobody waits where the team is gone.
                    let _ = end.send(());
                }
            };
            match std::thread::Builder::new().name(format!("compute-{number}")).spawn(work) {
                Ok(_) => helpers.push(Helper { jobs, ended }),
                Err(cause) => {
                    warn!(%cause, "only {number} of {threads} threads compute: the system gives no more");
                    break;
                }
            }
        }
        Team { threads, helpers }
    }

    /// How many were asked for: work is cut for these.
    pub fn threads(&self) -> usize {
        self.threads.get()
    }

    /// How many of `count` numbers each thread takes where all share them.
    pub fn piece(&self, count: usize) -> usize {
        count.div_ceil(self.threads()).max(SMALLEST_PIECE)
    }

    /// Does `work` on all `items` at once, each on a thread while there are threads, the first on the caller's. Returns
    /// when all is done.
    ///
    /// # Panics
    /// As `work` does, once nobody is at it any more.
    pub fn each<T: Send>(&mut self, items: Vec<T>, work: impl Fn(T) + Sync) {
        each(&mut self.helpers, items, &work);
    }
}

fn each<T: Send>(helpers: &mut [Helper], mut items: Vec<T>, work: &(impl Fn(T) + Sync)) {
    if items.len() > 1
        && let [helper, helpers @ ..] = helpers
        && let Some(last) = items.pop()
    {
        helper.beside(|| work(last), || each(helpers, items, work));
    } else {
        items.into_iter().for_each(work);
    }
}

impl Helper {
    /// Does `there` on its thread and `here` on the caller's.
    fn beside(&mut self, there: impl FnOnce() + Send, here: impl FnOnce()) {
        let (mut there, mut panic): (_, Option<Box<dyn Any + Send>>) = (Some(there), None);
        let mut job = || panic = there.take().and_then(|there| catch_unwind(AssertUnwindSafe(there)).err());
        let job: &mut (dyn FnMut() + Send) = &mut job;
        // SAFETY: the thread does not touch the job after it has said that it has ended, and never keeps one. `Waiting`
        // hears that, or that the thread is no more, before this function is left, even by a panic of `here`; what the
        // job borrows lives longer than that.
        let job = unsafe { std::mem::transmute::<&mut (dyn FnMut() + Send), Job>(job) };
        match self.jobs.send(job) {
            Ok(()) => {
                let waiting = Waiting(&self.ended);
                here();
                drop(waiting);
            }
            Err(unsent) => {
                here();
                (unsent.0)();
            }
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Waits when it is dropped.
struct Waiting<'a>(&'a Receiver<()>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // An error says that the thread is no more: then it has no job either.
        let _ = self.0.recv();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::sync::{Barrier, Mutex};
    use std::thread::ThreadId;

    fn team(threads: usize) -> Team {
        Team::new(NonZeroUsize::new(threads).unwrap())
    }

    #[test]
    fn every_item_is_done_once_on_the_same_threads_each_time() {
        for threads in 1..=4 {
            let mut team = team(threads);
            let seen: Mutex<BTreeSet<String>> = Mutex::default();
            for count in [0, 1, 2, 3, 4, 9, 4] {
                let mut items = vec![0; count];
                team.each(items.iter_mut().collect(), |item| {
                    seen.lock().unwrap().insert(format!("{:?}", std::thread::current().id()));
                    *item += 1;
                });
                assert_eq!(items, vec![1; count]);
            }
            assert_eq!(seen.lock().unwrap().len(), threads);
        }
    }

    #[test]
    fn all_work_at_once() {
        // Nobody passes before all have come.
        let barrier = Barrier::new(3);
        let mut ids: Vec<Option<ThreadId>> = vec![None; 3];
        team(3).each(ids.iter_mut().collect(), |id| {
            barrier.wait();
            *id = Some(std::thread::current().id());
        });
        assert_eq!(ids[0], Some(std::thread::current().id()));
        assert!(ids.iter().all(Option::is_some));
    }

    #[test]
    fn a_panic_anywhere_is_the_callers_and_the_team_goes_on() {
        let mut team = team(3);
        for fails in 0..3 {
            let mut done = [(0, false), (1, false), (2, false)];
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.each(done.iter_mut().collect(), |(number, done)| {
                    *done = true;
                    assert_ne!(*number, fails, "as it is meant to");
                });
            }));
            assert!(result.is_err());
            assert!(done.iter().all(|(_, done)| *done), "nobody is left at work");
        }
        let mut items = [1, 2, 3];
        team.each(items.iter_mut().collect(), |item| *item *= 2);
        assert_eq!(items, [2, 4, 6]);
    }

    #[test]
    fn few_numbers_are_not_shared() {
        let team = team(4);
        assert_eq!(team.piece(10), SMALLEST_PIECE);
        assert_eq!(team.piece(1_000_001), 250_001);
    }
}
