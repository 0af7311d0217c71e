//! Threads that wait between steps, to compute beside the one that has the work.
//!
//! A step of a small model takes a few milliseconds, and a new thread a tenth of one. Products also keep their room for
//! work by thread.

use std::num::NonZeroUsize;

use rayon_core::ThreadPoolBuilder;
use tracing::warn;

/// The fewest numbers for which another thread is woken.
const SMALLEST_PIECE: usize = 16 * 1024;

/// The thread that calls it, and others.
#[derive(Debug)]
pub struct ThreadPool {
    threads: NonZeroUsize,
    others: Option<rayon_core::ThreadPool>,
}

impl ThreadPool {
    /// A pool of so many, the caller's thread among them. Where the system gives no more, that one does all the work.
    pub fn new(threads: NonZeroUsize) -> ThreadPool {
        let pool = |others: usize| {
            let builder =
                ThreadPoolBuilder::new().num_threads(others).thread_name(|number| format!("compute-{number}"));
            let built = builder.build();
            built.inspect_err(|cause| warn!(%cause, "one thread computes instead of {threads}")).ok()
        };
        ThreadPool { threads, others: Some(threads.get() - 1).filter(|others| *others > 0).and_then(pool) }
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
    /// As `work` does, once no thread runs it any more.
    pub fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Sync) {
        let Some(others) = self.others.as_ref().filter(|_| items.len() > 1) else {
            return items.into_iter().for_each(work);
        };
        let work = &work;
        others.in_place_scope(|scope| {
            let mut items = items.into_iter();
            let own = items.next();
            items.for_each(|item| scope.spawn(move |_| work(item)));
            own.into_iter().for_each(work);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::thread::ThreadId;

    fn team(threads: usize) -> ThreadPool {
        ThreadPool::new(NonZeroUsize::new(threads).unwrap())
    }

    #[test]
    fn every_item_is_done_once() {
        for threads in 1..=4 {
            let team = team(threads);
            for count in [0, 1, 2, 3, 4, 9, 4] {
                let mut items = vec![0; count];
                team.each(items.iter_mut().collect(), |item| *item += 1);
                assert_eq!(items, vec![1; count]);
            }
        }
    }

    #[test]
    fn all_work_at_once() {
        // No thread passes before all have come.
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
    fn a_panic_in_any_thread_reaches_the_caller_and_the_pool_still_works() {
        let team = team(3);
        for fails in 0..3 {
            let mut done = [(0, false), (1, false), (2, false)];
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.each(done.iter_mut().collect(), |(number, done)| {
                    *done = true;
                    assert_ne!(*number, fails, "the intended panic");
                });
            }));
            assert!(result.is_err());
            assert!(done.iter().all(|(_, done)| *done), "no thread is left at work");
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
