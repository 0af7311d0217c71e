//! What the answer to a request changes. The next request follows from what is known then.

use std::time::Duration;

use super::{Call, KeepAliveKey, Making, Mode, Participant, Stage, Swap, VersionRank};
use crate::etcd_v2::{Answer, Entry, Refusal};
use crate::keys::rank_file;
use crate::state::RendezvousState;
use elastic_rendezvous::End;
use elastic_rendezvous::time::Time;
use elastic_store::StoreError;

impl Participant {
    pub(super) fn answered(&mut self, now: Time, call: Call, result: Result<Answer, StoreError>) {
        let Answer { index, outcome } = match result {
            Ok(answer) => answer,
            Err(error) if error.is_transient() => {
                if let (Call::Make(Making::Bump { .. }), Mode::Making(_, step)) = (&call, &mut self.mode) {
                    *step = Making::Counter;
                }
                return self.unanswered(now, &error);
            }
            Err(error) => return self.lost(now, &error),
        };
        if let Err(refusal @ Refusal::Other(..)) = &outcome {
            let reason = format!(
                "etcd refuses to do what TorchElastic's rendezvous takes: {refusal}; does something else use {}?",
                self.setup.paths.run()
            );
            return self.end(now, End::Refused(reason), None);
        }
        match call {
            Call::Foreign => self.looked_for_dynamic(now, outcome),
            Call::Open => {
                if let Mode::Opening(step) = &mut self.mode {
                    *step += 1;
                }
                // If it was there already, its time to live begins again.
                self.run_at.get_or_insert(now);
            }
            Call::ReadActive => {
                let read = self.view.set_active(index, outcome.ok().map(|entry| entry.value));
                self.or_refuse(now, read);
            }
            Call::ReadFiles(version) => self.view.set_files(&version, index, outcome.ok().as_ref()),
            Call::Setup(setup) => match outcome {
                Ok(entry) => {
                    self.wrote(now, &entry, Some(setup.clone()));
                    if self.mode == Mode::Seeking {
                        self.mode = Mode::Making(setup, Making::Counter);
                    }
                }
                Err(_) => self.outrun(now),
            },
            Call::Make(step) => self.made(step, outcome),
            Call::Swap(why, value) => match outcome {
                Ok(entry) => {
                    self.wrote(now, &entry, Some(value.clone()));
                    self.swapped(now, why, &value);
                }
                Err(_) => self.outrun(now),
            },
            Call::Free => match outcome {
                Ok(entry) => self.wrote(now, &entry, None),
                Err(_) => self.outrun(now),
            },
            Call::OwnKey(place) => {
                self.view.set_file(&place.version, &rank_file(place.rank), Some(""));
                let refresh_at = now + Duration::from_secs(self.ttl()) / 3;
                self.key = Some(KeepAliveKey { place, kept: now, refresh_at, asked: false });
            }
            Call::DropKey(place) => {
                self.view.set_file(&place.version, &rank_file(place.rank), None);
                self.key = None;
            }
            Call::Tell { version, file, value } => match outcome {
                Ok(_) => self.view.set_file(&version, &file, Some(&value)),
                // Somebody else has made it up, in other words.
                Err(_) => self.view.forget(),
            },
            Call::Count { version, number, value } => self.counted(now, &version, number, &value, outcome),
        }
    }

    /// The exit barrier's count was written, or another node's was.
    fn counted(&mut self, now: Time, version: &str, number: u32, value: &str, outcome: Result<Entry, Refusal>) {
        match outcome {
            Ok(_) => {
                let file = crate::keys::kv_file(crate::exchange::DONE_COUNT);
                self.view.set_file(version, &file, Some(value));
                if let Mode::Member(_, _, Stage::Done { counted, .. }) = &mut self.mode {
                    *counted = Some(number);
                }
            }
            Err(_) => {
                if let Mode::Member(_, _, Stage::Done { tried, .. }) = &mut self.mode {
                    *tried = None;
                }
                self.view.forget();
                self.retry_at = now + self.jitter(Duration::from_millis(10));
            }
        }
    }

    fn wrote(&mut self, now: Time, entry: &Entry, value: Option<String>) {
        let read = self.view.set_active(entry.modified, value);
        self.or_refuse(now, read);
    }

    /// Where torchrun's dynamic rendezvous keeps a state for this job's id, this node would be alone. The state itself
    /// is a Python pickle: to read it would be to run it.
    fn looked_for_dynamic(&mut self, now: Time, outcome: Result<Entry, Refusal>) {
        if outcome.is_ok() {
            let end = End::Refused(crate::dynamic_found(self.setup.paths.dynamic()));
            return self.end(now, end, None);
        }
        if let Mode::Opening(step) = &mut self.mode {
            *step = 1;
        }
    }

    fn made(&mut self, made: Making, outcome: Result<Entry, Refusal>) {
        let Mode::Making(_, step) = &mut self.mode else { return };
        let next = match (made, outcome) {
            (Making::Counter, Ok(entry)) => {
                // A counter that is no number is begun again beyond anything that was counted before.
                let number = entry.value.parse::<u64>().unwrap_or(entry.modified) + 1;
                Making::Bump { number, index: entry.modified }
            }
            (Making::Bump { number, .. }, Ok(_)) => Making::Directory(number),
            (Making::Bump { .. }, Err(Refusal::Differs)) => Making::Counter,
            // If it is there, an answer was lost: the number is this node's alone.
            (Making::Directory(number), _) => Making::Publish(number),
            // The job's directory is gone.
            _ => {
                self.mode = Mode::Opening(1);
                self.view.forget();
                return;
            }
        };
        *step = next;
    }

    fn swapped(&mut self, now: Time, why: Swap, value: &str) {
        match why {
            Swap::Publish | Swap::Join(_) if matches!(self.mode, Mode::Making(..) | Mode::Seeking) => {
                // It was written by us a moment ago.
                let Ok(state) = RendezvousState::parse(value) else { return };
                let rank = state.rank_of(&self.id).unwrap_or_default();
                let version = state.version.unwrap_or_default();
                self.held_at = now;
                self.mode = Mode::Joined(VersionRank { version, rank }, now);
            }
            Swap::Publish | Swap::Join(_) => {
                // It must end meanwhile.
                let place = RendezvousState::parse(value).ok().and_then(|state| {
                    let rank = state.rank_of(&self.id)?;
                    Some(VersionRank { version: state.version?, rank })
                });
                if let (Mode::Ending(ending), Some(place)) = (&mut self.mode, place) {
                    ending.place.get_or_insert((place, 0));
                }
            }
            Swap::Hold | Swap::Freeze | Swap::Confirm | Swap::Announce | Swap::Close => {}
        }
    }
}
