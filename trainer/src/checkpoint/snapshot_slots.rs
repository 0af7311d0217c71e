//! The two slots that snapshots are copied to, and which one is filled next: the older one, so that the newest whole
//! snapshot is never overwritten.
//!
//! In the agent's memory they outlive this process. A later process on the node continues from there.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::warn;

use super::pages::Mapping;
use super::snapshot::{LastStep, Layout, Slot, Unfit};

/// One is written to disk, or is the newest whole one, while the other is filled.
pub(super) const SLOTS: usize = 2;

/// Both slots. Clones share them.
#[derive(Debug, Clone)]
pub struct SnapshotSlots {
    shared: Arc<Shared>,
    kept: bool,
}

#[derive(Debug, Default)]
struct Shared {
    room: Mutex<Idle>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Idle {
    idle: Vec<Slot>,
    /// How many slots have their memory.
    ready: usize,
}

/// What an earlier process left.
#[derive(Debug, Clone, PartialEq)]
pub struct Rescued {
    /// Optimizer steps in it.
    pub step: u64,
    /// The flat state.
    pub state: Vec<f32>,
    /// How its last step was done, if that is known.
    pub done: Option<LastStep>,
}

impl Layout {
    /// Bytes for all slots.
    pub fn bytes(&self) -> u64 {
        (SLOTS * self.slot_bytes()) as u64
    }
}

impl SnapshotSlots {
    /// Slots that end with this process. A thread makes their memory ready.
    pub fn own(layout: &Layout) -> io::Result<SnapshotSlots> {
        let mapping = Arc::new(Mapping::own(SLOTS * layout.slot_bytes())?);
        SnapshotSlots::make_ready((0..SLOTS).map(|number| Slot::at(&mapping, layout, number)).collect(), false)
    }

    /// Slots in a file that outlives this process, and has [`Layout::bytes`]; and the newest whole snapshot of this run
    /// that is left in it.
    pub fn kept(layout: &Layout, file: impl AsFd) -> io::Result<(SnapshotSlots, Option<Rescued>)> {
        let (slots, newest) = SnapshotSlots::left(layout, file)?;
        Ok((SnapshotSlots::make_ready(slots, true)?, newest))
    }

    /// That snapshot alone, for a worker that keeps no snapshots there.
    pub fn look(layout: &Layout, file: impl AsFd) -> io::Result<Option<Rescued>> {
        Ok(SnapshotSlots::left(layout, file)?.1)
    }

    fn left(layout: &Layout, file: impl AsFd) -> io::Result<(Vec<Slot>, Option<Rescued>)> {
        // To touch mapped memory behind a file's end kills the process (SIGBUS).
        if (rustix::fs::fstat(&file)?.st_size as u64) < layout.bytes() {
            return Err(io::Error::other("the file is shorter than it should be"));
        }
        let mapping = Arc::new(Mapping::of(file.as_fd(), SLOTS * layout.slot_bytes())?);
        let mut slots: Vec<Slot> = (0..SLOTS).map(|number| Slot::at(&mapping, layout, number)).collect();
        let mut newest: Option<Rescued> = None;
        for slot in &mut slots {
            match slot.take_up() {
                Ok(done) if newest.as_ref().is_none_or(|newest| newest.step < slot.step()) => {
                    newest = Some(Rescued { step: slot.step(), state: slot.state().to_vec(), done });
                }
                Ok(_) | Err(Unfit::Torn) => {}
                Err(Unfit::Flawed(cause)) => warn!("skipped a snapshot in the agent's memory: {cause}"),
            }
        }
        Ok((slots, newest))
    }

    fn make_ready(slots: Vec<Slot>, kept: bool) -> io::Result<SnapshotSlots> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let work = move || {
            for mut slot in slots {
                slot.populate();
                let mut room = theirs.lock();
                room.idle.push(slot);
                room.ready += 1;
                drop(room);
                theirs.changed.notify_all();
            }
        };
        std::thread::Builder::new().name("slots".into()).spawn(work)?;
        Ok(SnapshotSlots { shared, kept })
    }

    /// Whether they outlive this process.
    pub fn are_kept(&self) -> bool {
        self.kept
    }

    /// Takes the idle slot with the older snapshot, once the memory of all is there: until then the older one may be
    /// missing. [`put`](Self::put) it back.
    pub fn take(&self) -> Option<Slot> {
        let mut room = self.shared.lock();
        if room.ready < SLOTS {
            return None;
        }
        let (oldest, _) = room.idle.iter().enumerate().min_by_key(|(_, slot)| slot.step())?;
        Some(room.idle.swap_remove(oldest))
    }

    /// The newest step that an idle slot has.
    pub(crate) fn newest(&self) -> u64 {
        self.shared.lock().idle.iter().map(Slot::step).max().unwrap_or_default()
    }

    /// Takes the idle slot that has this step, if one has.
    pub(crate) fn take_step(&self, step: u64) -> Option<Slot> {
        let idle = &mut self.shared.lock().idle;
        let place = idle.iter().position(|slot| slot.step() == step)?;
        Some(idle.swap_remove(place))
    }

    /// Gives a slot back.
    pub fn put(&self, slot: Slot) {
        self.shared.lock().idle.push(slot);
    }

    /// Waits until the memory of all is there, for at most `time`. Whether it is.
    pub fn wait(&self, time: Duration) -> bool {
        let waiting = |room: &mut Idle| room.ready < SLOTS;
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), time, waiting);
        waited.unwrap_or_else(PoisonError::into_inner).0.ready == SLOTS
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::super::manifest::{Entry, Position};
    use super::super::snapshot::SnapshotHeader;
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// More than one chunk's.
    pub(in super::super) const NUMBERS: usize = 3 << 20;

    fn tensors(name: &str) -> Vec<Entry> {
        vec![Entry { name: name.into(), dtype: "F32".into(), shape: vec![NUMBERS], offset: 0, len: 4 * NUMBERS as u64 }]
    }

    pub(in super::super) fn layout(job: &str, settings: &str) -> Layout {
        Layout::new(job, settings, &tensors("a"))
    }

    /// Fills a slot with the snapshot of a step: that number again and again.
    pub(in super::super) fn keep(slots: &SnapshotSlots, step: u64) {
        let done = Some(LastStep { round: 3, world_size: 2, loss: 0.1 + step as f32 }).filter(|_| step != 5);
        let header = SnapshotHeader { round: 4, world_size: 2, step, done, data: Position::default() };
        assert!(slots.wait(LONG));
        let mut slot = slots.take().unwrap();
        slot.fill(&header, &vec![step as f32; NUMBERS]);
        slots.put(slot);
    }

    pub(in super::super) fn memory(layout: &Layout) -> File {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(layout.bytes()).unwrap();
        file
    }

    /// What a successor finds.
    fn found(layout: &Layout, memory: &File) -> Option<u64> {
        let (_, rescued) = SnapshotSlots::kept(layout, memory).unwrap();
        rescued.map(|rescued| {
            assert!(rescued.state == vec![rescued.step as f32; NUMBERS], "step {}", rescued.step);
            let done = LastStep { round: 3, world_size: 2, loss: 0.1 + rescued.step as f32 };
            assert_eq!(rescued.done, Some(done).filter(|_| rescued.step != 5));
            rescued.step
        })
    }

    #[test]
    fn a_successor_finds_the_newest_whole_snapshot_and_overwrites_the_other_first() {
        let layout = layout("job", "--flags");
        let memory = memory(&layout);
        assert_eq!(found(&layout, &memory), None);
        let (slots, _) = SnapshotSlots::kept(&layout, &memory).unwrap();
        for step in [2, 5, 9] {
            keep(&slots, step);
            assert_eq!(found(&layout, &memory), Some(step));
        }
        let (slots, _) = SnapshotSlots::kept(&layout, &memory).unwrap();
        slots.wait(LONG);
        assert_eq!(slots.take().unwrap().step(), 5);
        assert_eq!(slots.take().unwrap().step(), 9);
    }

    #[test]
    fn a_copy_that_was_cut_short_or_changed_anywhere_is_not_taken() {
        let layout = layout("job", "--flags");
        let memory = memory(&layout);
        let (slots, _) = SnapshotSlots::kept(&layout, &memory).unwrap();
        keep(&slots, 5);
        keep(&slots, 9);
        let half = layout.bytes() / 2;
        let newest = (0..2).map(|slot| slot * half).find(|&start| {
            let mut mark = [0; 8];
            memory.read_exact_at(&mut mark, start).unwrap();
            memory.write_all_at(&[0; 8], start).unwrap();
            let is_newest = found(&layout, &memory) == Some(5);
            memory.write_all_at(&mark, start).unwrap();
            is_newest
        });
        let newest = newest.expect("without its mark the newest is none");
        assert_eq!(found(&layout, &memory), Some(9));
        // Every part of a head, the manifest, and the first and last bytes of the state's chunks
        let state = half - 4 * NUMBERS as u64;
        let places = (8..48).chain([48, 60, 500, state, state + 1, half / 2, (8 << 20) + 4096, half - 4097]);
        for place in places {
            let mut byte = [0];
            memory.read_exact_at(&mut byte, newest + place).unwrap();
            memory.write_all_at(&[byte[0] ^ 0x10], newest + place).unwrap();
            assert_eq!(found(&layout, &memory), Some(5), "byte {place}");
            memory.write_all_at(&byte, newest + place).unwrap();
        }
        assert_eq!(found(&layout, &memory), Some(9));
    }

    #[test]
    fn another_runs_snapshots_are_not_taken() {
        let own = layout("job", "--flags");
        let memory = memory(&own);
        let (slots, _) = SnapshotSlots::kept(&own, &memory).unwrap();
        keep(&slots, 5);
        for other in [layout("jab", "--flags"), layout("job", "--flogs"), Layout::new("job", "--flags", &tensors("b"))]
        {
            assert_eq!(found(&other, &memory), None);
        }
        assert_eq!(found(&own, &memory), Some(5));
    }
}
